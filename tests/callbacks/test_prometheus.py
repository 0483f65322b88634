"""The exporter: figures worked by hand, real scrapes, addresses, and what must never end a run."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedsel_flwr.callbacks import prometheus
from fedsel_flwr.callbacks.prometheus import REASONS, Exporter, reason_label
from fedsel_flwr.checks import parse_address
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.checkpoints import Checkpoint, Checkpoints
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.records import ClientRecord
from tests.e2e.fleet import wait_until
from tests.pages import ROOT
from tests.report.made import client

Figures = dict[tuple[str, str], float]


def scrape(url: str | None) -> Figures:
    """Name of a sample and its labels -> its value, over HTTP as Prometheus reads it."""
    assert url is not None
    with urllib.request.urlopen(url, timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        text = reply.read().decode()
    return {
        (one.name, ",".join(f"{key}={value}" for key, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def values(exporter: Exporter, *names: str) -> list[float]:
    """What a scrape has under these names, without labels."""
    found = scrape(exporter.url)
    return [found[f"fedsel_{name}", ""] for name in names]


def row(number: int, name: str, latency_s: float = 1.0, problem: str = "", **values: Any) -> ClientRecord:
    """A client's record; a problem means that it has failed."""
    return client(name, latency_s, round=number, completed=not problem, problem=problem, **values)


def two_rounds(history: History | None = None) -> History:
    """Round 1: 0.3 s, 4 s and a spare; 1 + 2 J. Round 2: 0.3 s, and three failures; no joules."""
    history = History() if history is None else history
    spare = row(1, "c", 9.0, "late: enough other updates had arrived", spare=True)
    done = [row(1, "a", 0.3, energy_j=1.0), row(1, "b", 4.0, energy_j=2.0)]
    history.append(round=1, num_available=5, round_s=4.0, clients=[*done, spare])
    failures = [
        row(2, "b", 9.0, "no answer within 9 s", timed_out=True),
        row(2, "c", 9.0, "exception: ValueError: client b is broken"),
        row(2, "d", 9.0, "energy: -1 cannot be used; arrays: expected 2, got 1"),
    ]
    history.append(round=2, num_available=4, round_s=9.0, clients=[row(2, "a", 0.3), *failures])
    history.record_evaluation(2, loss=0.5, accuracy=0.75)
    return history


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    one = Exporter("0")
    one.begin(History())
    yield one
    one.close()


def test_the_figures_are_those_worked_by_hand(exporter: Exporter) -> None:
    assert len(REASONS) <= 8
    before = scrape(exporter.url)
    assert before["fedsel_rounds_total", ""] == 0
    assert math.isnan(before["fedsel_accuracy_ratio", ""])
    exporter.update(two_rounds())
    found = scrape(exporter.url)
    expected = {
        "fedsel_round": 2,
        "fedsel_rounds_total": 2,
        "fedsel_round_duration_seconds_count": 2,
        "fedsel_round_duration_seconds_sum": 4.0 + 9.0,
        "fedsel_selected_clients_total": 3 + 4,
        "fedsel_completed_clients_total": 2 + 1,
        "fedsel_spare_clients_total": 1,
        "fedsel_last_round_available_clients": 4,
        "fedsel_last_round_selected_clients": 4,
        "fedsel_last_round_completed_clients": 1,
        # Without the failed clients and the spare, whose latency is max_latency.
        "fedsel_client_latency_seconds_count": 3,
        "fedsel_client_latency_seconds_sum": 0.3 + 4.0 + 0.3,
        "fedsel_energy_joules_total": 1.0 + 2.0,
        "fedsel_accuracy_ratio": 0.75,
        "fedsel_loss": 0.5,
        "fedsel_evaluated_round": 2,
    }
    assert {name: found[name, ""] for name in expected} == pytest.approx(expected)
    failed = {labels: value for (name, labels), value in found.items() if name == "fedsel_failed_clients_total"}
    counted = {"reason=timeout": 1, "reason=exception": 1, "reason=model": 1}
    assert failed == {f"reason={one}": 0 for one in (*REASONS, "other")} | counted
    # 7 selected = 3 completed + 3 failed + 1 spare
    assert sum(failed.values()) == 3
    buckets = {"0.25": 0, "0.5": 2, "2.5": 2, "5.0": 3, "+Inf": 3}
    assert {le: found["fedsel_client_latency_seconds_bucket", f"le={le}"] for le in buckets} == buckets
    assert abs(found["fedsel_last_round_timestamp_seconds", ""] - time.time()) < 60
    # Without checkpoints there is no age.
    assert not [name for name, _ in found if "checkpoint" in name]


def test_a_round_is_counted_once_and_its_evaluation_may_come_later(exporter: Exporter) -> None:
    history = two_rounds()
    for _ in range(3):
        exporter.update(history)
    history.record_evaluation(2, loss=0.25, accuracy=0.875)
    exporter.update(history)
    assert values(exporter, "rounds_total", "selected_clients_total", "loss") == [2, 7, 0.25]
    history.append(round=3, num_available=4, round_s=1.0, clients=[row(3, "a")])
    exporter.update(history)
    history.append(round=4, num_available=0, round_s=0.0, clients=[])
    exporter.update(history)
    counted = ("rounds_total", "selected_clients_total", "client_latency_seconds_count")
    assert values(exporter, *counted, "round") == [4, 8, 4, 4]
    # These rounds have no evaluation, so the last known one stays.
    assert values(exporter, "loss", "evaluated_round") == [0.25, 2]


def test_rounds_in_a_journal_are_counted_as_rounds_in_memory(exporter: Exporter, tmp_path: Path) -> None:
    exporter.update(two_rounds(History(Journal(tmp_path / "journal.jsonl"))))
    assert values(exporter, "selected_clients_total", "client_latency_seconds_count") == [7, 3]


def test_counters_of_a_resumed_run_begin_at_0_and_gauges_at_the_loaded_round() -> None:
    exporter, history = Exporter("0"), two_rounds()
    exporter.begin(history)
    names = ("rounds_total", "selected_clients_total", "round")
    assert values(exporter, *names, "last_round_selected_clients", "accuracy_ratio") == [0, 0, 2, 4, 0.75]
    # The resumed run repeats the end of the checkpoint's round.
    exporter.update(history)
    assert scrape(exporter.url)["fedsel_rounds_total", ""] == 0
    history.append(round=3, num_available=4, round_s=1.0, clients=[row(3, "a")])
    exporter.update(history)
    assert values(exporter, *names) == [1, 1, 3]
    exporter.close()


def test_a_history_that_went_back_is_followed(exporter: Exporter) -> None:
    """A state of an earlier round was loaded into the strategy: the rounds after it take place a second time."""
    exporter.update(two_rounds())
    earlier = History()
    earlier.append(round=1, num_available=5, round_s=4.0, clients=[row(1, "a")])
    exporter.follow(earlier)
    earlier.append(round=2, num_available=5, round_s=4.0, clients=[row(2, "a")])
    exporter.update(earlier)
    assert values(exporter, "rounds_total", "selected_clients_total") == [3, 8]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("exception: ValueError: x", "exception"),
        ("status: FIT_NOT_IMPLEMENTED: ", "exception"),
        ("node unavailable: its SuperNode stopped reporting", "unavailable"),
        ("not reached: the SuperLink did not take the message", "unavailable"),
        ("update norm: 9 is above max_update_norm = 1", "model"),
        ("num_examples: expected an integer", "metrics"),
        ("late: done after 3 s", "late"),
        ("crashed: the client did not train", "dropout"),
        ("energy: -1 cannot be used; lost: its answer did not arrive", "dropout"),
        ("no answer", "timeout"),
        ("client-7 at 10.0.0.7: anything", "other"),
        ('"} 1\nfedsel_round 9', "other"),
        ("", "other"),
    ],
)
def test_a_label_is_one_of_few_words_and_never_a_clients_text(problem: str, reason: str) -> None:
    assert reason_label(row(1, "a", 9.0, problem or "x")) == reason
    assert reason in (*REASONS, "other")


def test_a_client_that_did_not_reply_before_the_deadline_is_a_timeout() -> None:
    text = "late: no answer within round_deadline_s = 3 s"
    assert [reason_label(row(1, "a", 9.0, text, timed_out=one)) for one in (True, False)] == ["timeout", "late"]


# ---- the checkpoint's age --------------------------------------------------------------------------------------------


def test_the_age_of_the_newest_checkpoint_is_that_of_the_scrape(tmp_path: Path, monkeypatch: Any) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    exporter = Exporter("0", checkpoints)
    exporter.begin(History())
    # Before the first checkpoint: since the beginning of the run.
    assert 0 <= scrape(exporter.url)["fedsel_checkpoint_age_seconds", ""] < 60
    checkpoints.written_at = time.monotonic() - 4000
    assert 4000 <= scrape(exporter.url)["fedsel_checkpoint_age_seconds", ""] < 4060
    # A change of the machine's date is no age.
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic))
    assert 4000 <= scrape(exporter.url)["fedsel_checkpoint_age_seconds", ""] < 4060
    exporter.close()


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (9464, ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("monitor.example:80", ("monitor.example", 80)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_addresses(given: str | int, address: tuple[str, int]) -> None:
    assert parse_address("metrics_address", given) == address


@pytest.mark.parametrize(
    "wrong", ["", "x", ":9464", "localhost", "host:", "host:-1", "65536", -1, True, 1.5, "a b:1", "::1"], ids=repr
)
def test_what_is_no_address_is_refused(wrong: Any) -> None:
    with pytest.raises(ParameterError, match=r"^metrics_address must be a port or HOST:PORT, .* got "):
        parse_address("metrics_address", wrong)


def test_only_this_machine_can_connect_unless_a_host_is_named(exporter: Exporter) -> None:
    assert exporter.url is not None
    port = int(exporter.url.removeprefix("http://127.0.0.1:").removesuffix("/metrics"))
    # Another address of this machine, which a server on all addresses would answer.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    everywhere = Exporter("0.0.0.0:0")
    everywhere.begin(History())
    assert scrape(str(everywhere.url).replace("0.0.0.0", "127.0.0.2"))["fedsel_round", ""] == 0
    everywhere.close()


def test_a_port_that_is_taken_and_a_host_that_is_not_here_are_named(exporter: Exporter) -> None:
    taken = str(exporter.url).split("/")[2]
    for address, why in ((taken, "in use"), ("192.0.2.1:0", "assign"), (f"{'x' * 70}:0", "too long")):
        other = Exporter(address)
        with pytest.raises(RunError, match=rf"^metrics_address {address!r} cannot be used: .*{why}.*\. .*0 for a free"):
            other.begin(History())
        assert other.url is None


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(RunError, match=r"needs prometheus-client.*pip install 'fedsel-flwr\[metrics\]'$"):
        Exporter("0")


# ---- beginning and end -----------------------------------------------------------------------------------------------


def is_open(url: str) -> bool:
    host, port = url.split("/")[2].rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it closes at this moment
        return False
    return True


def test_the_server_ends_with_close_and_begins_again_with_its_counts() -> None:
    exporter = Exporter("0")
    assert exporter.url is None
    exporter.update(two_rounds())
    exporter.close()
    exporter.begin(History())
    first = exporter.url
    exporter.begin(History())
    assert exporter.url == first is not None
    history = two_rounds()
    exporter.update(history)
    exporter.close()
    exporter.close()
    assert exporter.url is None
    assert not is_open(first)
    exporter.begin(history)
    assert scrape(exporter.url)["fedsel_rounds_total", ""] == 2
    exporter.close()


def test_the_server_ends_when_its_exporter_is_forgotten() -> None:
    exporter = Exporter("0")
    exporter.begin(History())
    url = str(exporter.url)
    assert is_open(url)
    del exporter
    gc.collect()
    wait_until(lambda: not is_open(url), 10, "the server ends")


def test_an_error_in_the_metrics_is_logged_once_and_ends_nothing(exporter: Exporter, caplog: Any) -> None:
    class Unreadable(History):
        @property
        def last(self) -> Any:
            raise OSError("the disk\nis gone")

    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"):
        exporter.update(Unreadable())
        exporter.update(Unreadable())
    [said] = caplog.messages
    assert said.startswith("the metrics could not be updated, and the run continues: OSError: the disk is gone")
    exporter.update(two_rounds())
    assert scrape(exporter.url)["fedsel_rounds_total", ""] == 2


def test_a_loaded_checkpoint_has_the_age_of_its_file(tmp_path: Path) -> None:
    writing = Checkpoints(tmp_path)
    writing.write(Checkpoint(round=1, model=[], names=[], state={}))
    assert writing.written_at is not None
    assert abs(writing.written_at - time.monotonic()) < 60
    del writing
    gc.collect()
    written = time.time() - 5000.0
    os.utime(tmp_path / "round-000001.safetensors", (written, written))
    loading = Checkpoints(tmp_path, resume=True)
    assert loading.written_at is None
    assert loading.newest(lambda checkpoint: None) is not None
    assert loading.written_at == pytest.approx(time.monotonic() - 5000.0, abs=60)


# ---- connections that hang -------------------------------------------------------------------------------------------


def half_open(url: str | None, number: int) -> list[socket.socket]:
    """Connections that begin a request and never end it."""
    host, port = str(url).split("/")[2].rsplit(":", 1)
    held = []
    for _ in range(number):
        held.append(one := socket.create_connection((host, int(port)), timeout=5))
        one.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    return held


def is_closed(one: socket.socket) -> bool:
    """Whether the server ends a connection within ten seconds."""
    one.settimeout(10.0)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_half_open_connections_are_few_and_keep_nobody_from_scraping(exporter: Exporter) -> None:
    before = threading.active_count()
    held = half_open(exporter.url, 60)
    assert scrape(exporter.url)["fedsel_rounds_total", ""] == 0
    assert threading.active_count() - before <= 33
    assert is_closed(held[0])
    exporter.close()
    assert all(is_closed(one) for one in held)
    for one in held:
        one.close()


def test_a_connection_that_sends_a_little_now_and_then_is_closed_too(exporter: Exporter, monkeypatch: Any) -> None:
    monkeypatch.setattr(prometheus, "CONNECTION_S", 0.3, raising=False)
    (one,) = half_open(exporter.url, 1)
    deadline, closed = time.monotonic() + 5.0, False
    while not closed and time.monotonic() < deadline:
        time.sleep(0.1)
        try:
            one.sendall(b"x")
        except ConnectionError:
            closed = True
    one.close()
    assert closed


SERVER = """
import os, resource, sys
from pathlib import Path
from fedsel_flwr.callbacks.prometheus import Exporter
from fedsel_flwr.rounds.checkpoints import Checkpoint, Checkpoints
from fedsel_flwr.rounds.history import History
limit, used, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
store, exporter = Checkpoints(folder), Exporter("0")
store.write(Checkpoint(round=1, model=[], names=[], state={}))
exporter.begin(History())
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(used)]
print(exporter.url, flush=True)
sys.stdin.readline()
store.write(Checkpoint(round=2, model=[], names=[], state={}))
print("written", len(os.listdir("/proc/self/fd")), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the descriptors in /proc")
@pytest.mark.parametrize(("limit", "used"), [(256, 150), (256, 200)])
def test_connections_leave_descriptors_for_a_checkpoint(limit: int, used: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(limit), str(used), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url, held = server.stdout.readline(), list[socket.socket]()
        for _ in range(limit - used):
            with contextlib.suppress(ConnectionError):
                held += half_open(url, 1)
        server.stdin.write("\n")
        server.stdin.flush()
        said = server.stdout.readline().split()
        for one in held:
            one.close()
    assert said[:1] == ["written"]
    assert int(said[1]) <= used + 50
