"""The store of checkpoints: what is written comes back bit for bit, and what is not that is never taken for it."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, load_file, save

from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.checkpoints import Checkpoint, Checkpoints, checkpoint_path, read_checkpoint, write_checkpoint
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.state_dicts import pack_state, unpack_state
from tests.processes import ROOT, run_python


def checkpoint(number: int = 3, **changes: Any) -> Checkpoint:
    generator = np.random.default_rng(number)
    values: dict[str, Any] = {
        "round": number,
        "model": [generator.normal(size=(30, 20)).astype(np.float32), np.float64(number) * np.ones(())],
        "names": ["layer/weight", "scale"],
        "state": {"mean": generator.normal(size=400), "round": number, "ids": [f"client-{k}-ü" for k in range(300)]},
        "base": {"layers": [{"m_t": [generator.normal(size=3)], "norm": float("inf")}]},
        "fingerprint": {"selector": "bsfl"},
    }
    return Checkpoint(**{**values, **changes})


def names(folder: Path) -> list[str]:
    """The files in a folder, without the one by which this process holds it."""
    return sorted({*os.listdir(folder)} - {".lock"})


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        order = (one.flags.f_contiguous, one.flags.c_contiguous) == (other.flags.f_contiguous, other.flags.c_contiguous)
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes() and order
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or one != one
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


EVERY_FORM: dict[Any, Any] = {
    "bits": np.random.default_rng(5).bit_generator.state, "large": 2**200, "low": -(2**70), "bytes": b"\x00a",
    "number": np.float32(0.5), "columns": np.arange(6.0).reshape(2, 3).T, "foreign": np.arange(6, dtype=">i2"),
    "texts": np.array(["ab", "c"]), "complex": np.array([[1j, 2.0]]).T, "empty": np.zeros((0, 2), dtype=">f4"),
    "many": [2 * ["ü"], 2 * [0.5], 2 * [2**70], 2 * [True]],
    "a/b": np.ones(1), "a": {"b": np.zeros(1)}, 7: (1, "x"), "$array": None, "half": np.float64(-0.0), "no": (),
}  # fmt: skip
LEAVES = st.sampled_from([*EVERY_FORM.values()]) | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.sampled_from([*EVERY_FORM, "$items"]) | st.text(max_size=4) | st.integers()
STATES = st.recursive(
    LEAVES, max_leaves=8,
    extend=lambda part: st.lists(part, max_size=3) | st.tuples(part, part) | st.dictionaries(KEYS, part, max_size=3),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@example(EVERY_FORM)
@given(STATES)
def test_any_state_comes_back_bit_for_bit(state: Any) -> None:
    arrays: dict[str, Any] = {}
    text = pack_state(state, "state", arrays)
    assert same(unpack_state(json.loads(json.dumps(text)), load(save(arrays))), state)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """The names of its files' arrays say what they are, to whoever looks into them."""
    written = checkpoint(state={"mean": np.array([np.nan, -0.0, np.inf]), "sizes": np.zeros((0, 2)), "none": None})
    write_checkpoint(tmp_path, written)
    assert same(vars(read_checkpoint(checkpoint_path(tmp_path, 3))), vars(written))
    arrays = sorted(load_file(tmp_path / "round-000003.safetensors"))
    assert arrays == ["base/layers/0/m_t/0", "model/layer/weight", "model/scale", "rest", "state/mean"]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), 1j, np.zeros(2, [("a", int)])])
def test_what_cannot_be_saved_is_named(value: object, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="state/part/key cannot be saved"):
        pack_state({"part": {"key": value}}, "state", {})
    with pytest.raises(RunError, match=r"round-000003.safetensors' cannot be written: state/key"):
        Checkpoints(tmp_path).write(checkpoint(state={"key": value}))
    assert names(tmp_path) == []


def newest(store: Checkpoints) -> Checkpoint:
    found = store.newest(lambda one: None)
    assert found is not None
    return found


def test_every_flipped_bit_and_every_cut_is_found(tmp_path: Path) -> None:
    """In the header's length, its names, types and shapes, its text and padding, and in the arrays."""
    write_checkpoint(tmp_path, checkpoint())
    path = checkpoint_path(tmp_path, 3)
    content, generator = path.read_bytes(), np.random.default_rng(27)
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(100), *generator.integers(header, size=40), *generator.integers(header, len(content), size=40)]
    damaged = [content + b"\n", content + content, bytes(len(content))]
    for place in map(int, places):
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(generator.integers(8))
        damaged += [bytes(flipped), content[:place]]
    for broken in damaged:
        path.write_bytes(broken)
        with pytest.raises(StateError, match=r"damaged: its \d+ bytes differ from what was written"):
            read_checkpoint(path)
    path.write_bytes(content)
    assert read_checkpoint(path).round == 3


def rewritten(path: Path, **changes: Any) -> None:
    """Change what a checkpoint says of itself, with the right digest."""
    with safe_open(path, "np") as file:
        said = json.loads(file.metadata()["checkpoint"]) | changes | {"sha256": "0" * 64}
    text = json.dumps({key: value for key, value in said.items() if value is not ...})
    content = save(load_file(path), {"checkpoint": text})
    path.write_bytes(content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"schema": 9, "written_by": "fedsel-flwr 9.0"}, r"schema 9 \(fedsel-flwr 9\.0\), but .* reads schema 5"),
        ({"schema": ...}, "it is not a checkpoint"),
        ({"made_for": ...}, "it is not a checkpoint"),
        ({"round": "three"}, "it is not a checkpoint"),
        ({"round": 7}, "renamed: it holds round 7"),
    ],
)
def test_a_checkpoint_of_another_form_is_refused(changes: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, resume=True)
    store.write(checkpoint())
    rewritten(path := checkpoint_path(tmp_path, 3), **changes)
    with pytest.raises(StateError, match=wanted):
        read_checkpoint(path)
    with pytest.raises(RunError, match=rf"none of the checkpoints .* can be used: round-0+3\.safetensors: .*{wanted}"):
        store.newest(lambda one: None)
    assert path.exists(), "nothing is set aside where nothing is taken"


def test_the_header_is_short_whatever_the_number_of_clients(tmp_path: Path) -> None:
    roster, clients = Roster(), 20_000
    holders = {f"node-{k}": f"key {k}" for k in range(clients)}
    roster.register({f"node-{k}": f"phone-{k}-ü" for k in range(clients)}, 1, holders)
    busy = {"until": dict.fromkeys(holders, float("inf"))}
    refused = {"refused": {node: f"{node} refused" for node in holders}, "sizes": (1,) * clients}
    written = checkpoint(state={"roster": roster.state_dict(), "busy": busy, **refused})
    write_checkpoint(tmp_path, written)
    path = checkpoint_path(tmp_path, 3)
    assert int.from_bytes(path.read_bytes()[:8], "little") < 10_000
    found = read_checkpoint(path)
    assert same(found.state, written.state)
    (other := Roster()).load_state_dict(found.state["roster"])
    assert same(other.state_dict(), roster.state_dict())


def test_the_newest_that_fits_is_taken_and_the_others_are_set_aside(tmp_path: Path, caplog: Any) -> None:
    store = Checkpoints(tmp_path, keep=9, resume=True)
    for number in range(1, 5):
        store.write(checkpoint(number))

    def fits(one: Checkpoint) -> None:
        if one.round > 2:
            raise StateError(f"it smells of {one.round}")

    checkpoint_path(tmp_path, 4).write_bytes(b"")
    found = store.newest(fits)
    assert found is not None
    assert same(vars(found), vars(checkpoint(2)))
    damaged, smelling = caplog.messages
    assert re.search(r"round-000004\.safetensors is not used: .*damaged", damaged)
    assert smelling.endswith("round-000003.safetensors is not used: it smells of 3")
    refused = [f"round-{number}.safetensors.refused" for number in ("000003", "000004")]
    assert names(tmp_path) == ["round-000001.safetensors", "round-000002.safetensors", *refused]


def test_so_many_are_kept_and_leftovers_of_a_death_are_cleared(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, every=2, keep=2, resume=True)
    assert [number for number in range(1, 8) if store.due(number)] == [2, 4, 6]
    newer = "round-000099.safetensors"  # nobody's business here
    for name in ("round-000001.safetensors", "round-000003.safetensors.tmp", "notes.txt", newer):
        (tmp_path / name).write_bytes(b"")
    for number in (2, 4, 6):
        store.write(checkpoint(number))
    assert names(tmp_path) == ["notes.txt", "round-000004.safetensors", "round-000006.safetensors", newer]


def test_a_folder_of_another_run_and_what_is_no_folder_are_refused(tmp_path: Path) -> None:
    """It is neither overwritten nor continued unasked."""
    Checkpoints(tmp_path).write(checkpoint())
    with pytest.raises(RunError, match=r"holds the checkpoints of 3 rounds of another run\. .*resume=True"):
        Checkpoints(tmp_path)
    with pytest.raises(RunError, match=r"holds no checkpoint .*checkpoint_dir"):
        Checkpoints(tmp_path / "new", resume="must")
    assert Checkpoints(tmp_path / "new", resume=True).newest(lambda one: None) is None
    (tmp_path / "new" / "journal.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"holds rounds in journal\.jsonl of another run"):
        Checkpoints(tmp_path / "new")
    assert Checkpoints(tmp_path / "new", resume=True).newest(lambda one: None) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be created: "):
        Checkpoints(tmp_path / "file")


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}, {"every": 1.5}, {"resume": "yes"}, {"resume": None}])
def test_odd_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"checkpoint_every|keep_checkpoints|resume must be False, True or 'must'"):
        Checkpoints(tmp_path, **options)


def failing(number: int) -> Callable[..., Any]:
    """A call of the operating system that fails for this reason."""
    return Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    ("call", "number", "cure"),
    [
        *((call, errno.ENOSPC, "Free disk space") for call in ("open", "write", "fsync", "replace")),
        *(("open", number, "Raise the limit of open files") for number in (errno.EMFILE, errno.ENFILE)),
        ("open", errno.EDQUOT, "Free disk space"), ("open", errno.EACCES, "Make the folder writable"),
    ],
)  # fmt: skip
def test_a_failed_write_names_the_file_with_the_cure_and_leaves_what_was_there(
    call: str, number: int, cure: str, tmp_path: Path, monkeypatch: Any
) -> None:
    store = Checkpoints(tmp_path, resume=True)
    store.write(checkpoint(2))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")}
    wanted = (
        rf"round 3: the checkpoint '.*round-000003\.safetensors' cannot be written: {os.strerror(number)}\. "
        rf"Earlier checkpoints are unchanged\. {cure}"
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        with pytest.raises(RunError, match=wanted) as raised:
            store.write(checkpoint(3))
    assert ("Free disk space" in str(raised.value)) == (cure == "Free disk space")
    assert {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")} == before
    store.write(checkpoint(3))
    assert same(vars(newest(store)), vars(checkpoint(3)))


def test_old_ones_that_cannot_be_removed_are_no_reason_to_stop(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    store = Checkpoints(tmp_path, keep=1)
    store.write(checkpoint(2))
    monkeypatch.setattr(os, "unlink", failing(errno.ENOSPC))
    with caplog.at_level(logging.WARNING):
        store.write(checkpoint(3))
    assert "old checkpoints" in caplog.text
    assert read_checkpoint(checkpoint_path(tmp_path, 3)).round == 3


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may mount a file system")
def test_a_read_only_folder_is_refused_before_the_run(tmp_path: Path) -> None:
    """Root may write anywhere but on a file system that is mounted so."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        with pytest.raises(RunError, match="cannot be written to"):
            Checkpoints(disk)
        with pytest.raises(RunError, match="Read-only file system"):
            Checkpoints(disk / "run")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_files_have_the_permissions_that_are_usual_here(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint())
    (tmp_path / "usual").write_text("")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("[!.]*")}) == 1


OTHER = """
import sys
from pathlib import Path
from fedsel_flwr.rounds.storage import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
HOLDING = r"another process writes checkpoints to .*checkpoint_dir"


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        checkpoints = Checkpoints(tmp_path, resume=True)
        with pytest.raises(RunError, match=HOLDING):
            checkpoints.newest(lambda one: None)
        with pytest.raises(RunError, match=HOLDING):
            checkpoints.write(checkpoint())
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        other.kill()
        other.wait(timeout=30)
        assert checkpoints.newest(lambda one: None) is None
        checkpoints.write(checkpoint())


def test_one_process_shares_it_and_lets_it_go(tmp_path: Path) -> None:
    first, second = Checkpoints(tmp_path, resume=True), Checkpoints(tmp_path, resume=True)
    first.write(checkpoint())
    assert newest(second).round == 3
    assert "RunError: another process writes checkpoints" in run_python("-c", OTHER, tmp_path, status=1).stderr
    del first, second
    gc.collect()
    assert run_python("-c", OTHER, tmp_path).stdout == "held\n"
