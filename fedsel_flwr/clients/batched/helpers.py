"""The processes that help this one to train, and the memory that they share with it."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import whole
from fedsel_flwr.clients.batched.examples import Examples, Held
from fedsel_flwr.clients.batched.memory import Block, Form, nbytes_of
from fedsel_flwr.clients.batched.remote import Remote

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
