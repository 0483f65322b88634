"""Checkpoints of a run: writing, pruning, and finding the one to resume from.

``checkpoint_dir`` holds the last checkpoints, two files each, and ``journal.jsonl``, the finished rounds. A run resumes
from the newest checkpoint that is undamaged and fits. The others are logged with the reason, and set aside
(``.refused``) once an older one is taken: the resumed run plays their rounds again.

A checkpoint is safetensors for the arrays and JSON for the rest, no pickle. ``round-000012.safetensors`` is written
first. ``round-000012.json`` holds its digest, and makes the checkpoint valid when the file takes its name. The JSON
begins with the digest of everything that follows in it, so that a truncated or changed file is detected.
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
from fedsel_flwr.rounds.state_dicts import Array, State, pack_state, unpack_state
from fedsel_flwr.rounds.storage import TEMPORARY, FolderLock, lock_folder, make_folder, sync_folder, write_atomically

__all__ = ["Checkpoint", "Checkpoints", "Resume"]

logger = logging.getLogger("fedsel_flwr")
Resume = Literal[False, True, "must"]
JOURNAL: Final = "journal.jsonl"
"""The file of the finished rounds, in the folder of the checkpoints."""
REFUSED: Final = ".refused"
"""Suffix of the files of a checkpoint that was set aside."""
SCHEMA: Final = 1
"""Version of the files; other versions are refused."""
NAME = re.compile(r"round-(\d{6,})\.json")
"""Names of the files that make checkpoints valid."""
_FILE = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "checkpoint": (\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that a run needs to resume after a round.

    Attributes:
        round: The absolute round that was finished.
        model: The global model's arrays after it.
        names: The arrays' names.
        state: What :meth:`fedsel_flwr.strategies.wrapping.adapter.Adapter.state_dict` returned.
        base: The base strategy's own state.
        fingerprint: What the run consists of, which must be the same when it resumes: part -> description.
    """

    round: int
    model: list[Array]
    names: list[str]
    state: State
    base: State = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)


class Checkpoints:
    """Writes a run's checkpoints into a folder, and finds the one to resume from.

    Args:
        folder: The folder of one run; it is made if needed.
        every: A checkpoint is due after this many rounds.
        keep: Number of checkpoints that are kept.
        resume: False begins a new run and refuses a folder that holds one. True resumes the run in the folder, or
            begins a new one if there is none. "must" refuses to begin a new run.

    Raises:
        ParameterError: A value is out of range.
        RunError: The folder cannot be written to, holds another run and ``resume`` is False, or holds none and
            ``resume`` is "must".
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
                f"{str(self.folder)!r} holds no checkpoint to resume from. Check checkpoint_dir, or begin a new run "
                "with resume=True"
            )
        if not resume and (here or self._has_journal()):
            found = f"the checkpoints of {max(here)} rounds" if here else f"rounds in {JOURNAL}"
            raise RunError(
                f"{str(self.folder)!r} holds {found} of another run. Resume it with resume=True, or give the new run "
                "another checkpoint_dir"
            )

    def due(self, round: int) -> bool:
        """Return whether a checkpoint is written after this round; the last round always has one."""
        return round % self.every == 0

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and remove the oldest ones beyond ``keep``.

        Raises:
            RunError: It cannot be written; earlier ones are unchanged. Or another process writes to the folder.
        """
        # Kept for as long as this object lives: the lock ends with it.
        self._lock = self._lock or lock_folder(self.folder)
        path = json_path(self.folder, checkpoint.round)
        try:
            write_checkpoint(self.folder, checkpoint)
        except OSError as error:
            raise RunError(
                f"round {checkpoint.round}: the checkpoint {str(path)!r} cannot be written: {error.strerror}. The "
                "earlier ones are unchanged: free disk space, and resume with resume=True"
            ) from error
        except StateError as error:
            raise RunError(
                f"round {checkpoint.round}: the checkpoint {str(path)!r} cannot be written: {error}"
            ) from error
        # A warning is enough: the new checkpoint is there, and the old ones do no harm.
        try:
            self._prune(checkpoint.round)
        except OSError as error:
            logger.warning("old checkpoints in %s cannot be removed: %s", self.folder, error.strerror)

    def newest(self, load: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Return the checkpoint to resume from: the newest that can be used.

        Args:
            load: Loads a checkpoint, or raises :class:`~fedsel_flwr.errors.StateError` with the reason why not.

        Returns:
            The checkpoint that was loaded; None if a new run begins.

        Raises:
            RunError: There are checkpoints, but none of them can be used; says why of each. Or another process writes
                to the folder.
        """
        self._lock = self._lock or lock_folder(self.folder)
        refused: dict[Path, str] = {}
        for round in sorted(self._rounds(), reverse=True) if self.resume else []:
            path = json_path(self.folder, round)
            try:
                checkpoint = read_checkpoint(path)
                load(checkpoint)
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
                "them, or give the new run another checkpoint_dir"
            )
        return None

    def _rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise RunError(f"{str(self.folder)!r} cannot be read: {error.strerror}") from error
        return [int(match[1]) for name in names if (match := NAME.fullmatch(name))]

    def _has_journal(self) -> bool:
        journal = self.folder / JOURNAL
        return journal.is_file() and journal.stat().st_size > 0

    def _set_aside(self, paths: list[Path]) -> None:
        """Rename refused checkpoints, first the file that makes each valid."""
        for path in paths:
            for one in (path, arrays_path(path)):
                try:
                    os.replace(one, one.with_name(one.name + REFUSED))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise RunError(
                        f"the unusable file {str(one)!r} cannot be renamed: {error.strerror}. Move it away"
                    ) from error

    def _prune(self, newest: int) -> None:
        """Remove the oldest checkpoints beyond ``keep``, and temporary files of a process that died."""
        kept = sorted(round for round in self._rounds() if round <= newest)[-self.keep :]
        for name in sorted(os.listdir(self.folder)):
            stem, _, ending = name.partition(".")
            whose = NAME.fullmatch(f"{stem}.json")
            # Later rounds are not of this run's past: they are not deleted here.
            if whose is None or int(whose[1]) > newest:
                continue
            old = int(whose[1]) not in kept and ending in ("json", "safetensors")
            if old or ending.endswith(TEMPORARY[1:]):
                os.unlink(self.folder / name)


def json_path(folder: Path, round: int) -> Path:
    """Return the path of the file that makes a checkpoint valid."""
    return folder / f"round-{round:06d}.json"


def arrays_path(path: Path) -> Path:
    """Return the path of the arrays that belong to a JSON file."""
    return path.with_suffix(".safetensors")


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; it is synced to the disk when this returns.

    Raises:
        StateError: The state holds something that cannot be saved.
        OSError: The disk is full, or otherwise refuses; earlier checkpoints are unchanged.
    """
    from safetensors.numpy import save

    path = json_path(folder, checkpoint.round)
    parts: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    named = dict(zip(checkpoint.names, checkpoint.model, strict=True))
    for name, tree in (("model", named), ("state", checkpoint.state), ("base", checkpoint.base)):
        parts[name], found = pack_state(tree, name)
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
    # In this order: a process that dies between the two files leaves arrays that no JSON names.
    write_atomically(arrays_path(path), content)
    write_atomically(path, b'{"sha256": "%s", "checkpoint": %s}\n' % (digest, text))
    sync_folder(folder)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Args:
        path: The JSON file.

    Raises:
        StateError: It is damaged, of another version, or was renamed; says which.
    """
    try:
        return _read(path)
    except StateError:
        raise
    # The digests are right, but the content is not ours: a file made by hand.
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise StateError(f"it is no checkpoint: {type(error).__name__}: {error}") from error


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    said = _said(path)
    if said.get("schema") != SCHEMA:
        raise StateError(
            f"it has schema {said.get('schema')!r} ({said.get('written_by')}), but this fedsel-flwr "
            f"{fedsel_flwr.__version__} reads schema {SCHEMA}. Resume with the version that wrote it, or a newer one"
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
    model = unpack_state(said["model"], arrays)
    return Checkpoint(
        round=said["round"],
        model=list(model.values()),
        names=list(model),
        state=unpack_state(said["state"], arrays),
        base=unpack_state(said["base"], arrays),
        fingerprint=said["made_for"],
    )


def _said(path: Path) -> Mapping[str, Any]:
    """Return the JSON file's content after checking its digest."""
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
