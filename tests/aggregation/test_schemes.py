"""The averaging schemes of Kim et al., Table 1: by hand, and through strategies with a FedAvg base."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr import strategies as legacy_api
from fedsel_flwr.aggregation import SCHEMES, Averaging, averaging
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.selectors import create
from tests.rounds.written import Written, core_of, facts, play_round, reply
from tests.strategies import numpy_world as world
from tests.strategies.either_api import make
from tests.strategies.flower_world import base, legacy_base, play

pytestmark = pytest.mark.timeout(60)


def _combined(scheme: Averaging, models: list[float], before: float) -> float:
    """The new model as a base strategy and the mix make it."""
    mean = np.average(np.array(models), weights=scheme.weights)
    return float(scheme.mix([np.array([before])], [np.array([mean])])[0][0])


# Three of five clients with 10, 20 and 30 of 100 examples: p = .1, .2, .3; models 1, 2 and 6, the old model 10.
# fedpdp         (.1*1 + .2*2 + .3*6) / .6            = 2.3 / .6 = 3.8333
# fedpdp-exact   5/3 * (.1*1 + .2*2 + .3*6)           = 5/3 * 2.3 = 3.8333
# fedavg-absent  .4 * 10 + (.1*1 + .2*2 + .3*6)       = 6.3
# mean           (1 + 2 + 6) / 3                      = 3
# Here .6 = 3/5, so the printed FedPdp equals the normalized one. With 80 more examples elsewhere it does not:
# p = 10, 20, 30 of 180; sum p = 1/3: exact = 5/3 * (10 + 40 + 180)/180 = 2.1296; absent = 2/3*10 + 230/180 = 7.9444.
BY_HAND = [
    ("fedpdp", 100.0, 23 / 6), ("fedpdp-exact", 100.0, 23 / 6), ("fedavg-absent", 100.0, 6.3), ("mean", 100.0, 3.0),
    ("fedpdp", 180.0, 23 / 6), ("fedpdp-exact", 180.0, 5 / 3 * 230 / 180), ("fedavg-absent", 180.0, 143 / 18),
    ("mean", 180.0, 3.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "total", "expected"), BY_HAND)
def test_three_of_five_clients_by_hand(name: str, total: float, expected: float) -> None:
    scheme = averaging(name, np.array([10.0, 20.0, 30.0]), total, 5)
    assert _combined(scheme, [1.0, 2.0, 6.0], before=10.0) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "weights", "old", "new"),
    [
        ("fedpdp", [10.0, 30.0], 0.0, 1.0), ("fedpdp-exact", [10.0, 30.0], 0.0, 0.5 * 8 / 2),
        ("fedavg-absent", [10.0, 30.0], 0.5, 0.5), ("mean", [1.0, 1.0], 0.0, 1.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_and_mix(name: str, weights: list[float], old: float, new: float, dtype: Any) -> None:
    """Two of eight clients hold half of the data; the given arrays stay, and the model keeps types and shapes."""
    given = np.array([10.0, 30.0])
    scheme = averaging(name, given, 80.0, 8)
    assert scheme.weights.tolist() == weights
    assert (scheme.old, scheme.new) == pytest.approx((old, new), abs=1e-12)
    before, mean = ([np.full((3, 2), value, dtype), np.full(2, value, dtype)] for value in (1.0, 3.0))
    mixed = scheme.mix(before, mean)
    for array, one, other in zip(mixed, before, mean, strict=True):
        assert (array.shape, array.dtype) == (one.shape, one.dtype)
        np.testing.assert_allclose(array, old + 3 * new)
        assert (array is other) == ((old, new) == (0.0, 1.0))  # an identity hands the mean on unchanged
        assert (np.unique(one).tolist(), np.unique(other).tolist()) == ([1.0], [3.0])
    assert given.tolist() == [10.0, 30.0]


def test_fedprox_counts_a_client_drawn_twice_twice() -> None:
    """Client 0 was drawn twice and client 1 once: (2 * 1 + 4) / 3 = 2, whatever the sizes."""
    scheme = averaging("mean", np.array([10.0, 90.0]), 300.0, 5, draws=[2, 1])
    assert _combined(scheme, [1.0, 4.0], 0.0) == 2.0


@pytest.mark.parametrize(
    ("name", "numbers", "total", "draws", "named"),
    [
        ("fedsgd", [1.0], 2.0, None, "scheme 'fedsgd'"), ("fedavg-absent", [1.0], 0.0, None, "num_examples"),
        *(("fedpdp", one, 2.0, None, "num_examples") for one in ([], [1.0, 0.0], [1.0, -1.0], [1.0, np.nan], [[1.0]])),
        *(("mean", [1.0, 2.0], 3.0, one, "draws") for one in ([1.0], [1, 0], [1, np.nan], [[1, 1]])),
    ],
)  # fmt: skip
def test_refusals_by_name(name: str, numbers: Any, total: float, draws: Any, named: str) -> None:
    with pytest.raises(ParameterError, match=named):
        averaging(name, np.array(numbers), total, 3, draws=draws)


# ---- through a strategy with a FedAvg base ---------------------------------------------------------------------------


def _by_hand(name: str, before: world.Array, kept: list[int], trained: world.Array) -> world.Array:
    """The formula of Table 1, with S the eight clients of the world, whose sizes are all known from the roll call."""
    sizes = np.array([world.num_examples(k) for k in range(world.FLEET)], dtype=float)
    p = sizes / sizes.sum()
    own = (p[kept][:, None] * trained).sum(axis=0)
    models = {
        "fedavg-absent": p[[k for k in range(world.FLEET) if k not in kept]].sum() * before + own,
        "fedpdp-exact": world.FLEET / len(kept) * own,
        "fedpdp": own / p[kept].sum(),
        "mean": trained.mean(axis=0),
    }
    return np.asarray(models[name])


def _played(api: str, selector: Any, rounds: int, **options: Any) -> tuple[Any, list[world.Array]]:
    """A strategy with a FedAvg base after some rounds, and the model after each."""
    strategy = make(api, selector, base(api), **{"max_latency": world.MAX_LATENCY, **options})
    return strategy, play(api, strategy, rounds)


def _check_rounds(name: str, strategy: Any, models: list[world.Array], used: str) -> int:
    """Compare each round's model with the formula over the clients whose record says ``used``; count the others."""
    before, absent = world.initial(), 0
    for server_round, model in enumerate(models, start=1):
        rows = [row for row in strategy.history.clients if row.round == server_round]
        kept = [row.client for row in rows if getattr(row, used)]
        expected = _by_hand(name, before, kept, world.train(before, np.array(kept)))
        np.testing.assert_allclose(model, expected, rtol=0, atol=1e-12)
        absent += len(rows) - len(kept)
        before = model
    return absent


@pytest.mark.parametrize("name", SCHEMES)
def test_through_a_strategy_eight_rounds_equal_the_formula(name: str, api: str) -> None:
    """S^t is the usable models: failed clients (3, 7 and sometimes 5) are absent ones."""
    strategy, models = _played(api, create("random", clients_per_round=4, seed=8), 8, averaging=name)
    assert _check_rounds(name, strategy, models, "completed") > 3


def test_fedprox_through_a_strategy_is_the_plain_mean_over_the_multiset_drawn(api: str) -> None:
    """Table 1: clients drawn by p_k with replacement, each asked once, the mean over the draws that came back."""
    drawn: list[dict[int, int]] = []
    selector = create("random-by-size", clients_per_round=5, replacement=True, seed=3)
    select = selector.select

    def noted(available: Any) -> Any:
        chosen = select(available)
        drawn.append(dict(zip(chosen.tolist(), selector.draws(chosen).tolist(), strict=True)))
        return chosen

    selector.select = noted  # type: ignore[method-assign]
    strategy, models = _played(api, selector, 12, averaging="mean")
    before = world.initial()
    for server_round, (model, draws) in enumerate(zip(models, drawn, strict=True), start=1):
        assert sum(draws.values()) == 5
        usable = [row.client for row in strategy.history.clients if row.round == server_round and row.completed]
        weights = [draws[k] for k in usable]
        expected = np.average(world.train(before, np.array(usable)), axis=0, weights=weights)
        np.testing.assert_allclose(model, expected, rtol=0, atol=1e-12)
        before = model
    assert max(max(draws.values()) for draws in drawn) > 1


@pytest.mark.parametrize("name", ["fedavg-absent", "fedpdp-exact", "fedpdp"])
def test_through_fedca_the_kept_models_are_the_round(name: str) -> None:
    """Equation (5): the scheme over S_opt; a model that the filter dropped counts as absent."""
    strategy = legacy_api.FedCA(
        legacy_base(), clients_per_round=4, seed=8, validation=world.validation(), averaging=name,
        max_latency=world.MAX_LATENCY,
    )  # fmt: skip
    absent = _check_rounds(name, strategy, play("legacy", strategy, 6), "kept")
    assert absent > sum(not row.completed for row in strategy.history.clients)


def test_clients_of_unknown_size_count_with_the_mean_of_the_known() -> None:
    """Nothing said in the roll call: p_k of those never heard of is that of an average client."""
    core = core_of(create("round-robin", clients_per_round=2), averaging="fedavg-absent")
    everyone = [str(k) for k in range(5)]
    sizes = {n: 30 if i else 10 for i, n in enumerate(core.choose(everyone, [np.zeros(1)], Written(facts(*everyone))))}
    scheme = core.collect({n: reply(arrays=[np.zeros(1)], num_examples=size) for n, size in sizes.items()}).averaging
    assert scheme is not None
    assert (scheme.old, scheme.new) == pytest.approx((0.6, 0.4))  # 40 of 5 * 20 examples


def test_an_evicted_clients_size_does_not_count_for_the_newcomer_in_its_row() -> None:
    """Client b leaves with 70 of 80 examples; c, of unknown size, gets its row: c counts as 10, as a, not as 70."""
    core = core_of(
        create("random", clients_per_round=1, seed=0), averaging="fedavg-absent",
        roster=Roster(max_clients=2, evict_after=1),
    )  # fmt: skip
    model = [np.zeros(1)]
    transport = Written({
        "x": {"client_id": "a", "num_examples": 10}, "y": {"client_id": "b", "num_examples": 70},
        "z": {"client_id": "c"},
    })  # fmt: skip
    answer = reply(arrays=model, num_examples=10)
    for connected in (["x", "y"], ["x"], ["x"], ["x"]):
        play_round(core, connected, answer, model=model, transport=transport)
    core.parts.registrar.note_sizes(np.array([1]), np.array([70]))  # b, if it was chosen, said 10
    # At first b is away, but still one of the clients.
    for connected, ids, examples in ((["x"], ["a", "b"], 80), (["x", "z"], ["a", "c"], 20)):
        chosen = core.choose(connected, model, transport)
        assert core.parts.roster.ids == ids
        scheme = core.collect(dict.fromkeys(chosen, answer)).averaging
        core.finish()
        assert scheme is not None
        assert scheme.new == pytest.approx(10 / examples)
