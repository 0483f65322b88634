"""Ending everything that a process started, orphans and the deaf included."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tests.processes import ROOT

# A child that ignores SIGTERM; and one that starts a grandchild in a session of its own, and ends.
SCRIPT = """
import subprocess, sys, time
from fedsel_flwr.simulations.shutdown import adopt_orphans, end_descendants

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


# One that says what it does when it is told to leave; its child is the sign that it may be told.
LEAVING = """
import os, signal, subprocess, sys, time
from fedsel_flwr.simulations.shutdown import shutdown_on_signal

before = signal.getsignal(signal.SIGTERM)
with shutdown_on_signal(lambda: print("last", flush=True), lambda: "left", 7):
    pass
assert signal.getsignal(signal.SIGTERM) is before
with shutdown_on_signal(lambda: print("last", flush=True), lambda: "left", 7):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        time.sleep(60)
    finally:
        print("an exception passed", flush=True)
"""


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_a_shutdown_ends_the_children_and_passes_no_exception(signal: str) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING, signal], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "left\n")
    pid, *said = done.stdout.splitlines()
    assert said == ["last"]
    assert not psutil.pid_exists(int(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_nothing_is_left() -> None:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pids, counts = done.stdout.splitlines()
    assert counts == "2 0"
    for pid in map(int, pids.split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - start < 30
