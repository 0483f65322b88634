"""Finished training survives a crash: each reply of a round is written as it arrives, and used after a restart.

The folder of the checkpoints has a folder ``arrivals``. In it are a folder for the choice of the round in progress and
one for each reply, each with a file in the form of a checkpoint. A reply is Flower's protobuf of its content. All are
deleted when the round has its checkpoint.

A restarted server repeats the round: it chooses among the same clients, with the same answers to probes, and asks only
those whose reply was not written. For Flower this is a new run, so that replies under way are lost.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from fedsel_flwr.errors import StateError, disk_errors
from fedsel_flwr.flower import bytes_of, content_of
from fedsel_flwr.rounds.checkpoints import Checkpoint, checkpoint_path, read_checkpoint, write_checkpoint
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.roll_call import Answers

logger = logging.getLogger("fedsel_flwr")
FOLDER, CHOICE = "arrivals", "choice"
MODELS, MORE_BYTES = 4, 2**20
"""Largest size of a reply that is written: so many models, and so many bytes more."""


class Recalled(NamedTuple):
    """A round that a server before this one has begun.

    Attributes:
        present: The ids of the clients that the selector could choose.
        answers: Client id -> its answer to the probe, for each call of the selector that probes.
        replies: Client id -> the content of its reply, and the seconds until it came.
    """

    present: list[str]
    answers: list[dict[str, Any]]
    replies: dict[str, tuple[RecordDict, float]]


class Arrivals:
    """The replies of the round in progress, in the folder of the checkpoints.

    Args:
        folder: The folder of the checkpoints.
        fingerprint: Fingerprint of the run, as in its checkpoints.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, str]) -> None:
        self._folder, self._fingerprint = folder / FOLDER, fingerprint
        self._round, self._model, self._most = 0, "", 0

    def recall(self, number: int, model: Arrays, resume: bool) -> Recalled | None:
        """Return what was written of a round; None, and an empty folder, if nothing was, or for another model.

        Args:
            number: The absolute round.
            model: The model that its clients get.
            resume: Whether this run goes on with an earlier one. A new run uses nothing.
        """
        self._round, self._model = number, _digest(model)
        self._most = MODELS * sum(array.nbytes for array in model) + MORE_BYTES
        if not resume or (choice := self._read(self._folder / CHOICE)) is None:
            self.clear()
            return None
        replies = {}
        for folder in sorted(self._folder.glob("client-*")):
            if (reply := self._read(folder)) is not None:
                content = content_of(reply.model[0].tobytes())
                replies[str(reply.state["client"])] = (content, float(reply.state["seconds"]))
        # On the console too, where Flower counts its rounds from 1 again.
        logging.getLogger("flwr").info(
            "round %d was begun by a server before this one: %d of its replies were written, and are used",
            number, len(replies),
        )  # fmt: skip
        return Recalled(list(choice.state["present"]), list(choice.state["answers"]), replies)

    def begin(self, present: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> None:
        """Write whom the round may choose, and the answers to its probes; attributes as in :class:`Recalled`."""
        state = {"model": self._model, "present": list(present), "answers": [dict(one) for one in answers]}
        self._write(CHOICE, [], state)

    def write(self, client_id: str, reply: Message, seconds: float) -> None:
        """Write a reply without an error; one that is too large is only logged.

        Raises:
            RunError: It cannot be written.
        """
        if reply.has_error():
            return
        content = bytes_of(reply.content)
        if len(content) > self._most:
            logger.warning("the reply of client %s has %d bytes and is not kept on disk", client_id, len(content))
            return
        name = f"client-{hashlib.sha256(client_id.encode()).hexdigest()[:32]}"
        state = {"model": self._model, "client": client_id, "seconds": seconds}
        self._write(name, [np.frombuffer(content, np.uint8)], state)

    def clear(self) -> None:
        """Delete everything, because the round has its checkpoint."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, name: str, model: Arrays, state: dict[str, Any]) -> None:
        folder = self._folder / name
        with disk_errors(folder, ", or leave keep_arrivals out"):
            folder.mkdir(parents=True, exist_ok=True)
            names, fingerprint = [str(i) for i in range(len(model))], dict(self._fingerprint)
            write_checkpoint(folder, Checkpoint(
                round=self._round, model=list(model), names=names, state=state, fingerprint=fingerprint,
            ))  # fmt: skip

    def _read(self, folder: Path) -> Checkpoint | None:
        """Return a file of this round; None, with a warning, if it is damaged, or of another run or model."""
        path = checkpoint_path(folder, self._round)
        if not path.exists():
            return None
        try:
            found = read_checkpoint(path)
            if found.fingerprint != dict(self._fingerprint) or found.state["model"] != self._model:
                raise StateError("it belongs to another run, or to a round with another model")
            return found
        except (StateError, KeyError) as error:
            logger.warning("%s is not used, and its client is asked again: %s", path, error)
            return None


class ProbeAnswers:
    """A transport that keeps the answers to a round's probes, or gives those of a round that is repeated.

    Args:
        transport: Reaches the clients.
        ids: Connection -> client id.
        recalled: The answers of the round that is repeated; None asks the clients.
        busy: The clients that have not answered.
    """

    def __init__(self, transport: Any, ids: Any, recalled: Sequence[Mapping[str, Any]] | None, busy: Busy) -> None:
        self._transport, self._ids, self._busy = transport, ids, busy
        self._recalled = None if recalled is None else list(recalled)
        self.asked: list[dict[str, Any]] = []
        self.silent: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Return the transport's own attribute."""
        return getattr(self._transport, name)

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Return the answers: connection -> metrics, for those that answered."""
        answers: Answers
        if self._recalled:
            known = self._recalled.pop(0)
            answers = {node: known[self._ids(node)] for node in nodes if self._ids(node) in known}
            self.silent += [node for node in nodes if node not in answers]
            self._busy.owe(self.silent)
        else:
            answers = self._transport.probe(nodes, config)
        self.asked.append({self._ids(node): answer for node, answer in answers.items()})
        return answers


def _digest(model: Arrays) -> str:
    found = hashlib.sha256()
    for array in model:
        found.update(f"{array.dtype.str} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
