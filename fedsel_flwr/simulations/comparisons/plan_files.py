"""Files of a plan: write, read and compare ``plan.json``, and lock the folder of a comparison, to resume it there."""

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
"""Name of the file with the plan."""
FINGERPRINTS = "fingerprints"
"""Key of the fingerprints of code and data at the time when the plan was written."""
PLACEMENT_KEYS = ("where", "device", "processes", "jobs", "checkpoints", FINGERPRINTS)
"""Keys of a plan that do not say what it runs, but on which resources, or with which code."""
FOLDER_CURE = "Give a folder that can be written to"
"""The remedy if the folder cannot be written to."""


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a folder.

    Raises:
        RunError: It cannot be written.
    """
    try:
        with atomic_write(folder / PLAN) as temporary:
            temporary.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{str(folder)!r} cannot be begun: {error.strerror or error}. {FOLDER_CURE}") from error


def read_plan(folder: Path) -> dict[str, Any]:
    """Read the plan of a folder, or make one from the record of a single run.

    Raises:
        ParameterError: There is nothing to resume, or a link; says what was expected.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ParameterError(f"{str(folder)!r} {what}. Give the folder of the run, or of the comparison, to resume")
    check_links(folder)
    if not (folder / PLAN).is_file():
        if not has_begun(folder):
            raise ParameterError(
                f"{str(folder)!r} holds nothing to resume: it has no {PLAN} and no {RUN}, which fedsel run and "
                "compare write first. Give another folder, or leave --resume out"
            )
        label, scenario = read_label(folder)
        one = {"label": label, "name": scenario.selector}
        return {"scenario": scenario.model_dump(), "selectors": [one], "seeds": [scenario.seed]}
    return parse_plan(folder / PLAN)


def check_plan(folder: Path, here: Mapping[str, Any]) -> None:
    """Refuse to resume a comparison whose selectors, model, data or scenario have changed.

    Args:
        folder: Of the comparison.
        here: The fingerprints of the code and data of this process
            (:func:`~fedsel_flwr.simulations.fingerprints.plan_fingerprints`).

    Raises:
        RunError: Names what has changed.
    """
    # Without a plan, or with one that has no fingerprints, each run compares its own when it is resumed.
    there = read_plan(folder).get(FINGERPRINTS) if (folder / PLAN).is_file() else None
    if isinstance(there, Mapping) and (names := changed_plan_parts(there, here)):
        raise RunError(
            f"{str(folder)!r} was begun with other code or data than there is now: {', '.join(names)}. {REPLAY_CURE}"
        )


def find_newest_run(plan: Mapping[str, Any], root: Path, skipped: Callable[[str], None] = logger.warning) -> Path:
    """Find the newest folder with the same plan.

    Args:
        plan: A plan.
        root: The folder of all runs.
        skipped: Called with the reason for each newer folder whose plan cannot be read.

    Raises:
        ParameterError: There is none.
    """
    # Through JSON, as the plans in folders: tuples become lists.
    wanted = _without_placement(json.loads(json.dumps(plan)))
    # A link is found too, so that reading it refuses it by name. Its own time counts, not that of its target.
    found = [place for place in root.glob(f"*/{PLAN}") if place.is_file() or place.is_symlink()]
    for place in sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True):
        try:
            there = read_plan(place.parent)
        except ParameterError as error:
            skipped(f"a folder is skipped: {error}")
            continue
        if _without_placement(there) == wanted:
            return place.parent
    raise ParameterError(
        f"no run in {str(root)!r} was begun with these arguments. Give its folder, as in --resume runs/NAME, or leave "
        "--resume out"
    )


def check_folder(folder: Path, own: Collection[str], *, single: bool, resume: bool) -> None:
    """Refuse a folder with runs of another comparison, which would later count as this one's.

    Args:
        folder: Of the comparison.
        own: Names of its runs.
        single: Whether the folder is also that of its only run.
        resume: Whether runs that were cut off are resumed; otherwise they are not overwritten.

    Raises:
        ParameterError: Names the runs.
    """
    foreign = sorted({path.parent.name for path in folder.glob(f"*/{RUN}")} - {*own, *(f"{o}-on-flower" for o in own)})
    if foreign:
        raise ParameterError(
            f"folder {str(folder)!r} holds runs of another comparison ({', '.join(foreign[:3])}). Give a new one, or "
            "delete them"
        )
    places = [folder] if single else [folder / name for name in own]
    cut_off = sorted(place.name for place in places if any((place / CHECKPOINTS).glob("round-*")))
    if cut_off and not resume:
        raise ParameterError(
            f"folder {str(folder)!r} holds runs that were cut off ({', '.join(cut_off[:3])}). Resume them with "
            "resume=True, give a new folder, or delete it"
        )


def lock_comparison(folder: Path) -> FolderLock | None:
    """Make the folder of a comparison, if needed, and lock it for this process.

    Returns:
        The lock, which its reference holds; None if folders cannot be locked.

    Raises:
        RunError: It cannot be made, or another process writes there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{str(folder)!r} cannot be begun: {error.strerror or error}. {FOLDER_CURE}") from error
    return lock_folder(folder, RUN_IN_USE)


def read_seeds(seeds: int | Sequence[int], first: int) -> list[int]:
    """Read the seeds of a comparison.

    Args:
        seeds: The number of seeds, or the seeds themselves.
        first: The first seed, if a number is given.

    Raises:
        ParameterError: There is none, one is given twice, or something is no seed.
    """
    # A text is a sequence too: "12" would be read as the seeds 1 and 2.
    if isinstance(seeds, str):
        raise ParameterError(f"seeds must be a whole number of seeds, or a list of seeds, got the text {seeds!r}")
    if not isinstance(seeds, Sequence):
        return list(range(first, first + whole("seeds", seeds, 1)))
    numbers = [whole("seeds", seed, 0) for seed in seeds]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ParameterError(f"seeds must be a number of seeds, or at least one seed and none twice, got {list(seeds)}")
    return numbers


def _without_placement(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key not in PLACEMENT_KEYS}
