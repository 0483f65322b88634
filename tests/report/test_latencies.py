"""Rows of a history: what counts as measured, cut off, failed, or left out; folders, and CSV files good and bad."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.advice import advise
from fedsel_flwr.report.latencies import read_latencies
from fedsel_flwr.report.run_folder import JOURNAL, write_history
from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.rounds.records import RoundEntry, encode_entry
from tests.report.page.deployments import client, entries

RECORD = replace(entries((9.0, [client("a", 9.0), client("b", 9.0)]))[0].round, num_available=6)


def row(name: str, seconds: float, *, round: int = 1, problem: str = "", **own: object) -> ClientRecord:
    source = "max_latency" if problem else "reported"
    given = {"completed": not problem, "num_examples": 10, "latency_source": source} | own
    return client(name, seconds, round=round, problem=problem, **given)


def write(folder: Path, rows: list[ClientRecord], scenario: str = "", **own: object) -> Path:
    records = [replace(RECORD, round=t, **own) for t in sorted({one.round for one in rows})]  # type: ignore[arg-type]
    write_history(folder, History.from_records(records, rows))
    if scenario:
        (folder / "scenario.toml").write_text(scenario)
    return folder


def test_each_kind_of_row(tmp_path: Path) -> None:
    rows = [
        row("a", 3.0),
        row("b", 20.0, problem="late: 25 s is not below max_latency = 20 s"),
        row("c", 20.0, problem="no answer", timed_out=True),
        row("d", 20.0, problem="crashed: before training"),
        row("e", 20.0, problem="", latency_source="max_latency"),
        row("f", 4.0, latency_source="first"),
        row("g", 20.0, latency_source="observed"),
    ]
    found = read_latencies(write(tmp_path, rows))
    # b and c count as longer than their round, g as longer than max_latency.
    assert found.seconds.tolist() == [3.0, 9.0, 9.0, 20.0]
    assert found.censored.tolist() == [False, True, True, True]
    assert (found.failed, found.left_out) == (1, 2)
    assert found.failure_rate == pytest.approx(1 / 7)
    assert (found.max_latency, found.num_clients, found.clients_per_round) == (20.0, 7, 2)
    assert (found.rounds, found.parameters) == (None, {})
    assert (found.num_available.tolist(), found.selections.tolist()) == ([6], [1, 1, 1, 0, 0, 0, 1])


def test_a_run_has_its_scenarios_values(tmp_path: Path) -> None:
    scenario = "seed = 3\nrounds = 40\nnum_clients = 50\nclients_per_round = 5\n[wireless]\nmax_latency_s = 30.0\n"
    own = write(tmp_path, [row("a", 3.0), row("b", 4.0, num_examples=0)], f"{scenario}[selectors.bsfl]\nalpha = 2.0\n")
    found = read_latencies(own)
    assert (found.rounds, found.num_clients, found.clients_per_round, found.max_latency) == (40, 50, 5, 30.0)
    assert found.parameters["bsfl"] == {"max_latency": 30.0, "alpha": 2.0}
    assert found.parameters["cs-ucb"] == {"max_latency": 30.0}
    np.testing.assert_array_equal(found.num_examples, [10.0, np.nan])
    changed = read_latencies(own, clients_per_round=7, max_latency=3.5)
    assert (changed.clients_per_round, changed.max_latency) == (7, 3.5)
    assert changed.censored.tolist() == [False, True]


def test_runs_on_the_same_seed_share_their_latencies(tmp_path: Path) -> None:
    for name, seed, seconds in (("bsfl-seed1", 1, 3.0), ("random-seed1", 1, 3.0), ("random-seed2", 2, 5.0)):
        write(tmp_path / name, [row("a", seconds), row("a", seconds + 1, round=2)], f"seed = {seed}\nnum_clients = 4\n")
    found = read_latencies(tmp_path)
    assert found.seconds.tolist() == [3.0, 4.0, 5.0, 6.0]
    assert found.client.tolist() == [0, 0, 1, 1]
    assert found.fleet.tolist() == [0, 1]
    assert found.num_clients == 4
    write(tmp_path / "other", [row("a", 3.0)], "seed = 1\nnum_clients = 5\n")
    with pytest.raises(ParameterError, match=r"holds runs of different scenarios. Give the folder of one run"):
        read_latencies(tmp_path)


def test_deployments_are_not_mixed(tmp_path: Path) -> None:
    """Clients of two deployments may have the same ids, in folders side by side or one within the other."""
    for name in ("monday", "tuesday"):
        write(tmp_path / name, [row("a", 3.0), row("b", 4.0)])
    with pytest.raises(
        ParameterError, match=r"holds 2 deployments, such as '.*monday' and '.*tuesday', .* of one depl"
    ):
        read_latencies(tmp_path)
    write(tmp_path / "monday" / "old", [row("a", 30.0)])
    with pytest.raises(ParameterError, match=r"holds 2 deployments, such as '.*monday' and '.*monday/old'"):
        read_latencies(tmp_path / "monday")
    assert len(read_latencies(tmp_path / "tuesday").seconds) == 2
    run = write(tmp_path / "run", [row("a", 3.0)], "seed = 1\n")
    write(run / "checkpoints", [row("a", 3.0)])
    assert len(read_latencies(run).seconds) == 1
    with pytest.raises(ParameterError, match=r"holds 2 deployments"):
        read_latencies(tmp_path)


def test_a_journal_that_is_being_written(tmp_path: Path) -> None:
    lines = b"".join(
        encode_entry(RoundEntry(replace(RECORD, round=t), [row("a", 3.0 + t, round=t)])) for t in (1, 2, 3)
    )
    (tmp_path / JOURNAL).write_bytes(lines[:-40])
    assert read_latencies(tmp_path).seconds.tolist() == [4.0, 5.0]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("\ufeffround,client,seconds\n1,a,2.5\n1,b, 4\n2,a,3e0\n", encoding="utf-8")
    found = read_latencies(path)
    assert (found.client.tolist(), found.seconds.tolist()) == ([0, 1, 0], [2.5, 4.0, 3.0])
    assert not found.censored.any()
    assert (found.num_clients, found.clients_per_round, found.max_latency) == (2, 1, math.inf)
    assert [note.split(" (")[0] for note in found.notes] == [
        "Only the 2 clients with a row count", "1 client per round, which is 5 % of the clients",
        "No latency counts as cut off",
    ]  # fmt: skip
    more = read_latencies(path, num_clients=40)
    assert (more.num_clients, more.clients_per_round, len(more.fleet)) == (40, 2, 2)
    cut = read_latencies(path, clients_per_round=2, max_latency=3.0, num_clients=2)
    assert (cut.seconds.tolist(), cut.censored.tolist(), cut.notes) == ([2.5, 3.0, 3.0], [False, True, True], ())


@pytest.mark.parametrize(
    ("seconds", "limit", "remark"),
    [
        ([9, 180, 180, 180], None, "3 rows have the largest value, 180 s. If this is the server's timeout, set --max"),
        ([9, 180, 180, 170], None, ""),
        ([9, 180, 180, 180], 180.0, ""),
        ([9, 170, 170, 170], 180.0, "No row is cut off. If slow clients timed out, add a row with the timeout"),
        ([9000, 4000, 179_000, 8000], None, "more than an hour. If the values are milliseconds, divide them by 1,000"),
    ],
)
def test_remarks_on_odd_rows(seconds: list[float], limit: float | None, remark: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("client,seconds\n" + "".join(f"{k % 2},{value}\n" for k, value in enumerate(seconds)))
    notes = read_latencies(path, clients_per_round=1, max_latency=limit, num_clients=2).notes
    odd = [note for note in notes if note != "No latency counts as cut off (set --max-latency)."]
    assert len(odd) == bool(remark)
    assert all(remark in note for note in odd)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must have the columns client,seconds in its first line, got an empty file. Add client and seconds"),
        ("client,time\na,1\n", "got 'client,time'. Add seconds"),
        ("client,seconds\n", "has no rows"),
        ("client,seconds\na,1\nb,fast\n", "line 3, column 'seconds': expected a number of at least 1e-06, got 'fast'"),
        ("client,seconds\na,0\n", "line 2, column 'seconds': .* got '0'. Correct the cell. If the client timed out"),
        ("client,seconds\na,timeout\n", "If the client timed out, write the timeout and set --max-latency"),
        ("client,seconds\n,3\n", "line 2"),
        ("client,seconds\na,1\nb,1e308\n", r"line 3, .* of at most 1e\+09"),  # cannot be fitted, nor can the next
        ("client,seconds\na,1\nb,1e-320\n", "line 3"),
    ],
)
def test_bad_csv(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ParameterError, match=problem):
        read_latencies(tmp_path / "bad.csv")


def test_no_history(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"^'/dev/null' is neither a file nor a folder\. Give"):
        read_latencies("/dev/null")
    with pytest.raises(ParameterError, match=r"nosuch' does not exist. Give the folder of a run, or a CSV file"):
        read_latencies(tmp_path / "nosuch")
    (tmp_path / "runs").mkdir()
    with pytest.raises(ParameterError, match=r"holds no finished round.*folder of a comparison"):
        read_latencies(tmp_path)
    for name, value in (("clients_per_round", 0), ("max_latency", 0.0)):
        with pytest.raises(ParameterError, match=name):
            read_latencies(tmp_path, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"max_latency must be .* at most 1e\+09, got 1e\+308"):
        read_latencies(tmp_path, max_latency=1e308)
    (tmp_path / "runs" / JOURNAL).write_bytes(b"")
    (tmp_path / "runs" / "scenario.toml").write_text("rounds = [")
    with pytest.raises(ParameterError, match=r"scenario.toml is not a readable scenario|holds no finished round"):
        read_latencies(tmp_path / "runs")


SCENARIOS = [
    "seed = []", "rounds = nan", "num_clients = -1", 'clients_per_round = "x"', "wireless = 5", "selectors = [1]",
    "[selectors]\nbsfl = 5", "[wireless]\nmax_latency_s = -5", "x = " + "[" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_of_another_form_is_refused(scenario: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"scenario\.toml is not a readable scenario"):
        read_latencies(write(tmp_path, [row("a", 3.0)], scenario))


@pytest.mark.parametrize("name", ["journal.jsonl", "scenario.toml", "clients.parquet", "notes"])
@pytest.mark.timeout(30)
def test_a_pipe_or_a_link_in_a_folder_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "run", [row("a", 3.0)])
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        make(tmp_path / "run" / name)
        with pytest.raises(ParameterError, match=f"{name}' is (a link|neither a file nor)"):
            read_latencies(tmp_path / "run")


def test_a_prediction_has_a_bounded_length(tmp_path: Path) -> None:
    """A scenario of two rounds may say that it has ten million."""
    found = read_latencies(write(tmp_path / "run", [row("a", 3.0)], "rounds = 10000000\nnum_clients = 10000000\n"))
    assert found.rounds == 1000
    with pytest.raises(ParameterError, match="a prediction of 1,000 rounds with 10,000,000 clients has more than"):
        advise(found)


def test_a_csv_file_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    os.truncate(tmp_path / "rows.csv", 40 * 10**9)
    with pytest.raises(ParameterError, match="it has 40,000,000,000 bytes"):
        read_latencies(tmp_path / "rows.csv")
