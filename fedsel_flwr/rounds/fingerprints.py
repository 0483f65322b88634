"""Fingerprints: texts that are equal on every machine and in every process if what they describe is equal.

An identity is a mapping of parts or parameters of a run to such texts. Two runs are the same if their identities are
equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from fedsel_flwr.rounds.roster import ClientValues

MAX_SHOWN = 60
"""Number of characters of the longest value that a text shows. For a longer value it has the type and a digest."""


def fingerprint(**parts: object) -> str:
    """Return a short digest of everything that a run depends on.

    Args:
        **parts: Values that JSON can hold. The order of the keys does not matter.

    >>> fingerprint(seed=1, selector="random")
    'bac931638a5e'
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def text_of(value: object) -> str:
    """Return a parameter's value as text.

    >>> text_of(1.5), text_of(object())
    ('1.5', 'object')
    """
    if isinstance(value, ClientValues):
        value = value.given
    if isinstance(value, np.ndarray):
        return f"array of {value.size}, {_digest(value.tobytes())}"
    # The default ``repr`` of an object contains its address, which differs between processes.
    if value is not None and not isinstance(value, bool | int | float | str | tuple | list | Mapping):
        return type(value).__qualname__
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= MAX_SHOWN else f"{type(value).__name__}, {_digest(text.encode())}"


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return the parts in which two identities differ, each with both values.

    >>> differences({"rounds": "3", "seed": "1"}, {"rounds": "4", "seed": "1"})
    {'rounds': 'rounds is 3 there and 4 here'}
    """
    return {
        key: f"{key} is {there.get(key, 'not set')} there and {here.get(key, 'not set')} here"
        for key in {**there, **here}
        if there.get(key) != here.get(key)
    }


def _digest(content: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"
