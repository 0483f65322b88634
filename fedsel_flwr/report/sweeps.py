"""Sweeps: labels of a selector's settings, and notes on how many settings were tried.

A sweep runs a selector with several values of a parameter. Each setting has its own row, whose label is the selector's
label and the values: "bsfl alpha=0.3". The notes read these labels, so that runs read back from their folders have the
same notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SETTING = re.compile(r"(?P<selector>.+?)(?: \w+=\S+)+")


def setting_label(selector: str, setting: Mapping[str, str]) -> str:
    """Return the label of a setting.

    Args:
        selector: The selector's own label.
        setting: Parameter -> value, as :func:`value_texts` returns it.

    >>> setting_label("bsfl", {"alpha": "0.3", "beta": "2"})
    'bsfl alpha=0.3 beta=2'
    """
    return " ".join([selector, *(f"{name}={value}" for name, value in setting.items())])


def value_texts(values: Sequence[Any]) -> list[str]:
    """Return the values of a parameter as texts for labels, short but different from each other.

    Args:
        values: Numbers, texts, booleans, or lists of them, none twice.

    >>> value_texts([0.30000000000000004, 1.0, True, [40, 30], "exact"])
    ['0.3', '1', 'true', '40,30', 'exact']
    >>> value_texts([0.3, 0.30000000000000004])
    ['0.3', '0.30000000000000004']
    """
    short = [_text(value) for value in values]
    return short if len(set(short)) == len(short) else [_text(value, "") for value in values]


def _text(value: Any, precision: str = "g") -> str:
    """Return a value as text without spaces; floats with six significant digits, or with all if there is no format."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(_text(one, precision) for one in value)
    text = format(value, precision) if isinstance(value, float) else str(value)
    # The notes split labels at spaces.
    return "_".join(text.split())


def settings_tried(labels: Iterable[str]) -> dict[str, int]:
    """Count the settings of each selector that was run with several.

    Args:
        labels: Those of a comparison's rows.

    Returns:
        Selector -> number of its settings; only selectors with at least two.

    >>> settings_tried(["bsfl alpha=0.3", "bsfl alpha=1", "oort", "random"])
    {'bsfl': 2}
    """
    counts: dict[str, int] = {}
    for label in labels:
        found = _SETTING.fullmatch(label)
        selector = found["selector"] if found else label
        counts[selector] = counts.get(selector, 0) + 1
    return {selector: count for selector, count in counts.items() if count > 1}


def describe_settings(labels: Iterable[str]) -> str:
    """Return the table's note: how many settings of which selector were tried; empty without a sweep.

    >>> describe_settings(["bsfl alpha=0.3", "bsfl alpha=1", "random"])
    'Settings tried: 2 of bsfl.'
    """
    tried = settings_tried(labels)
    return f"Settings tried: {', '.join(f'{count} of {name}' for name, count in tried.items())}." if tried else ""


def describe_optimism(labels: Iterable[str]) -> str:
    """Return the verdict's caution about the best of several settings; empty without a sweep.

    >>> describe_optimism(["bsfl alpha=0.3", "bsfl alpha=1", "random"])
    'The best of the 2 settings of bsfl looks better than it is: some of its lead is chance. Run it again on new seeds.'
    """
    tried = [f"{count} settings of {name}" for name, count in settings_tried(labels).items()]
    if not tried:
        return ""
    return (
        f"The best of the {' or of the '.join(tried)} looks better than it is: some of its lead is chance. Run it "
        "again on new seeds."
    )
