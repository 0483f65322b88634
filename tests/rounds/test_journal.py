"""The journal: whole lines, a short memory, and the same sequences as those of a history in memory."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.rounds import journal as module
from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.rounds.journal import Journal, read_lines
from fedsel_flwr.rounds.records import RoundRecord

NaN = float("nan")


def row(number: int, k: int, draw: random.Random) -> ClientRecord:
    problem = draw.choice(["", "", "late: done after 3 s", "energy: -1 cannot be used; arrays: é ≠ \u2028 \"'\\"])
    return ClientRecord(
        round=number, client_id=f"c{k}", client=k, completed=not problem, problem=problem, latency_s=draw.random() / 3,
        energy_j=draw.choice([NaN, math.inf, 5e-324, 1 / 3]), download_s=-0.0, compute_s=1e308, upload_s=NaN,
        train_loss=draw.gauss(), num_examples=2**53,
    )  # fmt: skip


def play(history: History, rounds: range, *, close: Callable[[int], bool] = lambda number: number % 3 > 0) -> History:
    """Rounds of 0 to 4 clients; some are closed, some evaluated before that, after it, or not at all."""
    for number in rounds:
        draw = random.Random(number)
        chosen = sorted(draw.sample(range(9), number % 5))
        history.append(
            round=number, num_available=9, round_s=draw.random(), clients=[row(number, k, draw) for k in chosen],
            probe_s=0.25 * (number % 2), probe_j=NaN,
        )  # fmt: skip
        if number % 2:
            history.record_evaluation(number, loss=draw.random(), accuracy=NaN)
        if close(number):
            history.close_round()
            if number % 7 == 0:
                history.record_evaluation(number, loss=draw.random(), accuracy=0.5)
    return history


def both(path: Path, rounds: int) -> tuple[History, History]:
    return play(History(), range(1, rounds + 1)), play(History(Journal(path)), range(1, rounds + 1))


@pytest.fixture(params=[1, 3, 100])
def last(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many rounds stay in memory: the open one, a few, all."""
    monkeypatch.setattr(module, "LAST_ROUNDS", request.param)
    return request.param


def in_file(path: Path) -> list[RoundRecord]:
    """The rounds of the file's whole lines."""
    return [entry.round for _, entry in read_lines(path)]


def test_on_disk_and_in_memory_it_is_the_same(last: int, tmp_path: Path) -> None:
    memory, disk = both(tmp_path / "j", 40)
    assert repr(disk) == repr(memory)
    assert (disk.rounds, memory.clients) == (memory.rounds, disk.clients)
    assert disk.rounds != memory.rounds[:-1]
    assert disk.clients != memory.clients[::-1]
    for ours, theirs in ((disk.rounds, memory.rounds), (disk.clients, memory.clients)):
        cuts = [None, 0, 3, 38, -4, 1000]
        for start, stop, step in itertools.product(cuts, cuts, (None, 2, -3)):
            cut = slice(start, stop, step)
            assert repr(ours[cut]) == repr(theirs[cut]), cut
        for i in (0, 5, 39, -1, -40):
            assert repr(ours[i]) == repr(theirs[i])
        for i in (len(theirs), -len(theirs) - 1):
            with pytest.raises(IndexError):
                ours[i]
        assert repr(list(reversed(ours))) == repr(theirs[::-1])
    assert disk.selection_counts(12).tolist() == memory.selection_counts(12).tolist()
    assert disk.problem_counts() == memory.problem_counts()
    assert disk.problem_counts()["arrays"] > 0


def test_memory_grows_by_24_bytes_a_round_only(tmp_path: Path) -> None:
    history, draw = History(Journal(tmp_path / "j")), random.Random(0)

    def measured(rounds: range) -> int:
        for number in rounds:
            clients = [row(number, k, draw) for k in range(20)]
            history.append(round=number, num_available=40, round_s=1.0, clients=clients)
            history.record_evaluation(number, loss=0.5, accuracy=0.5)
            history.close_round()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        measured(range(1, 111))
        before = measured(range(111, 161))
        grown = measured(range(161, 361)) - before
    finally:
        tracemalloc.stop()
    # The arrays of offsets are longer than they must be, by an eighth; the records of the last rounds differ in length.
    assert grown < 200 * 24 * 1.5 + 50_000  # the records of these rounds would be megabytes
    alive = [one for one in gc.get_objects() if isinstance(one, ClientRecord)]
    assert len(alive) == module.LAST_ROUNDS * 20
    assert len(history.clients) == 360 * 20
    assert repr(history.clients[77]) == repr(history.clients[70:80][7])  # NaN is equal to NaN


def test_a_round_is_written_when_it_has_ended_or_the_next_one_begins(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    history = History(journal)
    assert not journal.path.exists()
    play(history, range(1, 2), close=lambda number: False)
    assert not journal.path.exists()
    play(history, range(2, 3), close=lambda number: False)
    assert len(in_file(journal.path)) == 1
    history.close_round()
    assert len(in_file(journal.path)) == 2
    size = journal.path.stat().st_size
    history.close_round()
    assert journal.path.stat().st_size == size


def test_what_the_file_held_before_is_replaced_by_a_new_run(tmp_path: Path) -> None:
    play(History(Journal(tmp_path / "j")), range(1, 30), close=lambda number: True)
    play(History(Journal(tmp_path / "j")), range(1, 4), close=lambda number: True)
    assert [one.round for one in in_file(tmp_path / "j")] == [1, 2, 3]
    assert (tmp_path / "j").read_bytes().endswith(b"\n")


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, 2, 20])
def test_a_state_continues_as_if_nothing_had_happened(rounds: int, closed: bool, last: int, tmp_path: Path) -> None:
    whole, history = both(tmp_path / "j", rounds)
    if closed:
        history.close_round()
    state = pickle.loads(pickle.dumps(history.state_dict()))
    play(history, range(rounds + 1, rounds + 9))  # rounds that the checkpoint knows nothing of
    with (tmp_path / "j").open("ab") as file:
        file.write(b'{"round": {"rou')  # and one that was cut off
    resumed = History(Journal(tmp_path / "j"))
    resumed.load_state_dict(state)
    assert repr(resumed) == repr(whole)
    assert resumed.problem_counts() == whole.problem_counts()
    for one in (resumed, whole):
        one.record_evaluation(rounds, loss=0.125, accuracy=0.5)
    play(resumed, range(rounds + 1, rounds + 13))
    play(whole, range(rounds + 1, rounds + 13))
    assert repr(resumed) == repr(whole)
    assert resumed.selection_counts(9).tolist() == whole.selection_counts(9).tolist()
    resumed.close_round()
    assert (tmp_path / "j").read_bytes().endswith(b"\n")
    assert repr(in_file(tmp_path / "j")) == repr(whole.rounds)


def test_each_damage_of_the_file_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    state, path = play(History(Journal(tmp_path / "j")), range(1, 9)).state_dict(), tmp_path / "j"
    good = path.read_bytes()[: state["offset"]]
    lines = good.splitlines(keepends=True)
    fewer = {**state, "rounds": 6}
    cases: list[tuple[Any, bytes, str]] = [
        (state, good[:-1], f"offset: expected {len(good)}, got {len(good) - len(lines[-1])}"),
        (state, b"".join(lines[:-1]), "offset"),
        (state, b"", "offset"),
        (state, good.replace(b'"round_s": 0.', b'"round_s": 1.', 1), "checksum"),
        (state, good.replace(lines[3], b"x" * (len(lines[3]) - 1) + b"\n"), "line 4 of .* is not a round"),
        (state, good.replace(b'"latency_s"', b'"latencies"', 1), "line 1 of .* is not a round"),
        (state, good.replace(lines[2], b"\0" * (len(lines[2]) - 1) + b"\n"), "line 3 of .* is not a round"),
        (fewer, good, "rounds: expected 6, got 7"),
        ({**state, "offset": -1}, good, "offset must be a whole number"),
        ({**state, "checksum": None}, good, "checksum must be a whole number"),
        ({**state, "offset": state["offset"] - 1}, good, "offset"),
        ({**state, "last": None}, good, "must be a mapping"),
        ({**state, "last": History().state_dict()}, good, "last must hold one round, got 0"),
        ({**state, "last": play(History(), range(1, 3)).state_dict()}, good, "last must hold one round, got 2"),
        ({k: v for k, v in state.items() if k != "rounds"}, good, "missing"),
    ]  # fmt: skip
    for spoilt, content, why in cases:
        path.write_bytes(content)
        fresh = History(Journal(path))
        with pytest.raises(StateError, match=why):
            fresh.load_state_dict(spoilt)
        assert (len(fresh.rounds), path.read_bytes()) == (0, content)
    path.unlink()
    with pytest.raises(StateError, match="No such file"):
        History(Journal(path)).load_state_dict(state)


def test_no_flipped_byte_before_the_offset_is_taken_for_the_history(tmp_path: Path) -> None:
    state, path = play(History(Journal(tmp_path / "j")), range(1, 9)).state_dict(), tmp_path / "j"
    content, draw = path.read_bytes(), random.Random(1)
    for place in draw.sample(range(state["offset"]), 120):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :])
        with pytest.raises(StateError, match=r"is not a round|is not the history"):
            History(Journal(path)).load_state_dict(state)


def test_histories_in_memory_and_on_disk_do_not_mix_and_a_copy_is_in_memory(tmp_path: Path) -> None:
    memory, disk = both(tmp_path / "j", 12)
    with pytest.raises(StateError, match="checkpoint_dir"):
        History().load_state_dict(disk.state_dict())
    with pytest.raises(StateError, match="missing"):
        History(Journal(tmp_path / "other")).load_state_dict(memory.state_dict())
    with pytest.raises(RunError, match="12 rounds already"):
        memory.write_to(Journal(tmp_path / "late"))
    for copied in (copy.deepcopy(disk), pickle.loads(pickle.dumps(disk))):
        assert copied.journal is None
        assert repr(copied) == repr(memory)


def test_a_removed_file_can_still_be_read_and_is_closed_with_the_history(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "LAST_ROUNDS", 1)
    memory, disk = both(tmp_path / "j", 30)
    (tmp_path / "j").unlink()
    assert repr(disk) == repr(memory)
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    open_files = len(os.listdir("/proc/self/fd"))
    del disk
    assert open_files - len(os.listdir("/proc/self/fd")) == 1


def test_a_write_that_fails_leaves_whole_lines_and_can_be_done_again(tmp_path: Path, monkeypatch: Any) -> None:
    whole = play(History(), range(1, 9), close=lambda number: True)
    history = play(History(Journal(tmp_path / "j")), range(1, 5), close=lambda number: True)
    size, pwrite = (tmp_path / "j").stat().st_size, os.pwrite

    def some(descriptor: int, data: Any, place: int) -> int:
        """Takes ten bytes at a time, and fails after the third."""
        if place >= size + 30:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data[:10], place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", some)
        with pytest.raises(RunError, match=r"round 5 cannot be written .*No space left"):
            play(history, range(5, 6), close=lambda number: True)
    assert history.journal is not None
    assert "No space left" in str(history.journal.failure)
    assert len(in_file(tmp_path / "j")) == 4
    history.close_round()
    play(history, range(6, 9), close=lambda number: True)
    assert repr(history) == repr(whole)
    assert len(in_file(tmp_path / "j")) == 8


def test_a_file_that_another_program_cut_is_not_written_on(tmp_path: Path) -> None:
    history = play(History(Journal(tmp_path / "j")), range(1, 5), close=lambda number: True)
    os.truncate(tmp_path / "j", 100)
    with pytest.raises(RunError, match="another program has truncated it from"):
        play(history, range(5, 6), close=lambda number: True)


def test_a_state_is_on_the_disk_before_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    history = play(History(Journal(tmp_path / "j")), range(1, 5))
    assert synced == []
    history.state_dict()
    history.state_dict()
    assert synced == [str(tmp_path / "j")] * 2
