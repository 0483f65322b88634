"""State of base strategies in a checkpoint: known attributes of Flower's classes, ``state_dict`` of all others.

Each layer of a base has its own part. Values that Flower's strategies set again in every round are not saved. These are
the round's arrays in DP wrappers and QFedAvg. The state of NumPy's global generator is not saved either, because
Flower's differential privacy draws from it, and noise must not be drawn twice.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common import Parameters

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.strategies.wrapping.bases import layers

ATTRIBUTES: Final = ("m_t", "v_t", "current_weights", "momentum_vector", "clipping_norm", "clip_norm", "global_model")
"""Attributes of Flower's strategies that outlive a round: of FedOpt's family, FedAvgM, adaptive clipping, trees."""
OF_FEDAVGM: Final = ("initial_parameters", "current_arrays")
"""Attributes that outlive a round only in FedAvgM: other strategies drop the first, and set the second each round."""


def check_base(base: object) -> None:
    """Refuse a base whose state could not be saved.

    Raises:
        ParameterError: A layer has state that cannot be saved; the message has the cure.
    """
    for layer in layers(base):
        _check_layer(layer)


def save_base(base: object) -> state_dicts.State:
    """Return a base's own state.

    Returns:
        A state for a checkpoint, with the list of the layers' states under "layers".

    Raises:
        ParameterError: As for :func:`check_base`, because a layer may have got another attribute in the meantime.
    """
    return {"layers": [_save_layer(layer) for layer in layers(base)]}


def load_base(base: object, state: Mapping[str, Any]) -> None:
    """Load a state of :func:`save_base`.

    Raises:
        StateError: The state belongs to another strategy, or a layer refuses its part; nothing has changed.
    """
    mine, theirs = list(layers(base)), state.get("layers")
    if not isinstance(theirs, list) or [_class(layer) for layer in mine] != [one.get("class") for one in theirs]:
        names = [one.get("class") for one in theirs] if isinstance(theirs, list) else theirs
        raise StateError(f"base: the state belongs to {names}, but this base is {[_class(layer) for layer in mine]}")
    before = save_base(base)
    try:
        for layer, part in zip(mine, theirs, strict=True):
            _load_layer(layer, part)
    # A user's own load_state_dict may raise any error after outer layers were loaded, so all layers are restored.
    except Exception as error:
        for layer, part in zip(mine, before["layers"], strict=True):
            _load_layer(layer, part)
        raise StateError(f"base: {type(error).__name__}: {error}") from error


def _check_layer(layer: object) -> None:
    """Refuse a layer with attributes that are neither in Flower's code nor covered by a ``state_dict``."""
    if _has_state_dict(layer) or _is_flowers(type(layer)):
        return
    flowers = [cls for cls in type(layer).__mro__ if _is_flowers(cls)]
    known = {name for cls in flowers for name in inspect.signature(cls).parameters} | {*_lasting(layer)}
    known |= {name for cls in flowers for name in _assigned_by(cls)}
    unknown = sorted(name for name, value in vars(layer).items() if name not in known and not callable(value))
    if unknown:
        raise ParameterError(
            f"checkpoints cannot save {_class(layer)}, which keeps {', '.join(unknown)}. Give it state_dict(), which "
            "returns what must outlive a round (numbers, texts, lists, NumPy arrays; {} if nothing), and "
            "load_state_dict(state), or leave checkpoint_dir out"
        )


# An instance does not record whether Flower's class or the user's subclass set an attribute, so the source of Flower's
# class decides. ``__static_attributes__`` has the same names, but only from Python 3.13 on.
@functools.cache
def _assigned_by(cls: type) -> frozenset[str]:
    """Return the attributes that a class assigns in its own methods; none if its source is not installed.

    >>> from flwr.server.strategy import FedAvgM
    >>> assigned = _assigned_by(FedAvgM)
    >>> "momentum_vector" in assigned, "aggregate_fit" in assigned
    (True, False)
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    # Without the source, a user's subclass is refused and its attributes are named, so that no state is lost silently.
    except (OSError, SyntaxError):
        return frozenset()
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return frozenset(node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self")


def _lasting(layer: object) -> list[str]:
    """Return the known attributes of a layer that outlive a round."""
    is_fedavgm = any(cls.__name__ == "FedAvgM" for cls in type(layer).__mro__)
    return [name for name in (*ATTRIBUTES, *(OF_FEDAVGM if is_fedavgm else ())) if name in vars(layer)]


def _save_layer(layer: object) -> state_dicts.State:
    _check_layer(layer)
    part: state_dicts.State = {"class": _class(layer), "known": {}, "own": None}
    if any(map(_is_flowers, type(layer).__mro__)):
        part["known"] = {name: _to_plain(getattr(layer, name)) for name in _lasting(layer)}
    if _has_state_dict(layer):
        part["own"] = layer.state_dict()  # type: ignore[attr-defined]
    # Differential privacy with an accountant: the spent budget must not be spent again after a restart.
    accountant = getattr(layer, "accountant", None)
    if accountant is not None:
        part["accountant"] = accountant.state_dict()
    return part


def _load_layer(layer: Any, part: Mapping[str, Any]) -> None:
    if _has_state_dict(layer) != (part["own"] is not None):
        raise StateError(
            f"the state of {_class(layer)} has {'no ' if part['own'] is None else ''}entries from state_dict, but "
            f"the class {'has' if part['own'] is None else 'lacks'} that method"
        )
    for name, value in part["known"].items():
        setattr(layer, name, _from_plain(value))
    if part["own"] is not None:
        layer.load_state_dict(part["own"])
    if "accountant" in part:
        if getattr(layer, "accountant", None) is None:
            raise StateError(f"the state of {_class(layer)} has a privacy accountant, but this base has none")
        layer.accountant.load_state_dict(part["accountant"])


def _class(layer: object) -> str:
    return type(layer).__qualname__


def _is_flowers(cls: type) -> bool:
    return cls.__module__.startswith("flwr.")


def _has_state_dict(layer: object) -> bool:
    return callable(getattr(layer, "state_dict", None)) and callable(getattr(layer, "load_state_dict", None))


def _to_plain(value: object) -> Any:
    """Convert a Flower value into plain types."""
    if isinstance(value, Parameters):
        return {"flower": "Parameters", "tensor_type": value.tensor_type, "tensors": list(value.tensors)}
    if isinstance(value, ArrayRecord):
        return {"flower": "ArrayRecord", "arrays": {name: array.numpy() for name, array in value.items()}}
    return value


def _from_plain(value: Any) -> Any:
    """Convert the result of :func:`_to_plain` back."""
    if isinstance(value, Mapping) and value.get("flower") == "Parameters":
        return Parameters(tensors=value["tensors"], tensor_type=value["tensor_type"])
    if isinstance(value, Mapping) and value.get("flower") == "ArrayRecord":
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in value["arrays"].items()})
    return value
