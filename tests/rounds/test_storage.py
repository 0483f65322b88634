"""The door through which folders of other people are read, and what a killed process leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.storage import check_entries, check_links, lock_folder, open_file, read_file


def make_link(path: Path) -> None:
    path.with_name("victim").write_text("precious")
    path.symlink_to(path.with_name("victim"))


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 * 10**9)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "it is not a regular file"),
    "link": (make_link, "it is a link"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is a link"),
    "folder": (Path.mkdir, "it is not a regular file"),
    "40 GB": (make_sparse, "it has 40,000,000,000 bytes, more than"),
}


@pytest.mark.parametrize(("make", "words"), KINDS.values(), ids=KINDS)
def test_only_regular_files_of_bounded_size_are_read(make: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    make(tmp_path / "model")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=words):
        read_file(tmp_path / "model")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_opened_file_counts_not_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange after every check of the name does not matter, because the name is never checked."""
    for name in ("stat", "lstat", "is_file", "is_symlink", "exists"):
        monkeypatch.setattr(Path, name, lambda *_, **__: pytest.fail("the name is checked"))
    (tmp_path / "file").write_bytes(b"content")
    assert read_file(tmp_path / "file") == b"content"
    make_link(tmp_path / "link")
    assert read_file(tmp_path / "link", follow=True) == b"precious"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "led").symlink_to(tmp_path / "pipe")
    for wrong in (tmp_path / "led", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(wrong, follow=True)
    # Files of /proc have the size 0.
    with pytest.raises(OSError, match="more than 5 bytes"):
        read_file(Path("/proc/self/status"), 5)
    with pytest.raises(OSError, match="not a regular file"):
        open_file(tmp_path / "pipe", append=True)


def test_links_and_pipes_in_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe")
    check_entries(tmp_path)
    for check, place in ((check_links, tmp_path), (check_entries, tmp_path / "a")):
        with pytest.raises(ParameterError, match="a/pipe' is neither a file nor a folder"):
            check(place)


def test_a_new_lock_removes_what_a_killed_process_has_left(tmp_path: Path) -> None:
    left = [".comparison.png-x1y2z3a_/comparison.png", ".runs.csv-00000000/runs.csv", "model.safetensors.tmp"]
    kept = ["runs.csv", ".cache-abcdefgh/mine", "notes.tmp", "bsfl-seed1/.run.json-abcdefgh/run.json"]
    for name in (*left, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    lock = lock_folder(tmp_path)
    assert [name for name in (*left, *kept) if (tmp_path / name).exists()] == kept
    assert not (tmp_path / ".comparison.png-x1y2z3a_").exists()
    # A lock that is held already removes nothing, because this process may be writing.
    (tmp_path / ".rounds.png-abcdefgh").mkdir()
    assert lock is not None
    assert lock_folder(tmp_path) is lock
    assert (tmp_path / ".rounds.png-abcdefgh").exists()
