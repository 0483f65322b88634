"""Updates and their projections on the server's direction, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import ModelList
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import create
from tests.strategies.scripted import APIS, Counted, Spy, play_scripted, two_examples

pytestmark = pytest.mark.timeout(30)


def test_the_update_is_the_flattened_difference_in_the_order_of_the_arrays() -> None:
    reference = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5.0])]
    models = [[reference[0] + [[0.5, 0.0], [-1.0, 0.0]], reference[1] - 5.0], [reference[0], reference[1]]]
    columns = Measurer(Spy("update"), Settings(learning_rate=0.25)).models(ModelList(models), reference)
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
    _, models = play_scripted(
        api, selector, lambda k, t, w: ROUNDS[t - 1][k], rounds, start=[0.0, 0.0], validation=two_examples(predict),
        learning_rate=0.5, momentum=0.1, averaging="mean",
    )  # fmt: skip
    expected = np.array(PROJECTIONS[rounds - 1]) / DIRECTIONS[rounds - 1]
    np.testing.assert_allclose(selector.state_dict()["projection"], expected, atol=1e-12)
    np.testing.assert_allclose(models, MODELS[:rounds], atol=1e-15)
    np.testing.assert_allclose(predict.models, MODELS[:rounds], atol=1e-15)  # A and F: w0 in round 1, then each w^t


def test_the_direction_by_hand() -> None:
    """The same rounds on the measurer alone, and what comes after one in which the model stayed: G is gamma G."""
    selector = create("gpfl", clients_per_round=2, total_rounds=9, seed=0)
    measurer = Measurer(selector, Settings(validation=two_examples(), learning_rate=0.5, momentum=0.1))
    before = np.zeros(2)
    for models, after in zip(ROUNDS, MODELS, strict=True):
        selector.select(np.arange(2))
        measurer.models(ModelList([[np.array(m)] for m in models]), [before])
        measurer.global_model([before], [np.array(after)])
        before = np.array(after)
    step = 0.1 * np.array([2.01, 1.105]) + [0.0, 1.0]
    np.testing.assert_allclose(measurer.direction._direction, step, atol=1e-12)
    selector.select(np.arange(2))
    measurer.global_model([before], [before])
    np.testing.assert_allclose(measurer.direction._direction, 0.1 * step, atol=1e-12)


def test_without_a_direction_the_projection_is_zero() -> None:
    selector = create("gpfl", clients_per_round=2, total_rounds=9, seed=0)
    measurer = Measurer(selector, Settings(validation=two_examples(), learning_rate=0.5))
    selector.select(np.arange(2))
    opposite = [[np.array([1.0, 0.0])], [np.array([-1.0, 0.0])]]
    assert measurer.models(ModelList(opposite), [np.zeros(2)])["projection"].tolist() == [0.0, 0.0]
    selector.select(np.arange(2))
    assert measurer.models(ModelList(opposite), [np.zeros(2)])["projection"].tolist() == [0.0, 0.0]


@APIS
def test_a_round_without_clients_is_one_in_which_the_model_stayed(api: str) -> None:
    """Nobody is there in round 3: its G is .1 (.1, 1.05), and round 4's .1 times that plus the step (2, 1)."""
    selector = create("gpfl", clients_per_round=2, total_rounds=9, seed=0)
    strategy, models = play_scripted(
        api, selector, lambda k, t, w: ROUNDS[t - 1 if t < 3 else t - 2][k], 4, start=[0.0, 0.0],
        validation=two_examples(), learning_rate=0.5, momentum=0.1, averaging="mean",
        availability=lambda client_id, server_round, seconds: server_round != 3,
    )  # fmt: skip
    assert [record.num_selected for record in strategy.history.rounds] == [2, 2, 0, 2]
    np.testing.assert_allclose(models, [MODELS[0], MODELS[1], MODELS[1], MODELS[2]], atol=1e-15)
    direction = strategy.core.parts.measurer.direction._direction
    np.testing.assert_allclose(direction, 0.01 * np.array([0.1, 1.05]) + [2.0, 1.0], atol=1e-12)
