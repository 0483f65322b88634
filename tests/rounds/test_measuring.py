"""When the server measures models: only when needed, and before the base may overwrite replies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.server import strategy as legacy_bases
from flwr.serverapp import strategy as message_bases

from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import Filter
from tests.strategies.scripted import APIS, MAX_LATENCY, A, B, C, Counted, Script, Spy, play_scripted, two_examples

pytestmark = pytest.mark.timeout(30)


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
    _, (after,) = play_scripted(
        api, spy, lambda k, t, w: models[k], 1, start=np.zeros((2, 2)), base=base, validation=two_examples(),
        filter=Filter(), averaging="mean", learning_rate=1.0,
    )  # fmt: skip
    (report,) = spy.reports
    assert report.update is not None
    assert report.update.tolist() == [[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]
    np.testing.assert_allclose(after, [[0.25, 0.0], [0.0, 0.25]], atol=1e-9)


@APIS
def test_a_round_in_which_all_fail_has_empty_columns(api: str) -> None:
    spy = Spy("update", "accuracy", "kept", "projection", "global_loss", "energy_score", "num_examples")
    strategy, models = play_scripted(
        api, spy, lambda k, t, w: np.full((2, 2), np.nan), 2, start=np.eye(2), validation=two_examples(),
        filter=Filter(), averaging="fedpdp", learning_rate=1.0,
    )  # fmt: skip
    assert models == [np.eye(2).tolist()] * 2
    for report in spy.reports:
        assert report.completed.tolist() == report.kept.tolist() == [False, False]  # type: ignore[union-attr]
        assert np.isnan(report.accuracy).all()  # type: ignore[arg-type]
        assert np.isnan(report.update).all()  # type: ignore[arg-type]
    assert [record.num_completed for record in strategy.history.rounds] == [0, 0]


@APIS
def test_a_round_without_clients_needs_no_columns(api: str) -> None:
    spy = Spy("update", "accuracy", "kept", "projection", "global_loss", "energy_score", "num_examples")
    strategy, _ = play_scripted(
        api, spy, lambda k, t, w: A, 3, start=np.eye(2), validation=two_examples(), filter=Filter(),
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
    play_scripted(
        api, Spy(*needs), lambda k, t, w: models[k], 3, start=np.zeros((2, 2)), clients=4, learning_rate=1.0,
        validation=two_examples(predict), filter=Filter() if filtered else None, averaging="fedpdp",
    )  # fmt: skip
    assert len(predict.models) == calls


@APIS
def test_with_a_validation_set_that_nobody_reads_nothing_is_measured(api: str) -> None:
    predict = Counted()
    selector = create("cs-ucb", clients_per_round=2, max_latency=MAX_LATENCY, seed=0)
    play_scripted(api, selector, lambda k, t, w: A, 3, start=np.eye(2), validation=two_examples(predict))
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
    _, models = play_scripted(
        api, spy, lambda k, t, w: [B, C, A][t - 1], 3, start=np.zeros((2, 2)), base=base,
        validation=two_examples(predict),
    )  # fmt: skip
    assert models == predict.models == [B, B, A]
    assert [report.global_accuracy for report in spy.reports] == [0.0, 0.0, 1.0]
    losses = [np.log1p(np.exp(3.0)), np.log1p(np.exp(3.0)), np.log1p(np.exp(-2.0))]
    assert [report.global_loss for report in spy.reports] == pytest.approx(losses, abs=1e-12)


@APIS
def test_with_too_few_updates_the_old_model_is_measured(api: str) -> None:
    spy, predict = Spy("global_accuracy"), Counted()
    script: Script = lambda k, t, w: A if t == 1 or k == 0 else np.full((2, 2), np.nan)  # noqa: E731
    play_scripted(api, spy, script, 2, start=np.eye(2), validation=two_examples(predict), min_completed=2)
    assert predict.models == [A, A]
    assert [report.global_loss for report in spy.reports] == [None, None]  # not needed
