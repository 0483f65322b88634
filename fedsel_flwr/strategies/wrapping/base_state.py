"""What base strategies keep from round to round: Flower's by the attributes that are known, others by their own word.

A base is the strategy that was given and those it wraps, a layer each. What Flower's strategies set anew in every
round (the arrays of the round that DP wrappers and QFedAvg hold) is not kept. Neither is the state of NumPy's global
generator, from which Flower's differential privacy draws: noise must not be drawn twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common import Parameters

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.strategies.wrapping.bases import layers

ATTRIBUTES: Final = (
    "m_t", "v_t", "current_weights", "momentum_vector", "initial_parameters", "clipping_norm", "clip_norm",
    "global_model",
)  # fmt: skip
"""Attributes of Flower's strategies that outlive a round: of FedOpt's family, FedAvgM, adaptive clipping, trees.

``current_arrays`` is one for FedAvgM alone; others set it in every round.
"""
INITIAL: Final = ("initial_parameters",)
"""Those that hold the first model until it was asked for; only FedAvgM of the legacy API keeps it, and changes it."""


def check_base(base: object) -> None:
    """Refuse a base whose state could not be saved.

    Raises:
        ParameterError: A layer keeps something that nobody knows how to save; says what to write.
    """
    for layer in layers(base):
        _check(layer)


def save_base(base: object) -> state_dicts.State:
    """A base's own state.

    Returns:
        A state that can be put into a checkpoint, a list of the layers' under "layers".

    Raises:
        ParameterError: As :func:`check_base` raises it: an attribute may have come since.
    """
    return {"layers": [_saved(layer) for layer in layers(base)]}


def load_base(base: object, state: Mapping[str, Any]) -> None:
    """Continue from a state of :func:`save_base`.

    Raises:
        StateError: It is another strategy's, or a layer does not take its part; nothing has changed then.
    """
    mine, theirs = list(layers(base)), state.get("layers")
    if not isinstance(theirs, list) or [_class(layer) for layer in mine] != [one.get("class") for one in theirs]:
        names = [one.get("class") for one in theirs] if isinstance(theirs, list) else theirs
        raise StateError(f"base: the state is that of {names}, this base is {[_class(layer) for layer in mine]}")
    before = save_base(base)
    try:
        for layer, part in zip(mine, theirs, strict=True):
            _load(layer, part)
    except Exception as error:  # a base's own load_state_dict may raise anything
        for layer, part in zip(mine, before["layers"], strict=True):
            _load(layer, part)
        raise StateError(f"base: {type(error).__name__}: {error}") from error


def _class(layer: object) -> str:
    return type(layer).__qualname__


def _is_flowers(cls: type) -> bool:
    return cls.__module__.startswith("flwr.")


def _has_own(layer: object) -> bool:
    return callable(getattr(layer, "state_dict", None)) and callable(getattr(layer, "load_state_dict", None))


def _check(layer: object) -> None:
    if _has_own(layer) or _is_flowers(type(layer)):
        return
    flowers = [cls for cls in type(layer).__mro__ if _is_flowers(cls)]
    known = {name for cls in flowers for name in inspect.signature(cls).parameters} | {*_kept(layer)}
    unknown = sorted(
        name for name, value in vars(layer).items()
        if name not in known and not callable(value) and not _set_by(flowers, name)
    )  # fmt: skip
    if unknown:
        raise ParameterError(
            f"checkpoints cannot save {_class(layer)}, which keeps {', '.join(unknown)}: give it state_dict(), which "
            "returns what must outlive a round (numbers, texts, lists, NumPy arrays; {} if nothing), and "
            "load_state_dict(state), or leave checkpoint_dir out"
        )


def _set_by(flowers: list[type], name: str) -> bool:
    """Whether one of Flower's own constructors or methods sets an attribute."""
    return any(
        name in function.__code__.co_names
        for cls in flowers
        for function in vars(cls).values()
        if inspect.isfunction(function)
    )


def _kept(layer: object) -> list[str]:
    """The known attributes that a layer has and that outlive a round."""
    names = [cls.__name__ for cls in type(layer).__mro__]
    wanted = [name for name in ATTRIBUTES if name not in INITIAL or "FedAvgM" in names]
    return [name for name in [*wanted, *(["current_arrays"] if "FedAvgM" in names else [])] if name in vars(layer)]


def _saved(layer: object) -> state_dicts.State:
    _check(layer)
    part: state_dicts.State = {"class": _class(layer), "known": {}, "own": None}
    if any(map(_is_flowers, type(layer).__mro__)):
        part["known"] = {name: _plain(getattr(layer, name)) for name in _kept(layer)}
    if _has_own(layer):
        part["own"] = layer.state_dict()  # type: ignore[attr-defined]
    accountant = getattr(layer, "accountant", None)
    if accountant is not None:
        part["accountant"] = accountant.state_dict()
    return part


def _load(layer: Any, part: Mapping[str, Any]) -> None:
    if _has_own(layer) != (part["own"] is not None):
        raise StateError(f"the state of {_class(layer)} has {'no ' if part['own'] is None else ''}part of its own")
    for name, value in part["known"].items():
        setattr(layer, name, _flowers(value))
    if part["own"] is not None:
        layer.load_state_dict(part["own"])
    if "accountant" in part:
        if getattr(layer, "accountant", None) is None:
            raise StateError(f"the state of {_class(layer)} has a privacy accountant's part, but here there is none")
        layer.accountant.load_state_dict(part["accountant"])


def _plain(value: object) -> Any:
    """A value of Flower's in plain types."""
    if isinstance(value, Parameters):
        return {"flower": "Parameters", "tensor_type": value.tensor_type, "tensors": list(value.tensors)}
    if isinstance(value, ArrayRecord):
        return {"flower": "ArrayRecord", "arrays": {name: array.numpy() for name, array in value.items()}}
    return value


def _flowers(value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if isinstance(value, Mapping) and value.get("flower") == "Parameters":
        return Parameters(tensors=value["tensors"], tensor_type=value["tensor_type"])
    if isinstance(value, Mapping) and value.get("flower") == "ArrayRecord":
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in value["arrays"].items()})
    return value
