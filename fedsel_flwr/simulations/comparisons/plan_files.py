"""What a comparison is made of: read, checked, and kept in its folder, so that it can go on there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import atomic_write
from fedsel_flwr.rounds.storage import RUN_IN_USE, FolderLock, lock_folder
from fedsel_flwr.simulations.existing_runs import CHECKPOINTS, REPLAY_CURE, has_begun
from fedsel_flwr.simulations.fingerprints import changed_plan_parts
from fedsel_flwr.simulations.results import read_label
from fedsel_flwr.simulations.run_record import RUN
from fedsel_flwr.simulations.untrusted_folders import check_links, parse_plan

logger = logging.getLogger("fedsel_flwr")
PLAN = "plan.json"
"""What is run in a folder, and where."""
FINGERPRINTS = "fingerprints"
"""The part of a plan that says what selectors, model and data were when it was begun."""
ELSEWHERE = ("where", "device", "processes", "jobs", "checkpoints", FINGERPRINTS)
"""Parts of a plan that do not say what it runs, but where, or with which code."""


def write_plan(folder: Path, said: Mapping[str, Any]) -> None:
    """Write what is to be run in a folder; raises :class:`RunError` if that cannot be done."""
    try:
        with atomic_write(folder / PLAN) as temporary:
            temporary.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{str(folder)!r} cannot be begun: {error.strerror or error}") from error


def read_plan(folder: Path) -> dict[str, Any]:
    """Read what is run in a folder of a comparison, or in that of a single run.

    Raises:
        ParameterError: There is nothing that could go on, or a link; says what was expected.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ParameterError(f"{str(folder)!r} {what}: give the folder of the run, or of the comparison, to go on with")
    check_links(folder)
    if not (folder / PLAN).is_file():
        if not has_begun(folder):
            raise ParameterError(
                f"{str(folder)!r} holds nothing to go on with: it has no {PLAN} and no {RUN}, which fedsel run and "
                "compare write first"
            )
        label, scenario = read_label(folder)
        one = {"label": label, "name": scenario.selector}
        return {"scenario": scenario.model_dump(), "selectors": [one], "seeds": [scenario.seed]}
    return parse_plan(folder / PLAN)


def check_plan(folder: Path, here: Mapping[str, Any]) -> None:
    """Refuse to go on with a comparison whose selectors, model, data or scenario are not what they were.

    Args:
        folder: Of the comparison; without a plan, or with one that has no fingerprints, its runs are asked instead.
        here: The fingerprints of what there is now (:func:`~fedsel_flwr.simulations.fingerprints.of_plan`).

    Raises:
        RunError: Names what is not the same.
    """
    there = read_plan(folder).get(FINGERPRINTS) if (folder / PLAN).is_file() else None
    if isinstance(there, Mapping) and (names := changed_plan_parts(there, here)):
        raise RunError(
            f"{str(folder)!r} was begun with other code or data than there is now: {', '.join(names)}. {REPLAY_CURE}"
        )


def find_newest_run(said: Mapping[str, Any], root: Path, skipped: Callable[[str], None] = logger.warning) -> Path:
    """The newest folder in which the same was begun.

    Args:
        said: A plan.
        root: The folder of all runs.
        skipped: Told why, of each newer folder whose plan cannot be read.

    Raises:
        ParameterError: There is none.
    """
    wanted = _what(json.loads(json.dumps(said)))
    found = [place for place in root.glob(f"*/{PLAN}") if place.is_file() or place.is_symlink()]
    for place in sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            there = read_plan(place.parent)
        except ParameterError as error:
            skipped(f"a folder is skipped: {error}")
            continue
        if _what(there) == wanted:
            return place.parent
    raise ParameterError(
        f"no run in {str(root)!r} was begun with these arguments: give its folder, as in --resume runs/NAME, or leave "
        "--resume out"
    )


def check_folder(folder: Path, own: Collection[str], *, single: bool, resume: bool) -> None:
    """Refuse a folder with runs that this comparison would not write: they would be taken for its own later.

    Args:
        folder: Of the comparison.
        own: What its runs are called.
        single: Whether it is that of its only run.
        resume: Whether what was cut off goes on; else it is not overwritten.

    Raises:
        ParameterError: Says which.
    """
    foreign = sorted({path.parent.name for path in folder.glob(f"*/{RUN}")} - {*own, *(f"{o}-on-flower" for o in own)})
    if foreign:
        raise ParameterError(
            f"folder {str(folder)!r} holds runs of another comparison ({', '.join(foreign[:3])}): give a new one, or "
            "delete them"
        )
    places = [folder] if single else [folder / name for name in own]
    cut_off = sorted(place.name for place in places if any((place / CHECKPOINTS).glob("*.json*")))
    if cut_off and not resume:
        raise ParameterError(
            f"folder {str(folder)!r} holds what was cut off ({', '.join(cut_off[:3])}): go on with resume=True, give a "
            "new folder, or delete it"
        )


def lock_comparison(folder: Path) -> FolderLock | None:
    """Make the folder of a comparison, if needed, and hold it for this process.

    Returns:
        To be kept for as long as runs are written there; None if folders cannot be locked.

    Raises:
        RunError: It cannot be made, or another process writes there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{str(folder)!r} cannot be begun: {error.strerror or error}") from error
    return lock_folder(folder, RUN_IN_USE)


def read_seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    """Read the seeds of a comparison.

    Args:
        seeds: How many, or the seeds themselves.
        first: Where they are counted up from.

    Raises:
        ParameterError: There is none, one stands there twice, or something is no seed.
    """
    if isinstance(seeds, str):
        raise ParameterError(f"seeds must be a whole number of seeds, or a list of seeds, got the text {seeds!r}")
    if not isinstance(seeds, Sequence):
        return list(range(first, first + whole("seeds", seeds, 1)))
    numbers = [whole("seeds", seed, 0) for seed in seeds]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ParameterError(f"seeds must be a number of seeds, or at least one seed and none twice, got {list(seeds)}")
    return numbers


def _what(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key not in ELSEWHERE}
