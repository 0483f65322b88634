"""One worker process, from the side of the process that started it.

Also the bytes in which a trainer's arguments travel (:func:`packed`), with a user's modules that are read from files.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from fedsel_flwr.clients.batched.shared_memory import ArraySpec, Block
from fedsel_flwr.references import OWN_FILES, load_reference

logger = logging.getLogger("fedsel_flwr")
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from fedsel_flwr.clients.batched.worker import main; main(int(sys.argv[1]))"
)
"""Program of a worker: not multiprocessing's, so that scripts need no guard, and notebooks have workers too."""
GONE = (EOFError, OSError)
MESSAGE_S = 60
"""Seconds in which a worker must take or bring the rest of a message that has begun."""


class WorkerConnection:
    """A worker process; its answers are read when they are asked for, and nothing waits for its start.

    Attributes:
        pid: Its process id.
        gone: Whether it has ended; the log says so once.
        ready: Whether it has started.
        learning: Whether it is starting, or taking in a job.
        learned: The number of the job that it can train; 0 before the first.
        refused: The number of the last job that it cannot train, and why.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # a worker that stops in the middle of a message must not stop this process
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_S, 0))
        with theirs:
            # sys.path as it is now, which may differ from the one that a new process would have
            path = json.dumps([place for place in sys.path if isinstance(place, str)])
            try:
                # Its own session, so that Ctrl-C goes to this process alone. One thread: libraries read these variables
                # when they are imported, and their idle threads would spin on the other processes' cores.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", START, str(theirs.fileno()), path],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                )  # fmt: skip
            except BaseException:
                ours.close()
                raise
        self._connection = Connection(ours.detach())
        self.pid = self._process.pid
        self.gone, self.ready, self.learning, self.learned = False, False, True, 0
        self.refused, self._sent_job = (0, ""), 0
        self._known: set[int] = set()

    def poll(self, seconds: float = 0.0) -> None:
        """Read its answers, and wait at most ``seconds`` for the first."""
        with self._noticing_its_end():
            while not self.gone and self._connection.poll(seconds):
                self._receive()
                seconds = 0.0

    def send_job(
        self, job: int, recipe: bytes, data: int, specs: Sequence[ArraySpec], blocks: Mapping[int, Block]
    ) -> None:
        """Send the arguments of a trainer and the place of the examples, unless they were sent; do not wait for it.

        Args:
            job: A number, never used before for something else.
            recipe: The arguments of a trainer, packed.
            data: The number of the block of the examples.
            specs: Specs of inputs and labels there.
            blocks: All blocks, by number.
        """
        if self._sent_job != job:
            self._sent_job, self.learning = job, True
            with self._noticing_its_end():
                self._show(data, blocks, writable=False)
                self._connection.send(("learn", job, recipe, data, specs))

    def train(
        self, number: int, blocks: Mapping[int, Block], count: int, first: int, rate: float, rows: Any, draws: Any
    ) -> bool:
        """Order it to train clients of a round into the stack of a block; return whether the order was sent."""
        with self._noticing_its_end():
            self._show(number, blocks, writable=True)
            self._connection.send(("train", number, count, first, rate, rows, draws))
        return not self.gone

    def finished(self, seconds: float) -> bool:
        """Wait until it has trained, at most ``seconds``; return whether it has. After that time it is killed.

        Raises:
            Exception: What the training raised there.
        """
        with self._noticing_its_end():
            if self._connection.poll(seconds):
                self._receive()
                return not self.gone
            logger.warning("a worker process has not answered for %.3g s and is killed", seconds)
            raise TimeoutError
        return False

    def close(self) -> None:
        """Kill it."""
        self.gone, self.learning = True, False
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _show(self, number: int, blocks: Mapping[int, Block], *, writable: bool) -> None:
        """Send it a block, and make it drop those that are no longer there."""
        # memory goes back only when the last process has dropped it
        for old in self._known - set(blocks):
            self._connection.send(("forget", old))
        self._known &= set(blocks)
        if number not in self._known:
            self._connection.send(("take", number, blocks[number].nbytes, writable))
            send_handle(self._connection, blocks[number].fd, self.pid)
            self._known.add(number)

    def _receive(self) -> None:
        what, about, words = self._connection.recv()
        if what != "done":
            self.learning = False
        if what == "ready":
            self.ready = True
        elif what == "learned":
            self.learned = about
        elif what == "cannot":
            self.refused = about, words
        elif what == "failed":
            raise about from _WorkerTraceback(words)

    @contextlib.contextmanager
    def _noticing_its_end(self) -> Iterator[None]:
        """Note within the block that it has ended, and log it once."""
        try:
            yield
        except GONE:
            was_ready = self.ready
            self.close()
            logger.warning(
                "a worker process ended %s (status %s): this process trains its clients from now on",
                "at work" if was_ready else "before it was ready",
                self._process.returncode,
            )


class _WorkerTraceback(Exception):
    """Cause of an error that was raised in a worker; its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def packed(what: Any) -> bytes:
    """Pickle an object for another process.

    What the script or notebook itself defines is sent along if cloudpickle is installed. Everything else is imported at
    the other end, a user's files (``./mine.py:function``) from their places.

    Raises:
        Exception: It cannot be sent; pickle raises many kinds.
    """
    by_value = importlib.util.find_spec("cloudpickle")
    pickler = importlib.import_module("cloudpickle") if by_value else pickle
    files = {name: module.__file__ for name, module in list(sys.modules.items()) if name.startswith(OWN_FILES)}
    return pickle.dumps((files, pickler.dumps(what)))


def unpacked(data: bytes) -> Any:
    """Return the object of such bytes.

    Raises:
        Exception: Something that it needs cannot be imported here; pickle raises many kinds.
    """
    files, inner = pickle.loads(data)
    return _Unpickler(inner, files).load()


class _Unpickler(pickle.Unpickler):
    """Finds modules that were read from files.

    Args:
        data: The pickled object.
        files: Files by the name of the module.
    """

    def __init__(self, data: bytes, files: dict[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in a module stands for."""
        if module in self._files and module not in sys.modules:
            return load_reference(f"{self._files[module]}:{name}", "model")
        return super().find_class(module, name)
