"""Wrappers that count the messages of the strategy they wrap, as differential privacy with an accountant does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr import serverapp
from flwr.serverapp import strategy as flower

from tests.strategies.either_api import Server, base_of, selection
from tests.strategies.helpers import fleet

COHORT, FLEET = 3, 10


def _server(base: flower.Strategy, **options: Any) -> Server:
    return Server("message", selection("message", COHORT, base, **options), fleet(FLEET, extra={"one": 1.0}))


accounted = pytest.mark.skipif(
    not hasattr(serverapp, "PrivacyAccountant"), reason="this flwr has no privacy accountants"
)


class Adding:
    """An accountant that adds up; Flower's own needs the package dp-accounting."""

    def __init__(self, limit: int | None = None) -> None:
        self.config = serverapp.PrivacyConfig(
            target_delta=1e-5, population_size=FLEET, max_epsilon=limit and float(limit),
            sampling_method=serverapp.SamplingMethod.NO_AMPLIFICATION,
            neighboring_relation=serverapp.NeighboringRelation.ADD_OR_REMOVE_ONE,
        )  # fmt: skip
        self.sizes: list[int] = []

    @property
    def num_releases(self) -> int:
        return len(self.sizes)

    def compose(self, event: Any, count: int = 1) -> None:
        self.sizes += [event.sample_size] * count

    def would_exceed(self, event: Any, max_epsilon: float | None = None, count: int = 1) -> bool:
        return self.num_releases + count > self.config.max_epsilon

    def get_privacy_spent(self, delta: float | None = None) -> Any:
        return serverapp.PrivacySpent(
            epsilon=float(self.num_releases), delta=1e-5, num_releases=self.num_releases, accounting_method="adding"
        )

    def state_dict(self) -> dict[str, object]:
        return {"sizes": list(self.sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sizes = list(state["sizes"])


def _private(
    accountant: Adding, kind: str = "ServerSide", key: str = "one", sampled: int = COHORT, **options: Any
) -> Server:
    base = getattr(flower, f"DifferentialPrivacy{kind}FixedClipping")(
        base_of("message", weighted_by_key=key), noise_multiplier=0.5, clipping_norm=1.0, num_sampled_clients=sampled,
        accountant=accountant,
    )  # fmt: skip
    return _server(base, **options)


@accounted
@pytest.mark.parametrize("kind", ["ServerSide", "ClientSide"])
def test_differential_privacy_with_an_accountant_runs_and_counts_every_round(kind: str) -> None:
    accountant = Adding()
    server = _private(accountant, kind).play(3)
    assert accountant.sizes == [COHORT] * 3
    assert [one.num_completed for one in server.strategy.history.rounds] == [COHORT] * 3


@accounted
def test_the_accountant_goes_on_with_the_run(tmp_path: Path) -> None:
    for rounds in (2, 4):
        accountant = Adding()
        _private(accountant, checkpoint_dir=tmp_path, resume=True).play(rounds)
        assert accountant.num_releases == rounds


@accounted
def test_a_privacy_budget_that_is_spent_ends_the_run_in_flowers_error() -> None:
    accountant = Adding(limit=2)
    server = _private(accountant)
    with pytest.raises(Exception, match="max_epsilon") as raised:
        server.play(4)
    assert type(raised.value).__name__ == "PrivacyBudgetExhausted"
    assert (accountant.num_releases, len(server.strategy.history.rounds)) == (2, 2)
    assert server.strategy.last_model is not None
    assert server.strategy.last_model.round == 2


@accounted
@pytest.mark.parametrize("options", [{"over_selection": 0.5}, {"warmup_rounds": 1}])
def test_an_accountant_refuses_rounds_that_ask_more_clients(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not match num_sampled_clients"):
        _private(Adding(), **options).play(1)


@accounted
def test_an_accountant_releases_no_round_with_fewer_replies_than_messages() -> None:
    accountant = Adding()
    server = _private(accountant, sampled=5, over_selection=0.5).play(2)
    assert accountant.sizes == []
    assert not any(array.any() for model in server.models for array in model)


@accounted
def test_an_accountant_needs_equal_weights_which_averaging_gives() -> None:
    accountant = Adding()
    _private(accountant, key="num-examples", averaging="mean").play(2)
    assert accountant.sizes == [COHORT] * 2
    with pytest.raises(ValueError, match="equal client weights"):
        _private(Adding(), key="num-examples").play(1)
