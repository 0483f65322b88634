"""What the server measures: validation, directions and projections by hand; only when needed, and before the base."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import ModelList, ModelStack
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import FedCM, Filter, Validation
from fedsel_flwr.testing.in_process import play_round
from tests.strategies.either_api import base_of, private, selection
from tests.strategies.scripted import A, B, C, Counted, Spy, play_scripted, two_examples


def test_loss_and_accuracy_by_hand() -> None:
    """Rows (2, 0) and (0, 1): both right; loss = (ln(1 + e^-2) + ln(1 + e^-1)) / 2 = (.12693 + .31326) / 2."""
    validation = two_examples()
    model = [np.array([[2.0, 0.0], [0.0, 1.0]])]
    assert validation.logits(model).tolist() == [[2.0, 0.0], [0.0, 1.0]]
    assert validation.loss_and_accuracy(model) == (pytest.approx(0.2200948, abs=1e-7), 1.0)
    assert validation.loss_and_accuracy([-model[0]]) == (pytest.approx((2.126928 + 1.3132617) / 2, abs=1e-6), 0.0)
    assert validation.loss_and_accuracy([np.zeros((2, 2))]) == (pytest.approx(np.log(2.0)), 0.5)  # ties: the first
    # 1e5 and 0 nats do not overflow; logits of 1e308 and -1e308 differ by no float any more
    assert validation.loss_and_accuracy([np.array([[0.0, 1e5], [0.0, 1e5]])]) == (pytest.approx(5e4), 0.5)
    for wrong in (1e308, np.nan, np.inf):
        assert validation.loss_and_accuracy([np.array([[-wrong, wrong], [0.0, 0.0]])])[0] == 1e6
    assert (validation.inputs.tolist(), validation.labels.tolist()) == ([[1.0, 0.0], [0.0, 1.0]], [0, 1])


def test_what_is_no_validation_is_refused() -> None:
    for wrong in (np.zeros((3, 2)), np.zeros(2), np.zeros((2, 2, 1))):
        with pytest.raises(ParameterError, match=r"logits of shape \(2, n_classes\)"):
            Validation(lambda arrays, inputs, wrong=wrong: wrong, np.eye(2), np.array([0, 1])).logits([])
    for labels in ([0, 2], [-1, 0]):
        with pytest.raises(ParameterError, match="label"):
            Validation(lambda a, i: i @ a[0], np.eye(2), np.array(labels)).loss_and_accuracy([np.eye(2)])
    with pytest.raises(ParameterError, match=r"^validation .*3 .*2 "):
        Validation(lambda a, i: i, np.eye(3), np.array([0, 1]))
    with pytest.raises(ParameterError, match="validation must be a Validation, got tuple"):
        FedCM(clients_per_round=2, validation=(lambda a, i: i, np.eye(2), np.array([0, 1])))


def test_a_stack_is_asked_at_once_where_it_can_be() -> None:
    """Two models in one call, a list of models and a model that overflows one by one; too few answers are refused."""
    calls: list[int] = []

    def predict_stack(layers: Any, inputs: Any) -> Any:
        calls.append(len(layers[0]))
        return np.einsum("nd,mdc->mnc", inputs, layers[0])

    one_by_one = two_examples()
    validation = Validation(one_by_one.predict, one_by_one.inputs, one_by_one.labels, predict_stack)
    layers = [np.array([[[2.0, 0.0], [0.0, 1.0]], [[np.inf, 0.0], [0.0, 1.0]]])]
    together = validation.logits_of(ModelStack(layers))
    assert together[0].tolist() == [[2.0, 0.0], [0.0, 1.0]]
    assert np.isnan(together[1]).all()
    np.testing.assert_array_equal(together, one_by_one.logits_of(ModelStack(layers)))
    np.testing.assert_array_equal(together, validation.logits_of(ModelList([[model] for model in layers[0]])))
    assert calls == [2]
    broken = Validation(one_by_one.predict, np.eye(2), np.array([0, 1]), lambda layers, inputs: np.zeros((1, 2, 2)))
    with pytest.raises(ParameterError, match=r"logits of 2 models, got shape \(1, 2, 2\)"):
        broken.logits_of(ModelStack(layers))


def test_integers_are_no_part_of_an_update() -> None:
    """Counters and masks: alone and in a stack, and also after an average has turned the counter into a float."""
    first = [np.array([1.0, 2.0]), np.array(3), np.array([True, False]), np.array([5.0])]
    models = ModelList([[first[0] + 0.5, np.array(400), ~first[2], first[3] - 5.0], first])
    stack = ModelStack([np.stack([np.asarray(model[i]) for model in models.models]) for i in range(4)])
    averaged = [first[0], np.array(201.5), np.array([0.5, 0.5]), first[3]]
    for given in (models, stack):
        measurer = Measurer(Spy("update"), Settings(learning_rate=0.25))
        for reference in (first, averaged):
            columns = measurer.models(given, reference)
            assert columns["update"].tolist() == [[0.5, 0.5, -5.0], [0.0] * 3]
        resumed = Measurer(Spy("update"), Settings(learning_rate=0.25))
        resumed.load_state_dict(measurer.state_dict())
        assert resumed.models(given, averaged)["update"].shape == (2, 3)
    with pytest.raises(RunError, match=r"spy reads updates, but the global model has no floating-point array"):
        Measurer(Spy("update"), Settings()).models(ModelList([[np.array(3)]]), [np.array(3)])


def counting(step: float, batches: int) -> Any:
    """A client that moves all weights, and counts its batches as batch normalization does: as an integer."""

    def fit(model: Any, config: Any) -> Any:
        counted = [np.asarray(int(counter) + batches) for counter in model[1:]]
        return [model[0] - np.float32(step), *counted], 10, {"latency_s": 0.5}

    return fit


def test_a_counter_of_batches_changes_neither_projections_nor_norms(api: str) -> None:
    """Flower's average makes the counter a float after round 1, and one client has far more batches."""
    clients = [counting(0.3, 5), counting(0.2, 5), counting(0.1, 5), counting(-0.2, 400)]
    found = []
    for counters in ([], [np.array(0)]):
        spy = Spy("projection", "update")
        options = {"learning_rate": 0.1, "momentum": 0.5, "max_update_norm": 1.0, "min_available": 4}
        strategy = selection(api, spy, base_of(api), **options)
        model = [np.zeros(2, np.float32), *counters]
        for number in (1, 2, 3):
            model = play_round(strategy, clients, model, number)
        assert all(row.completed for row in strategy.history.clients)
        found.append([(report.projection.tolist(), report.update.shape) for report in spy.reports])
    assert found[0] == found[1]
    assert found[1][2][1] == (4, 2)


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


def gpfl() -> Any:
    return create("gpfl", clients_per_round=2, total_rounds=9, seed=0)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_projections_with_momentum_by_hand(api: str, rounds: int) -> None:
    selector, predict = gpfl(), Counted()
    _, models = play_scripted(
        api, selector, lambda k, t, w: ROUNDS[t - 1][k], rounds, start=[0.0, 0.0], validation=two_examples(predict),
        learning_rate=0.5, momentum=0.1, averaging="mean",
    )  # fmt: skip
    expected = np.array(PROJECTIONS[rounds - 1]) / DIRECTIONS[rounds - 1]
    np.testing.assert_allclose(selector.state_dict()["projection"], expected, atol=1e-12)
    np.testing.assert_allclose(models, MODELS[:rounds], atol=1e-15)
    np.testing.assert_allclose(predict.models, MODELS[:rounds], atol=1e-15)  # A and F: w0 in round 1, then each w^t


def test_without_a_direction_the_projection_is_zero() -> None:
    selector = gpfl()
    measurer = Measurer(selector, Settings(validation=two_examples(), learning_rate=0.5, momentum=0.1))
    opposite = [[np.array([1.0, 0.0])], [np.array([-1.0, 0.0])]]
    for _ in range(2):
        selector.select(np.arange(2))
        assert measurer.models(ModelList(opposite), [np.zeros(2)])["projection"].tolist() == [0.0, 0.0]


def test_a_round_without_clients_is_one_in_which_the_model_stayed(api: str) -> None:
    """Nobody is there in round 3: its G is .1 (.1, 1.05), and round 4's .1 times that plus the step (2, 1)."""
    strategy, models = play_scripted(
        api, gpfl(), lambda k, t, w: ROUNDS[t - 1 if t < 3 else t - 2][k], 4, start=[0.0, 0.0],
        validation=two_examples(), learning_rate=0.5, momentum=0.1, averaging="mean",
        availability=lambda client_id, server_round, seconds: server_round != 3,
    )  # fmt: skip
    assert [record.num_selected for record in strategy.history.rounds] == [2, 2, 0, 2]
    np.testing.assert_allclose(models, [MODELS[0], MODELS[1], MODELS[1], MODELS[2]], atol=1e-15)
    direction = strategy.core.parts.measurer.direction._direction
    np.testing.assert_allclose(direction, 0.01 * np.array([0.1, 1.05]) + [2.0, 1.0], atol=1e-12)


def test_updates_are_measured_before_the_base_clips_them(api: str) -> None:
    """The differential-privacy wrapper clips the replies in place, to a norm of .5; the selector saw 3 and 4."""
    base = private(api, base_of(api), clients=2, clipping_norm=0.5)
    spy = Spy("update", "accuracy", "kept")
    models = [[[3.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]]]
    _, (after,) = play_scripted(
        api, spy, lambda k, t, w: models[k], 1, start=np.zeros((2, 2)), base=base, validation=two_examples(),
        filter=Filter(), averaging="mean", learning_rate=1.0,
    )  # fmt: skip
    assert spy.reports[0].update.tolist() == [[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]  # type: ignore[union-attr]
    np.testing.assert_allclose(after, [[0.25, 0.0], [0.0, 0.25]], atol=1e-9)


@pytest.mark.parametrize(
    ("needs", "filtered", "calls"),  # in three rounds of three usable models and one failed
    [
        (("latency", "energy", "update", "projection"), False, 0),
        (("global_loss", "global_accuracy"), False, 3),
        (("accuracy",), False, 1 + 9),  # that of the initial model once
        ((), True, 9),
        (("kept", "accuracy", "global_loss"), True, 1 + 9 + 3),
    ],
    ids=str,
)
def test_the_model_is_run_no_more_often_than_needed(api: str, needs: tuple[str], filtered: bool, calls: int) -> None:
    predict = Counted()
    play_scripted(
        api, Spy(*needs), lambda k, t, w: [A, B, C, np.full((2, 2), np.nan)][k], 3, start=np.zeros((2, 2)), clients=4,
        learning_rate=1.0, validation=two_examples(predict), filter=Filter() if filtered else None, averaging="fedpdp",
    )  # fmt: skip
    assert len(predict.models) == calls


def test_where_the_base_returns_nothing_the_old_model_is_measured(api: str) -> None:
    """Rounds 1 and 3 make B and A; round 2's C is lost."""
    base = base_of(api)
    method, nothing = ("aggregate_fit", (None, {})) if api == "legacy" else ("aggregate_train", (None, None))
    whole = getattr(base, method)
    setattr(base, method, lambda number, *replies: nothing if number == 2 else whole(number, *replies))
    spy, predict = Spy("global_accuracy", "global_loss"), Counted()
    _, models = play_scripted(
        api, spy, lambda k, t, w: [B, C, A][t - 1], 3, start=np.zeros((2, 2)), base=base,
        validation=two_examples(predict),
    )  # fmt: skip
    assert models == predict.models == [B, B, A]
    assert [report.global_accuracy for report in spy.reports] == [0.0, 0.0, 1.0]
    losses = [np.log1p(np.exp(3.0)), np.log1p(np.exp(3.0)), np.log1p(np.exp(-2.0))]
    assert [report.global_loss for report in spy.reports] == pytest.approx(losses, abs=1e-12)
