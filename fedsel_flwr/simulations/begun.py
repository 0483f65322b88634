"""Runs whose folder is there already: is it the same run, and has it finished?"""

from __future__ import annotations

import shutil
from pathlib import Path

from fedsel_flwr.errors import RunError
from fedsel_flwr.references import is_reference
from fedsel_flwr.report import run_folder
from fedsel_flwr.simulations.fingerprints import Fingerprints, differing
from fedsel_flwr.simulations.keeping import CHECKPOINTS
from fedsel_flwr.simulations.results import RunResult, read_label, read_run
from fedsel_flwr.simulations.run_record import RUN, has_digests, read_fingerprints, read_record
from fedsel_flwr.simulations.scenario import Scenario, in_words

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
