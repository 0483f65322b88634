"""Figures of a deployment, against rounds worked by hand."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.page.comparison_tables import PageRun, failure_seconds
from fedsel_flwr.report.page.deployment_page import figure_rows, settings_text, status_sentence
from fedsel_flwr.report.page.deployment_tables import (
    GROUPS,
    RunSettings,
    RunStatus,
    deployment_folder,
    failure_groups,
    newest_checkpoint,
    part_groups,
    read_deployment,
)
from fedsel_flwr.report.page.waiting_costs import client_figures
from fedsel_flwr.rounds.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.records import RoundEntry, encode_entry
from tests.report.page.deployments import client, entries, failed, write

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def split(given: Sequence[RoundEntry]) -> tuple[Any, Any]:
    """The records of the rounds, and the clients of each round."""
    return [one.round for one in given], {one.round.round: one.clients for one in given}


def figures(given: Sequence[RoundEntry]) -> Any:
    waiting, clients = client_figures(*split(given))
    return waiting, {one.client_id: one for one in clients}, [one.client_id for one in clients]


# ---- what waiting costs ----------------------------------------------------------------------------------------------

ROUNDS = [
    # c is the slowest: 9 - 5 = 4 beyond the second, 9 - 5 = 4 beyond the median.
    (9.0, [client("a", 2), client("b", 5), client("c", 9)]),
    # b is the slowest: 7 - 3 = 4, and 7 - 5 = 2.
    (7.0, [client("a", 3), client("b", 7)]),
    # b and c fail together: 0, and 60 - (6 + 60) / 2 = 27, 13.5 for each of them.
    (60.0, [client("a", 4), client("d", 6), failed("b"), failed("c")]),
    # Over-selection: the round ends after a and b. It waited neither for the spare c nor for d, which failed:
    # 4 - 2 = 2, and 4 - 3 = 1.
    (4.0, [client("a", 2), client("b", 4), failed("c", "late: enough others", spare=True), failed("d")]),
    # A deadline of 10 s, which b misses: 10 - 5 = 5, and 10 - 7.5 = 2.5.
    (10.0, [client("a", 5), failed("b", "late: after the deadline")]),
    # The first time of a is an estimate, 3 s; the round waited for 20 s: 20 - 5 = 15, and 20 - 12.5 = 7.5.
    (20.0, [client("a", 3, latency_source="first", first_s=20.0), client("b", 5)]),
    # One client alone: no cost is defined.
    (2.0, [client("a", 2)]),
]


def test_the_cost_of_waiting_as_worked_by_hand() -> None:
    waiting, clients, order = figures(entries(*ROUNDS))
    assert (waiting.rounds, waiting.slowest_failed) == (6, 2)
    assert waiting.beyond_second_s == pytest.approx((4 + 4 + 0 + 2 + 5 + 15) / 6)
    assert waiting.beyond_median_s == pytest.approx((4 + 2 + 27 + 1 + 2.5 + 7.5) / 6)
    assert waiting.share == pytest.approx(44 / 112)
    found = {name: (one.slowest, one.beyond_second_s, one.beyond_median_s) for name, one in clients.items()}
    assert found == {"a": (1, 15, 7.5), "b": (4, 11, 19), "c": (2, 4, 17.5), "d": (0, 0, 0)}
    assert order == ["b", "c", "a", "d"]


def test_the_clients_costs_add_up_and_the_probes_are_no_waiting() -> None:
    generator = np.random.default_rng(1)
    given = []
    for _ in range(50):
        rows = [client(f"client-{k}", float(generator.integers(1, 6))) for k in range(5)]
        given.append((max(row.latency_s for row in rows) + 0.1, rows))
    waiting, clients, _ = figures(entries(*given, probe_s=0.1))
    assert waiting.rounds == 50
    assert sum(one.beyond_median_s for one in clients.values()) == pytest.approx(50 * waiting.beyond_median_s)
    seconds = [sorted(row.latency_s for row in rows) for _, rows in given]
    worked = [(five[4] - five[3], five[4] - five[2]) for five in seconds]
    assert (waiting.beyond_second_s, waiting.beyond_median_s) == pytest.approx(tuple(np.mean(worked, axis=0)))


def test_spares_are_not_waited_for_and_the_deadline_counts_without_the_probes() -> None:
    # On the server's clock, a round may wait for a failed client after it has sent its spares away.
    rows = [client("a", 2), failed("b"), failed("c", "late: enough others", spare=True)]
    assert figures(entries((60.0, rows)))[0].beyond_second_s == 58
    # 2 s of probes, and a deadline after 10 s.
    rows = [client("a", 5), failed("b", "late: after the deadline")]
    assert figures(entries((12.0, rows), probe_s=2.0))[0].beyond_second_s == 5


def test_rounds_without_seconds_have_no_share_and_a_first_time_may_be_unknown() -> None:
    waiting, _, _ = figures(entries((0.0, [client("a", 0), client("b", 0)])))
    assert (waiting.beyond_second_s, math.isnan(waiting.share)) == (0, True)
    waiting, _, _ = figures(entries((7.0, [client("a", 7, latency_source="first"), client("b", 4)])))
    assert waiting.beyond_second_s == 3


# ---- clients ---------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_client_as_worked_by_hand() -> None:
    given = entries(
        (10.0, [client("a", 10), client("b", 1)]),
        (99.0, [client("a", 99, latency_source="first", first_s=99.0)]),
        (20.0, [client("a", 20, problem="energy: -1 cannot be used")]),
        (60.0, [failed("a", "exception: Boom"), failed("b", "no answer", timed_out=True)]),
        (5.0, [client("b", 5), failed("a", "late: enough others", spare=True)]),
    )
    _, clients, _ = figures(given)
    a, b = clients["a"], clients["b"]
    assert (a.last_seen, a.last_selected, a.problem_round, a.problem) == (3, 5, 4, "exception: Boom")
    assert (a.selections, a.share, a.failures) == (5, 1.0, 1)
    # 10 s and 20 s are measured: the 95th percentile is 10 + 0.95 * 10.
    assert (a.mean_s, a.p95_s) == (15.0, 19.5)
    # The exception is a reply. The spare's silence is none.
    assert (a.last_reply, a.reasons, a.problem_reason) == (4, {"exception": 1}, "exception")
    assert (b.last_reply, b.reasons) == (5, {"timeout": 1})
    assert (b.last_seen, b.share, b.problem, b.mean_s) == (5, 0.6, "no answer", 3.0)
    assert b.p95_s == pytest.approx(1 + 0.95 * 4)


def test_without_a_failure_the_last_problem_of_an_update_is_shown() -> None:
    _, clients, _ = figures(entries((3.0, [client("a", 3, problem="energy: -1 cannot be used"), failed("b")])))
    assert (clients["a"].problem_round, clients["a"].problem) == (1, "energy: -1 cannot be used")
    assert (clients["b"].last_seen, math.isnan(clients["b"].mean_s)) == (None, True)


def test_the_last_reply_is_no_usable_update_and_silence_is_no_reply() -> None:
    late, silent = "late: 70 s is not below max_latency = 60 s", "no answer within 30 s"
    given = entries((60.0, [client("a", 3), failed("b", silent)]), (60.0, [failed("a", late), failed("b", silent)]),
                    (60.0, [failed("a", "lost: a reply"), failed("b", silent)]))  # fmt: skip
    _, clients, _ = figures(given)
    assert (clients["a"].last_seen, clients["a"].last_reply) == (1, 2)
    assert (clients["b"].last_seen, clients["b"].last_reply) == (None, None)
    assert clients["a"].reasons == {"late": 1, "dropout": 1}
    assert (clients["a"].problem_reason, clients["b"].reasons) == ("dropout", {"timeout": 3})


# ---- parts of a round ------------------------------------------------------------------------------------------------


def parts(given: Sequence[RoundEntry]) -> dict[str, float]:
    """The parts of the only group."""
    columns = part_groups(*split(given))
    assert len(set(columns["part"])) == len(columns["part"])
    return dict(zip(columns["part"], columns["seconds"], strict=True))


def test_parts_that_clients_report() -> None:
    times = {"download_s": 1.0, "compute_s": 4.0, "upload_s": 1.0}
    lies = {"download_s": 1e6, "compute_s": 1.0, "upload_s": 1.0}
    rows = [client("a", 6, **times), client("b", 8, **times | {"compute_s": 6.0}), client("c", 9, **lies), failed("d")]
    found = parts(entries((12.0, rows), probe_s=2.0))
    # The round without its probes lasts 10 s, and d alone is waited for from 9 s on; the mean of a and b is 1 + 5 + 1.
    assert found == {"download": 1, "compute": 5, "upload": 1, "waiting": 2, "failures": 1, "probes": 2}


def test_parts_if_the_clients_report_only_their_training() -> None:
    rows = [client("a", 6, compute_s=4.0), client("b", 8, compute_s=5.0), client("c", 9)]
    assert parts(entries((9.0, rows))) == {"compute": 4.5, "transfer": 2.5, "waiting": 2, "failures": 0, "probes": 0}


def test_parts_if_the_clients_report_nothing() -> None:
    rows = [client("a", 2), client("b", 4), client("c", 1, latency_source="first", first_s=9.0), failed("d")]
    assert parts(entries((60.0, rows))) == {"latency": 5, "waiting": 4, "failures": 51, "probes": 0}


def test_groups_of_rounds() -> None:
    most = GROUPS
    given = entries(*[(60.0, [failed("a")])] * 30, *[(4.0, [client("a", 4)])] * (2 * most - 30))
    columns = part_groups(*split(given))
    assert list(dict.fromkeys(columns["round"])) == list(range(1, 2 * most, 2))
    assert columns["round_end"][-1] == 2 * most + 1
    seconds = {(place, part): own for place, part, own in zip(columns["round"], columns["part"], columns["seconds"],
                                                             strict=True)}  # fmt: skip
    failures = failure_groups(*split(given))
    assert (failures["round"], set(failures["clients_per_round"])) == (list(range(1, 31, 2)), {1})
    # Without a usable update, the whole round is waiting for failed clients.
    found = [[seconds[number, part] for part in ("latency", "waiting", "failures")] for number in (1, 31)]
    assert found == [[0, 0, 60], [4, 0, 0]]


def test_failures_have_the_reasons_of_the_metrics_and_no_text_of_a_client() -> None:
    rows = [
        failed("a", "no answer within 30 s", timed_out=True), failed("b", "no answer within 31 s"),
        failed("c", "energy: not reported; exception: <b>"), failed("d", "<b>: a kind that does not exist"),
        failed("e", "late: enough others", spare=True), client("f", 2),
    ]  # fmt: skip
    given = entries((60.0, rows), (60.0, [failed("a", "lost: a reply")]))
    assert failure_groups(*split(given)) == {
        "round": [1, 1, 1, 2], "round_end": [2, 2, 2, 3], "reason": ["exception", "other", "timeout", "dropout"],
        "clients_per_round": [1, 1, 2, 1],
    }  # fmt: skip


def test_failures_end_with_the_round_and_spares_cost_nothing() -> None:
    spare = failed("c", "late: enough others", spare=True)
    given = entries(
        (10.0, [client("a", 5), failed("b", "late: after the deadline")]),
        (4.0, [client("a", 4), failed("b"), spare]),
        (4.0, [client("a", 4), spare]),
        (20.0, [client("a", 3, latency_source="first", first_s=20.0), failed("b", latency_s=12.0)]),
    )
    history = History.from_records([one.round for one in given], [row for one in given for row in one.clients])
    assert failure_seconds(PageRun("a", 1, history)).tolist() == [5, 0, 0, 0]


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_the_summary_of_a_folder_while_a_line_is_being_written(tmp_path: Path) -> None:
    given = entries(*ROUNDS)
    folder = write(tmp_path / "run", given, encode_entry(given[0])[:-40])
    os.utime(folder / "journal.jsonl", (NOW.timestamp() - 30,) * 2)
    for number, seconds in ((6, 500), (7, 90)):
        path = folder / f"round-{number:06d}.safetensors"
        path.touch()
        os.utime(path, (NOW.timestamp() - seconds,) * 2)
    (folder / "round-000009.safetensors.refused").touch()
    before = sorted(path.name for path in folder.iterdir())
    found = read_deployment(folder, NOW)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (found.as_of, found.read, found.last_round) == (datetime(2026, 11, 24, 11, 59, 30, tzinfo=UTC), NOW, 7)
    assert (found.rounds, found.seconds, found.mean_s) == (7, 112.0, 16.0)
    # Sorted durations: 2 4 7 9 10 20 60. The 95th percentile is at 0.95 * 6 = 5.7.
    assert found.p95_s == pytest.approx(20 + 0.7 * 40)
    assert (found.selections, found.updates, found.spares) == (18, 13, 1)
    assert found.reasons == {"exception": 3, "late": 1}
    # Sorted, the fourth is 9. Only failed clients took 60 - 6 seconds of round 3, and 10 - 5 of round 5.
    assert (found.median_s, found.counted_s) == (9.0, pytest.approx((54 + 5) / 7))
    assert found.checkpoint is not None
    assert (found.checkpoint.round, found.checkpoint.age_s) == (7, 90)
    # These checkpoints are empty, so the settings are unknown. Their times are 410 s and one round apart.
    assert (found.settings, found.checkpoint.round_s) == (RunSettings(), 410)
    assert found.status == RunStatus(word="running", since_s=30, usual_s=410)
    assert found.accuracy == {"round": [], "accuracy": [], "loss": []}
    assert sorted(zip(found.failures["round"], found.failures["reason"], strict=True)) == [
        (3, "exception"), (4, "exception"), (5, "late")
    ]  # fmt: skip
    assert (found.advice, found.refusal) == (None, f"{folder} is too short")
    facts = json.loads(json.dumps(found.facts(), allow_nan=False))
    assert facts["as_of"] == "2026-11-24T11:59:30+00:00"
    assert facts["clients"][0]["client_id"] == "b"
    assert facts["waiting"]["beyond_second_s"] == 5.0
    assert facts["checkpoint"]["written"] == "2026-11-24T11:58:30+00:00"
    # Round 7 has one client alone. In round 3 both failed clients were the slowest.
    assert found.max_latency_s == 60
    assert [one["round"] for one in facts["slowest"]] == [6, 5, 4, 3, 2, 1]
    assert facts["slowest"][3] == {
        "round": 3, "round_s": 60.0, "measured_s": 6.0, "client": "b, c", "outcome": "failed", "beyond_median_s": 27.0,
        "problem": "exception: ValueError; exception: ValueError",
    }  # fmt: skip
    assert (facts["slowest"][5]["client"], facts["slowest"][5]["outcome"]) == ("c", "usable update")
    assert {"round": 3, "round_end": 4, "reason": "exception", "clients_per_round": 2.0} in facts["failures"]


def test_the_first_and_the_last_quarter_with_and_without_counted_seconds(tmp_path: Path) -> None:
    usual = [(float(k), [client("a", k)]) for k in range(1, 7)]
    given = entries(*usual, (60.0, [client("a", 7), failed("b")]), (8.0, [client("a", 8)]))
    found = read_deployment(write(tmp_path / "run", given), NOW)
    assert (found.quarters_s, found.quarters_measured_s) == ((1.5, 34.0), (1.5, 7.5))
    assert all(map(math.isnan, read_deployment(write(tmp_path / "shorter", given[:7]), NOW).quarters_s))


MADE_FOR = {"selector": "cs-ucb", "selector.clients_per_round": "6", "max_latency": "45.0", "clock": "'server'"}


@pytest.mark.parametrize(
    ("clock", "total", "since", "word", "usual"),
    [
        ("'server'", 7, 5_000.0, "finished", 9),
        ("'server'", 8, 26.0, "running", 9),
        ("'server'", 8, 28.0, "no new round", 9),
        # The virtual clock's seconds are not real ones: two rounds took 400 s.
        ("'virtual'", None, 590.0, "running", 200),
        ("'virtual'", None, 610.0, "no new round", 200),
    ],
)
def test_running_finished_or_stalled(
    tmp_path: Path, clock: str, total: int | None, since: float, word: str, usual: int
) -> None:
    folder = write(tmp_path / "run", entries(*ROUNDS))
    os.utime(folder / "journal.jsonl", (NOW.timestamp() - since,) * 2)
    for number, seconds in ((5, 500), (7, 100)):
        made_for = MADE_FOR | {"clock": clock}
        one = Checkpoint(
            round=number, model=[np.zeros(2)], names=["w"], state={}, fingerprint=made_for, total_rounds=total
        )
        write_checkpoint(folder, one)
        path = folder / f"round-{number:06d}.safetensors"
        os.utime(path, (NOW.timestamp() - seconds,) * 2)
        assert read_checkpoint(path).total_rounds == total
    found = read_deployment(folder, NOW)
    assert found.settings == RunSettings(
        selector="cs-ucb", clients_per_round=6, max_latency_s=45, clock=clock.strip("'"), total_rounds=total
    )
    assert found.status == RunStatus(word=word, since_s=since, usual_s=usual)  # type: ignore[arg-type]
    sentence = status_sentence(found)
    assert sentence.startswith(word)
    assert (f"7 of {total} rounds" in sentence) == (total is not None)
    assert settings_text(found).startswith("cs-ucb, 6 clients per round, max_latency 60 s, durations ")


def test_without_a_clock_a_status_is_unknown_and_a_damaged_checkpoint_has_no_settings(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", entries(*ROUNDS))
    assert read_deployment(folder, NOW).status.word == "unknown"
    assert "unknown" in status_sentence(read_deployment(folder, NOW))
    for content in (b"", b"\xff" * 9, b"\x02" + b"\0" * 7 + b"[]", b"\x04" + b"\0" * 7 + b'{"a"'):
        (folder / "round-000007.safetensors").write_bytes(content)
        assert read_deployment(folder, NOW).settings == RunSettings()
    (folder / "round-000007.safetensors").unlink()
    (folder / "round-000007.safetensors").symlink_to(folder / "journal.jsonl")
    assert read_deployment(folder, NOW).settings == RunSettings()


def test_a_folder_without_a_checkpoint_or_a_finished_round(tmp_path: Path) -> None:
    assert newest_checkpoint(write(tmp_path / "none", entries((2.0, [client("a", 2)]))), NOW) is None
    with pytest.raises(ParameterError, match="no finished round"):
        read_deployment(write(tmp_path / "begun", []))


def test_a_link_to_a_journal_is_not_read(tmp_path: Path) -> None:
    elsewhere, folder = write(tmp_path / "elsewhere", entries((2.0, [client("a", 2)]))), tmp_path / "run"
    folder.mkdir()
    (folder / "journal.jsonl").symlink_to(elsewhere / "journal.jsonl")
    assert deployment_folder([str(folder)]) == folder
    with pytest.raises(ParameterError, match=r"run/journal\.jsonl' is a link"):
        read_deployment(folder)


def test_evaluated_rounds(tmp_path: Path) -> None:
    given = entries((2.0, [client("a", 2)])) + entries((2.0, [client("a", 2)]), accuracy=0.5, loss=1.0)
    assert read_deployment(write(tmp_path / "run", given)).accuracy == {"round": [1], "accuracy": [0.5], "loss": [1.0]}


def test_which_folders_are_deployments(tmp_path: Path) -> None:
    run, deployed = (write(tmp_path / name, entries((2.0, [client("a", 2)]))) for name in ("run", "deployed"))
    (run / "scenario.toml").touch()
    compared = write(tmp_path / "compared", [])
    (compared / "plan.json").touch()
    assert deployment_folder([str(run), str(compared), str(tmp_path)]) is None
    assert deployment_folder([str(deployed)]) == deployed
    with pytest.raises(ParameterError, match="Run the command for each folder"):
        deployment_folder([str(run), str(deployed)])
    with pytest.raises(ParameterError, match="Leave --reference out"):
        deployment_folder([str(deployed)], "random")


def test_a_column_that_no_client_reported_is_a_remark(tmp_path: Path) -> None:
    said = "missing_columns: no client reported loss"
    given = entries((9.0, [client("a", 2)]), (7.0, [client("a", 3)]), remark=said)
    found = read_deployment(write(tmp_path / "run", given), now=NOW)
    assert found.remarks == {said: 2}
    assert ("remark", "no client reported loss (2 of 2 rounds)") in figure_rows(found)


def test_the_last_rounds_say_what_happened(tmp_path: Path) -> None:
    given = [
        one._replace(round=replace(one.round, note=f"note {one.round.round}", num_late=one.round.round % 2))
        for one in entries(*ROUNDS)
    ]
    write(tmp_path, given)
    rows = figure_rows(read_deployment(tmp_path, NOW))
    assert [row for row in rows if row[0].startswith("round ")] == [(f"round {k}", f"note {k}") for k in range(3, 8)]
    assert ("late updates", "4 counted in later rounds") in rows
