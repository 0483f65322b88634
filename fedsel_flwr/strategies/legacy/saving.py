"""Between Flower's parameters and the model of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.common import Parameters, ndarrays_to_parameters

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.strategies.legacy.replies import decode

NUMPY = "numpy.ndarray"
"""The type of Flower's parameters that are NumPy arrays."""


def saved_model(parameters: Parameters) -> tuple[list[str], Arrays]:
    """The names and arrays of a model in a checkpoint.

    NumPy arrays go by their numbers. Anything else, such as trees, is kept as its bytes: an array for each tensor,
    which goes by its type, a colon and its number.

    Raises:
        RunError: It is no model of Flower's.

    >>> saved_model(ndarrays_to_parameters([np.zeros(2)]))
    (['0'], [array([0., 0.])])
    >>> saved_model(Parameters(tensors=[b"{}"], tensor_type="json"))
    (['json:0'], [array([123, 125], dtype=uint8)])
    """
    if not isinstance(parameters, Parameters):
        raise RunError(
            f"checkpoints cannot save a model of {type(parameters).__name__}: expected flwr.common.Parameters; leave "
            "checkpoint_dir out"
        )
    arrays = decode(parameters) if parameters.tensor_type == NUMPY else None
    if arrays is not None:
        return [str(i) for i in range(len(arrays))], arrays
    tensors = [np.frombuffer(tensor, np.uint8) for tensor in parameters.tensors]
    return [f"{parameters.tensor_type}:{i}" for i in range(len(tensors))], tensors


def parameters_of(checkpoint: Checkpoint) -> Parameters:
    """The model of a checkpoint as Flower's parameters."""
    kind, colon, _ = checkpoint.names[0].rpartition(":") if checkpoint.names else ("", "", "")
    if not colon:
        return ndarrays_to_parameters(checkpoint.model)
    return Parameters(tensors=[array.tobytes() for array in checkpoint.model], tensor_type=kind)


def named(parameters: object) -> Mapping[str, object] | None:
    """Name -> array of the initial model, to be compared with a checkpoint's; None where it cannot be."""
    if not isinstance(parameters, Parameters) or parameters.tensor_type != NUMPY:
        return None
    names, arrays = saved_model(parameters)
    return dict(zip(names, arrays, strict=True)) if ":" not in "".join(names) else None
