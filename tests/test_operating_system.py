"""Differences between systems: both branches, with the other system's primitives put in; what reaches the system."""

from __future__ import annotations

import errno
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedsel_flwr import operating_system
from fedsel_flwr.callbacks import prometheus
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.storage import lock_folder, open_file, read_file, write_atomically
from fedsel_flwr.simulations.shutdown import SignalShutdown

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="puts the other systems' primitives in on Linux")
BINARY = 0x8000
"""O_BINARY on Windows; Linux gives this bit another meaning, so it is taken out before the real call."""
LINUX_ONLY = ("O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "pread", "pwrite")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names and flags of all files that are opened."""
    found, real = [], os.open

    def recorded(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        found.append((Path(path).name, flags))
        return real(path, flags & ~BINARY, mode, **more)

    monkeypatch.setattr(os, "open", recorded)
    return found


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, opened: list[tuple[str, int]]) -> None:
    """What Python has, and lacks, on Windows."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "O_BINARY", BINARY, raising=False)
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise PermissionError(errno.EACCES, "a folder cannot be opened")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is synced."""
    found: list[Any] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    return found


def test_files_are_opened_as_they_are_on_linux(tmp_path: Path, opened: list[tuple[str, int]]) -> None:
    write_atomically(tmp_path / "a", b"1\n")
    read_file(tmp_path / "a")
    extra = os.O_NONBLOCK | os.O_CLOEXEC
    assert opened == [
        ("a.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | extra),
        ("a", os.O_RDONLY | os.O_NOFOLLOW | extra),
    ]


def test_windows_translates_no_byte(tmp_path: Path, windows: None, opened: list[tuple[str, int]]) -> None:
    write_atomically(tmp_path / "a", b"1\n\x1a\r\n")
    assert read_file(tmp_path / "a") == b"1\n\x1a\r\n"
    with open_file(tmp_path / "a", append=True) as file:
        file.write(b"2\n")
    assert [name for name, _ in opened] == ["a.tmp", "a", "a"]
    assert all(flags & BINARY for _, flags in opened)
    operating_system.sync_folder(tmp_path)
    assert len(opened) == 3


def test_windows_refuses_links(tmp_path: Path, windows: None, opened: list[Any], monkeypatch: Any) -> None:
    (tmp_path / "secret").write_bytes(b"1")
    (tmp_path / "link").symlink_to("secret")
    with pytest.raises(OSError, match="is a link"):
        open_file(tmp_path / "link")
    assert opened == []
    with open_file(tmp_path / "link", follow=True) as file:
        assert file.read() == b"1"
    # A link that was put there after the first look.
    monkeypatch.setattr(os.path, "islink", lambda path: False)
    closed, real = [], os.close
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), real(descriptor)))
    with pytest.raises(OSError, match="is a link"):
        open_file(tmp_path / "link")
    assert len(closed) == 1


def test_windows_reads_and_writes_a_journal_without_pread(tmp_path: Path, windows: None) -> None:
    journal = Journal(tmp_path / "rounds.jsonl")
    journal.begin()
    descriptor = journal._opened()
    assert operating_system.write_at(descriptor, b"abcdef\n", 0) == 7
    assert operating_system.write_at(descriptor, b"X", 2) == 1
    assert operating_system.read_at(descriptor, 3, 1) == b"bXd"
    assert (tmp_path / "rounds.jsonl").read_bytes() == b"abXdef\n"


def test_linux_syncs_files_and_folders(tmp_path: Path, synced: list[Any]) -> None:
    write_atomically(tmp_path / "a", b"1")
    operating_system.sync_folder(tmp_path)
    assert synced == [str(tmp_path / "a.tmp"), str(tmp_path)]


def test_macos_syncs_through_the_memory_of_the_disk(tmp_path: Path, synced: list[Any], monkeypatch: Any) -> None:
    asked: list[int] = []
    fcntl = types.SimpleNamespace(F_FULLFSYNC=51, fcntl=lambda descriptor, command: asked.append(command))
    monkeypatch.setitem(sys.modules, "fcntl", fcntl)
    monkeypatch.setattr(sys, "platform", "darwin")
    write_atomically(tmp_path / "a", b"1")
    operating_system.sync_folder(tmp_path)
    assert (asked, synced) == ([51, 51], [])
    fcntl.fcntl = Mock(side_effect=OSError(errno.ENOTSUP, "not on this file system"))
    operating_system.sync_folder(tmp_path)
    assert synced == [str(tmp_path)]


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_only_windows_replaces_again(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new").touch()
    tries, real = [], os.replace

    def replace(source: Path, target: Path) -> None:
        tries.append(target.name)
        if len(tries) < 3:
            raise PermissionError(errno.EACCES, "another program has it open")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(sys, "platform", platform)
    if platform == "win32":
        operating_system.replace(tmp_path / "new", tmp_path / "old")
        assert (tmp_path / "old").exists()
    else:
        with pytest.raises(PermissionError):
            operating_system.replace(tmp_path / "new", tmp_path / "old")
    assert tries == ["old"] * (3 if platform == "win32" else 1)


def test_windows_gives_up_a_file_that_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", Mock(side_effect=PermissionError(errno.EACCES, "another program has it open")))
    monkeypatch.setattr(operating_system, "REPLACE_LIMIT_S", 0.05)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(PermissionError):
        write_atomically(tmp_path / "a", b"1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("platform", "removed"), [("linux", True), ("darwin", True), ("win32", False)])
def test_a_lock_is_gone_where_open_files_can_be(platform: str, removed: bool, tmp_path: Path, monkeypatch: Any) -> None:
    lock = lock_folder(tmp_path)
    assert lock is not None
    monkeypatch.setattr(sys, "platform", platform)
    lock.release()
    # On Windows, filelock removes it; here its part for Linux runs, which does not.
    assert (tmp_path / ".lock").exists() is not removed


def test_commands_are_quoted_for_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operating_system.shell_line("fedsel", "report", "my runs/$1") == "fedsel report 'my runs/$1'"
    monkeypatch.setattr(sys, "platform", "win32")
    assert operating_system.shell_line("fedsel", "report", r"C:\my runs") == r'fedsel report "C:\my runs"'


def test_descriptors_have_a_limit_except_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = types.SimpleNamespace(RLIMIT_NOFILE=7, getrlimit=lambda which: (1024 if which == 7 else 0, 4096))
    monkeypatch.setitem(sys.modules, "resource", resource)
    assert operating_system.free_descriptors_end(7 / 8) == 896
    resource.getrlimit = lambda which: (-1, -1)
    assert operating_system.free_descriptors_end(7 / 8) == float("inf")
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(sys, "platform", "win32")
    assert operating_system.free_descriptors_end(7 / 8) == float("inf")


def test_a_port_of_windows_is_not_shared_with_a_running_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prometheus._Server.allow_reuse_address is operating_system.ports_can_be_reused() is True
    monkeypatch.setattr(sys, "platform", "win32")
    assert operating_system.ports_can_be_reused() is False


@pytest.mark.parametrize(("platform", "listens"), [("linux", True), ("darwin", True), ("win32", False)])
def test_signals_reach_a_pipe_except_on_windows(platform: str, listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pipes: list[int] = []
    real: Callable[..., int] = signal.set_wakeup_fd

    def set_wakeup_fd(descriptor: int, **options: Any) -> int:
        pipes.append(descriptor)
        return real(descriptor, **options)

    monkeypatch.setattr(signal, "set_wakeup_fd", set_wakeup_fd)
    monkeypatch.setattr(sys, "platform", platform)
    before = signal.getsignal(signal.SIGINT)
    with SignalShutdown(lambda: None, str, 130).listening():
        assert signal.getsignal(signal.SIGINT) not in (before, signal.SIG_DFL)
    assert bool(pipes) is listens
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("platform", "calls"), [("linux", [(36, 1, 0, 0, 0)]), ("darwin", []), ("win32", [])])
def test_orphans_are_adopted_on_linux(platform: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []
    library = types.SimpleNamespace(prctl=lambda *arguments: found.append(arguments))
    monkeypatch.setattr(operating_system.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", platform)
    operating_system.adopt_orphans()
    assert found == calls


def test_a_worker_knows_that_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [operating_system.has_lost(parent) for parent in (os.getppid(), os.getppid() + 1)] == [False, True]
    monkeypatch.setattr(sys, "platform", "win32")
    # A launcher stands between the two, and the number of a parent stays after its end.
    monkeypatch.setattr(os, "getppid", lambda: -1)
    monkeypatch.setitem(sys.modules, "psutil", types.SimpleNamespace(pid_exists=lambda process: process == 7))
    assert [operating_system.has_lost(parent) for parent in (7, 8)] == [False, True]
