"""Resumption: decides whether a run begins, resumes, is replayed, returns its result, or is refused.

All these decisions are made here. Other rooms report the content of a folder and whether it fits, and carry out the
decision.

The rules for the folder of a simulated run, with ``resume`` (``simulations.engine.simulate``):

1. The run there has other settings, code or data, or is damaged: refuse. With ``replay``, play it again.
2. The run has finished: return its result.
3. The run was cut off, or there is none: the checkpoints decide. If none can be used: refuse. With ``replay``, play the
   run again.

The rules for a folder of checkpoints, of a simulation or a server (:func:`check_start`, :func:`newest_usable`):

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

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.fingerprints import differences

Resume = Literal[False, True, "must"]
Loaded = TypeVar("Loaded")
MAX_SHAPES = 200
"""Largest number of characters of a list of shapes in an error."""
logger = logging.getLogger("fedsel_flwr")


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
            f"{str(folder)!r} holds no checkpoint to resume from. Check checkpoint_dir, or start a new run with "
            "resume=True"
        )
    if not resume and (rounds or (journal.is_file() and journal.stat().st_size > 0)):
        found = f"the checkpoints of {max(rounds)} rounds" if rounds else f"rounds in {journal.name}"
        raise RunError(
            f"{str(folder)!r} holds {found} of another run. Resume it with resume=True, or give the new run another "
            "checkpoint_dir"
        )


def newest_usable(
    folder: Path, paths: Sequence[Path], load: Callable[[Path], Loaded]
) -> tuple[Loaded | None, list[Path]]:
    """Load the newest checkpoint that can be used.

    Args:
        folder: The folder of the checkpoints.
        paths: The checkpoints, the newest first.
        load: Loads a checkpoint, or raises :class:`~fedsel_flwr.errors.StateError` with the reason why it cannot.

    Returns:
        The loaded checkpoint, None if there are none. And the refused checkpoints, which are newer.

    Raises:
        RunError: There are checkpoints, but none can be used; the message has the reason for each.
    """
    refused: dict[Path, str] = {}
    for path in paths:
        try:
            return load(path), list(refused)
        except StateError as error:
            refused[path] = str(error)
            logger.warning("checkpoint %s is not used: %s", path, error)
    if not refused:
        return None, []
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in refused.items())
    raise RunError(
        f"none of the checkpoints in {str(folder)!r} can be used: {reasons}. Resume with the program that wrote "
        "them, or give the new run another checkpoint_dir"
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
