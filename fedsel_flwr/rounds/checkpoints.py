"""Checkpoints of a run: one file each, complete or absent, with every byte checked when the file is read.

``checkpoint_dir`` holds the last checkpoints, ``round-000012.safetensors``, and the finished rounds, ``journal.jsonl``.
Newer checkpoints than the one from which a run resumes are renamed (suffix ``.refused``), and the resumed run plays
their rounds again.

A checkpoint is a safetensors file, no pickle. The model's arrays are ``model/NAME``. What is no array is a JSON text,
the bytes of the array ``rest``. Round and settings are a JSON text in the file's header. It begins with the digest of
the whole file, in which the digest itself counts as 64 zeros.

All decisions about a resumed run are made here. The rules for the folder of a simulated run, with ``resume``
(``simulations.engine.simulate``):

1. The run there has other settings, code or data, or is damaged: refuse. With ``replay``, play it again.
2. The run has finished: return its result.
3. The run was cut off, or there is none: the checkpoints decide. If none can be used: refuse. With ``replay``, play the
   run again.

The rules for a folder of checkpoints, of a simulation or a server (:func:`check_start`, :meth:`Checkpoints.newest`):

4. No ``resume``, but checkpoints or finished rounds: refuse, because they belong to another run.
5. ``resume="must"``, but no checkpoint: refuse.
6. No checkpoint, or no ``resume``: begin a new run.
7. Otherwise resume from the newest checkpoint that is undamaged and fits. Its fingerprint must equal the run's
   (:func:`check_fingerprint`), and its model must have the initial model's shapes (:func:`check_model`). Newer
   checkpoints are renamed.
8. No checkpoint can be used: refuse, with the reason for each.
9. The checkpoint has more rounds than the run will have: refuse (:func:`check_length`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

import fedsel_flwr
from fedsel_flwr import operating_system
from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError, RunError, StateError, write_cure
from fedsel_flwr.rounds import storage
from fedsel_flwr.rounds.fingerprints import differences
from fedsel_flwr.rounds.state_dicts import Array, State, pack_state, unpack_state

logger = logging.getLogger("fedsel_flwr")
Resume = Literal[False, True, "must"]
MAX_SHAPES = 200
"""Largest number of characters of a list of shapes in an error."""
JOURNAL: Final = "journal.jsonl"
"""The file of the finished rounds, in the folder of the checkpoints."""
REFUSED: Final = ".refused"
"""Suffix of a refused checkpoint."""
SCHEMA: Final = 5
"""Version of the files. Other versions are refused."""
NAME = re.compile(r"round-(\d{6,})\.safetensors")
"""Names of checkpoints."""
NO_DIGEST = b"0" * 64
_BEGINNING = re.compile(rb'.{8}\{"__metadata__":\{"checkpoint":"\{\\"sha256\\": \\"([0-9a-f]{64})\\"', re.DOTALL)
"""The first bytes of a file: the length of its header, and the digest."""
BEGINNING_BYTES = 2**12


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that a run needs to resume after a round.

    Attributes:
        round: The absolute round that was finished.
        model: The arrays of the global model after this round.
        names: The names of the arrays.
        state: The state from :meth:`fedsel_flwr.strategies.wrapping.adapter.Adapter.state_dict`.
        base: The base strategy's own state.
        fingerprint: Fingerprint of the run, part -> description. It must be the same when the run resumes.
        total_rounds: Number of the last round; None if it is unknown. Reports read it, and it may change when the run
            resumes.
    """

    round: int
    model: list[Array]
    names: list[str]
    state: State
    base: State = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)
    total_rounds: int | None = None


class Checkpoints:
    """Writes a run's checkpoints into a folder, and finds the one to resume from.

    Args:
        folder: The folder of one run; created if needed.
        every: Number of rounds from one checkpoint to the next.
        keep: Number of checkpoints to keep.
        resume: False begins a new run and refuses a folder that holds one. True resumes the run in the folder, or
            begins a new one if there is none. "must" refuses to begin a new run.

    Attributes:
        written_at: When the newest checkpoint was written, in monotonic seconds; None if none was written or loaded.

    Raises:
        ParameterError: A value is out of range.
        RunError: The folder cannot be written to. Or it holds another run and ``resume`` is False, or no run and
            ``resume`` is "must".
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: int = 1, keep: int = 3, resume: Resume = False
    ) -> None:
        self.folder = Path(folder)
        self.every = whole("checkpoint_every", every, 1)
        self.keep = whole("keep_checkpoints", keep, 1)
        check_resume(resume)
        self.resume: Resume = resume
        self.written_at: float | None = None
        self._lock: storage.FolderLock | None = None
        # Checked before the folder is created, because a refused run leaves nothing behind.
        if not os.path.isdir(self.folder):
            check_start(self.folder, resume, [], self.folder / JOURNAL)
        storage.make_folder(self.folder)
        check_start(self.folder, resume, self._rounds(), self.folder / JOURNAL)

    def due(self, round: int) -> bool:
        """Return whether a checkpoint is due after this round; the last round always has one."""
        return round % self.every == 0

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and remove the oldest ones beyond ``keep``.

        Raises:
            RunError: The checkpoint cannot be written, and earlier checkpoints are unchanged. Or another process writes
                to the folder.
        """
        # The lock ends with its last reference, so this object keeps one.
        self._lock = self._lock or storage.lock_folder(self.folder)
        failed = f"round {checkpoint.round}: the checkpoint {str(self.path(checkpoint.round))!r} cannot be written: "
        try:
            write_checkpoint(self.folder, checkpoint)
        except OSError as error:
            raise RunError(
                f"{failed}{error.strerror}. Earlier checkpoints are unchanged. {write_cure(error)}, and set resume=True"
            ) from error
        except StateError as error:
            raise RunError(f"{failed}{error}") from error
        self.written_at = time.monotonic()
        # A warning is enough: the new checkpoint is complete, and old checkpoints do no harm.
        try:
            self._prune(checkpoint.round)
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be removed: %s", self.folder, error.strerror)

    def newest(self, load: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Return the checkpoint to resume from: the newest one that can be used.

        Args:
            load: Loads a checkpoint, or raises :class:`~fedsel_flwr.errors.StateError` with the reason why it cannot.

        Returns:
            The loaded checkpoint; None if a new run begins.

        Raises:
            RunError: There are checkpoints, but none can be used; the message has the reason for each. Or another
                process writes to the folder.
        """
        self._lock = self._lock or storage.lock_folder(self.folder)
        refused: dict[Path, str] = {}
        for round in reversed(self._rounds() if self.resume else []):
            path = self.path(round)
            try:
                load(found := read_checkpoint(path))
            except StateError as error:
                refused[path] = str(error)
                logger.warning("checkpoint %s is not used: %s", path, error)
                continue
            for newer in refused:
                operating_system.replace(newer, newer.with_name(newer.name + REFUSED))
            self.written_at = time.monotonic() - max(0.0, time.time() - path.stat().st_mtime)
            return found
        if refused:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in refused.items())
            raise RunError(
                f"none of the checkpoints in {str(self.folder)!r} can be used: {reasons}. Resume with the program "
                "that wrote them, or give the new run another checkpoint_dir"
            )
        return None

    def path(self, round: int) -> Path:
        """Return the path of a round's checkpoint."""
        return checkpoint_path(self.folder, round)

    def _rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, in ascending order."""
        return sorted(int(match[1]) for name in os.listdir(self.folder) if (match := NAME.fullmatch(name)))

    def _prune(self, newest: int) -> None:
        """Remove the oldest checkpoints beyond ``keep``, and temporary files of a process that died."""
        # Checkpoints of later rounds do not belong to this run's past, so they stay.
        old = [self.path(round) for round in self._rounds() if round <= newest][: -self.keep]
        for path in [*old, *self.folder.glob(f"round-*{storage.TEMPORARY}")]:
            os.unlink(path)


def checkpoint_path(folder: Path, round: int) -> Path:
    """Return the path of a round's checkpoint."""
    return folder / f"round-{round:06d}.safetensors"


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint and sync it to the disk.

    Raises:
        StateError: The state holds something that cannot be saved.
        OSError: The disk is full, or the write fails for another reason; earlier checkpoints are unchanged.
    """
    from safetensors.numpy import save

    said: dict[str, Any] = {
        # The digest comes first, so that a reader finds it without parsing the rest.
        "sha256": NO_DIGEST.decode(),
        "schema": SCHEMA,
        "written_by": f"fedsel-flwr {fedsel_flwr.__version__}",
        "round": checkpoint.round,
        "total_rounds": checkpoint.total_rounds,
        "made_for": checkpoint.fingerprint,
    }
    arrays: dict[str, Array] = {}
    named = dict(zip(checkpoint.names, checkpoint.model, strict=True))
    trees = {"model": named, "state": checkpoint.state, "base": checkpoint.base}
    packed = {name: pack_state(tree, name, arrays) for name, tree in trees.items()}
    # Not in the header, whose length safetensors limits: it grows with the number of clients.
    arrays["rest"] = np.frombuffer(json.dumps(packed).encode(), np.uint8)
    content = save(arrays, {"checkpoint": json.dumps(said)})
    start = content.index(NO_DIGEST)
    end = start + len(NO_DIGEST)
    digest = hashlib.sha256(content).hexdigest().encode()
    path = checkpoint_path(folder, checkpoint.round)
    storage.write_atomically(path, content[:start], digest, memoryview(content)[end:])
    operating_system.sync_folder(folder)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Raises:
        StateError: The file is damaged, renamed or of another version; the message says which.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        with storage.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Read first, so that the rest of a large file that is no checkpoint is not read.
            content = file.read(BEGINNING_BYTES)
            content += file.read() if _BEGINNING.match(content) else b""
    except OSError as error:
        raise StateError(f"it cannot be read: {error.strerror}") from error
    beginning = _BEGINNING.match(content)
    if beginning is None or _digest(content, beginning.start(1)) != beginning[1]:
        raise StateError(f"it is damaged: its {size} bytes differ from what was written")
    # The digest protects from damage, not from a file that somebody made by hand.
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        said = json.loads(header["__metadata__"]["checkpoint"])
        if said["schema"] != SCHEMA:
            raise StateError(
                f"it has schema {said['schema']!r} ({said['written_by']}), but fedsel-flwr {fedsel_flwr.__version__} "
                f"reads schema {SCHEMA}. Resume with the version that wrote it, or a newer one"
            )
        if checkpoint_path(path.parent, said["round"]).name != path.name:
            raise StateError(f"it was renamed: it holds round {said['round']}")
        arrays = load(content)
        packed = json.loads(arrays["rest"].tobytes())
        model, state, base = (unpack_state(packed[name], arrays) for name in ("model", "state", "base"))
        return Checkpoint(
            round=said["round"],
            model=list(model.values()),
            names=list(model),
            state=state,
            base=base,
            fingerprint=said["made_for"],
            total_rounds=said.get("total_rounds"),
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, SafetensorError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"it is not a checkpoint: {type(error).__name__}: {error}") from error


def _digest(content: bytes, place: int) -> bytes:
    """Return the digest of a file in which the digest at ``place`` counts as zeros."""
    whole_file = hashlib.sha256(content[:place] + NO_DIGEST)
    whole_file.update(memoryview(content)[place + len(NO_DIGEST) :])
    return whole_file.hexdigest().encode()


def check_resume(resume: object) -> None:
    """Refuse any value of ``resume`` except the three allowed ones."""
    if not (isinstance(resume, bool) or resume == "must"):
        raise ParameterError(f"resume must be False, True or 'must', got {resume!r}")


def check_start(folder: Path, resume: Resume, rounds: Sequence[int], journal: Path) -> None:
    """Refuse to begin a run in a folder of checkpoints that holds another run, or no run to resume.

    Args:
        folder: The folder of the checkpoints.
        resume: The user's choice.
        rounds: The rounds that have a checkpoint.
        journal: The file of the finished rounds.

    Raises:
        RunError: The run cannot begin; the message has the cure.
    """
    if resume == "must" and not rounds:
        raise RunError(
            f"{str(folder)!r} holds no checkpoint to resume from. Check checkpoint_dir, or begin with resume=True"
        )
    if not resume and (rounds or (journal.is_file() and journal.stat().st_size > 0)):
        found = f"the checkpoints of {max(rounds)} rounds" if rounds else f"rounds in {journal.name}"
        raise RunError(
            f"{str(folder)!r} holds {found} of another run. Set resume=True to resume it, or another checkpoint_dir"
        )


def check_fingerprint(theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Refuse a checkpoint of a run with another fingerprint.

    Raises:
        StateError: The fingerprints differ; the message lists the differences.
    """
    if found := differences(theirs, mine):
        raise StateError(f"it is from another run: {'; '.join(found.values())}")


def check_model(model: Mapping[str, Any], initial: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose model has other names or shapes than the initial model.

    Raises:
        StateError: The models differ; the message describes both.
    """
    theirs, mine = ({name: np.shape(array) for name, array in one.items()} for one in (model, initial))
    if theirs != mine:
        raise StateError(
            f"its model has arrays of the shapes {_shapes(theirs)}, but the initial model has {_shapes(mine)}"
        )


def check_length(folder: Path, done: int, rounds: int) -> None:
    """Refuse to resume a run that already has more rounds than requested.

    Raises:
        RunError: The run has too many rounds; the message has the smallest number that works.
    """
    if done > rounds:
        raise RunError(
            f"the run in {str(folder)!r} has finished {done} rounds, more than rounds = {rounds}. Set rounds to at "
            f"least {done}, or begin a new run in another folder"
        )


def _shapes(of: Mapping[str, tuple[int, ...]]) -> str:
    text = ", ".join(f"{name} {shape}" for name, shape in of.items())
    return text if len(text) <= MAX_SHAPES else f"{text[:MAX_SHAPES]} ..."
