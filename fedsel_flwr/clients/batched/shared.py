"""The training of a round's clients by several processes, each with one thread, into one stack."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.batched.choosing import Way
from fedsel_flwr.clients.batched.examples import Examples, with_generators
from fedsel_flwr.clients.batched.helpers import Helpers
from fedsel_flwr.clients.batched.parts import shares
from fedsel_flwr.clients.batched.schedule import longest_first
from fedsel_flwr.clients.batched.sending import packed
from fedsel_flwr.clients.batched.threads import using_threads
from fedsel_flwr.clients.batched.trainer import Arrays, BatchedTrainer, Pairs
from fedsel_flwr.clients.settings import TrainingSettings

logger = logging.getLogger("fedsel_flwr")
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
