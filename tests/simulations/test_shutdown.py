"""Shutting down on SIGINT and SIGTERM: one line, nothing left, and the same figures when resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from fedsel_flwr.report.run_folder import read_journal
from fedsel_flwr.rounds.storage import UNFINISHED
from tests.processes import Command, run_python
from tests.simulations.cut_off_runs import content

MOMENTS = int(os.environ.get("FEDSEL_TEST_MOMENTS", "10"))
"""Signals for each command, engine and signal."""
LONGEST_S = 10.0
"""So long may the command take to end after a signal."""
OF_RAY = re.compile(r"\*\*\* SIGTERM received|PC: @ |    @ |\[.* logging\.cc:")
"""Lines of Ray's start. Its C++ handler prints a stack, if the signal comes within milliseconds of its installation."""
EARLY_S = 0.3
"""Before that Python itself is still starting."""

# A program whose main thread is busy when it gets a signal: first alone in a block that shuts down on signals.
BUSY = """
import ctypes, hashlib, os, signal, subprocess, sys, threading, time
from pathlib import Path
from fedsel_flwr.simulations.shutdown import SignalShutdown

busy, folder = sys.argv[1:]
before = signal.getsignal(signal.SIGTERM)
with SignalShutdown(lambda: None, lambda: "left", 7).listening():
    pass
assert signal.getsignal(signal.SIGTERM) is before

def send():
    time.sleep(0.5)
    print(time.time(), flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)

with SignalShutdown(lambda: print("last", flush=True), lambda: "left", 7).listening() as leaving:
    leaving.folder = Path(folder)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "..", "child").write_text(str(child.pid))
    if busy not in ("SIGINT", "taken"):
        threading.Thread(target=send, daemon=True).start()
    try:
        if busy == "library":
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        elif busy == "wait":
            threading.Event().wait()
        elif busy == "twice":  # a second signal, and a third, while the first is acted on
            leaving.on_signal = lambda: [signal.raise_signal(each) for each in (signal.SIGTERM, signal.SIGINT)]
            threading.Event().wait(60)
        elif busy == "taken":  # what Ray's C++ does when it ends: the signal would end this process with -15
            sys.modules["ray"] = None
            for _ in range(10):
                ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
                time.sleep(0.1)
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        else:
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    finally:
        print("an exception passed", flush=True)
"""

# What Ray does when it starts, within and without a handler of the caller's.
RAY = """
import ctypes, signal, sys, threading
from types import SimpleNamespace
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
from fedsel_flwr.simulations.on_flower.ray_session import RaySession

def init(**options):
    print(threading.current_thread() is threading.main_thread())  # there Ray replaces the handler
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)

for handler in (lambda *_: print("heard", flush=True), signal.SIG_DFL):
    signal.signal(signal.SIGTERM, handler)
    RaySession(RayResources(num_cpus=1))._start(SimpleNamespace(init=init), str)
    print(signal.getsignal(signal.SIGTERM) is handler, flush=True)
    signal.raise_signal(signal.SIGTERM)
"""

# SIGTERM in the midst of an import that reading the rounds needs too.
HALF_IMPORTED = """
import signal, sys
from importlib.abc import MetaPathFinder
from fedsel_flwr.cli import main

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "pyarrow.parquet.core":
            signal.raise_signal(signal.SIGTERM)

sys.meta_path.insert(0, Interrupting())
main(["run", "smoke", "--engine", "vectorized", "--quiet"])
"""

# A child that ignores SIGTERM; and one that starts a grandchild in a session of its own, and ends.
ORPHANS = """
import subprocess, sys, time
from fedsel_flwr.operating_system import adopt_orphans
from fedsel_flwr.simulations.shutdown import end_descendants

adopt_orphans()
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
parent = (
    "import subprocess, sys; "
    "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, "
    "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
)
orphan = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True).stdout)
print(child.pid, orphan, flush=True)
print(end_descendants(), end_descendants(), flush=True)
"""


@pytest.mark.parametrize("busy", ["library", "wait", "twice", "taken", "SIGINT"])
def test_a_signal_ends_the_children_and_passes_no_exception(busy: str, tmp_path: Path) -> None:
    """Whatever the main thread does, and whichever thread gets the signal."""
    unfinished = tmp_path / "run" / ".plan.json-ab12cd3_"
    unfinished.mkdir(parents=True)
    (unfinished / "plan.json").write_text("{")
    done = run_python("-c", BUSY, busy, tmp_path / "run", status=7)
    ended = time.time()
    assert done.stderr == "left\n"
    sent, *said = done.stdout.splitlines()
    assert said == ([] if busy == "twice" else ["last"])
    assert ended - float(sent) < 7.0
    assert list((tmp_path / "run").iterdir()) == []
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_a_signal_during_an_import_is_acted_on(tmp_path: Path) -> None:
    done = run_python("-c", HALF_IMPORTED, cwd=tmp_path, status=130)
    assert done.stderr.splitlines()[-1].split(" (")[0] == "fedsel: interrupted", done.stderr


WRITING = """
import sys, threading, time
from pathlib import Path
from fedsel_flwr.report.run_folder import JOURNAL, read_journal
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.storage import write_atomically
from fedsel_flwr.simulations.shutdown import end_process
folder = Path(sys.argv[1])
def write():
    history = History()
    history.write_to(Journal(folder / JOURNAL))
    for number in range(1, 10**6):
        history.append(round=number, num_available=1, round_s=1.0, clients=[])
        history.close_round()
        write_atomically(folder / "checkpoint", str(number).encode())
        time.sleep(0.001)
threading.Thread(target=write, daemon=True).start()
while not (folder / "checkpoint").exists():
    time.sleep(0.01)
def message():
    said = f"{len(read_journal(folder).rounds)} {(folder / 'checkpoint').read_text()}"
    time.sleep(0.3)
    return said
end_process(message, 7)
"""


def test_no_round_is_written_after_the_last_message(tmp_path: Path) -> None:
    """Flower's server thread continues until the process ends, and its clients have been killed."""
    rounds, checkpoint = map(int, run_python("-c", WRITING, tmp_path, status=7).stderr.split())
    assert len(read_journal(tmp_path).rounds) == rounds
    assert int((tmp_path / "checkpoint").read_text()) == checkpoint
    assert rounds - checkpoint in (0, 1)


def test_ray_leaves_the_callers_handler_as_it_is() -> None:
    done = run_python("-c", RAY, status=-signal.SIGTERM)
    assert done.stdout.splitlines() == ["False", "True", "heard", "False", "True"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_orphans_and_the_deaf_are_ended() -> None:
    start = time.monotonic()
    pids, counts = run_python("-c", ORPHANS).stdout.splitlines()
    assert counts == "2 0"
    for pid in map(int, pids.split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - start < 30


# ---- the commands --------------------------------------------------------------------------------------------------


@pytest.fixture
def busy_loops() -> Iterator[None]:
    """Two programs that take what they get of the processor."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def begun(place: Path, *argv: str) -> Command:
    """A command in a folder; it listens to signals."""
    command = Command(sys.executable, "-m", "fedsel_flwr.cli", *argv, folder=place / "said", cwd=place)
    deadline = time.monotonic() + 100
    while not _catches(command.pid, signal.SIGTERM):
        assert command.poll() is None, command.stderr
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return command


def _catches(pid: int, which: int) -> bool:
    said = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(said and int(said[1], 16) >> (which - 1) & 1)


def finished(place: Path, *argv: str) -> tuple[Path, float]:
    """A command's folder, and how long it took."""
    with begun(place, *argv) as command:
        assert command.wait(500) == 0, command.stdout[-3000:] + command.stderr[-3000:]
        return Path(command.stdout.splitlines()[-1]), command.seconds


def signalled(command: Command, which: int, seconds: float) -> str | None:
    """Send a signal after a while; the line that the command says then, None if it had ended before."""
    try:
        time.sleep(seconds)
        if command.poll() is not None:
            assert command.wait(1) == 0, command.stderr
            return None
        os.kill(command.pid, which)
        sent = time.monotonic()
        status = command.wait(60)
        took = time.monotonic() - sent
        if status == 0:  # everything was said already
            return None
        assert status == 130, (status, command.stdout[-2000:], command.stderr[-3000:])
        assert took < LONGEST_S, (took, command.stderr)
        assert command.left() == []
        said = [line for line in command.stderr.splitlines() if not OF_RAY.match(line)]
        assert len(said) == 1, command.stderr
        assert said[0].startswith("fedsel: interrupted")
        return said[0]
    finally:
        command.kill()


COMMANDS = {
    ("run", "vectorized"): ("run", "smoke", "--rounds", "60", "--engine", "vectorized"),
    ("run", "ray"): ("run", "smoke", "--rounds", "25", "--num-cpus", "2"),
    ("compare", "vectorized"): (
        "compare", "smoke", "--selectors", "bsfl,random", "--seeds", "2", "--rounds", "40", "--engine", "vectorized",
    ),
    ("compare", "ray"): (
        "compare", "smoke", "--selectors", "bsfl,random", "--seeds", "1", "--engine", "ray", "--num-cpus", "2",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("busy_loops")
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(("name", "engine"), COMMANDS, ids=["-".join(key) for key in COMMANDS])
def test_a_signal_at_a_random_moment(name: str, engine: str, which: signal.Signals, tmp_path: Path) -> None:
    """Each command that is cut off is resumed by the next one, which the next signal cuts off."""
    argv, generator = COMMANDS[name, engine], np.random.default_rng([len(name), len(engine), which])
    for folder in ("straight", "cut"):
        (tmp_path / folder).mkdir()
    straight, longest = finished(tmp_path / "straight", *argv)
    place, now, sent, told = tmp_path / "cut", argv, 0, list[str]()
    for attempt in range(5 * MOMENTS):
        said = signalled(begun(place, *now), which, float(generator.uniform(EARLY_S, longest)))
        for folder in place.glob("runs/*"):
            assert [path for path in folder.rglob(".*") if UNFINISHED.fullmatch(path.name)] == []
            assert list(folder.rglob("*.tmp")) == []
        if said is None:
            (there,) = place.glob("runs/*")
            assert content(there) == content(straight)
            there.rename(tmp_path / f"finished-{attempt}")
            now = argv
        else:
            told.append(said)
            there = next(place.glob("runs/*"), None)
            if there is not None and f"--resume {there}" in said:
                now = (name, "--resume", str(there))
            elif "--resume" not in now:
                for folder in place.glob("runs/*"):
                    folder.rename(tmp_path / f"empty-{attempt}-{folder.name}")
        sent += said is not None
        if sent == MOMENTS:
            break
    assert sent == MOMENTS
    there, _ = finished(place, *now)
    assert content(there) == content(straight)
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if str(tmp_path) in line] == []
    print(f"\n{name} {engine} {which.name}: " + "\n".join(told))
