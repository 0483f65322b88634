"""What the server measures on models, worked by hand; each only when needed, before the base may overwrite replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.common import FitIns, FitRes, GetPropertiesIns, GetPropertiesRes, ndarrays_to_parameters
from flwr.server import strategy as legacy_bases
from flwr.serverapp import strategy as message_bases

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import RoundReport, create
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.strategies import Filter, Validation
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.measuring import Measurer
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import OK, FakeProxy, Federation, parameters_to_ndarrays
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id, play

pytestmark = pytest.mark.timeout(30)
MAX_LATENCY = 9.0
APIS = pytest.mark.parametrize("api", ["legacy", "message"])
Script = Callable[[int, int, Any], Any]
"""From client, round and received model to the client's new model."""


class Spy(Selector):
    """Asks everybody, reads what it is told to read, and keeps everything it is told."""

    name = "spy"

    def __init__(self, *needs: str, warmup_rounds: int = 0) -> None:
        super().__init__(clients_per_round=9)
        self.needs = frozenset(needs)  # type: ignore[misc]
        self.warmup_rounds = warmup_rounds
        self.reports: list[RoundReport] = []
        self.informed: list[tuple[list[int], dict[str, list[float]]]] = []

    def _select(self, available: Any) -> Any:
        return available

    def _observe(self, report: RoundReport) -> None:
        self.reports.append(report)

    def _inform(self, clients: Any, columns: Mapping[str, Any]) -> None:
        self.informed.append((clients.tolist(), {k: v.tolist() for k, v in columns.items()}))


class Scripted(FakeProxy):
    """A client whose models, metrics and facts are written down."""

    def __init__(self, number: int, script: Script, report: Callable[[int, int], dict[str, Any]], facts: Any) -> None:
        super().__init__(f"node-{number}", number, number=number)
        self.script, self.report, self.facts = script, report, facts

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return GetPropertiesRes(OK, {"client_id": self.number, **self.facts(self.number)})

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        assert group_id is not None
        (received,) = parameters_to_ndarrays(ins.parameters)
        model = np.array(self.script(self.number, group_id, received), dtype=np.float64)
        metrics = {"latency_s": 1.0, **self.report(self.number, group_id)}
        return FitRes(OK, ndarrays_to_parameters([model]), 10, metrics)


class Counted:
    """Softmax regression, ``inputs @ w``; of a vector w, the logits of class 1 are 0. Keeps the models it saw."""

    def __init__(self) -> None:
        self.models: list[list[Any]] = []

    def __call__(self, arrays: Any, inputs: Any) -> Any:
        self.models.append(arrays[0].tolist())
        logits = inputs @ arrays[0]
        return logits if logits.ndim == 2 else np.column_stack([logits, np.zeros(len(logits))])


def _validation(predict: Any = None) -> Validation:
    """Examples (1, 0) of class 0 and (0, 1) of class 1: the logits are the rows of w."""
    return Validation(predict or Counted(), np.eye(2), np.array([0, 1]))


def _play(
    api: str, selector: Selector, script: Script, rounds: int, *, start: Any, clients: int = 2,
    base: Any = None, report: Any = lambda k, t: {}, facts: Any = lambda k: {}, **options: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """Play scripted clients through an API; returns the strategy and the model after each round."""
    first = np.array(start, dtype=np.float64)
    everyone = [Scripted(k, script, report, facts) for k in range(clients)]
    options = {"max_latency": MAX_LATENCY, "min_available": 1, **options}
    if api == "legacy":
        own = base or legacy_bases.FedAvg(fraction_evaluate=0.0)
        inner = getattr(own, "strategy", own)
        inner.initial_parameters = ndarrays_to_parameters([first])
        strategy: Any = LegacyStrategy(selector, own, **options)
        federation = Federation(strategy, everyone)
        return strategy, [federation.play().arrays()[0].tolist() for _ in range(rounds)]
    strategy = MessageStrategy(selector, base or message_bases.FedAvg(fraction_evaluate=0.0), **options)
    grid = FakeGrid({node_id(p.number): FakeNode(p, extra={}) for p in everyone})
    _, models = play(strategy, grid, rounds, initial_arrays=ArrayRecord({"w": Array(first)}))
    return strategy, [np.frombuffer(one[0]).reshape(first.shape).tolist() for one in models]


# ---- logits, loss and accuracy ---------------------------------------------------------------------------------------


def test_loss_and_accuracy_by_hand() -> None:
    """Rows (2, 0) and (0, 1): both right; loss = (ln(1 + e^-2) + ln(1 + e^-1)) / 2 = (.12693 + .31326) / 2."""
    validation = _validation()
    model = [np.array([[2.0, 0.0], [0.0, 1.0]])]
    assert validation.logits(model).tolist() == [[2.0, 0.0], [0.0, 1.0]]
    loss, accuracy = validation.loss_and_accuracy(model)
    assert loss == pytest.approx(0.2200948, abs=1e-7)
    assert accuracy == 1.0
    assert validation.loss_and_accuracy([-model[0]]) == (pytest.approx((2.126928 + 1.3132617) / 2, abs=1e-6), 0.0)
    assert validation.loss_and_accuracy([np.zeros((2, 2))]) == (pytest.approx(np.log(2.0)), 0.5)  # ties: the first


def test_large_logits_do_not_overflow_the_loss() -> None:
    """A loss of 1e5 and 0 nats for the two examples."""
    assert _validation().loss_and_accuracy([np.array([[0.0, 1e5], [0.0, 1e5]])]) == (pytest.approx(5e4), 0.5)


def test_a_model_that_diverges_has_a_large_finite_loss() -> None:
    """Logits of 1e308 and -1e308: their difference is no float any more."""
    for wrong in (1e308, np.nan, np.inf):
        assert _validation().loss_and_accuracy([np.array([[-wrong, wrong], [0.0, 0.0]])])[0] == 1e6


def test_predict_must_return_one_row_of_logits_per_example() -> None:
    for wrong in (np.zeros((3, 2)), np.zeros(2), np.zeros((2, 2, 1))):
        with pytest.raises(ParameterError, match=r"logits of shape \(2, n_classes\)"):
            Validation(lambda arrays, inputs, wrong=wrong: wrong, np.eye(2), np.array([0, 1])).logits([])


@pytest.mark.parametrize("labels", [[0, 2], [-1, 0]])
def test_labels_must_be_classes_that_predict_knows(labels: list[int]) -> None:
    with pytest.raises(ParameterError, match="label"):
        Validation(lambda a, i: i @ a[0], np.eye(2), np.array(labels)).loss_and_accuracy([np.eye(2)])


def test_measuring_changes_neither_labels_nor_inputs() -> None:
    inputs, labels = np.eye(2), np.array([0, 1])
    Validation(lambda a, i: i @ a[0], inputs, labels).loss_and_accuracy([np.ones((2, 2))])
    assert (inputs.tolist(), labels.tolist()) == ([[1.0, 0.0], [0.0, 1.0]], [0, 1])


# Three models over two examples, as rows (logits of example 0, logits of example 1):
#   A right on both, B wrong on both by 3, C right on 0 by 1, wrong on 1 by 0.2.
A, B, C = [[2.0, 0.0], [0.0, 2.0]], [[0.0, 3.0], [3.0, 0.0]], [[1.0, 0.0], [0.2, 0.0]]


@pytest.mark.parametrize(
    ("score", "kept"),
    [
        # margins of means: A (2, 2), AC (1.5, .9), ABC (0, -.4), B (-3, -3): the loss is least for A alone
        ("loss", [True, False, False]),
        # A and AC are both right on both; ABC ties on example 0 (argmax is the first, right) and is wrong on 1
        ("accuracy", [True, False, True]),
    ],
)
def test_the_kept_column(score: str, kept: list[bool]) -> None:
    measurer = Measurer(Spy("kept", "accuracy"), _validation(), Filter(score=score))
    columns = measurer.models([[np.array(m)] for m in (A, B, C)], [np.zeros((2, 2))])
    assert columns["kept"].tolist() == kept
    assert columns["accuracy"].tolist() == [1.0, 0.0, 0.5]


@APIS
@pytest.mark.parametrize(("score", "kept"), [("loss", [0]), ("accuracy", [0, 2])])
def test_only_kept_models_are_averaged_and_the_selector_hears_which(api: str, score: str, kept: list[int]) -> None:
    """Client 3 fails with NaN; client 1's model is dropped."""
    models = [A, B, C, np.full((2, 2), np.nan)]
    spy = Spy("kept", "accuracy")
    _, (after,) = _play(
        api, spy, lambda k, t, w: models[k], 1, start=np.zeros((2, 2)), clients=4, validation=_validation(),
        filter=Filter(score=score), averaging="fedpdp",
    )  # fmt: skip
    (report,) = spy.reports
    assert report.completed.tolist() == [True, True, True, False]
    assert np.flatnonzero(report.kept).tolist() == kept  # type: ignore[arg-type]
    np.testing.assert_array_equal(report.accuracy, [1.0, 0.0, 0.5, np.nan])  # type: ignore[arg-type]
    np.testing.assert_allclose(after, np.mean([models[k] for k in kept], axis=0), atol=1e-15)


# ---- models that overflow --------------------------------------------------------------------------------------------

HUGE = [[1.7e308, 1.7e308], [0.0, 1.0]]


def _overflowing(arrays: Any, inputs: Any) -> Any:
    return 2.0 * inputs @ arrays[0]


def test_a_model_whose_logits_overflow_is_not_kept_and_never_right() -> None:
    measurer = Measurer(Spy("kept", "accuracy"), _validation(_overflowing), Filter())
    columns = measurer.models([[np.array(HUGE)], [np.array(A)]], [np.zeros((2, 2))])
    assert columns["kept"].tolist() == [False, True]
    assert columns["accuracy"].tolist() == [0.0, 1.0]
    loss, accuracy = _validation(_overflowing).loss_and_accuracy([np.array(HUGE)])
    assert (np.isfinite(loss), loss > 1e5, accuracy) == (True, True, 0.0)


@APIS
@pytest.mark.parametrize("averaging", [None, "fedpdp", "mean"])
def test_when_every_model_overflows_the_global_one_stays_and_the_run_goes_on(api: str, averaging: Any) -> None:
    spy = Spy("kept")
    start = [[0.5, 0.0], [0.0, 0.25]]
    strategy, models = _play(
        api, spy, lambda k, t, w: HUGE if t < 3 else A, 3, start=start, validation=_validation(_overflowing),
        filter=Filter(), averaging=averaging,
    )  # fmt: skip
    assert models == [start, start, A]
    assert [report.kept.tolist() for report in spy.reports] == [[False, False]] * 2 + [[True, True]]  # type: ignore[union-attr]
    assert [record.num_completed for record in strategy.history.rounds] == [2, 2, 2]


# ---- updates and projections -----------------------------------------------------------------------------------------


def test_the_update_is_the_flattened_difference_in_the_order_of_the_arrays() -> None:
    reference = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5.0])]
    models = [[reference[0] + [[0.5, 0.0], [-1.0, 0.0]], reference[1] - 5.0], [reference[0], reference[1]]]
    columns = Measurer(Spy("update"), learning_rate=0.25).models(models, reference)
    assert columns["update"].tolist() == [[0.5, 0.0, -1.0, 0.0, -5.0], [0.0] * 5]


# eta = .5, gamma = .1, two clients, w0 = (0, 0). Gradients d = (w - w_k) / eta:
#   round 1   models (-1, 0), (0, -.5): d = (2, 0), (0, 1); G = their mean (1, .5); the model stays
#             c = 2 / |G|, .5 / |G| with |G| = sqrt(1.25)
#   round 2   models (-1, -1), (1, 0) : d = (2, 2), (-2, 0); c = 3 / |G|, -2 / |G| with the G of round 1
#             w' = their mean (0, -.5): G = .1 (1, .5) + (0, 1) = (.1, 1.05)
#   round 3   models (0, -1.5), (-2, -.5): d = (0, 2), (4, 0); c = 2.1 / |G|, .4 / |G| with |G|^2 = .01 + 1.1025
#             w' = (-1, -1): G = .1 (.1, 1.05) + (2, 1) = (2.01, 1.105)
#   round 4   models (-1, -2), (-1, -1): d = (0, 2), (0, 0); c = 2.21 / |G|, 0
ROUNDS = [[(-1.0, 0.0), (0.0, -0.5)], [(-1.0, -1.0), (1.0, 0.0)], [(0.0, -1.5), (-2.0, -0.5)], [(-1.0, -2.0), (-1, -1)]]
DIRECTIONS = [np.sqrt(1.25), np.sqrt(1.25), np.sqrt(0.01 + 1.1025), np.sqrt(2.01**2 + 1.105**2)]
PROJECTIONS = [(2.0, 0.5), (3.0, -2.0), (2.1, 0.4), (2.21, 0.0)]
MODELS = [[0.0, 0.0], [0.0, -0.5], [-1.0, -1.0], [-1.0, -1.5]]


@APIS
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_projections_with_momentum_by_hand(api: str, rounds: int) -> None:
    selector = create("gpfl", clients_per_round=2, total_rounds=9, seed=0)
    predict = Counted()
    _, models = _play(
        api, selector, lambda k, t, w: ROUNDS[t - 1][k], rounds, start=[0.0, 0.0], validation=_validation(predict),
        learning_rate=0.5, momentum=0.1, averaging="mean",
    )  # fmt: skip
    expected = np.array(PROJECTIONS[rounds - 1]) / DIRECTIONS[rounds - 1]
    np.testing.assert_allclose(selector.state_dict()["projection"], expected, atol=1e-12)
    np.testing.assert_allclose(models, MODELS[:rounds], atol=1e-15)
    np.testing.assert_allclose(predict.models, MODELS[:rounds], atol=1e-15)  # A and F: w0 in round 1, then each w^t


def test_the_direction_by_hand() -> None:
    """The same rounds on the measurer alone, and what comes after one in which the model stayed: G is gamma G."""
    selector = create("gpfl", clients_per_round=2, total_rounds=9, seed=0)
    measurer = Measurer(selector, _validation(), learning_rate=0.5, momentum=0.1)
    before = np.zeros(2)
    for models, after in zip(ROUNDS, MODELS, strict=True):
        selector.select(np.arange(2))
        measurer.models([[np.array(m)] for m in models], [before])
        measurer.global_model([before], [np.array(after)])
        before = np.array(after)
    step = 0.1 * np.array([2.01, 1.105]) + [0.0, 1.0]
    np.testing.assert_allclose(measurer.direction._direction, step, atol=1e-12)
    selector.select(np.arange(2))
    measurer.global_model([before], [before])
    np.testing.assert_allclose(measurer.direction._direction, 0.1 * step, atol=1e-12)


def test_without_a_direction_the_projection_is_zero() -> None:
    selector = create("gpfl", clients_per_round=2, total_rounds=9, seed=0)
    measurer = Measurer(selector, _validation(), learning_rate=0.5)
    selector.select(np.arange(2))
    opposite = [[np.array([1.0, 0.0])], [np.array([-1.0, 0.0])]]
    assert measurer.models(opposite, [np.zeros(2)])["projection"].tolist() == [0.0, 0.0]
    selector.select(np.arange(2))
    assert measurer.models(opposite, [np.zeros(2)])["projection"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_a_round_without_clients_is_one_in_which_the_model_stayed(api: str) -> None:
    """Nobody is there in round 3: its G is .1 (.1, 1.05), and round 4's .1 times that plus the step (2, 1)."""
    selector = create("gpfl", clients_per_round=2, total_rounds=9, seed=0)
    strategy, models = _play(
        api, selector, lambda k, t, w: ROUNDS[t - 1 if t < 3 else t - 2][k], 4, start=[0.0, 0.0],
        validation=_validation(), learning_rate=0.5, momentum=0.1, averaging="mean",
        availability=lambda client_id, server_round, seconds: server_round != 3,
    )  # fmt: skip
    assert [record.num_selected for record in strategy.history.rounds] == [2, 2, 0, 2]
    np.testing.assert_allclose(models, [MODELS[0], MODELS[1], MODELS[1], MODELS[2]], atol=1e-15)
    direction = strategy.core.measurer.direction._direction
    np.testing.assert_allclose(direction, 0.01 * np.array([0.1, 1.05]) + [2.0, 1.0], atol=1e-12)


# ---- before the base may overwrite replies ---------------------------------------------------------------------------


@APIS
def test_updates_are_measured_before_the_base_clips_them(api: str) -> None:
    """The differential-privacy wrapper clips the replies in place, to a norm of .5; the selector saw 3 and 4."""
    bases: Any = legacy_bases if api == "legacy" else message_bases
    base = bases.DifferentialPrivacyServerSideFixedClipping(
        bases.FedAvg(fraction_evaluate=0.0), noise_multiplier=0.0, clipping_norm=0.5, num_sampled_clients=2
    )
    spy = Spy("update", "accuracy", "kept")
    models = [[[3.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]]]
    _, (after,) = _play(
        api, spy, lambda k, t, w: models[k], 1, start=np.zeros((2, 2)), base=base, validation=_validation(),
        filter=Filter(), averaging="mean", learning_rate=1.0,
    )  # fmt: skip
    (report,) = spy.reports
    assert report.update is not None
    assert report.update.tolist() == [[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]
    np.testing.assert_allclose(after, [[0.25, 0.0], [0.0, 0.25]], atol=1e-9)


@APIS
def test_a_round_in_which_all_fail_has_empty_columns(api: str) -> None:
    spy = Spy("update", "accuracy", "kept", "projection", "global_loss", "energy_score", "num_examples")
    strategy, models = _play(
        api, spy, lambda k, t, w: np.full((2, 2), np.nan), 2, start=np.eye(2), validation=_validation(),
        filter=Filter(), averaging="fedpdp", learning_rate=1.0,
    )  # fmt: skip
    assert models == [np.eye(2).tolist()] * 2
    for report in spy.reports:
        assert report.completed.tolist() == report.kept.tolist() == [False, False]  # type: ignore[union-attr]
        assert np.isnan(report.accuracy).all()  # type: ignore[arg-type]
        assert np.isnan(report.update).all()  # type: ignore[arg-type]
    assert [record.num_completed for record in strategy.history.rounds] == [0, 0]


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_a_round_without_clients_needs_no_columns(api: str) -> None:
    spy = Spy("update", "accuracy", "kept", "projection", "global_loss", "energy_score", "num_examples")
    strategy, _ = _play(
        api, spy, lambda k, t, w: A, 3, start=np.eye(2), validation=_validation(), filter=Filter(),
        averaging="fedpdp", learning_rate=1.0, report=lambda k, t: {"energy_score": 0.5},
        availability=lambda client_id, server_round, seconds: server_round == 2,
    )  # fmt: skip
    assert [record.num_selected for record in strategy.history.rounds] == [0, 2, 0]
    assert [report.clients.tolist() for report in spy.reports] == [[0, 1]]


# ---- only when needed ------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[tuple[str, ...], bool, int]] = {
    # needs, filter -> calls in three rounds of three usable models and one failed
    "nothing": (("latency", "energy"), False, 0),
    "updates": (("update", "projection"), False, 0),
    "the global loss": (("global_loss",), False, 3),
    "the global loss and accuracy": (("global_loss", "global_accuracy"), False, 3),
    "accuracy": (("accuracy",), False, 1 + 9),  # that of the initial model once
    "the filter": ((), True, 9),
    "filter, kept, accuracy and global loss": (("kept", "accuracy", "global_loss"), True, 1 + 9 + 3),
}


@APIS
@pytest.mark.parametrize("case", CALLS)
def test_the_model_is_run_no_more_often_than_needed(api: str, case: str) -> None:
    needs, filtered, calls = CALLS[case]
    predict = Counted()
    models = [A, B, C, np.full((2, 2), np.nan)]
    _play(
        api, Spy(*needs), lambda k, t, w: models[k], 3, start=np.zeros((2, 2)), clients=4, learning_rate=1.0,
        validation=_validation(predict), filter=Filter() if filtered else None, averaging="fedpdp",
    )  # fmt: skip
    assert len(predict.models) == calls


@APIS
def test_with_a_validation_set_that_nobody_reads_nothing_is_measured(api: str) -> None:
    predict = Counted()
    selector = create("cs-ucb", clients_per_round=2, max_latency=MAX_LATENCY, seed=0)
    _play(api, selector, lambda k, t, w: A, 3, start=np.eye(2), validation=_validation(predict))
    assert predict.models == []


# ---- the new global model --------------------------------------------------------------------------------------------


class _NothingInRound2(legacy_bases.FedAvg):
    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        return (None, {}) if server_round == 2 else super().aggregate_fit(server_round, results, failures)


class _NoRecordInRound2(message_bases.FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return (None, None) if server_round == 2 else super().aggregate_train(server_round, replies)


@APIS
def test_where_the_base_returns_nothing_the_old_model_is_measured(api: str) -> None:
    """Rounds 1 and 3 make B and A; round 2's C is lost."""
    base = (_NothingInRound2 if api == "legacy" else _NoRecordInRound2)(fraction_evaluate=0.0)
    spy, predict = Spy("global_accuracy", "global_loss"), Counted()
    _, models = _play(
        api, spy, lambda k, t, w: [B, C, A][t - 1], 3, start=np.zeros((2, 2)), base=base,
        validation=_validation(predict),
    )  # fmt: skip
    assert models == predict.models == [B, B, A]
    assert [report.global_accuracy for report in spy.reports] == [0.0, 0.0, 1.0]
    losses = [np.log1p(np.exp(3.0)), np.log1p(np.exp(3.0)), np.log1p(np.exp(-2.0))]
    assert [report.global_loss for report in spy.reports] == pytest.approx(losses, abs=1e-12)


@APIS
def test_with_too_few_updates_the_old_model_is_measured(api: str) -> None:
    spy, predict = Spy("global_accuracy"), Counted()
    script: Script = lambda k, t, w: A if t == 1 or k == 0 else np.full((2, 2), np.nan)  # noqa: E731
    _play(api, spy, script, 2, start=np.eye(2), validation=_validation(predict), min_completed=2)
    assert predict.models == [A, A]
    assert [report.global_loss for report in spy.reports] == [None, None]  # not needed


# ---- energy scores ---------------------------------------------------------------------------------------------------


@APIS
@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        # joules (1, 4), (8, 2), (16, 4): E_max grows to 8 in the warm-up of two rounds; 1 - 16/8 is cut at 0
        (2, [[0.75, 0.0], [0.0, 0.75], [0.0, 0.5]]),
        # without a warm-up E_max is that of round 1: 4
        (0, [[0.75, 0.0], [0.0, 0.5], [0.0, 0.0]]),
        (3, [[0.75, 0.0], [0.0, 0.75], [0.0, 0.75]]),
    ],
)
def test_energy_scores_from_joules(api: str, warmup: int, expected: list[list[float]]) -> None:
    joules = [(1.0, 4.0), (8.0, 2.0), (16.0, 4.0)]
    spy = Spy("energy_score", warmup_rounds=warmup)
    _play(api, spy, lambda k, t, w: w, 3, start=[1.0], report=lambda k, t: {"energy_j": joules[t - 1][k]})
    assert [report.energy_score.tolist() for report in spy.reports] == expected  # type: ignore[union-attr]


@APIS
def test_a_reported_energy_score_goes_before_joules(api: str) -> None:
    said = {0: {"energy_j": 2.0, "energy_score": 0.875}, 1: {"energy_j": 4.0}, 2: {"energy_score": 0.25}}
    spy = Spy("energy_score")
    _play(api, spy, lambda k, t, w: w, 1, start=[1.0], clients=3, report=lambda k, t: said[k])
    assert spy.reports[0].energy_score.tolist() == [0.875, 0.0, 0.25]  # type: ignore[union-attr]


@APIS
def test_a_client_without_score_and_joules_counts_as_failed_for_the_selector_only(api: str) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fedsel_flwr").addHandler(handler)
    spy = Spy("energy_score")
    try:
        strategy, models = _play(
            api, spy, lambda k, t, w: w + k, 1, start=[1.0],
            report=lambda k, t: {"energy_score": 0.5} if k == 0 else {"energy_score": 1.5},
        )  # fmt: skip
    finally:
        logging.getLogger("fedsel_flwr").removeHandler(handler)
    (report,) = spy.reports
    assert report.completed.tolist() == [True, False]
    assert report.latency.tolist() == [1.0, MAX_LATENCY]
    assert strategy.history.rounds[0].num_completed == 2
    assert models == [[1.5]]  # its model is averaged all the same
    assert [m for m in messages if "clients ['1'] lack energy_score and count as failed for the selector" in m]


@APIS
def test_the_largest_energy_is_looked_for_until_there_was_one(api: str) -> None:
    """Nobody is there in round 1, and nobody reports joules above 0 in round 2: E_max is round 3's 4 J."""
    joules = {2: (0.0, 0.0), 3: (4.0, 1.0), 4: (8.0, 2.0)}
    spy = Spy("energy_score")
    _play(
        api, spy, lambda k, t, w: w, 4, start=[1.0], report=lambda k, t: {"energy_j": joules[t][k]},
        availability=lambda client_id, server_round, seconds: server_round > 1,
    )  # fmt: skip
    scores = [report.energy_score.tolist() for report in spy.reports]  # type: ignore[union-attr]
    assert scores == [[1.0, 1.0], [0.0, 0.75], [0.0, 0.5]]
    assert all(report.completed.all() for report in spy.reports)


@APIS
def test_a_client_without_a_number_does_not_hide_those_of_the_others(api: str) -> None:
    """Client 1 says neither its examples nor its energy score: the selector hears of clients 0 and 2."""
    spy = Spy("energy_score")
    said: dict[int, dict[str, Any]] = {
        0: {"num_examples": 7, "energy_score": 0.25}, 1: {"energy_score": 1.5},
        2: {"num_examples": 9, "energy_score": 1.0},
    }  # fmt: skip
    _play(
        api, spy, lambda k, t, w: w, 1, start=[1.0], clients=3, facts=lambda k: said[k],
        report=lambda k, t: {"energy_score": 0.5},
    )  # fmt: skip
    told = [(rows, columns) for rows, columns in spy.informed if columns]
    assert told == [([0, 2], {"num_examples": [7.0, 9.0]}), ([0, 2], {"energy_score": [0.25, 1.0]})]
    assert spy.num_clients == 3


@APIS
def test_energy_scores_of_the_roll_call_are_passed_on(api: str) -> None:
    spy = Spy("energy_score")
    _play(
        api, spy, lambda k, t, w: w, 1, start=[1.0], facts=lambda k: {"energy_score": 0.25 + 0.5 * k},
        report=lambda k, t: {"energy_score": 0.5},
    )  # fmt: skip
    assert ([0, 1], {"energy_score": [0.25, 0.75]}) in [
        (rows, {k: v for k, v in columns.items() if k == "energy_score"}) for rows, columns in spy.informed
    ]


# ---- the initial model's accuracy ------------------------------------------------------------------------------------


def _of_accuracy(spy: Spy) -> list[tuple[list[int], list[float]]]:
    return [(rows, columns["accuracy"]) for rows, columns in spy.informed if "accuracy" in columns]


@APIS
def test_everybody_starts_with_the_accuracy_of_the_initial_model(api: str) -> None:
    """C is right on one of two."""
    spy = Spy("accuracy")
    _play(api, spy, lambda k, t, w: A, 3, start=C, clients=3, validation=_validation())
    assert _of_accuracy(spy) == [([0, 1, 2], [0.5, 0.5, 0.5])]


@APIS
def test_newcomers_start_with_the_initial_models_accuracy_too(api: str) -> None:
    """One newcomer a round: they hear w0's accuracy, although the model is right on both by then."""
    spy, predict = Spy("accuracy"), Counted()
    first = [Scripted(k, lambda k, t, w: A, lambda k, t: {}, lambda k: {}) for k in range(2)]
    late = Scripted(2, lambda k, t, w: A, lambda k, t: {}, lambda k: {})
    options: dict[str, Any] = {"max_latency": MAX_LATENCY, "min_available": 1, "validation": _validation(predict)}
    if api == "legacy":
        base = legacy_bases.FedAvg(fraction_evaluate=0.0, initial_parameters=ndarrays_to_parameters([np.array(C)]))
        federation = Federation(LegacyStrategy(spy, base, **options), first).play(2)
        federation.manager.register(late)
        federation.play(2)
    else:
        grid = FakeGrid({node_id(p.number): FakeNode(p, extra={}) for p in first})

        def arrive(record: Any) -> None:
            if record.round == 2:
                grid.nodes[node_id(2)] = FakeNode(late, extra={})

        strategy = MessageStrategy(spy, message_bases.FedAvg(fraction_evaluate=0.0), on_round=arrive, **options)
        play(strategy, grid, 4, initial_arrays=ArrayRecord({"w": Array(np.array(C))}))
    assert _of_accuracy(spy) == [([0, 1], [0.5, 0.5]), ([2], [0.5])]
    assert predict.models.count(C) == 1
    assert [report.clients.tolist() for report in spy.reports] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]


@APIS
def test_without_need_nobody_hears_of_accuracy(api: str) -> None:
    spy = Spy("global_accuracy")
    _play(api, spy, lambda k, t, w: A, 1, start=C, validation=_validation())
    assert _of_accuracy(spy) == []
