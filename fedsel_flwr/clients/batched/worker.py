"""A helper: another process that trains some of a round's clients, into memory that both see.

It hears and answers over a socket, and ends when the socket does, however the process at the other end has ended.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from fedsel_flwr.clients.batched.examples import Examples
from fedsel_flwr.clients.batched.shared_memory import Block, Form
from fedsel_flwr.clients.batched.trainer import BatchedTrainer
from fedsel_flwr.clients.batched.worker_connection import unpacked
from fedsel_flwr.errors import RunError


def main(fd: int) -> None:
    """Work until the other end is closed.

    Args:
        fd: The socket's descriptor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other end
    torch.set_num_threads(1)
    connection = Connection(fd)
    with contextlib.suppress(EOFError, OSError):  # the other end is gone
        _Work(connection).go_on()


class _Work:
    """What a helper has and does; the orders are methods, their answers are sent back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._blocks: dict[int, Block] = {}
        self._data: tuple[Any, Any] = (None, None)
        self._trainer: BatchedTrainer | None = None

    def go_on(self) -> None:
        self._connection.send(("ready", None, ""))
        while True:
            what, *arguments = self._connection.recv()
            try:
                said = getattr(self, what)(*arguments)
            except (EOFError, ConnectionError):
                raise
            except Exception as error:  # whatever a model of one's own raises
                said = ("failed", _that_travels(error), traceback.format_exc())
            if said is not None:
                self._connection.send(said)

    def take(self, number: int, nbytes: int, writable: bool) -> None:
        """A block, whose descriptor follows."""
        self._blocks[number] = Block(nbytes, recv_handle(self._connection), writable=writable)

    def forget(self, number: int) -> None:
        """A block that is no longer used."""
        self._blocks.pop(number, None)

    def learn(self, lesson: int, recipe: bytes, data: int, forms: list[Form]) -> tuple[str, int, str]:
        """How to train, and the examples of all clients."""
        self._trainer = None
        try:
            self._trainer = BatchedTrainer(**unpacked(recipe))
        except Exception as error:  # what cannot be imported here
            return "cannot", lesson, f"{type(error).__name__}: {error}"
        inputs, labels = self._blocks[data].arrays(forms)
        self._data = inputs, labels
        return "learned", lesson, ""

    def train(
        self, block: int, count: int, first: int, rate: float, rows: Any, generators: Any
    ) -> tuple[str, None, str]:
        """Train clients, the first of which is the round's client ``first``, into the stack of a block."""
        if self._trainer is None:
            raise RunError("a helper process was told to train before it was told how")
        self._trainer.settings = replace(self._trainer.settings, learning_rate=rate)
        start, losses, stacks = self._trainer.stacks.apart(
            self._blocks[block].arrays(self._trainer.stacks.forms(count))
        )
        part = slice(first, first + len(rows))
        examples = Examples(*self._data, rows)
        self._trainer.prepare(start, examples)
        into = [torch.from_numpy(stack[part]) for stack in stacks]
        losses[part] = self._trainer.train_into(into, start, examples, generators)
        return "done", None, ""


def _that_travels(error: Exception) -> Exception:
    """The error, or in its place one that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickle raises many kinds, and so do constructors
        return RunError(f"{type(error).__name__}: {error}")
    return error
