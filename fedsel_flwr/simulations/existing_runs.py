"""Runs whose folder is there already: is it the same run, and has it finished?

What a simulation keeps so that it can go on: where its checkpoints go, how often, and what must be the same then.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.references import is_reference
from fedsel_flwr.report import run_folder
from fedsel_flwr.rounds.checkpoints import Checkpoint, Resume
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.fingerprints import Fingerprints, differing
from fedsel_flwr.simulations.results import RunResult, read_label, read_run
from fedsel_flwr.simulations.run_record import RUN, has_digests, read_fingerprints, read_record
from fedsel_flwr.simulations.scenario import Scenario, in_words, shortened
from fedsel_flwr.simulations.worlds.world import World

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints in that of a run."""
SHARE = 0.02
"""Longest part of a vectorized run's time that goes into checkpoints of its own folder."""


@dataclass(frozen=True)
class Keeping:
    """Where a run's checkpoints go, and whether it goes on from them.

    Attributes:
        folder: Of the checkpoints; None keeps none.
        own: Whether it belongs to the run's folder: it is removed when the run has finished.
        every: A checkpoint after every so many rounds.
        keep: So many stay.
        resume: Whether to go on.
        share: Longest part of the run's time that goes into checkpoints; 1 sets no limit.
    """

    folder: Path | None = None
    own: bool = False
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
    ) -> Keeping:
        """Read the arguments of :func:`~fedsel_flwr.simulations.engine.simulate`.

        Raises:
            ParameterError: One is out of range, or they contradict each other.
        """
        if not (isinstance(resume, bool) or resume == "must"):
            raise ParameterError(f"resume must be False, True or 'must', got {resume!r}")
        number = 1 if every is None else whole("checkpoint_every", every, 0)
        keep = whole("keep_checkpoints", keep, 1)
        if not number and (resume == "must" or checkpoint_dir is not None):
            what = "checkpoint_dir" if checkpoint_dir is not None else "resume = 'must'"
            raise ParameterError(f"{what} needs checkpoints: leave out checkpoint_every = 0, which writes none")
        if checkpoint_dir is not None:
            return cls(Path(checkpoint_dir), False, number, keep, resume)
        if folder is None and resume:
            raise ParameterError(
                f"resume = {resume!r} needs the folder of the run, or checkpoint_dir, where its checkpoints are"
            )
        if folder is None or not number:
            return cls()
        share = SHARE if every is None and scenario.engine == "vectorized" else 1.0
        return cls(Path(folder) / CHECKPOINTS, True, number, keep, resume, share)

    def options(self, scenario: Scenario, selector: Selector | None = None) -> dict[str, Any]:
        """The options of a strategy.

        Args:
            scenario: What is run.
            selector: The caller's; it may plan for another number of rounds.
        """
        if self.folder is None:
            return {}
        total = None if hasattr(selector, "total_rounds") else scenario.rounds
        return {
            "checkpoint_dir": self.folder, "checkpoint_every": self.every, "keep_checkpoints": self.keep,
            "resume": self.resume, "total_rounds": total,
        }  # fmt: skip

    def begin(self, strategy: Any, world: World, fingerprints: Mapping[str, str]) -> None:
        """Tell a strategy what its run is made of, and have it go on from its checkpoint, if there is one.

        Args:
            strategy: Made with :meth:`options`.
            world: The scenario's.
            fingerprints: Of code and data, which must be the same in the checkpoint.

        Raises:
            RunError: No checkpoint can be used, or more rounds were done than are to be run.
        """
        if self.folder is None:
            return
        strategy.fingerprint.update(made_for(world, strategy.selector))
        strategy.fingerprint.update({f"fingerprint of {key}": found for key, found in fingerprints.items()})
        resumed: Checkpoint | None = strategy.resumed
        if resumed is not None and resumed.round > world.scenario.rounds:
            raise RunError(
                f"the run in {str(self.folder)!r} has done {resumed.round} rounds, more than rounds = "
                f"{world.scenario.rounds}: give at least {resumed.round}, or begin a new run elsewhere"
            )

    def finished(self) -> None:
        """Remove checkpoints that the run's folder does not need any more."""
        if self.own and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class Pace:
    """How often a checkpoint is worth its time.

    Args:
        share: Longest part of the time that may go into checkpoints; 1 sets no limit.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._share, self._next = share, -np.inf

    def __call__(self, write: Callable[[], None]) -> None:
        """Write a checkpoint, unless the last one was too short a while ago."""
        began = time.monotonic()
        if began < self._next:
            return
        write()
        ended = time.monotonic()
        if self._share < 1.0:
            self._next = ended + (ended - began) / self._share


def made_for(world: World, selector: Selector) -> dict[str, str]:
    """What a run is made of, as far as its course depends on it: what -> how, in words.

    Args:
        world: The scenario's world.
        selector: Who chooses.
    """
    scenario = world.scenario
    said = {f"scenario.{key}": value for key, value in in_words(scenario).items()}
    if "total_rounds" in inspect.signature(type(selector)).parameters:  # another plan from the first round on
        said["scenario.rounds"] = str(scenario.rounds)
    examples = hashlib.sha256(world.sizes.tobytes())
    examples.update(np.asarray(world.dataset.train.labels).tobytes())
    said["data"] = f"{len(world.dataset.train)} examples, SHA-256 {examples.hexdigest()[:16]}"
    shapes = [tuple(array.shape) for array in world.initial_arrays()]
    return {**said, "model": shortened(f"arrays of the shapes {shapes}")}


AGAIN = "Play it again with --replay (replay=True), or begin a new run in another folder"
"""What helps if a run does not fit."""
ENDS = ("rounds", "simulated_s", "joules")
"""Keys that say where a run ends."""


def has_begun(folder: Path) -> bool:
    """Whether a folder holds a run, as far as it has come."""
    return (folder / RUN).is_file() and (folder / run_folder.SCENARIO).is_file()


def has_finished(folder: Path) -> bool:
    """Whether a folder holds a run with its result; the model is written last."""
    return has_begun(folder) and (folder / run_folder.MODEL).is_file()


def finished_run(folder: str | Path, scenario: Scenario, label: str | None = None) -> RunResult | None:
    """Read back a run that had finished.

    Args:
        folder: Of the run.
        scenario: What is to be run there.
        label: What the selector is called; None: as in the scenario.

    Returns:
        What came out; None where there is no run, or one that was cut off.

    Raises:
        RunError: The folder holds another run; says by which key.
        ParameterError: A file is damaged.
    """
    place = Path(folder)
    if not has_begun(place):
        return None
    named, other = read_label(place)
    check_same(place, scenario, other)
    if named != (label or scenario.selector):
        raise _another(place, f"selector is called {named!r} there, and {label or scenario.selector!r} here")
    if not has_finished(place):
        return None
    if not has_digests(read_record(place)):
        raise RunError(
            f"the run in {str(place)!r} is of an older version, which wrote no digest of each file, so that damage to "
            f"them would not show. {AGAIN}; fedsel report still reads this one"
        )
    _, _, result = read_run(place)
    done = len(result.history.rounds)
    for key in ENDS:
        if (mine := getattr(scenario, key)) != (theirs := getattr(other, key)):
            raise RunError(
                f"the run in {str(place)!r} finished after {done} rounds with {key} = {theirs}, and its checkpoints "
                f"are gone: begin a new run with {key} = {mine}"
            )
    return result


def check_fingerprints(folder: Path, label: str, here: Fingerprints) -> None:
    """Refuse to go on with a run whose code, data or scenario is not what there is now.

    Args:
        folder: Of a run that has begun.
        label: What the selector is called.
        here: The fingerprints of what there is now.

    Raises:
        RunError: Names what is not the same, or says that the run is of an older version.
    """
    there = read_fingerprints(folder)
    if not there:
        raise RunError(
            f"the run in {str(folder)!r} is of an older version, which kept no fingerprint of selector, model and "
            f"data: nobody can tell whether they are the same. {AGAIN}"
        )
    if names := differing(there, here):
        told = ", ".join(f"selector {label!r}" if name == "selector" else name for name in names)
        raise RunError(
            f"the run in {str(folder)!r} was made with other code or data than there is now: {told}. {AGAIN}"
        )


def forget(folder: Path) -> None:
    """Remove what a run would go on from, so that it is played again."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    (folder / run_folder.MODEL).unlink(missing_ok=True)


def check_same(folder: Path, mine: Scenario, theirs: Scenario) -> None:
    """Refuse to go on in a folder with another run.

    Raises:
        RunError: Says by which keys.
    """
    if theirs.selector != mine.selector and is_reference(theirs.selector):
        # what another selector is called is known only once its code has run
        raise _another(folder, f"selector is {theirs.selector!r} there and {mine.selector!r} here")
    here, there = in_words(mine), in_words(theirs)
    differing = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    if differing:
        said = ", ".join(f"{key} is {there.get(key, 'not set')} there and {here.get(key, 'not set')} here"
                         for key in differing)  # fmt: skip
        raise _another(folder, said)


def _another(folder: Path, said: str) -> RunError:
    return RunError(
        f"{str(folder)!r} holds another run, so that this one cannot go on there: {said}. Begin a new run in a "
        "folder of its own, or go on with what was run there"
    )
