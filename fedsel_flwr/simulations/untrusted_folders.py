"""Untrusted folders: check names and content of a folder that another person may have made.

Labels and texts must be harmless before they are shown or become part of a path. Files are opened by
:func:`fedsel_flwr.rounds.storage.open_file`.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.untrusted import one_line, shown

MAX_DEPTH = 20
"""Largest nesting depth of a file. Our files have four levels."""
MAX_FAULTS = 3
"""Number of faults of a file that an error names. A file may have thousands."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except line ends and tabs, and surrogates, which no file can hold."""


def check_label(label: str) -> str:
    """Return the label of a selector if it is safe in tables, LaTeX, a terminal and the name of a folder.

    Args:
        label: The label. It is checked both when it is written and when it is read.

    Raises:
        ParameterError: The label cannot be part of a folder's name, or it contains control characters.

    >>> check_label("bsfl, alpha = 2")
    'bsfl, alpha = 2'
    """
    if not re.fullmatch(r"[^/\\]{1,100}", label) or not label.isprintable() or label.strip(". ") != label:
        raise ParameterError(
            f"label {shown(label)} cannot name a folder. Use up to 100 printable characters, no slash, no dot or space "
            "at the ends"
        )
    return label


def check_tree(tree: Any) -> None:
    """Refuse content of a file that is nested too deeply, or that has texts with control characters.

    Args:
        tree: Content of a JSON or TOML file.

    Raises:
        ParameterError: The content has such a fault. The error names it.
    """
    # Level by level, because recursion would fail on a deep tree.
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
    """Return the first faults of a validation error in one line, or the message of any other error.

    Each fault has its key, its value and the expected value.
    """
    if not isinstance(error, ValidationError):
        return one_line(str(error))
    faults = error.errors(include_url=False)
    # Keys and values come from the file; `shown` and `one_line` remove characters that would act on a terminal.
    lines = [
        f"{one_line('.'.join(map(str, fault['loc'])))} = {shown(fault['input'])}: "
        f"{one_line(str(fault['msg']).removeprefix('Value error, '))}"
        for fault in faults[:MAX_FAULTS]
    ]
    more = len(faults) - MAX_FAULTS
    return one_line("; ".join([*lines, *([f"and {more} more"] if more > 0 else [])]))
