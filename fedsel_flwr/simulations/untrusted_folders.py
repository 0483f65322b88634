"""Untrusted folders: check what a folder that another person may have made names, links to and holds.

A link leads out of the folder. Labels and texts must be harmless before anything shows them or makes paths of them.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.untrusted import one_line, shown

MAX_DEPTH = 20
"""Levels of a file; ours have four."""
MAX_FAULTS = 3
"""Faults of a file that an error names; there may be thousands."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters on which a terminal acts, and halves of characters, which no file can hold, but not line ends and tabs."""


def check_label(label: str) -> str:
    """Return the label of a selector if it is safe in tables, LaTeX, a terminal and the name of a folder.

    Args:
        label: The label, when it is written or read.

    Raises:
        ParameterError: It cannot be part of a folder's name, or a terminal would act on it.

    >>> check_label("bsfl, alpha = 2")
    'bsfl, alpha = 2'
    """
    if not re.fullmatch(r"[^/\\]{1,100}", label) or not label.isprintable() or label.strip(". ") != label:
        raise ParameterError(
            f"label {shown(label)} cannot name a folder. Use up to 100 printable characters, no slash, no dot or space "
            "at the ends"
        )
    return label


def check_links(folder: Path) -> None:
    """Refuse links, pipes and devices anywhere inside a folder that is to be read or written.

    The folder itself and those above it may be links: the user who names the folder has chosen them.

    Args:
        folder: Of a comparison or of a run; nothing needs to be there.

    Raises:
        ParameterError: Names the first one.
    """
    # os.walk lists links to folders among the folders, and does not go into them.
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
    except FileNotFoundError:
        # Another process has just removed it, as a run does with its old checkpoints.
        return
    if stat.S_ISLNK(mode):
        raise ParameterError(
            f"{str(path)!r} is a link, and runs are never read or written through links. Delete it, or replace it "
            "with what it points to"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ParameterError(f"{str(path)!r} is neither a file nor a folder. Delete it")


def check_tree(tree: Any) -> None:
    """Refuse a file's content that is nested too deeply, or holds texts with control characters.

    Args:
        tree: The content of a JSON or TOML file.

    Raises:
        ParameterError: Names the fault.
    """
    # Level by level, not by recursion, which a deep tree would exhaust.
    level, depth = [tree], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise ParameterError(f"it is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for one in level:
            if isinstance(one, str) and _CONTROL.search(one):
                raise ParameterError(f"the text {shown(one)} holds control characters")
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
        level = below


def describe_faults(error: Exception) -> str:
    """Return a validation error's first faults in one line: key, value and what was expected; else the message."""
    if not isinstance(error, ValidationError):
        return one_line(str(error))
    faults = error.errors(include_url=False)
    # Keys and values are the file's: `shown` and `one_line` keep them from acting on a terminal.
    lines = [
        f"{one_line('.'.join(map(str, fault['loc'])))} = {shown(fault['input'])}: "
        f"{one_line(str(fault['msg']).removeprefix('Value error, '))}"
        for fault in faults[:MAX_FAULTS]
    ]
    more = len(faults) - MAX_FAULTS
    return "; ".join([*lines, *([f"and {more} more"] if more > 0 else [])])
