"""Strategies as people outside write them: wrapped equals alone, and the chosen nodes get their own messages.

The clients, the runs and what is compared: ``world.py``. The strategies: ``own_start.py``, ``own_messages.py``,
``legacy.py``. Whatever a strategy's fractions and minima say, it is shown the chosen nodes and no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.server.client_manager import SimpleClientManager
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsel_flwr.errors import FedSelError, RunError
from fedsel_flwr.selectors import RoundRobin
from tests.strategies.either_api import BASES, make, private
from tests.strategies.foreign import legacy, own_messages, own_start
from tests.strategies.foreign.legacy import Base as LegacyAverage
from tests.strategies.foreign.world import CLIENTS, FEW, ROUNDS, Case, Played, node_id, play

CASES: dict[str, dict[str, Case]] = {
    "legacy": legacy.LEGACY,
    "message": {**own_start.AROUND, **own_start.LOOPS, **own_messages.OWN, **own_messages.PAYLOADS},
}
ALL = [(api, name) for api, cases in CASES.items() for name in cases]
CLOCKS = pytest.mark.parametrize("clock", ["virtual", "server"])


def _play(api: str, name: str, folder: Path, wrap: bool, **options: Any) -> Played:
    # The last part of the path is the same in all runs, so that paths among the base's attributes can be compared.
    (folder / "files").mkdir(parents=True)
    return play(api, CASES[api][name], folder / "files", wrap, **options)


def _equal(wrapped: Played, alone: Played) -> None:
    """Each part for itself, so that a failure names the part."""
    for part in vars(alone.outcome):
        assert (part, getattr(wrapped.outcome, part)) == (part, getattr(alone.outcome, part))


def _rounds_of(played: Played) -> list[int]:
    return [row.round for row in played.strategy.history.rounds]


@CLOCKS
@pytest.mark.parametrize(("api", "name"), ALL)
def test_a_strangers_strategy_does_wrapped_what_it_does_alone(api: str, name: str, clock: str, tmp_path: Path) -> None:
    """The selector asks every node, so nothing may differ; and the history has each round once."""
    alone = _play(api, name, tmp_path / "alone", wrap=False, clock=clock)
    wrapped = _play(api, name, tmp_path / "wrapped", wrap=True, clock=clock)
    assert alone.cohorts
    assert wrapped.cohorts == alone.cohorts == [[*range(CLIENTS)]] * len(alone.cohorts)
    _equal(wrapped, alone)
    played = ROUNDS if CASES[api][name].skips else len(alone.cohorts)
    assert _rounds_of(wrapped) == [*range(1, played + 1)]
    completed = [row.num_completed for row in wrapped.strategy.history.rounds if row.num_completed]
    assert completed == [CLIENTS] * len(alone.cohorts)
    counts = wrapped.strategy.history.problem_counts()
    assert counts.pop("skipped", 0) == played - len(alone.cohorts)
    assert counts.keys() <= {*CASES[api][name].problems}


@CLOCKS
@pytest.mark.parametrize(("api", "name"), ALL)
def test_a_strangers_strategy_sees_the_chosen_nodes_alone(api: str, name: str, clock: str, tmp_path: Path) -> None:
    """Alone, with only the chosen nodes connected, it does the same: each node's message, counters, tables, files."""
    wrapped = _play(api, name, tmp_path / "wrapped", wrap=True, clock=clock, cohort=FEW)
    alone = _play(api, name, tmp_path / "alone", wrap=False, clock=clock, schedule=wrapped.cohorts)
    assert {len(cohort) for cohort in wrapped.cohorts} == {FEW}
    assert len({tuple(cohort) for cohort in wrapped.cohorts[:2]}) == 2
    _equal(wrapped, alone)
    # On the server's clock the connections name the clients.
    names = {name: k for k in range(CLIENTS) for name in (str(k), f"node-{k}", str(node_id(k)))}
    rows = wrapped.strategy.history.clients
    chosen = [sorted(names[row.client_id] for row in rows if row.round == n) for n in _rounds_of(wrapped)]
    assert [one for one in chosen if one] == wrapped.cohorts


# ---- what a stranger's strategy is shown -----------------------------------------------------------------------------


def _chosen(base: Any, folder: Path, api: str = "message", cohort: int = 2, **case: Any) -> Played:
    return play(api, Case(lambda _: base, **case), folder, True, cohort=cohort)


@pytest.mark.parametrize("layer", ["base", "inner"])
def test_a_base_may_change_its_own_fraction(layer: str, tmp_path: Path) -> None:
    """What the call itself sets stays."""

    class Annealing(FedAvg):
        def configure_train(self, server_round: int, *args: Any) -> Any:
            messages = super().configure_train(server_round, *args)
            self.fraction_train = 0.5**server_round
            return messages

    inner = Annealing(fraction_train=0.9, min_train_nodes=3)
    base = inner if layer == "base" else private("message", inner, clients=2, clipping_norm=1e6)
    assert [len(one) for one in _chosen(base, tmp_path).cohorts] == [2] * ROUNDS
    assert (inner.fraction_train, inner.min_train_nodes) == (0.5**ROUNDS, 3)


class Computed(FedAvg):
    """A fraction that a property keeps elsewhere."""

    def __init__(self) -> None:
        self.kept = 0.4
        super().__init__(fraction_train=0.4, fraction_evaluate=0.0)

    @property
    def fraction_train(self) -> float:
        return float(self.kept * 1)

    @fraction_train.setter
    def fraction_train(self, value: float) -> None:
        self.kept = float(value)


def test_a_computed_fraction_is_restored(tmp_path: Path) -> None:
    base = Computed()
    assert [len(one) for one in _chosen(base, tmp_path, cohort=1).cohorts] == [1] * ROUNDS
    assert base.fraction_train == base.kept == 0.4
    assert "fraction_train" not in vars(base)


def test_a_fault_in_the_base_restores_its_fractions(tmp_path: Path) -> None:
    class Broken(FedAvg):
        def configure_train(self, *args: Any, **kwargs: Any) -> Any:
            super().configure_train(*args, **kwargs)
            raise ZeroDivisionError("in somebody's code")

    base = Broken(fraction_train=0.3, min_train_nodes=4, min_available_nodes=5)
    with pytest.raises(ZeroDivisionError, match="somebody's code"):
        _chosen(base, tmp_path)
    assert (base.fraction_train, base.min_train_nodes, base.min_available_nodes) == (0.3, 4, 5)


class _OneMessage(FedAvg):
    """Keeps the first message of each round only; those of later rounds may differ from node to node."""

    differs = False
    keeps = 1

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if self.differs:
            for message in messages:
                own = ConfigRecord({**config, "for-node": message.metadata.dst_node_id})
                message.content = RecordDict({"arrays": arrays, "config": own})
        return messages[: self.keeps]


def test_a_node_without_a_message_gets_a_copy_if_all_are_equal(tmp_path: Path) -> None:
    assert [len(one) for one in _chosen(_OneMessage(), tmp_path, cohort=3).cohorts] == [3] * ROUNDS


def test_a_node_without_a_message_of_its_own_is_an_error_that_names_the_base(tmp_path: Path) -> None:
    base = _OneMessage()
    base.differs, base.keeps = True, 2
    with pytest.raises(RunError, match="_OneMessage"):
        _chosen(base, tmp_path, cohort=3)


def test_nobody_else_gets_a_message(tmp_path: Path) -> None:
    """A base that adds a node of its own table chooses clients itself."""

    class Favourite(FedAvg):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({**config, "extra": True})})
            return [*messages, Message(content, dst_node_id=node_id(4), message_type="train")]

    with pytest.raises(RunError, match="Favourite"):
        _chosen(Favourite(), tmp_path)


def test_a_fraction_of_zero_is_named_before_round_1(tmp_path: Path) -> None:
    trained: list[int] = []
    with pytest.raises(FedSelError, match="fraction_train"):
        _chosen(FedAvg(fraction_train=0.0), tmp_path, client=lambda: lambda number, content: trained.append(number))
    assert trained == []


def test_the_cyclic_base_is_refused_at_construction(api: str) -> None:
    with pytest.raises(FedSelError, match="FedXgbCyclic"):
        make(api, RoundRobin(clients_per_round=2), BASES[api].FedXgbCyclic())


def test_a_base_that_wants_its_own_client_manager_is_named(tmp_path: Path) -> None:
    class OwnManager(SimpleClientManager):
        pass

    class Asserting(LegacyAverage):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            assert isinstance(client_manager, OwnManager), "needs OwnManager"
            return super().configure_fit(server_round, parameters, client_manager)

    with pytest.raises(RunError, match=r"(?s)Asserting.*OwnManager"):
        _chosen(Asserting(), tmp_path, api="legacy")


@pytest.mark.parametrize("way", ["all", "index"])
def test_a_base_that_takes_clients_that_were_not_chosen_is_named(way: str, tmp_path: Path) -> None:
    """A bare KeyError says nothing to a user."""

    class Favourites(LegacyAverage):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            pairs = super().configure_fit(server_round, parameters, client_manager)
            everybody = client_manager.all() if way == "all" else client_manager.clients
            return [(everybody["node-4"], pairs[0][1]), *pairs[1:]]

    with pytest.raises(RunError, match=r"(?s)Favourites.*node-4" if way == "all" else "Favourites"):
        _chosen(Favourites(), tmp_path, api="legacy")


# ---- public names that the strategy does not have are the base's, for reading, calling and setting -------------------


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
def test_a_name_in_neither_is_an_attribute_error_with_both(api: str, base: Any, strategy: Any, paper: bool) -> None:
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
