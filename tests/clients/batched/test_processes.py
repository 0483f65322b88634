"""Several processes train one stack: the same bits whoever trains, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples, SharedTrainer, WorkerPool, worker_processes
from fedsel_flwr.clients.batched.worker_processes import cut_into_shares
from fedsel_flwr.clients.objectives import Objective, Reduction, cross_entropy, fraction_correct, get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import load_reference
from tests.processes import Command

SETTINGS = TrainingSettings(learning_rate=0.1, batch_size=4, momentum=0.5)
DRAW = np.random.default_rng(0)
INPUTS, LABELS = DRAW.normal(size=(60, 1, 8, 8)).astype(np.float32), DRAW.integers(3, size=60)
EQUAL = Examples(INPUTS, LABELS, [DRAW.choice(60, size=12, replace=False) for _ in range(7)])
RAGGED = Examples(INPUTS, LABELS, [DRAW.choice(60, size=size, replace=False) for size in (3, 17, 9, 30, 1, 8)])

OWN = """
from torch import nn
from torch.nn import functional

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x):
        return 2 * self.layer(x.flatten(1))

def picky(outputs, targets, *, reduction="mean"):
    if (targets == 2).any():
        raise LookupError("a two")
    return functional.cross_entropy(outputs, targets, reduction=reduction)
"""


@pytest.fixture(scope="module")
def three() -> Iterator[WorkerPool]:
    with WorkerPool(3) as workers:
        yield workers


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    with WorkerPool(2) as workers:
        yield workers


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def drawn(examples: Examples) -> list[np.random.Generator]:
    return [np.random.default_rng(k) for k in range(len(examples.rows))]


def same(one: tuple, other: tuple) -> bool:  # type: ignore[type-arg]
    return all(map(np.array_equal, [*one[0], one[1]], [*other[0], other[1]]))


@pytest.mark.parametrize("examples", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["two", "three"])
def test_the_same_bits_before_and_after_workers_are_there(
    name: str, examples: Examples, request: pytest.FixtureRequest
) -> None:
    workers: WorkerPool = request.getfixturevalue(name)
    model = network()
    trainer = SharedTrainer(BatchedTrainer(model, SETTINGS), workers)
    before = workers.tasks
    results = [trainer.train(get_arrays(model), examples, drawn(examples))]  # nobody is there, or knows how
    assert workers.wait() == workers.processes - 1
    results.append(trainer.train(get_arrays(model), examples, drawn(examples)))  # now they may be told how
    workers.wait()
    helped = workers.tasks
    results.append(trainer.train(get_arrays(model), examples, drawn(examples)))
    assert workers.tasks == helped + workers.processes - 1
    assert helped < before + 2 * (workers.processes - 1)  # in the first round at least they did nothing
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    one = BatchedTrainer(model, SETTINGS).train(get_arrays(model), examples, drawn(examples))
    for layer, expected in zip([*results[2][0], results[2][1]], [*one[0], one[1]], strict=True):
        np.testing.assert_allclose(layer, expected, rtol=1e-5, atol=1e-6)
    if examples is EQUAL:
        assert same(one, results[2])  # no padding: a share has the products that the whole has


def test_the_stack_is_the_callers(three: WorkerPool) -> None:
    model = network()
    trainer = SharedTrainer(BatchedTrainer(model, SETTINGS), three)
    first, _ = trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
    copy = [layer.copy() for layer in first]
    part = first[1][2:]  # of a layer, all that is held on to
    for shift in (1, 2):
        trainer.train([array + shift for array in get_arrays(model)], EQUAL, drawn(EQUAL))
    assert all(map(np.array_equal, first, copy))
    del first
    for shift in (1, 2, 3):
        trainer.train([array + shift for array in get_arrays(model)], EQUAL, drawn(EQUAL))
    assert np.array_equal(part, copy[1][2:])
    assert len(three.blocks) <= 4  # the data, what is held, and two that take turns


def test_one_after_the_other_model_data_and_number_of_clients(three: WorkerPool) -> None:
    small = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    other = Examples(INPUTS + 1, LABELS, EQUAL.rows)
    for model, examples in ((network(), EQUAL), (small, other), (small, RAGGED), (network(), EQUAL)):
        trainer = SharedTrainer(BatchedTrainer(model, SETTINGS), three)
        results = []
        for _ in range(2):
            results.append(trainer.train(get_arrays(model), examples, drawn(examples)))
            three.wait()
        before = three.tasks
        results.append(trainer.train(get_arrays(model), examples, drawn(examples)))
        assert three.tasks == before + 2
        assert same(results[0], results[2])
        expected = BatchedTrainer(model, SETTINGS).train(get_arrays(model), examples, drawn(examples))
        np.testing.assert_allclose(results[2][0][0], expected[0][0], rtol=1e-5, atol=1e-6)


def test_a_model_from_a_file(tmp_path: Path, two: WorkerPool) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    model = load_reference(f"{tmp_path}/mine.py:Twice", "model")()
    trainer = SharedTrainer(BatchedTrainer(model, SETTINGS), two)
    for _ in range(2):
        trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
        two.wait()
    before = two.tasks
    helped = trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
    assert (two.tasks, trainer.backend) == (before + 1, "vmap")
    assert same(helped, BatchedTrainer(model, SETTINGS).train(get_arrays(model), EQUAL, drawn(EQUAL)))


def test_what_cannot_be_sent_is_trained_here(three: WorkerPool, caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()

    def guarded(outputs: torch.Tensor, targets: torch.Tensor, *, reduction: Reduction = "mean") -> torch.Tensor:
        with lock:
            return cross_entropy(outputs, targets, reduction=reduction)

    own = Objective(guarded, fraction_correct)
    trainer = SharedTrainer(BatchedTrainer(network(), SETTINGS, objective=own), three)
    for _ in range(2):
        result = trainer.train(get_arrays(network()), RAGGED, drawn(RAGGED))
    alone = BatchedTrainer(network(), SETTINGS, objective=own)
    assert same(result, alone.train(get_arrays(network()), RAGGED, drawn(RAGGED)))
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("the model cannot be sent to another process: TypeError: cannot pickle '_thread.lock' obj")


def test_what_cannot_be_loaded_there_is_trained_here(
    three: WorkerPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    three.wait()
    monkeypatch.syspath_prepend(tmp_path)  # after the workers have started
    (tmp_path / "unknown_there.py").write_text(OWN)
    own = Objective(load_reference("unknown_there:picky", "loss"), fraction_correct)
    examples = Examples(INPUTS, np.zeros(60, dtype=np.int64), EQUAL.rows)
    trainer = SharedTrainer(BatchedTrainer(network(), SETTINGS, objective=own), three)
    before = three.tasks
    for _ in range(3):
        result = trainer.train(get_arrays(network()), examples, drawn(examples))
        three.wait()
    assert three.tasks == before
    assert np.isfinite(result[1]).all()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("worker processes cannot load the model (ModuleNotFoundError: No module named 'unknown_ther")


def test_what_is_raised_in_a_helper_is_raised_here_and_ends_them(tmp_path: Path, two: WorkerPool) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    picky = Objective(load_reference(f"{tmp_path}/mine.py:picky", "loss"), fraction_correct)
    labels = np.array([0] * 48 + [2] * 12)
    fine = Examples(INPUTS, labels, [np.arange(12)] * 5)
    bad = Examples(INPUTS, labels, [np.arange(48, 60), *fine.rows[1:]])  # this process trains the last ones
    model = network()
    trainer = SharedTrainer(BatchedTrainer(model, SETTINGS, objective=picky), two)
    for _ in range(2):
        trainer.train(get_arrays(model), fine, drawn(fine))
        two.wait()
    with pytest.raises(LookupError, match="a two") as caught:
        trainer.train(get_arrays(model), bad, drawn(bad))
    assert "mine.py" in str(caught.value.__cause__)  # the traceback in the worker
    assert two.pids == []
    assert np.isfinite(trainer.train(get_arrays(model), fine, drawn(fine))[1]).all()


def test_workers_that_are_killed_are_replaced_by_this_process(
    three: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    trainer = SharedTrainer(BatchedTrainer(model, SETTINGS), three)
    expected = trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
    three.wait()
    trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
    before = three.tasks
    one, other = three.pids
    os.kill(one, signal.SIGSTOP)  # it does not answer, and is killed while the round waits for it
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {one}"]):
        cut_off = trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
    assert three.pids == [other]
    assert three.tasks == before + 1
    os.kill(other, signal.SIGKILL)
    while psutil.Process(other).status() != psutil.STATUS_ZOMBIE:  # it ends between two rounds
        time.sleep(0.01)
    later = trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
    assert three.pids == []
    assert same(cut_off, expected)
    assert same(later, expected)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a worker process ended at work (status -9): this process trains its clients from now on"] * 2


@pytest.mark.slow
def test_a_helper_that_hangs_is_not_waited_for_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "PATIENCE_S", 0.5)
    monkeypatch.setattr(worker_processes, "SLOWER", 0.0)
    model = network()
    with WorkerPool(2) as workers:
        trainer = SharedTrainer(BatchedTrainer(model, SETTINGS), workers)
        expected = trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
        while not workers.wait():
            trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
        trainer.train(get_arrays(model), EQUAL, drawn(EQUAL))
        workers.wait()
        (pid,) = workers.pids
        os.kill(pid, signal.SIGSTOP)
        assert same(trainer.train(get_arrays(model), EQUAL, drawn(EQUAL)), expected)
        assert workers.pids == []
        assert not psutil.pid_exists(pid)
    assert [record.getMessage() for record in caplog.records] == [
        "a worker process has not answered for 0.5 s and is ended",
        "a worker process ended at work (status -9): this process trains its clients from now on",
    ]


def test_without_memory_to_share_this_process_trains_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    model = network()
    expected = BatchedTrainer(model, SETTINGS).train(get_arrays(model), EQUAL, drawn(EQUAL))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with WorkerPool(2) as workers:
        trainer = SharedTrainer(BatchedTrainer(model, SETTINGS), workers)
        for _ in range(2):
            assert same(trainer.train(get_arrays(model), EQUAL, drawn(EQUAL)), expected)
        assert workers.pids == []
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("there is no memory to share with worker processes ([Errno 28] No space left)")


SCRIPT = """
import time
import numpy as np
from torch import nn
from torch.nn import functional
from fedsel_flwr.clients.batched import BatchedTrainer, Examples, WorkerPool, SharedTrainer
from fedsel_flwr.clients.objectives import Objective, fraction_correct
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings

def mine(outputs, targets, *, reduction="mean"):
    return functional.cross_entropy(outputs, targets, reduction=reduction)

model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
data = Examples(np.ones((6, 4), dtype=np.float32), np.zeros(6, dtype=np.int64), [np.arange(6)] * 4)
workers = WorkerPool(2)
settings = TrainingSettings(learning_rate=0.1, batch_size=2)
trainer = SharedTrainer(BatchedTrainer(model, settings, objective=Objective(mine, fraction_correct)), workers)
for _ in range(3):
    trainer.train(get_arrays(model), data, [np.random.default_rng(k) for k in range(4)])
    workers.wait()
print("tasks", workers.tasks, flush=True)
time.sleep(60)
"""


def test_a_program_without_a_file_and_its_end_by_kill(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    command = Command(sys.executable, "-c", SCRIPT, folder=tmp_path / "out", cwd=tmp_path)
    try:
        command.wait_for("tasks 1", 60)  # with a loss of the program itself
        [worker] = psutil.Process(command.pid).children()
        os.kill(command.pid, signal.SIGKILL)
        worker.wait(10)
        assert command.left() == []
    finally:
        command.kill()
    if Path("/dev/shm").is_dir():
        assert not [name for name in set(os.listdir("/dev/shm")) - before if "fedsel" in name]


@pytest.mark.parametrize("processes", [0, -1, 1.5, "two"])
def test_processes_are_a_whole_number_of_at_least_one(processes: int) -> None:
    with pytest.raises(ParameterError, match="processes must be a whole number of at least 1"):
        WorkerPool(processes)


@pytest.mark.parametrize("sizes", [[5], [9, 4, 3, 2], [7] * 25, [1] * 3, [100, 1, 1]])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_cover_everybody_once(sizes: list[int], count: int) -> None:
    found = cut_into_shares(sizes, SETTINGS, count)
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(len(sizes)))
    assert len(found) <= min(count, len(sizes))
    assert all(part.start < part.stop for part in found)
    lengths = [part.stop - part.start for part in found]
    if len(set(sizes)) == 1:
        assert max(lengths) - min(lengths) <= 1
