"""A folder that somebody else may have made: the code that its plan names, and ways that lead out of it."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import is_reference
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.simulations.scenario_files import REFERRING


def code_in(said: Mapping[str, Any]) -> dict[str, str]:
    """Find what a plan names that runs code: references, and a Ray cluster, which sends objects to unpickle.

    Args:
        said: The plan, as its file holds it.

    Returns:
        Key of the plan -> reference or address.

    >>> plan = {"selectors": [{"label": "mine", "name": "mine.py:Mine"}], "scenario": {"model": {"name": "mlp"}}}
    >>> code_in(plan)
    {'selectors[0].name': 'mine.py:Mine'}
    """
    named = {f"selectors[{number}].name": one["name"] for number, one in enumerate(said["selectors"])}
    for key in REFERRING:
        value: Any = said["scenario"]
        for part in key.split("."):
            value = value.get(part, {})
        named[f"scenario.{key}"] = value
    named["where.ray_address"] = said.get("where", {}).get("ray_address")
    return {key: value for key, value in named.items() if isinstance(value, str) and is_reference(value)}


def check_trusted(folder: Path, said: Mapping[str, Any], trust: bool, again: str) -> None:
    """Refuse to load the code that a plan names, unless its reader trusts it.

    Args:
        folder: Of the plan.
        said: The plan.
        trust: Whether it may be loaded.
        again: What to type to have it loaded.

    Raises:
        ParameterError: Names each reference, and says what to type.
    """
    if trust or not (found := code_in(said)):
        return
    named = ", ".join(f"{key} = {value!r}" for key, value in found.items())
    raise ParameterError(
        f"{str(folder)!r} names code that would run with your rights: {named}. Read it, and if you trust it, give "
        f"{again}"
    )


def check_checkpoints(folder: Path, said: Mapping[str, Any], confirmed: str | None, command: str) -> None:
    """Refuse a folder of checkpoints outside that of the plan, unless its reader has named it himself.

    Args:
        folder: Of the plan.
        said: The plan.
        confirmed: The folder of checkpoints that the reader has named.
        command: What to type, without that folder.

    Raises:
        ParameterError: Names the folder, and says what to type.
    """
    place = outside(folder, said)
    if confirmed is not None and place is None:
        raise ParameterError(
            f"{str(folder)!r} is the folder of a run, which knows its checkpoints: leave out --checkpoint-dir, or "
            "begin with the scenario and end with --resume"
        )
    if place is not None and (confirmed is None or Path(confirmed).expanduser().resolve() != Path(place).resolve()):
        raise ParameterError(
            f"{str(folder)!r} keeps its checkpoints elsewhere, in {place!r}. Check that the folder is yours, and name "
            f"it: {command} --checkpoint-dir {shlex.quote(place)}"
        )


def check_label(label: str) -> str:
    """Return the label of a selector; checked when it is written and when it is read.

    It stands in tables and LaTeX, on the terminal, and in the name of a folder.

    Args:
        label: What the selector is to be called.

    Raises:
        ParameterError: It cannot be part of a folder's name, or a terminal would act on it.

    >>> check_label("bsfl, alpha = 2")
    'bsfl, alpha = 2'
    """
    if not re.fullmatch(r"[^/\\]{1,100}", label) or not label.isprintable() or label.strip(". ") != label:
        raise ParameterError(
            f"label {shown(label)} names a folder: use up to 100 printable characters, no slash, no dot or space at "
            "the ends"
        )
    return label


def check_links(folder: Path) -> None:
    """Refuse links, pipes and devices anywhere inside a folder that is to be read or written.

    The folder itself and those above it may be links: whoever names it has chosen them.

    Args:
        folder: Of a comparison or of a run; nothing needs to be there.

    Raises:
        ParameterError: Names the first one.
    """
    for place, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            _check_plain(Path(place) / name)


def check_entries(folder: Path) -> None:
    """Refuse links, pipes and devices directly in a folder, as :func:`check_links` does."""
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            _check_plain(path)


def _check_plain(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # another process has just removed it
        return
    if stat.S_ISLNK(mode):
        raise ParameterError(
            f"{str(path)!r} is a link, and leads out of its folder: a run is neither read nor written through links. "
            "Delete it, or put what it leads to in its place"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ParameterError(f"{str(path)!r} is neither a file nor a folder: delete it")


def outside(folder: Path, said: Mapping[str, Any]) -> str | None:
    """The folder of the checkpoints of a plan, if that is not inside the plan's own."""
    place = said.get("checkpoints", {}).get("checkpoint_dir")
    if place is None or Path(place).resolve().is_relative_to(folder.resolve()):
        return None
    return str(place)
