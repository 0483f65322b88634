"""Training of a round's clients by several processes, each with one thread, into one stack in shared memory."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import FloatArray, whole
from fedsel_flwr.clients.batched.backends import Backend
from fedsel_flwr.clients.batched.examples import ArrayOrTensor, Examples, check_generators, longest_first, num_steps
from fedsel_flwr.clients.batched.shared_memory import ArraySpec, Block, nbytes_of
from fedsel_flwr.clients.batched.trainer import Arrays, BatchedTrainer, Pairs
from fedsel_flwr.clients.batched.worker_connection import WorkerConnection, packed
from fedsel_flwr.clients.threads import using_threads
from fedsel_flwr.clients.training_settings import TrainingSettings

logger = logging.getLogger("fedsel_flwr")


class WorkerPool:
    """Worker processes, which end with the block.

    They are ready after some seconds, as they import torch. Until then, and if one of them ends, the process that
    started them trains their share. They serve one trainer after the other.

    Args:
        processes: Number of processes that train, this one included; at least 1.

    Attributes:
        processes: As given.
        tasks: Number of shares of a round that workers have trained.
        closed: Whether they have been ended.
        blocks: The shared memory, by number.

    Raises:
        ParameterError: ``processes`` is below 1.
    """

    def __init__(self, processes: int) -> None:
        self.processes = whole("processes", processes, 1)
        self.tasks, self.closed = 0, False
        self._workers: list[WorkerConnection] = []
        self._numbers = itertools.count(1)
        self.blocks: dict[int, Block] = {}
        self._data: tuple[ArrayOrTensor, ArrayOrTensor] | None = None
        self._place: tuple[int, list[ArraySpec]] = (0, [])
        self._refused = 0
        if self.processes == 1:
            return
        if os.name != "posix" or not sys.executable:
            logger.warning("worker processes need a POSIX system and a Python program: this process trains alone")
            return
        try:
            for _ in range(self.processes - 1):
                self._workers.append(WorkerConnection())
        except OSError as error:
            logger.warning("no more than %d worker processes can be started: %s", len(self._workers), error)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill them; this process trains alone from now on."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self.blocks.clear()
        self._data, self.closed = None, True

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have not ended."""
        return [worker.pid for worker in self._workers if not worker.gone]

    def new_job(self) -> int:
        """Return a number for a trainer."""
        return next(self._numbers)

    def ready_for(self, job: int, recipe: bytes, examples: Examples) -> list[WorkerConnection]:
        """Return the workers that can train now; the others get the trainer's arguments, if they have started.

        Args:
            job: Number of the trainer.
            recipe: The arguments of the trainer, packed.
            examples: The data of all clients; they are held once more in memory, for all workers together.
        """
        found = []
        for worker in self._workers:
            worker.poll()
            if worker.gone:
                continue
            if worker.learned == job:
                found.append(worker)
            elif worker.refused[0] == job:
                if self._refused != job:
                    logger.warning(
                        "worker processes cannot load the model (%s): this process trains without", worker.refused[1]
                    )
                self._refused = job
            elif worker.ready:
                try:
                    number, specs = self._shared(examples)
                except OSError as error:
                    self._give_up(error)
                    return []
                worker.send_job(job, recipe, number, specs, self.blocks)
        return found

    def wait(self, seconds: float = 60.0) -> int:
        """Wait until each has taken in its job, or has ended; return the number of those that are ready."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            while worker.learning and (left := deadline - time.monotonic()) > 0:
                worker.poll(left)
        return len([worker for worker in self._workers if worker.ready and not worker.gone])

    def allocate(self, specs: list[ArraySpec]) -> tuple[int, list[npt.NDArray[Any]]]:
        """Return the number of a free block, and arrays for a round in it."""
        need = nbytes_of(specs)
        try:
            number = self._free_block(need) or self._new_block(need) if self.pids else 0
        except OSError as error:
            self._give_up(error)
            number = 0
        return number, self.blocks[number].arrays(specs) if number else [np.empty(*form) for form in specs]

    def _free_block(self, nbytes: int) -> int:
        """Return a block that is large enough and free, 0 if there is none."""
        for number, block in list(self.blocks.items()):
            if number != self._place[0] and block.free:
                if block.nbytes >= nbytes:
                    return number
                # made for a smaller round; its memory goes back
                del self.blocks[number]
        return 0

    def _give_up(self, error: OSError) -> None:
        logger.warning("there is no memory to share with worker processes (%s): this process trains alone", error)
        self.close()

    def _new_block(self, nbytes: int) -> int:
        number = next(self._numbers)
        self.blocks[number] = Block(nbytes)
        return number

    def _shared(self, examples: Examples) -> tuple[int, list[ArraySpec]]:
        """Return the place of the data, which are copied unless they are those of the last call."""
        if self._data is None or self._data[0] is not examples.inputs or self._data[1] is not examples.labels:
            self.blocks.pop(self._place[0], None)
            own = [tensor.numpy() for tensor in examples.to(torch.device("cpu"))]
            specs: list[ArraySpec] = [(array.shape, array.dtype) for array in own]
            self._place = (self._new_block(nbytes_of(specs)), specs)
            for copy, array in zip(self.blocks[self._place[0]].arrays(specs), own, strict=True):
                copy[...] = array
            self._data = (examples.inputs, examples.labels)
        return self._place


def cut_into_shares(sizes: Sequence[int], settings: TrainingSettings, count: int) -> list[slice]:
    """Cut clients into runs of about the same work.

    The cuts follow from the arguments alone, not from the workers that are ready: a model's last bits may depend on the
    models that are trained together with it.

    Args:
        sizes: Examples of each client, in the order of training.
        settings: How they train.
        count: Number of shares at most, at least 1.

    Returns:
        The shares in order, none of them empty.

    Example:
        >>> cut_into_shares([9, 4, 3, 2], TrainingSettings(learning_rate=0.1, batch_size=1), 2)
        [slice(0, 1, None), slice(1, 4, None)]
    """
    work = np.cumsum([num_steps(size, settings) * min(size, settings.batch_size) for size in sizes])
    if not len(work):
        return []
    ideal = work[-1] * np.arange(1, count) / count
    cuts = sorted({0, len(work), *(int(np.abs(work - each).argmin()) + 1 for each in ideal)})
    return [slice(begin, end) for begin, end in pairwise(cuts)]


PATIENCE_S, SLOWER = 60.0, 20.0
"""A worker may need this many seconds more than as many times the time of this process."""


class SharedTrainer:
    """Trains as a :class:`~fedsel_flwr.clients.batched.BatchedTrainer` does, together with worker processes.

    A second thread would have to be woken for each of the many small operations of a step; a process is woken once a
    round. The clients are cut into as many shares as there are processes, by their sizes alone. Each share is trained
    by itself on one thread, in whatever process: the result is the same to the last bit when a worker becomes ready or
    ends. Another number of processes cuts other shares, which may change the last bits, as padding and the order of
    sums do.

    Args:
        trainer: How to train, on the CPU.
        workers: The worker processes; or a function that starts them, called with the number of processes that
            :func:`~fedsel_flwr.clients.batched.backends.choose_backend` decides, if it is above 1.

    Attributes:
        alone: The reason why this process trains without workers; "" if there is none.
    """

    def __init__(self, trainer: BatchedTrainer, workers: WorkerPool | Callable[[int], WorkerPool]) -> None:
        self._trainer, self._workers = trainer, workers
        self._pool: WorkerPool | None = None
        self._job, self._recipe = 0, b""
        self.alone = ""

    @property
    def settings(self) -> TrainingSettings:
        """Settings of every client; those of another round differ in the learning rate only."""
        return self._trainer.settings

    @settings.setter
    def settings(self, settings: TrainingSettings) -> None:
        self._trainer.settings = settings

    @property
    def backend(self) -> Backend:
        """The backend that was chosen; "auto" before the first training."""
        return self._trainer.backend

    def train(
        self, start: Arrays, clients: Examples | Pairs, generators: Sequence[np.random.Generator]
    ) -> tuple[list[npt.NDArray[Any]], FloatArray]:
        """Train every client; arguments, result and errors are the trainer's, the generators may be left unused."""
        examples = check_generators(clients, generators)
        self._trainer.prepare(start, examples)
        if not (self._pool or self.alone) and len(examples.rows):
            self._find_workers()
        if self._pool is None or self.alone or not len(examples.rows):
            return self._trainer.train(start, examples, generators)
        try:
            return self._train_shares(self._pool, start, examples, generators)
        # Ctrl-C too: a worker may still be writing into this round's memory
        except BaseException:
            self._pool.close()
            raise

    def _find_workers(self) -> None:
        """Start the workers and pack the trainer's arguments, or say why this process trains alone."""
        if not isinstance(self._workers, WorkerPool) and self._trainer.processes == 1:
            self.alone = self._trainer.reasons.get("processes", "one process was asked for")
            return
        try:
            self._recipe = packed(self._trainer.recipe())
        # pickle raises many kinds
        except Exception as error:
            self.alone = f"the model cannot be sent to another process: {type(error).__name__}: {error}"
            logger.warning("%s; this process trains alone", self.alone)
            return
        given = self._workers
        self._pool = given if isinstance(given, WorkerPool) else given(self._trainer.processes)
        self._job = self._pool.new_job()

    def _train_shares(
        self, pool: WorkerPool, start: Arrays, examples: Examples, generators: Sequence[np.random.Generator]
    ) -> tuple[list[npt.NDArray[Any]], FloatArray]:
        order = longest_first(examples.sizes, self._trainer.settings)
        examples, draws = examples.subset(order), [generators[i] for i in order]
        parts = cut_into_shares(examples.sizes, self._trainer.settings, pool.processes)
        specs = self._trainer.stacks.specs(len(order))
        number, arrays = pool.allocate(specs)
        received, losses, stacks = self._trainer.stacks.split(arrays)
        for place, array in zip(received, start, strict=True):
            place[...] = array
        # The learning rate alone changes from round to round; workers have the other settings.
        rate = self._trainer.settings.learning_rate
        busy = [
            (part, worker)
            for part, worker in zip(parts[:-1], pool.ready_for(self._job, self._recipe, examples), strict=False)
            if worker.train(number, pool.blocks, len(order), part.start, rate, examples.rows[part], draws[part])
        ]

        began = time.monotonic()

        def train_here(part: slice) -> None:
            into = [torch.from_numpy(stack[part]) for stack in stacks]
            own = Examples(examples.inputs, examples.labels, examples.rows[part])
            losses[part] = self._trainer.train_into(into, start, own, draws[part])

        # one thread, as in a worker: on several threads a product may have other last bits
        with using_threads(1):
            given = [part.start for part, _ in busy]
            for part in parts:
                if part.start not in given:
                    train_here(part)
            patience = PATIENCE_S + SLOWER * (time.monotonic() - began)
            for part, worker in busy:
                if worker.finished(patience):
                    pool.tasks += 1
                else:
                    train_here(part)
        # a copy: whoever keeps the losses must not keep the whole block from being used again
        return self._trainer.stacks.in_client_order(stacks, losses.copy(), order)
