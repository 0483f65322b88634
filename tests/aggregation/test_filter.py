"""Which models FedCA's filter keeps, worked by hand, and what becomes of models that overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import ModelList
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.strategies import Filter
from tests.strategies.scripted import A, B, C, Spy, play_scripted, two_examples

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("score", "kept"),
    [
        # margins of means: A (2, 2), AC (1.5, .9), ABC (0, -.4), B (-3, -3): the loss is least for A alone
        ("loss", [0]),
        # A and AC are both right on both; ABC ties on example 0 (argmax is the first, right) and is wrong on 1
        ("accuracy", [0, 2]),
    ],
)
def test_only_kept_models_are_averaged_and_the_selector_hears_which(api: str, score: str, kept: list[int]) -> None:
    """Client 3 fails with NaN; client 1's model is dropped."""
    models = [A, B, C, np.full((2, 2), np.nan)]
    spy = Spy("kept", "accuracy")
    strategy, (after,) = play_scripted(
        api, spy, lambda k, t, w: models[k], 1, start=np.zeros((2, 2)), clients=4, validation=two_examples(),
        filter=Filter(score=score), averaging="fedpdp",
    )  # fmt: skip
    assert [record.client for record in strategy.history.clients if record.kept] == kept
    assert (strategy.history.rounds[0].num_completed, strategy.history.rounds[0].num_kept) == (3, len(kept))
    (report,) = spy.reports
    assert report.completed.tolist() == [True, True, True, False]
    assert np.flatnonzero(report.kept).tolist() == kept  # type: ignore[arg-type]
    np.testing.assert_array_equal(report.accuracy, [1.0, 0.0, 0.5, np.nan])  # type: ignore[arg-type]
    np.testing.assert_allclose(after, np.mean([models[k] for k in kept], axis=0), atol=1e-15)


HUGE = [[1e17, 1e17], [0.0, 1.0]]  # not beyond what a client may send


def _overflowing(arrays: Any, inputs: Any) -> Any:
    return 1e300 * inputs @ arrays[0]


def test_a_model_whose_logits_overflow_is_not_kept_and_never_right() -> None:
    measurer = Measurer(Spy("kept", "accuracy"), Settings(validation=two_examples(_overflowing), filter=Filter()))
    columns = measurer.models(ModelList([[np.array(HUGE)], [np.array(A)]]), [np.zeros((2, 2))])
    assert columns["kept"].tolist() == [False, True]
    assert columns["accuracy"].tolist() == [0.0, 1.0]
    loss, accuracy = two_examples(_overflowing).loss_and_accuracy([np.array(HUGE)])
    assert (np.isfinite(loss), loss > 1e5, accuracy) == (True, True, 0.0)


@pytest.mark.parametrize("averaging", [None, "fedpdp", "mean"])
def test_when_every_model_overflows_the_global_one_stays_and_the_run_goes_on(api: str, averaging: Any) -> None:
    spy = Spy("kept")
    start = [[0.5, 0.0], [0.0, 0.25]]
    strategy, models = play_scripted(
        api, spy, lambda k, t, w: HUGE if t < 3 else A, 3, start=start, validation=two_examples(_overflowing),
        filter=Filter(), averaging=averaging,
    )  # fmt: skip
    assert models == [start, start, A]
    assert [report.kept.tolist() for report in spy.reports] == [[False, False]] * 2 + [[True, True]]  # type: ignore[union-attr]
    assert [record.num_completed for record in strategy.history.rounds] == [2, 2, 2]


def test_of_a_multiset_the_copies_are_searched_and_weigh(api: str) -> None:
    """FedProx under FedCA (4): client 0, right by 1, drawn three times, and client 1, wrong by 2, are right together.

    Of the distinct models client 0's alone is right; of the copies all four are, by (3 - 2) / 4, and the larger set
    wins. The mean over the multiset has client 0 three times.
    """

    spy = Spy("kept")
    vars(spy)["draws"] = lambda clients: np.array([3, 1])[clients]
    right, wrong = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[-2.0, 0.0], [0.0, -2.0]])
    strategy, (after,) = play_scripted(
        api, spy, lambda k, t, w: (right, wrong)[k], 1, start=np.zeros((2, 2)), clients=2,
        validation=two_examples(), filter=Filter(score="accuracy"), averaging="mean",
    )  # fmt: skip
    assert [record.kept for record in strategy.history.clients] == [True, True]
    np.testing.assert_allclose(after, (3 * right + wrong) / 4, atol=1e-15)
