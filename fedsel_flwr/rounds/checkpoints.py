"""The checkpoints of a run: which are written, which are kept, and which one a run goes on from.

``checkpoint_dir`` holds the last checkpoints, two files each, and ``journal.jsonl``, the rounds that are finished. The
newest checkpoint that is whole and fits is taken. Those that are not are named in the log with the reason, and set
aside (``.refused``) once an older one is taken: from then on they belong to a past that did not happen.

One checkpoint on the disk: arrays as safetensors, the rest as JSON, no pickle.

``round-000012.safetensors`` is written first; ``round-000012.json`` beside it holds its digest and makes it valid when
it takes its name. The JSON begins with the digest of all that follows in it, so that a file that was cut off or changed
is known from its own words.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import fedsel_flwr
from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.state_dicts import Array, State, packed, unpacked
from fedsel_flwr.rounds.storage import TEMPORARY, FolderLock, hold, make_folder, sync_folder, write_whole

SCHEMA: Final = 1
"""Version of the files; a reader refuses those of a newer one."""
NAME = re.compile(r"round-(\d{6,})\.json")
"""The names of valid checkpoints."""
_FILE = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "checkpoint": (\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that a run needs to go on after a round.

    Attributes:
        round: The absolute round that was finished.
        model: The global model's arrays after it.
        names: Their names.
        state: What :meth:`fedsel_flwr.strategies.wrapping.adapter.Adapter.state_dict` returned.
        base: The base strategy's own state.
        fingerprint: What the run was made of, which must be the same when it goes on: what -> how, in words.
    """

    round: int
    model: list[Array]
    names: list[str]
    state: State
    base: State = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)


def json_path(folder: Path, round: int) -> Path:
    """The file that makes a checkpoint valid."""
    return folder / f"round-{round:06d}.json"


def arrays_path(path: Path) -> Path:
    """The file of the arrays beside it."""
    return path.with_suffix(".safetensors")


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; it is there for good when this returns.

    Raises:
        StateError: The state holds something that cannot be saved.
        OSError: The disk is full, or otherwise refuses; checkpoints that were there are as they were.
    """
    from safetensors.numpy import save

    path = json_path(folder, checkpoint.round)
    parts: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    named = dict(zip(checkpoint.names, checkpoint.model, strict=True))
    for name, tree in (("model", named), ("state", checkpoint.state), ("base", checkpoint.base)):
        parts[name], found = packed(tree, name)
        arrays |= found
    content = save(arrays)
    said = {
        "schema": SCHEMA,
        "written_by": f"fedsel-flwr {fedsel_flwr.__version__}",
        "round": checkpoint.round,
        "made_for": checkpoint.fingerprint,
        "arrays_sha256": hashlib.sha256(content).hexdigest(),
        **parts,
    }
    text = json.dumps(said).encode("ascii")
    digest = hashlib.sha256(text).hexdigest().encode("ascii")
    write_whole(arrays_path(path), content)
    write_whole(path, b'{"sha256": "%s", "checkpoint": %s}\n' % (digest, text))
    sync_folder(folder)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, checking every byte of it.

    Args:
        path: Its JSON file.

    Raises:
        StateError: It is damaged, newer than this version, or was renamed; says which.
    """
    try:
        return _read(path)
    except StateError:
        raise
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        RecursionError,
    ) as error:  # a file that somebody made by hand
        raise StateError(f"it is no checkpoint: {type(error).__name__}: {error}") from error


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    said = _said(path)
    if said.get("schema") != SCHEMA:
        raise StateError(
            f"it has schema {said.get('schema')!r} ({said.get('written_by')}), but this fedsel-flwr "
            f"{fedsel_flwr.__version__} reads schema {SCHEMA}: go on with the version that wrote it, or a newer one"
        )
    content = _content(arrays_path(path))
    if hashlib.sha256(content).hexdigest() != said["arrays_sha256"]:
        raise StateError(
            f"{arrays_path(path).name} is damaged: its {len(content)} bytes are not those that were written"
        )
    if json_path(path.parent, said["round"]).name != path.name:
        raise StateError(f"it was renamed: it holds round {said['round']}")
    try:
        arrays = load(content)
    except SafetensorError as error:
        raise StateError(f"{arrays_path(path).name} cannot be read: {error}") from error
    model = unpacked(said["model"], arrays)
    return Checkpoint(
        round=said["round"],
        model=list(model.values()),
        names=list(model),
        state=unpacked(said["state"], arrays),
        base=unpacked(said["base"], arrays),
        fingerprint=said["made_for"],
    )


def _said(path: Path) -> Mapping[str, Any]:
    """The JSON file's content, once its digest is right."""
    text = _content(path)
    match = _FILE.fullmatch(text)
    if match is None or hashlib.sha256(match[2]).hexdigest().encode("ascii") != match[1]:
        raise StateError(f"it is damaged: its {len(text)} bytes are not those that were written")
    said: Mapping[str, Any] = json.loads(match[2])
    return said


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StateError(f"{path.name} is missing") from None
    except OSError as error:
        raise StateError(f"{path.name} cannot be read: {os.strerror(error.errno or 0)}") from error


__all__ = ["Checkpoint", "Checkpoints", "Resume"]

logger = logging.getLogger("fedsel_flwr")
Resume = Literal[False, True, "must"]
JOURNAL: Final = "journal.jsonl"
"""The file of the finished rounds, beside the checkpoints."""
REFUSED: Final = ".refused"
"""What is added to the names of a checkpoint that was set aside."""


class Checkpoints:
    """Writes a run's checkpoints into a folder, and finds the one to go on from.

    Args:
        folder: Of one run; it is made if needed.
        every: A checkpoint is due after every so many rounds.
        keep: So many checkpoints are kept.
        resume: False begins a new run and refuses a folder that holds one; True goes on where there is something, and
            begins anew where there is nothing; "must" refuses to begin anew.

    Raises:
        ParameterError: A value is out of range.
        RunError: The folder cannot be written to, or holds a run that is neither to be continued nor overwritten, or
            none that could be continued.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: int = 1, keep: int = 3, resume: Resume = False
    ) -> None:
        self.folder = Path(folder)
        self.every = whole("checkpoint_every", every, 1)
        self.keep = whole("keep_checkpoints", keep, 1)
        if not (isinstance(resume, bool) or resume == "must"):
            raise ParameterError(f"resume must be False, True or 'must', got {resume!r}")
        self.resume: Resume = resume
        self._lock: FolderLock | None = None
        make_folder(self.folder)
        here = self._rounds()
        if resume == "must" and not here:
            raise RunError(
                f"{str(self.folder)!r} holds no checkpoint to go on from: check checkpoint_dir, or begin a new run "
                "with resume=True"
            )
        if not resume and (here or self._has_journal()):
            found = f"the checkpoints of {max(here)} rounds" if here else f"rounds in {JOURNAL}"
            raise RunError(
                f"{str(self.folder)!r} holds {found} of another run: go on with resume=True, or give a new run a "
                "checkpoint_dir of its own"
            )

    def due(self, round: int) -> bool:
        """Whether a checkpoint is to be written after this round, beside those of the last one."""
        return round % self.every == 0

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and remove those that are too many.

        Raises:
            RunError: It cannot be written; those before it are there. Or another process writes there.
        """
        self._lock = self._lock or hold(self.folder)
        path = json_path(self.folder, checkpoint.round)
        try:
            write_checkpoint(self.folder, checkpoint)
        except OSError as error:
            raise RunError(
                f"round {checkpoint.round}: the checkpoint {str(path)!r} cannot be written: {error.strerror}; the "
                "checkpoints before it are there: make room, and go on with resume=True"
            ) from error
        except StateError as error:
            raise RunError(
                f"round {checkpoint.round}: the checkpoint {str(path)!r} cannot be written: {error}"
            ) from error
        try:
            self._prune(checkpoint.round)
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be removed: %s", self.folder, error.strerror)

    def newest(self, fits: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """The checkpoint to go on from: the newest that can be used.

        Args:
            fits: Takes a checkpoint, or raises :class:`~fedsel_flwr.errors.StateError` with the reason why not.

        Returns:
            The checkpoint that ``fits`` took; None where a new run begins.

        Raises:
            RunError: There are checkpoints, but none of them can be used; says why of each. Or another process writes
                there.
        """
        self._lock = self._lock or hold(self.folder)
        refused: dict[Path, str] = {}
        for round in sorted(self._rounds(), reverse=True) if self.resume else []:
            path = json_path(self.folder, round)
            try:
                checkpoint = read_checkpoint(path)
                fits(checkpoint)
            except StateError as error:
                refused[path] = str(error)
                logger.warning("checkpoint %s is not used: %s", path, error)
                continue
            self._set_aside(list(refused))
            return checkpoint
        if refused:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in refused.items())
            raise RunError(
                f"none of the checkpoints in {str(self.folder)!r} can be used: {reasons}. Start the program that wrote "
                "them, or give a new run a checkpoint_dir of its own"
            )
        return None

    def _rounds(self) -> list[int]:
        """The rounds of which there is a checkpoint."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise RunError(f"{str(self.folder)!r} cannot be read: {error.strerror}") from error
        return [int(match[1]) for name in names if (match := NAME.fullmatch(name))]

    def _has_journal(self) -> bool:
        journal = self.folder / JOURNAL
        return journal.is_file() and journal.stat().st_size > 0

    def _set_aside(self, paths: list[Path]) -> None:
        """Rename checkpoints that were refused, the file that makes them valid first."""
        for path in paths:
            for one in (path, arrays_path(path)):
                try:
                    os.replace(one, one.with_name(one.name + REFUSED))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise RunError(
                        f"{str(one)!r}, which cannot be used, cannot be set aside: {error.strerror}; move it away"
                    ) from error

    def _prune(self, newest: int) -> None:
        """Remove checkpoints that are too many, and what a process that died left behind."""
        kept = sorted(round for round in self._rounds() if round <= newest)[-self.keep :]
        for name in sorted(os.listdir(self.folder)):
            stem, _, ending = name.partition(".")
            whose = NAME.fullmatch(f"{stem}.json")
            if whose is None or int(whose[1]) > newest:
                continue
            old = int(whose[1]) not in kept and ending in ("json", "safetensors")
            if old or ending.endswith(TEMPORARY[1:]):
                os.unlink(self.folder / name)
