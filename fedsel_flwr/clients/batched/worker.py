"""A worker process, from its own side: trains a share of a round's clients into shared memory.

It receives orders and answers over a socket. It ends when the socket does, however the process at the other end ended.
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
from fedsel_flwr.clients.batched.shared_memory import ArraySpec, Block
from fedsel_flwr.clients.batched.trainer import BatchedTrainer
from fedsel_flwr.clients.batched.worker_connection import unpacked
from fedsel_flwr.errors import RunError


def main(fd: int) -> None:
    """Serve orders until the other end is closed.

    Args:
        fd: The socket's descriptor.
    """
    # Ctrl-C reaches the whole group of processes; the other end decides, and closes the socket
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    connection = Connection(fd)
    # either error: the other end is gone
    with contextlib.suppress(EOFError, OSError):
        _Worker(connection).serve()


class _Worker:
    """State of a worker process; each order is a method, whose answer is sent back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._blocks: dict[int, Block] = {}
        self._data: tuple[Any, Any] = (None, None)
        self._trainer: BatchedTrainer | None = None

    def serve(self) -> None:
        self._connection.send(("ready", None, ""))
        while True:
            what, *arguments = self._connection.recv()
            try:
                said = getattr(self, what)(*arguments)
            except (EOFError, ConnectionError):
                raise
            # a user's model may raise anything
            except Exception as error:
                said = ("failed", _picklable(error), traceback.format_exc())
            if said is not None:
                self._connection.send(said)

    def take(self, number: int, nbytes: int, writable: bool) -> None:
        """Take a block of shared memory, whose descriptor follows."""
        self._blocks[number] = Block(nbytes, recv_handle(self._connection), writable=writable)

    def forget(self, number: int) -> None:
        """Drop a block that is no longer used."""
        self._blocks.pop(number, None)

    def learn(self, lesson: int, recipe: bytes, data: int, specs: list[ArraySpec]) -> tuple[str, int, str]:
        """Take the arguments of a trainer, and the examples of all clients."""
        self._trainer = None
        try:
            self._trainer = BatchedTrainer(**unpacked(recipe))
        # what cannot be imported here, of many kinds
        except Exception as error:
            return "cannot", lesson, f"{type(error).__name__}: {error}"
        inputs, labels = self._blocks[data].arrays(specs)
        self._data = inputs, labels
        return "learned", lesson, ""

    def train(
        self, block: int, count: int, first: int, rate: float, rows: Any, generators: Any
    ) -> tuple[str, None, str]:
        """Train clients, the first of which is the round's client ``first``, into the stack of a block."""
        if self._trainer is None:
            raise RunError(
                "a worker process got the order to train before the order to learn. Send the order to learn first."
            )
        self._trainer.settings = replace(self._trainer.settings, learning_rate=rate)
        start, losses, stacks = self._trainer.stacks.split(
            self._blocks[block].arrays(self._trainer.stacks.specs(count))
        )
        part = slice(first, first + len(rows))
        examples = Examples(*self._data, rows)
        self._trainer.prepare(start, examples)
        into = [torch.from_numpy(stack[part]) for stack in stacks]
        losses[part] = self._trainer.train_into(into, start, examples, generators)
        return "done", None, ""


def _picklable(error: Exception) -> Exception:
    """Return the error, or in its place one that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    # pickle raises many kinds, and so do constructors
    except Exception:
        return RunError(f"{type(error).__name__}: {error}")
    return error
