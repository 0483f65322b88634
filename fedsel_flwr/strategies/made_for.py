"""What a run is made of, in words: a checkpoint of a run that was made of something else is not taken.

Only what the state depends on counts: the selector and its parameters, how models are averaged, what is believed of
clients, the base's class. Deadlines, waiting times and the base's parameters may change when a run goes on.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping

import numpy as np

from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds.client_values import ClientValues
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.strategies.bases import layers

SHOWN = 60
"""Longest value in words; longer ones are told by their kind, size and digest."""


def made_for(core: SelectionCore, base: object) -> dict[str, str]:
    """What a strategy is made of, as far as what it learns depends on it."""
    selector, settings = core.parts.selector, core.settings
    said = {"selector": selector.name}
    for name in inspect.signature(type(selector)).parameters:
        if name != "seed" and hasattr(selector, name):  # the generator is part of the state
            said[f"selector.{name}"] = _in_words(getattr(selector, name))
    for name in ("max_latency", "averaging", "clock", "identity", "learning_rate", "momentum", "over_selection"):
        said[name] = _in_words(getattr(settings, name))
    said["filter"] = _in_words(settings.filter and settings.filter.score)
    flowers = (cls.__module__ for cls in type(base).__mro__ if cls.__module__.startswith("flwr."))
    api = ".".join(next(flowers, "").split(".")[:2])  # flwr.server, or flwr.serverapp of the Message API
    return {**said, "base": f"{', '.join(type(layer).__qualname__ for layer in layers(base))} ({api})"}


def _in_words(value: object) -> str:
    """A parameter's value in words that are the same in every process."""
    if isinstance(value, ClientValues):
        value = value.given
    if isinstance(value, np.ndarray):
        return f"array of {value.size}, {_digest(value.tobytes())}"
    if value is not None and not isinstance(value, bool | int | float | str | tuple | list | Mapping):
        return type(value).__qualname__
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= SHOWN else f"{type(value).__name__}, {_digest(text.encode())}"


def _digest(content: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"


def check_made_for(theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Refuse a checkpoint of a run that was made of something else.

    Raises:
        StateError: Says what differs.
    """
    differing = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
    if differing:
        said = "; ".join(
            f"{key} = {theirs.get(key, 'none')}, this one has {mine.get(key, 'none')}" for key in differing
        )
        raise StateError(f"it was written by a run with {said}")
