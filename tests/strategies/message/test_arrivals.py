"""Replies that are written as they arrive: a server that is killed in a round asks only those without one."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.common import FitIns, FitRes

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Everyone, create
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy
from fedsel_flwr.strategies.wrapping.arrivals import FOLDER, Arrivals
from tests.strategies.message.helpers import FakeGrid, FakeNode, ProbeProxy, fedavg, play
from tests.strategies.zygote import Zygote

pytestmark = pytest.mark.timeout(120)
CLIENTS, ROUNDS = 6, 4


class Logged(ProbeProxy):
    """A client that writes down each training, and answers probes, but for one silent client."""

    log: Path

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        with self.log.open("a") as file:
            file.write(f"{self.number} {group_id}\n")
        return super().fit(ins, timeout, group_id)


def _nodes(log: Path, shift: int) -> dict[int, FakeNode]:
    """Sites by name, whose node ids differ from server to server; replies come one after the other."""
    nodes = {}
    for k in range(CLIENTS):
        proxy = Logged(f"site-{k}", k, number=k)
        proxy.log = log
        node = FakeNode(proxy, ready=0.03 * k)
        node.registered = {"name": f"site-{k}"}  # type: ignore[attr-defined]
        nodes[100 * shift + (k * 7) % 11 + 5] = node
    return nodes


def _strategy(folder: Path, selector: Any = None, **options: Any) -> SelectionStrategy:
    """One that keeps replies, and chooses everyone by default."""
    given = {"clock": "server", "identity": "name", "checkpoint_dir": folder, "keep_arrivals": True, **options}
    return SelectionStrategy(selector or Everyone(), fedavg(), **given)


def _play(folder: Path, log: Path, shift: int) -> tuple[list[bytes], list[Any]]:
    """The final model, and who was chosen with what in each round."""
    strategy = _strategy(folder, create("power-of-choice", clients_per_round=4, candidates=5, seed=1), resume=True)
    _, models = play(strategy, FakeGrid(_nodes(log, shift)), ROUNDS)
    rows = [(row.round, row.client_id, row.completed, row.num_examples) for row in strategy.history.clients]
    assert len(strategy.history.rounds) == ROUNDS
    return models[-1] if models else [], rows


def _written(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / FOLDER).glob("client-*/round-*.safetensors")}


def _trainings(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    """Of this test alone: a command that a later test plays ends the children of the process."""
    (results := tmp_path / "results").mkdir()
    process = Zygote(results, __name__)
    yield process
    process.close()


@pytest.mark.parametrize("trials", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_at_random_moments_no_written_training_is_repeated(zygote: Zygote, trials: int, tmp_path: Path) -> None:
    _, expected = _play(tmp_path / "straight", tmp_path / "straight.log", 0)
    straight = _play(tmp_path / "again", tmp_path / "again.log", 0)[0]
    draw, kept = np.random.default_rng(3), 0
    for trial in range(trials):
        folder, log = tmp_path / f"run-{trial}", tmp_path / f"{trial}.log"
        for start in range(1, 4):
            pid, _ = zygote.start(_play, folder, log, start)
            # So many replies are on their way or written, in any round; the end of the run ends the wait too.
            begun, more = len(_trainings(log)), int(draw.integers(1, 7))
            while len(_trainings(log)) < begun + more and os.path.exists(f"/proc/{pid}/exe"):
                time.sleep(0.002)
            time.sleep(float(draw.uniform(0.0, 0.6)))
            os.kill(pid, signal.SIGKILL)
            zygote.wait(pid)
            written, trained = _written(folder), len(_trainings(log))
            names = {path.parent.name: int(path.stem[6:]) for path in written}
            kept += len(names)
        model, rows = zygote.call(_play, folder, log, 9)
        assert rows == expected
        assert model == straight
        # What was written before the last start was not trained again.
        later = _trainings(log)[trained:]
        done = {f"{k} {number}" for k in range(CLIENTS) for name, number in names.items() if name == _name(k)}
        assert not done.intersection(later)
        assert not (folder / FOLDER).exists()
    assert kept >= trials


def _name(k: int) -> str:
    return f"client-{hashlib.sha256(f'site-{k}'.encode()).hexdigest()[:32]}"


class _Crash(BaseException):
    """Ends the process as far as the test is concerned."""


class _Crashing(FakeGrid):
    """A grid on which the server dies after so many replies to training, those of the sites in order."""

    left = CLIENTS + 3

    def pull_messages(self, message_ids: Any) -> Any:
        # Waits for all of them, so that a busy machine changes nothing.
        while self._replies and max(ready for ready, _ in self._replies.values()) > time.monotonic():
            time.sleep(0.01)
        here = sorted(super().pull_messages(message_ids), key=lambda one: self.nodes[one.metadata.src_node_id].ready)
        if any(one.metadata.message_type != "train" for one in here):
            return here
        if not self.left:
            raise _Crash
        taken, rest = here[: self.left], here[self.left :]
        self.left -= len(taken)
        self._replies |= {one.metadata.reply_to_message_id: (0.0, one) for one in rest}
        return taken


def _crash(folder: Path, log: Path, left: int = CLIENTS + 3, selector: Any = None) -> None:
    """Play round 1, and in round 2 the replies of sites 0 to 2."""
    grid = _Crashing(_nodes(log, 1))
    grid.left = left
    with pytest.raises(_Crash):
        play(_strategy(folder, selector), grid, 3)


def _resumed(folder: Path, log: Path, nodes: dict[int, FakeNode] | None = None, **options: Any) -> Any:
    strategy = _strategy(folder, resume=True, **options)
    play(strategy, FakeGrid(nodes or _nodes(log, 2)), 3)
    return strategy


def test_a_repeated_round_asks_no_probe_again(tmp_path: Path) -> None:
    """Six candidates are probed for four places; the server dies after six replies, two of them in round 2."""
    probing = {"clients_per_round": 4, "candidates": 6, "seed": 1}
    _crash(tmp_path / "run", tmp_path / "log", left=6, selector=create("power-of-choice", **probing))
    nodes = _nodes(tmp_path / "log", 2)
    strategy = _resumed(tmp_path / "run", tmp_path / "log", nodes, selector=create("power-of-choice", **probing))
    assert [one.num_completed for one in strategy.history.rounds] == [4, 4, 4]
    probed = [config["round"] for node in nodes.values() for config in node.proxy.probed]  # type: ignore[attr-defined]
    assert set(probed) == {3}
    trained = [one.split()[1] for one in _trainings(tmp_path / "log")]
    # Four in each round, and the two whose reply was lost once more.
    assert (trained.count("1"), trained.count("2"), trained.count("3")) == (4, 6, 4)


def test_a_reply_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("fedsel_flwr.strategies.wrapping.arrivals.MODELS", 0)
    monkeypatch.setattr("fedsel_flwr.strategies.wrapping.arrivals.MORE_BYTES", 10)
    _crash(tmp_path / "run", tmp_path / "log")
    assert not _written(tmp_path / "run")
    assert "is not kept on disk" in caplog.text


@pytest.mark.parametrize(
    ("gone", "trainings"), [(0, [2, 3, 3, 4, 4, 4]), (5, [3, 3, 3, 4, 4, 2])], ids=["with a reply", "without one"]
)
def test_a_client_that_is_gone_counts_if_its_reply_was_written(gone: int, trainings: list[int], tmp_path: Path) -> None:
    """A site dies with the server: its reply in round 2 was written, or it has failed; it is away in round 3."""
    log = tmp_path / "log"
    _crash(tmp_path / "run", log)
    nodes = {i: node for i, node in _nodes(log, 2).items() if node.proxy.number != gone}
    rows = _resumed(tmp_path / "run", log, nodes).history.clients
    second = [(row.client_id, row.completed) for row in rows if row.round == 2]
    assert second == [(f"site-{k}", k != 5 or gone != 5) for k in range(CLIENTS)]
    assert [row.client_id for row in rows if row.round == 3] == [f"site-{k}" for k in range(CLIENTS) if k != gone]
    # Sites 3 to 5 trained for round 2 twice where they could, because their reply was lost.
    assert [sum(one.split()[0] == str(k) for one in _trainings(log)) for k in range(CLIENTS)] == trainings


def test_enough_written_replies_end_the_round_without_asking(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _crash(tmp_path / "run", log)
    before = len(_trainings(log))
    history = _resumed(tmp_path / "run", log, wait_for=3).history
    assert [row.completed for row in history.clients if row.round == 2] == [True] * 3 + [False] * 3
    assert [row.spare for row in history.clients if row.round == 2] == [False] * 3 + [True] * 3
    assert len(_trainings(log)) == before + CLIENTS  # those of round 3


@pytest.mark.parametrize(("resume", "again"), [(True, 3), (False, CLIENTS)])
def test_only_a_resumed_run_uses_the_replies_of_another_one(resume: bool, again: int, tmp_path: Path) -> None:
    """The server dies in round 1, so that there is no checkpoint; a new run in the same folder begins anew."""
    log = tmp_path / "log"
    _crash(tmp_path / "run", log, left=3)
    strategy = _strategy(tmp_path / "run", resume=resume)
    play(strategy, FakeGrid(_nodes(log, 2)), 1)
    assert all(row.completed for row in strategy.history.clients)
    assert len(_trainings(log)) == CLIENTS + again


@pytest.mark.parametrize("damage", ["torn", "another model", "a link", "the choice"])
def test_what_is_damaged_is_asked_again(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    _crash(folder, log)
    first = sorted((folder / FOLDER).glob("client-*/*.safetensors"))[0]
    if damage == "torn":
        first.write_bytes(first.read_bytes()[:-1])
    elif damage == "another model":
        other = Arrivals(tmp_path / "other", {})
        other.recall(2, [np.ones(3)], resume=True)
        other.begin(["site-0"], [])
        first.write_bytes(next((tmp_path / "other").glob("*/choice/*")).read_bytes())
    elif damage == "a link":
        target = tmp_path / "elsewhere"
        first.rename(target)
        first.symlink_to(target)
    else:
        path = next((folder / FOLDER / "choice").glob("*.safetensors"))
        path.write_bytes(b"")
    strategy = _resumed(folder, log)
    assert all(row.completed for row in strategy.history.clients)
    assert len(strategy.history.clients) == 3 * CLIENTS
    assert "is not used, and its client is asked again" in caplog.text
    again = CLIENTS if damage == "the choice" else 4
    assert len(_trainings(log)) == 2 * CLIENTS + again + CLIENTS


def test_a_disk_that_is_full_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("fedsel_flwr.strategies.wrapping.arrivals.write_checkpoint", full)
    with pytest.raises(RunError, match="No space left on device"):
        play(_strategy(tmp_path), FakeGrid(_nodes(tmp_path / "log", 1)), 1)


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 2}, {"clock": "virtual"}, {"concurrency": 4}])
def test_where_it_cannot_help_it_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    own = {"clock": "server"} | options | ({"checkpoint_dir": tmp_path} if options else {})
    with pytest.raises(ParameterError, match="keep_arrivals needs"):
        SelectionStrategy(create("random", clients_per_round=4), keep_arrivals=True, **own)
    with pytest.raises(ParameterError, match="the legacy API's server waits"):
        LegacyStrategy(Everyone(), keep_arrivals=True, clock="server", checkpoint_dir=tmp_path)
