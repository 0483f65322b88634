"""One helper process, from the side of the one that started it.

What has to be trained, as bytes for another process, with the modules of one's own that are read from files.
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

from fedsel_flwr.clients.batched.shared_memory import Block, Form
from fedsel_flwr.references import OWN_FILES, load_reference

logger = logging.getLogger("fedsel_flwr")
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from fedsel_flwr.clients.batched.worker import main; main(int(sys.argv[1]))"
)
"""What a helper runs: a program of its own, so that scripts need no guard, and notebooks have helpers too."""
GONE = (EOFError, OSError)
MESSAGE_S = 60
"""Seconds in which a helper must take or bring the rest of a message that has begun."""


class Remote:
    """A helper process; its answers are heard when they are asked for, nothing waits for it to start.

    Attributes:
        pid: Its process id.
        gone: Whether it has ended; said once in the log.
        ready: Whether it has started.
        learning: Whether it starts, or takes in a lesson.
        learned: The number of the lesson that it trains by; 0 before the first.
        refused: The number of the last lesson that it cannot train by, and why.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_S, 0))
        with theirs:
            path = json.dumps([place for place in sys.path if isinstance(place, str)])
            try:
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
        self.refused, self._taught = (0, ""), 0
        self._known: set[int] = set()

    def listen(self, seconds: float = 0.0) -> None:
        """Hear what it has said, waiting so long for something."""
        with self._losing_it():
            while not self.gone and self._connection.poll(seconds):
                self._hear()
                seconds = 0.0

    def teach(self, lesson: int, recipe: bytes, data: int, forms: Sequence[Form], blocks: Mapping[int, Block]) -> None:
        """Tell it how to train, and where the examples are, unless it was told; do not wait for it.

        Args:
            lesson: A number, never used before for something else.
            recipe: The arguments of a trainer, packed.
            data: The number of the block of the examples.
            forms: Of inputs and labels there.
            blocks: All that there are, by number.
        """
        if self._taught != lesson:
            self._taught, self.learning = lesson, True
            with self._losing_it():
                self._show(data, blocks, writable=False)
                self._connection.send(("learn", lesson, recipe, data, forms))

    def train(
        self, number: int, blocks: Mapping[int, Block], count: int, first: int, rate: float, rows: Any, draws: Any
    ) -> bool:
        """Tell it to train clients of a round into the stack of a block; return whether it could be told."""
        with self._losing_it():
            self._show(number, blocks, writable=True)
            self._connection.send(("train", number, count, first, rate, rows, draws))
        return not self.gone

    def finished(self, seconds: float) -> bool:
        """Wait until it has trained; return whether it has, rather than ended, or been ended after so long.

        Raises:
            Exception: What was raised there.
        """
        with self._losing_it():
            if self._connection.poll(seconds):
                self._hear()
                return not self.gone
            logger.warning("a helper process has not answered for %.3g s and is ended", seconds)
            raise TimeoutError
        return False

    def close(self) -> None:
        """End it, at once."""
        self.gone, self.learning = True, False
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _show(self, number: int, blocks: Mapping[int, Block], *, writable: bool) -> None:
        """Give it a block, and take from it those that are no more."""
        for old in self._known - set(blocks):
            self._connection.send(("forget", old))
        self._known &= set(blocks)
        if number not in self._known:
            self._connection.send(("take", number, blocks[number].nbytes, writable))
            send_handle(self._connection, blocks[number].fd, self.pid)
            self._known.add(number)

    def _hear(self) -> None:
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
            raise about from _There(words)

    @contextlib.contextmanager
    def _losing_it(self) -> Iterator[None]:
        """Note, and say once, that it has ended."""
        try:
            yield
        except GONE:
            was_ready = self.ready
            self.close()
            logger.warning(
                "a helper process ended %s (status %s): this process trains its clients from here on",
                "at work" if was_ready else "before it was ready",
                self._process.returncode,
            )


class _There(Exception):
    """Where in a helper an error was raised; its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def packed(what: Any) -> bytes:
    """An object as bytes.

    What was defined in the script or notebook itself is sent along where cloudpickle is installed; everything else is
    imported at the other end, files of one's own (``./mine.py:function``) from where they are.

    Raises:
        Exception: It cannot be sent; pickle raises many kinds.
    """
    by_value = importlib.util.find_spec("cloudpickle")
    pickler = importlib.import_module("cloudpickle") if by_value else pickle
    files = {name: module.__file__ for name, module in list(sys.modules.items()) if name.startswith(OWN_FILES)}
    return pickle.dumps((files, pickler.dumps(what)))


def unpacked(data: bytes) -> Any:
    """The object again.

    Raises:
        Exception: Something that it needs cannot be imported here; pickle raises many kinds.
    """
    files, inner = pickle.loads(data)
    return _Unpickler(inner, files).load()


class _Unpickler(pickle.Unpickler):
    """Finds modules that were read from files.

    Args:
        data: The pickled object.
        files: By the name of the module.
    """

    def __init__(self, data: bytes, files: dict[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def find_class(self, module: str, name: str) -> Any:
        """What a name in a module stands for."""
        if module in self._files and module not in sys.modules:
            return load_reference(f"{self._files[module]}:{name}", "model")
        return super().find_class(module, name)
