"""Existing runs: read a run's folder, check that it fits the scenario, and plan its checkpoints.

:mod:`fedsel_flwr.rounds.checkpoints` decides what follows: resume, begin again, or refuse.
"""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.references import is_reference
from fedsel_flwr.report import run_folder
from fedsel_flwr.rounds.checkpoints import Checkpoint, Resume, check_length, check_resume
from fedsel_flwr.rounds.fingerprints import differences
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.results import RunResult, read_label, read_run
from fedsel_flwr.simulations.run_identity import PARTS, RUN, Identity, has_digests, read_identity, read_record
from fedsel_flwr.simulations.scenario import Scenario, course_settings
from fedsel_flwr.simulations.worlds.world import World

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints inside a run's folder."""
CHECKPOINT_SHARE = 0.02
"""Largest share of a vectorized run's time that checkpoints in the run's folder may take."""
END_KEYS = ("rounds", "simulated_s", "joules")
"""Keys of a scenario that determine when a run ends."""
REPLAY_CURE = "Repeat it with --replay (replay=True), or begin a new run in another folder"
"""Advice in errors about a run that does not fit the scenario."""


def has_begun(folder: Path) -> bool:
    """Return whether a folder holds a run, finished or not."""
    return (folder / RUN).is_file() and (folder / run_folder.SCENARIO).is_file()


def has_finished(folder: Path) -> bool:
    """Return whether a folder holds a run with its result."""
    # The model is written last, after the digests of all other files.
    return has_begun(folder) and (folder / run_folder.MODEL).is_file()


def read_fitting_run(
    folder: str | Path, scenario: Scenario, label: str, prints: Identity, *, explain: bool
) -> RunResult | None:
    """Read the result of a finished run, if the run fits the scenario.

    Args:
        folder: Folder of the run.
        scenario: Scenario that is to be run there.
        label: The selector's label.
        prints: Identity of the code and data of this process.
        explain: Whether to compare the fingerprints of an interrupted run too. If not, its checkpoint is compared
            later, and that error names the differences.

    Returns:
        The result of the run; None if there is no run, or if it was interrupted.

    Raises:
        RunError: The folder holds another run. The error names the differences.
        ParameterError: A file is damaged.
    """
    place = Path(folder)
    if not has_begun(place):
        return None
    named, other = read_label(place)
    _check_same_settings(place, scenario, other)
    if named != label:
        raise _different_run(place, f"selector is called {named!r} there, and {label!r} here")
    result = _read_finished_run(place, scenario, other) if has_finished(place) else None
    if result is not None or explain:
        _check_fingerprints(place, label, prints)
    return result


def _read_finished_run(folder: Path, mine: Scenario, theirs: Scenario) -> RunResult:
    """Read the result of a finished run; refuse a run without digests, or with another length or budget."""
    if not has_digests(read_record(folder)):
        raise RunError(
            f"the run in {str(folder)!r} was written by an older version without file digests, so damage would go "
            f"unnoticed. {REPLAY_CURE}. fedsel report can still read this run"
        )
    _, _, result = read_run(folder)
    done = len(result.history.rounds)
    for key in END_KEYS:
        if (wanted := getattr(mine, key)) != (there := getattr(theirs, key)):
            raise RunError(
                f"the run in {str(folder)!r} finished after {done} rounds with {key} = {there}, and its checkpoints "
                f"were deleted. Start a new run with {key} = {wanted}"
            )
    return result


def _check_fingerprints(folder: Path, label: str, here: Identity) -> None:
    """Refuse to resume a run without fingerprints, or whose code, data or scenario has changed."""
    there = read_identity(folder)
    if not there:
        raise RunError(
            f"the run in {str(folder)!r} was written by an older version without fingerprints, so changes of "
            f"selector, model or data would go unnoticed. {REPLAY_CURE}"
        )
    if names := [name for name in PARTS if there.get(name) != here.get(name)]:
        changed = ", ".join(f"selector {label!r}" if name == "selector" else name for name in names)
        raise RunError(
            f"the run in {str(folder)!r} was made with other code or data. Changed since then: {changed}. "
            f"{REPLAY_CURE}. Notebook cells that your code uses, and values in closures, are not compared"
        )


def discard_progress(folder: Path) -> None:
    """Remove the checkpoints and the result of a run, so that it can be run again."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    (folder / run_folder.MODEL).unlink(missing_ok=True)


def _check_same_settings(folder: Path, mine: Scenario, theirs: Scenario) -> None:
    """Refuse to resume in a folder with another run.

    Raises:
        RunError: The settings differ. The error names their keys.
    """
    # References are compared first. The keys of another selector's parameters begin with its label, and the label is
    # known only after the selector's code has run.
    if theirs.selector != mine.selector and is_reference(theirs.selector):
        raise _different_run(folder, f"selector is {theirs.selector!r} there and {mine.selector!r} here")
    if found := differences(course_settings(theirs), course_settings(mine)):
        raise _different_run(folder, ", ".join(found.values()))


def _different_run(folder: Path, differences: str) -> RunError:
    return RunError(
        f"{str(folder)!r} holds another run: {differences}. Begin a new run in another folder, or resume the run in "
        "this folder"
    )


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints of a run: their folder, how often they are written, and whether the run resumes from them.

    Attributes:
        folder: Folder of the checkpoints. If None, no checkpoints are written.
        temporary: Whether the folder is inside the run's folder, and is removed when the run has finished.
        every: Rounds between two checkpoints.
        keep: Number of checkpoints that are kept.
        resume: Whether to resume.
        share: Largest share of the run's time that checkpoints may take; 1 sets no limit.
    """

    folder: Path | None = None
    temporary: bool = False
    every: int = 1
    keep: int = 3
    resume: Resume = False
    share: float = 1.0

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        folder: str | os.PathLike[str] | None,
        checkpoint_dir: str | os.PathLike[str] | None,
        every: int | None,
        keep: int,
        resume: Resume,
    ) -> CheckpointPlan:
        """Return the plan that the arguments of :func:`~fedsel_flwr.simulations.engine.simulate` describe.

        Raises:
            ParameterError: An argument is out of range, or arguments contradict each other.
        """
        check_resume(resume)
        number = 1 if every is None else whole("checkpoint_every", every, 0)
        keep = whole("keep_checkpoints", keep, 1)
        if not number and (resume == "must" or checkpoint_dir is not None):
            what = "checkpoint_dir" if checkpoint_dir is not None else "resume = 'must'"
            raise ParameterError(f"{what} needs checkpoints. Leave out checkpoint_every = 0, which writes none")
        if checkpoint_dir is not None:
            return cls(Path(checkpoint_dir), False, number, keep, resume)
        if folder is None and resume:
            raise ParameterError(
                f"resume = {resume!r} needs the folder of the run, or checkpoint_dir with its checkpoints. Set "
                "one of them"
            )
        if folder is None or not number:
            return cls()
        # A vectorized round may take less time than its checkpoint. A round on Ray always takes longer.
        share = CHECKPOINT_SHARE if every is None and scenario.engine == "vectorized" else 1.0
        return cls(Path(folder) / CHECKPOINTS, True, number, keep, resume, share)

    def options(self, scenario: Scenario, selector: Selector | None = None) -> dict[str, Any]:
        """Return the options of a strategy that set these checkpoints.

        Args:
            scenario: Scenario that is run.
            selector: The caller's selector, which may plan for another number of rounds.
        """
        if self.folder is None:
            return {}
        total = None if hasattr(selector, "total_rounds") else scenario.rounds
        return {
            "checkpoint_dir": self.folder, "checkpoint_every": self.every, "keep_checkpoints": self.keep,
            "resume": self.resume, "total_rounds": total,
        }  # fmt: skip

    def attach(self, strategy: Any, world: World, prints: Identity) -> None:
        """Give a strategy the identity of its run, and let it read its checkpoint, if there is one.

        Args:
            strategy: Strategy made with :meth:`options`.
            world: The scenario's world.
            prints: Identity of the run. Those in the checkpoint must be equal.

        Raises:
            RunError: No checkpoint can be used, or the checkpoint has more rounds than the scenario.
        """
        if self.folder is None:
            return
        # Set before `resumed` is read, because reading the checkpoint compares it with these values.
        settings = course_settings(world.scenario)
        # A selector that plans for a number of rounds makes other choices for another number, from the first round on.
        if "total_rounds" in inspect.signature(type(strategy.selector)).parameters:
            settings["rounds"] = str(world.scenario.rounds)
        strategy.fingerprint.update({f"scenario.{key}": text for key, text in settings.items()})
        strategy.fingerprint.update({f"fingerprint of {key}": found for key, found in prints.items()})
        resumed: Checkpoint | None = strategy.resumed
        if resumed is not None:
            check_length(self.folder, resumed.round, world.scenario.rounds)

    def discard(self) -> None:
        """Remove checkpoints that the folder of a finished run no longer needs."""
        if self.temporary and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class CheckpointPace:
    """Limit on the share of a run's time that checkpoints take.

    Args:
        share: Largest share of the time; 1 sets no limit.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share, self._next = share, -np.inf

    def __call__(self, write: Callable[[], None]) -> None:
        """Write a checkpoint, unless the last one was written too recently."""
        began = time.monotonic()
        if began < self._next:
            return
        write()
        ended = time.monotonic()
        if self._share < 1.0:
            # Waiting cost / share from now keeps the cost below its share, even if the disk is slow.
            self._next = ended + (ended - began) / self._share
