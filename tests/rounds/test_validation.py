"""The loss and the accuracy of a model on the server, worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.models import ModelList, ModelStack
from fedsel_flwr.strategies import FedCM, Validation
from tests.strategies.scripted import two_examples

pytestmark = pytest.mark.timeout(30)


def test_loss_and_accuracy_by_hand() -> None:
    """Rows (2, 0) and (0, 1): both right; loss = (ln(1 + e^-2) + ln(1 + e^-1)) / 2 = (.12693 + .31326) / 2."""
    validation = two_examples()
    model = [np.array([[2.0, 0.0], [0.0, 1.0]])]
    assert validation.logits(model).tolist() == [[2.0, 0.0], [0.0, 1.0]]
    loss, accuracy = validation.loss_and_accuracy(model)
    assert loss == pytest.approx(0.2200948, abs=1e-7)
    assert accuracy == 1.0
    assert validation.loss_and_accuracy([-model[0]]) == (pytest.approx((2.126928 + 1.3132617) / 2, abs=1e-6), 0.0)
    assert validation.loss_and_accuracy([np.zeros((2, 2))]) == (pytest.approx(np.log(2.0)), 0.5)  # ties: the first


def test_large_logits_do_not_overflow_the_loss() -> None:
    """A loss of 1e5 and 0 nats for the two examples."""
    assert two_examples().loss_and_accuracy([np.array([[0.0, 1e5], [0.0, 1e5]])]) == (pytest.approx(5e4), 0.5)


def test_a_model_that_diverges_has_a_large_finite_loss() -> None:
    """Logits of 1e308 and -1e308: their difference is no float any more."""
    for wrong in (1e308, np.nan, np.inf):
        assert two_examples().loss_and_accuracy([np.array([[-wrong, wrong], [0.0, 0.0]])])[0] == 1e6


def test_predict_must_return_one_row_of_logits_per_example() -> None:
    for wrong in (np.zeros((3, 2)), np.zeros(2), np.zeros((2, 2, 1))):
        with pytest.raises(ParameterError, match=r"logits of shape \(2, n_classes\)"):
            Validation(lambda arrays, inputs, wrong=wrong: wrong, np.eye(2), np.array([0, 1])).logits([])


@pytest.mark.parametrize("labels", [[0, 2], [-1, 0]])
def test_labels_must_be_classes_that_predict_knows(labels: list[int]) -> None:
    with pytest.raises(ParameterError, match="label"):
        Validation(lambda a, i: i @ a[0], np.eye(2), np.array(labels)).loss_and_accuracy([np.eye(2)])


def test_there_is_a_label_for_each_example() -> None:
    with pytest.raises(ParameterError, match=r"^validation .*3 .*2 "):
        Validation(lambda a, i: i, np.eye(3), np.array([0, 1]))


def test_what_is_no_validation_is_refused_before_round_one() -> None:
    with pytest.raises(ParameterError, match="validation must be a Validation, got tuple"):
        FedCM(clients_per_round=2, validation=(lambda a, i: i, np.eye(2), np.array([0, 1])))


def test_measuring_changes_neither_labels_nor_inputs() -> None:
    inputs, labels = np.eye(2), np.array([0, 1])
    Validation(lambda a, i: i @ a[0], inputs, labels).loss_and_accuracy([np.ones((2, 2))])
    assert (inputs.tolist(), labels.tolist()) == ([[1.0, 0.0], [0.0, 1.0]], [0, 1])


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
