"""Public attributes and methods that the strategy does not have are the base's, for reading, calling and setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.selectors import RoundRobin
from tests.strategies.either_api import BASES, make, private


def _saving(api: str) -> Any:
    class Saving(BASES[api].FedAvg):
        """Has a setter, a property and a value that its server app reads and sets."""

        patience = 3

        def __init__(self) -> None:
            super().__init__(fraction_evaluate=0.0)
            self.calls = 0
            self._secret = 1

        def set_save_path(self, path: Path, *, run: str = "") -> str:
            self.save_path, self.run, self.calls = path, run, self.calls + 1
            return f"{path.name}/{run}"

        @property
        def where(self) -> str:
            return self.save_path.name

        @property
        def rate(self) -> float:
            return self._rate

        @rate.setter
        def rate(self, value: float) -> None:
            self._rate = value / 2

        @property
        def broken(self) -> float:
            return self.never_set

    return Saving()


@pytest.fixture
def base(api: str) -> Any:
    return _saving(api)


@pytest.fixture
def strategy(api: str, base: Any) -> Any:
    return make(api, RoundRobin(clients_per_round=2), base)


def test_a_method_of_the_base_can_be_called(base: Any, strategy: Any) -> None:
    assert strategy.set_save_path(Path("some/where"), run="a") == "where/a"
    assert (base.save_path, base.run, base.calls) == (Path("some/where"), "a", 1)
    assert strategy.calls == 1
    assert strategy.save_path == Path("some/where")
    assert strategy.where == "where"
    assert callable(getattr(strategy, "set_save_path", None))
    assert hasattr(strategy, "calls")


def test_an_attribute_of_the_base_can_be_set(base: Any, strategy: Any) -> None:
    strategy.patience = 5
    strategy.calls = 7
    strategy.rate = 1.0
    assert (base.patience, base.calls, base.rate) == (5, 7, 0.5)
    assert (strategy.patience, strategy.calls, strategy.rate) == (5, 7, 0.5)
    assert not {"patience", "calls", "rate"} & vars(strategy).keys()
    base.patience = 6
    assert strategy.patience == 6


def test_the_strategys_own_names_stay_its_own(base: Any, strategy: Any) -> None:
    base.history, base.selector = "the base's", "the base's"
    assert strategy.history.rounds == []
    assert isinstance(strategy.selector, RoundRobin)
    assert strategy.base is base


@pytest.mark.parametrize("paper", [False, True])
def test_a_name_in_neither_is_an_attribute_error_that_names_both(
    api: str, base: Any, strategy: Any, paper: bool
) -> None:
    if paper:
        strategy = make(api, "CSUCB", base, clients_per_round=2, max_latency=9.0)
        assert strategy.set_save_path(Path("x")) == "x/"
    with pytest.raises(AttributeError, match="Saving") as error:
        strategy.no_such_name  # noqa: B018
    assert type(strategy).__name__ in str(error.value)
    assert "no_such_name" in str(error.value)
    assert not hasattr(strategy, "no_such_name")


def test_private_names_of_the_base_stay_private(strategy: Any) -> None:
    assert not hasattr(strategy, "_secret")
    assert not hasattr(strategy, "__no_such_protocol__")


def test_a_faulty_property_of_the_base_names_what_it_lacks(strategy: Any) -> None:
    with pytest.raises(AttributeError, match="never_set"):
        strategy.broken  # noqa: B018


def test_wrappers_of_privacy_hand_on_the_names_of_what_they_wrap(api: str) -> None:
    """A wrapper of Flower's has no such method, alone or wrapped, but the layer inside is the user's strategy."""
    strategy = make(api, RoundRobin(clients_per_round=2), private(api, _saving(api)))
    assert strategy.strategy.set_save_path(Path("y")) == "y/"
    with pytest.raises(AttributeError, match="DifferentialPrivacyServerSideFixedClipping"):
        strategy.set_save_path(Path("y"))


def test_a_name_that_nobody_has_yet_is_the_bases(base: Any, strategy: Any) -> None:
    """A base may read in its start what its user sets before."""
    strategy.set_later = 3
    assert base.set_later == strategy.set_later == 3
    strategy._private = 4
    assert not hasattr(base, "_private")


def test_a_class_of_a_users_own_keeps_the_names_that_it_sets(base: Any, strategy: Any) -> None:
    own = type("Own", (type(strategy),), {"__module__": "somebody"})(RoundRobin(clients_per_round=2), base)
    own.extra = 5
    assert own.extra == 5
    assert not hasattr(base, "extra")
