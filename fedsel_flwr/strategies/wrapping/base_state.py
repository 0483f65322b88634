"""State of base strategies in a checkpoint: known attributes of Flower's classes, ``state_dict`` of all others.

Each layer of a base has its part. What Flower's strategies set again in every round (the arrays of the round that DP
wrappers and QFedAvg hold) is not saved. Neither is the state of NumPy's global generator, from which Flower's
differential privacy draws: noise must not be drawn twice.
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
"""Attributes that outlive a round in FedAvgM alone: others drop the first, and set the second in every round."""


def check_base(base: object) -> None:
    """Refuse a base whose state could not be saved.

    Raises:
        ParameterError: A layer keeps something that nobody knows how to save; the message says what to write.
    """
    for layer in layers(base):
        _check_layer(layer)


def save_base(base: object) -> state_dicts.State:
    """Return a base's own state.

    Returns:
        A state that can be put into a checkpoint; under "layers" the list of the layers' states.

    Raises:
        ParameterError: As :func:`check_base` raises it, since a layer may have got an attribute in the meantime.
    """
    return {"layers": [_save_layer(layer) for layer in layers(base)]}


def load_base(base: object, state: Mapping[str, Any]) -> None:
    """Continue from a state of :func:`save_base`.

    Raises:
        StateError: It is another strategy's, or a layer refuses its part; nothing has changed then.
    """
    mine, theirs = list(layers(base)), state.get("layers")
    if not isinstance(theirs, list) or [_class(layer) for layer in mine] != [one.get("class") for one in theirs]:
        names = [one.get("class") for one in theirs] if isinstance(theirs, list) else theirs
        raise StateError(f"base: the state belongs to {names}, but this base is {[_class(layer) for layer in mine]}")
    before = save_base(base)
    try:
        for layer, part in zip(mine, theirs, strict=True):
            _load_layer(layer, part)
    # A user's own load_state_dict may raise anything, and outer layers are loaded by then: all go back.
    except Exception as error:
        for layer, part in zip(mine, before["layers"], strict=True):
            _load_layer(layer, part)
        raise StateError(f"base: {type(error).__name__}: {error}") from error


def _check_layer(layer: object) -> None:
    """Refuse a layer with attributes that neither Flower's code nor a ``state_dict`` accounts for."""
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


# An instance does not say who set an attribute: Flower's class, or the user's subclass of it. The source of Flower's
# class says what that assigns. ``__static_attributes__`` does too, but only from Python 3.13 on.
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
    # Without the source a user's subclass is refused with its attributes named: nothing is lost unseen.
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
    # Differential privacy with an accountant: the budget that was spent must not be spent again after a restart.
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
    """Convert a value of Flower's into plain types."""
    if isinstance(value, Parameters):
        return {"flower": "Parameters", "tensor_type": value.tensor_type, "tensors": list(value.tensors)}
    if isinstance(value, ArrayRecord):
        return {"flower": "ArrayRecord", "arrays": {name: array.numpy() for name, array in value.items()}}
    return value


def _from_plain(value: Any) -> Any:
    """Invert :func:`_to_plain`."""
    if isinstance(value, Mapping) and value.get("flower") == "Parameters":
        return Parameters(tensors=value["tensors"], tensor_type=value["tensor_type"])
    if isinstance(value, Mapping) and value.get("flower") == "ArrayRecord":
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in value["arrays"].items()})
    return value
