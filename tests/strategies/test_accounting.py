"""Wrappers that count the messages of the strategy they wrap, as differential privacy with an accountant does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr import serverapp
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies.message import SelectionStrategy
from tests.strategies.helpers import FakeProxy
from tests.strategies.message.helpers import FakeGrid, FakeNode, crowd, dispatched, fedavg, node_id, play

pytestmark = pytest.mark.timeout(30)
COHORT, FLEET = 3, 10


class Counting(flower.Strategy):
    """A wrapper that sees whom the strategy inside asks; it may leave some out."""

    def __init__(self, strategy: flower.Strategy, most: int | None = None) -> None:
        self.strategy, self.most = strategy, most
        self.seen: list[list[int]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.seen.append([message.metadata.dst_node_id for message in messages])
        return messages[: self.most]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(self, *args: Any) -> Any:
        return self.strategy.configure_evaluate(*args)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()


def _strategy(base: flower.Strategy, **kwargs: Any) -> SelectionStrategy:
    return SelectionStrategy(Random(clients_per_round=COHORT, seed=0), base, max_latency=9.0, **kwargs)


@pytest.mark.parametrize("options", [{}, {"fraction_train": 0.1}, {"min_train_nodes": 7, "min_available_nodes": 8}])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_wrapper_sees_exactly_the_chosen(layers: int, options: dict[str, Any]) -> None:
    inner = fedavg(**options)
    outer: Any = inner
    for _ in range(layers):
        outer = Counting(outer)
    strategy, grid = _strategy(outer), FakeGrid(crowd(FLEET))
    play(strategy, grid, 3)
    assert [[str(grid.nodes[node].proxy.client_id) for node in seen] for seen in outer.seen] == dispatched(grid)
    assert [len(seen) for seen in outer.seen] == [COHORT] * 3
    assert "configure_train" not in vars(inner)  # as it was
    assert [one.num_completed for one in strategy.history.rounds] == [COHORT] * 3


def test_a_wrapper_that_asks_others_is_refused_by_name() -> None:
    with pytest.raises(RunError, match="Counting configured 2 messages, but the selector chose 3 nodes"):
        play(_strategy(Counting(fedavg(), most=2)), FakeGrid(crowd(FLEET)), 1)


def test_the_base_of_an_error_is_as_it_was() -> None:
    inner = fedavg(fraction_train=0.0)
    with pytest.raises(RunError, match=r"its fraction_train is 0\.0"):
        play(_strategy(Counting(inner)), FakeGrid(crowd(FLEET)), 1)
    assert "configure_train" not in vars(inner)


# ---- Flower's accountants, by 1.41 ------------------------------------------------------------------------------

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


def _private(kind: str, accountant: Adding) -> flower.Strategy:
    wrapper = getattr(flower, f"DifferentialPrivacy{kind}FixedClipping")
    made: flower.Strategy = wrapper(
        fedavg(weighted_by_key="one"), noise_multiplier=0.5, clipping_norm=1.0, num_sampled_clients=COHORT,
        accountant=accountant,
    )  # fmt: skip
    return made


def _fleet() -> FakeGrid:
    return FakeGrid(
        {
            node_id(k): FakeNode(FakeProxy(str(node_id(k)), k, number=k), extra={"one": 1.0, "acc": 0.5})
            for k in range(FLEET)
        }
    )


@accounted
@pytest.mark.parametrize("kind", ["ServerSide", "ClientSide"])
def test_differential_privacy_with_an_accountant_runs_and_counts_every_round(kind: str) -> None:
    accountant = Adding()
    strategy = _strategy(_private(kind, accountant))
    result, _ = play(strategy, _fleet(), 3)
    assert accountant.sizes == [COHORT] * 3
    assert [one.num_completed for one in strategy.history.rounds] == [COHORT] * 3
    assert result.arrays is not None


@accounted
def test_the_accountant_goes_on_with_the_run(tmp_path: Path) -> None:
    for rounds in (2, 4):
        accountant = Adding()
        strategy = _strategy(_private("ServerSide", accountant), checkpoint_dir=tmp_path, resume=True)
        play(strategy, _fleet(), rounds)
        assert accountant.num_releases == rounds


@accounted
def test_a_privacy_budget_that_is_spent_ends_the_run_in_flowers_error() -> None:
    accountant = Adding(limit=2)
    strategy = _strategy(_private("ServerSide", accountant))
    with pytest.raises(Exception, match="max_epsilon") as raised:
        play(strategy, _fleet(), 4)
    assert type(raised.value).__name__ == "PrivacyBudgetExhausted"
    assert (accountant.num_releases, len(strategy.history.rounds)) == (2, 2)
    assert strategy.last_model is not None
    assert strategy.last_model.round == 2
