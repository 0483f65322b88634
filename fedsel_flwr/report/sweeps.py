"""Sweeps: labels of a selector's settings, and notes on how many settings were tried.

A sweep runs a selector with several values of a parameter. Each setting has a row. Its label is the selector's label
and the values, such as "bsfl alpha=0.3". The notes use only these labels, so that runs from folders have the same
notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SETTING = re.compile(r"(?P<selector>.+?)(?: \w+=\S+)+")


def setting_label(selector: str, setting: Mapping[str, str]) -> str:
    """Return the label of a setting.

    Args:
        selector: Label of the selector.
        setting: Parameter -> value, in the form of :func:`value_texts`.

    >>> setting_label("bsfl", {"alpha": "0.3", "beta": "2"})
    'bsfl alpha=0.3 beta=2'
    """
    return " ".join([selector, *(f"{name}={value}" for name, value in setting.items())])


def value_texts(values: Sequence[Any]) -> list[str]:
    """Return the values of a parameter as short texts for labels, all different.

    Args:
        values: Numbers, texts, booleans, or lists of them. No value occurs twice.

    >>> value_texts([0.30000000000000004, 1.0, True, [40, 30], "exact"])
    ['0.3', '1', 'true', '40,30', 'exact']
    >>> value_texts([0.3, 0.30000000000000004])
    ['0.3', '0.30000000000000004']
    """
    short = [_text(value) for value in values]
    return short if len(set(short)) == len(short) else [_text(value, "") for value in values]


def _text(value: Any, precision: str = "g") -> str:
    """Return a value as text without spaces; floats have six significant digits, or all digits without a format."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(_text(one, precision) for one in value)
    text = format(value, precision) if isinstance(value, float) else str(value)
    # The notes split labels at spaces.
    return "_".join(text.split())


def selector_of(label: str) -> str:
    """Return the selector's label without the values of a setting.

    >>> selector_of("bsfl alpha=0.3 beta=2"), selector_of("cs-ucb")
    ('bsfl', 'cs-ucb')
    """
    found = _SETTING.fullmatch(label)
    return found["selector"] if found else label


def settings_tried(labels: Iterable[str]) -> dict[str, int]:
    """Count the settings of each selector that ran with several settings.

    Args:
        labels: Labels of the rows of a comparison.

    Returns:
        Selector -> number of its settings, for selectors with at least two settings.

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
    """Return the table's note on the number of settings tried per selector; empty without a sweep.

    >>> describe_settings(["bsfl alpha=0.3", "bsfl alpha=1", "random"])
    'Settings tried: 2 of bsfl.'
    """
    tried = settings_tried(labels)
    return f"Settings tried: {', '.join(f'{count} of {name}' for name, count in tried.items())}." if tried else ""


def describe_optimism(labels: Iterable[str]) -> str:
    """Return the verdict's warning about the best of several settings; empty without a sweep.

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
