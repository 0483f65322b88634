"""What a simulation keeps so that it can go on: where its checkpoints go, how often, and what must be the same then."""

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
from fedsel_flwr.rounds.checkpoints import Checkpoint, Resume
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.scenario import Scenario, in_words, shortened
from fedsel_flwr.simulations.world import World

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
        strategy.made_for.update(made_for(world, strategy.selector))
        strategy.made_for.update({f"fingerprint of {key}": found for key, found in fingerprints.items()})
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
