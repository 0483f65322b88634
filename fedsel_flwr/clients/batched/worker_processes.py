"""The training of a round's clients by several processes, each with one thread, into one stack.

The processes that help this one to train, and the memory that they share with it.

Which clients of a round each of several processes trains.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import FloatArray, whole
from fedsel_flwr.clients.batched.examples import Examples, Held, longest_first, num_steps, with_generators
from fedsel_flwr.clients.batched.shared_memory import Block, Form, nbytes_of
from fedsel_flwr.clients.batched.trainer import Arrays, BatchedTrainer, Pairs, Way
from fedsel_flwr.clients.batched.worker_connection import Remote, packed
from fedsel_flwr.clients.threads import using_threads
from fedsel_flwr.clients.training_settings import TrainingSettings

logger = logging.getLogger("fedsel_flwr")


class Helpers:
    """Starts helper processes, and ends them with the block.

    They are ready some seconds later, for what they import; until then, and should one of them end, the process that
    started them trains alone. They serve one trainer after the other.

    Args:
        processes: How many processes train, this one included; at least 1.

    Attributes:
        processes: As given.
        tasks: How many shares of a round helpers have trained.
        closed: Whether they were ended.
        blocks: The shared memory, by number.

    Raises:
        ParameterError: ``processes`` is below 1.
    """

    def __init__(self, processes: int) -> None:
        self.processes = whole("processes", processes, 1)
        self.tasks, self.closed = 0, False
        self._remotes: list[Remote] = []
        self._numbers = itertools.count(1)
        self.blocks: dict[int, Block] = {}
        self._data: tuple[Held, Held] | None = None
        self._place: tuple[int, list[Form]] = (0, [])
        self._refused = 0
        if self.processes == 1:
            return
        if os.name != "posix" or not sys.executable:
            logger.warning("helper processes need a POSIX system and a Python program: this process trains alone")
            return
        try:
            for _ in range(self.processes - 1):
                self._remotes.append(Remote())
        except OSError as error:
            logger.warning("no more than %d helper processes can be started: %s", len(self._remotes), error)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End them, at once; this process trains alone from here on."""
        for remote in self._remotes:
            remote.close()
        self._remotes.clear()
        self.blocks.clear()
        self._data, self.closed = None, True

    @property
    def pids(self) -> list[int]:
        """The process ids of those that have not ended."""
        return [remote.pid for remote in self._remotes if not remote.gone]

    def lesson(self) -> int:
        """A number for what is to be trained."""
        return next(self._numbers)

    def able(self, lesson: int, recipe: bytes, examples: Examples) -> list[Remote]:
        """Those that can train now; the others are told how, if they are there.

        Args:
            lesson: Its number.
            recipe: The arguments of the trainer, packed.
            examples: The data of all clients; they stand once more in memory, for all helpers together.
        """
        found = []
        for remote in self._remotes:
            remote.listen()
            if remote.gone:
                continue
            if remote.learned == lesson:
                found.append(remote)
            elif remote.refused[0] == lesson:
                if self._refused != lesson:
                    logger.warning(
                        "helper processes cannot load the model (%s): this process trains without", remote.refused[1]
                    )
                self._refused = lesson
            elif remote.ready:
                try:
                    number, forms = self._shared(examples)
                except OSError as error:
                    self._give_up(error)
                    return []
                remote.teach(lesson, recipe, number, forms, self.blocks)
        return found

    def wait(self, seconds: float = 60.0) -> int:
        """Wait until each has taken in what it was told, or has ended; return how many are there."""
        deadline = time.monotonic() + seconds
        for remote in self._remotes:
            while remote.learning and (left := deadline - time.monotonic()) > 0:
                remote.listen(left)
        return len([remote for remote in self._remotes if remote.ready and not remote.gone])

    def room(self, forms: list[Form]) -> tuple[int, list[npt.NDArray[Any]]]:
        """Arrays for a round in memory that nobody holds any more, and the number of their block."""
        need = nbytes_of(forms)
        try:
            number = self._free(need) or self._made(need) if self.pids else 0
        except OSError as error:
            self._give_up(error)
            number = 0
        return number, self.blocks[number].arrays(forms) if number else [np.empty(*form) for form in forms]

    def _free(self, nbytes: int) -> int:
        """A block that is large enough and free, 0 if there is none; others were made for a smaller round."""
        for number, block in list(self.blocks.items()):
            if number != self._place[0] and block.free:
                if block.nbytes >= nbytes:
                    return number
                del self.blocks[number]
        return 0

    def _give_up(self, error: OSError) -> None:
        logger.warning("there is no memory to share with helper processes (%s): this process trains alone", error)
        self.close()

    def _made(self, nbytes: int) -> int:
        number = next(self._numbers)
        self.blocks[number] = Block(nbytes)
        return number

    def _shared(self, examples: Examples) -> tuple[int, list[Form]]:
        """Where the data are, which are copied unless they are the last ones."""
        if self._data is None or self._data[0] is not examples.inputs or self._data[1] is not examples.labels:
            self.blocks.pop(self._place[0], None)
            own = [tensor.numpy() for tensor in examples.on(torch.device("cpu"))]
            forms: list[Form] = [(array.shape, array.dtype) for array in own]
            self._place = (self._made(nbytes_of(forms)), forms)
            for copy, array in zip(self.blocks[self._place[0]].arrays(forms), own, strict=True):
                copy[...] = array
            self._data = (examples.inputs, examples.labels)
        return self._place


def shares(sizes: Sequence[int], settings: TrainingSettings, count: int) -> list[slice]:
    """Cut clients into runs of about the same work.

    The cuts follow from the arguments alone, not from who is there to train: a model's last bits may depend on the
    models that are trained together with it.

    Args:
        sizes: Examples of each client, in the order of training.
        settings: How they train.
        count: How many shares at most, at least 1.

    Returns:
        The shares in order, none of them empty.

    Example:
        >>> shares([9, 4, 3, 2], TrainingSettings(learning_rate=0.1, batch_size=1), 2)
        [slice(0, 1, None), slice(1, 4, None)]
    """
    work = np.cumsum([num_steps(size, settings) * min(size, settings.batch_size) for size in sizes])
    if not len(work):
        return []
    ideal = work[-1] * np.arange(1, count) / count
    cuts = sorted({0, len(work), *(int(np.abs(work - each).argmin()) + 1 for each in ideal)})
    return [slice(begin, end) for begin, end in pairwise(cuts)]


PATIENCE_S, SLOWER = 60.0, 20.0
"""Seconds that a helper may need beyond those of this process, and how many times as long it may need."""


class SharedTrainer:
    """Trains as a :class:`~fedsel_flwr.clients.batched.BatchedTrainer` does, together with helper processes.

    A second thread would have to be woken for each of the many small operations of a step; a process is woken once a
    round. The clients are cut into as many shares as there are processes, by their sizes alone, and each share is
    trained by itself on one thread, whoever trains it: so the result is the same to the last bit whenever a helper
    becomes ready or ends. Another number of processes cuts other shares, which may change the last bits, as padding and
    the order of sums do.

    Args:
        trainer: How to train, on the CPU.
        helpers: With whom.

    Attributes:
        alone: Why the helpers cannot train this model; "" while nothing stands against it.
    """

    def __init__(self, trainer: BatchedTrainer, helpers: Helpers) -> None:
        self._trainer, self._helpers = trainer, helpers
        self._lesson, self._recipe = helpers.lesson(), b""
        self.alone = ""

    @property
    def settings(self) -> TrainingSettings:
        """How every client trains; may be set to those of another round, which differ in the learning rate only."""
        return self._trainer.settings

    @settings.setter
    def settings(self, settings: TrainingSettings) -> None:
        self._trainer.settings = settings

    @property
    def way(self) -> Way:
        """The way that was taken; "auto" before the first training."""
        return self._trainer.way

    def train(
        self, start: Arrays, clients: Examples | Pairs, generators: Sequence[np.random.Generator]
    ) -> tuple[list[npt.NDArray[Any]], FloatArray]:
        """Train every client; arguments, result and errors are the trainer's, the generators may be left unused."""
        examples = with_generators(clients, generators)
        self._trainer.prepare(start, examples)
        if not (self._recipe or self.alone) and len(examples.rows):
            self._pack()
        if self.alone or not len(examples.rows):
            return self._trainer.train(start, examples, generators)
        try:
            return self._shared(start, examples, generators)
        except BaseException:  # Ctrl-C too: a helper may still be at work for this round
            self._helpers.close()
            raise

    def _shared(
        self, start: Arrays, examples: Examples, generators: Sequence[np.random.Generator]
    ) -> tuple[list[npt.NDArray[Any]], FloatArray]:
        order = longest_first(examples.sizes, self._trainer.settings)
        examples, draws = examples.of(order), [generators[i] for i in order]
        parts = shares(examples.sizes, self._trainer.settings, self._helpers.processes)
        forms = self._trainer.stacks.forms(len(order))
        number, arrays = self._helpers.room(forms)
        received, losses, stacks = self._trainer.stacks.apart(arrays)
        for place, array in zip(received, start, strict=True):
            place[...] = array
        rate = self._trainer.settings.learning_rate
        busy = [
            (part, remote)
            for part, remote in zip(parts[:-1], self._helpers.able(self._lesson, self._recipe, examples), strict=False)
            if remote.train(
                number, self._helpers.blocks, len(order), part.start, rate, examples.rows[part], draws[part]
            )
        ]

        began = time.monotonic()

        def train_here(part: slice) -> None:
            into = [torch.from_numpy(stack[part]) for stack in stacks]
            own = Examples(examples.inputs, examples.labels, examples.rows[part])
            losses[part] = self._trainer.train_into(into, start, own, draws[part])

        with using_threads(1):
            given = [part.start for part, _ in busy]
            for part in parts:
                if part.start not in given:
                    train_here(part)
            patience = PATIENCE_S + SLOWER * (time.monotonic() - began)
            for part, remote in busy:
                if remote.finished(patience):
                    self._helpers.tasks += 1
                else:
                    train_here(part)
        return self._trainer.stacks.unsorted(stacks, losses.copy(), order)

    def _pack(self) -> None:
        try:
            self._recipe = packed(self._trainer.recipe())
        except Exception as error:  # pickle raises many kinds
            self.alone = f"the model cannot be sent to another process: {type(error).__name__}: {error}"
            logger.warning("%s; this process trains alone", self.alone)
