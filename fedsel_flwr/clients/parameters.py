"""A torch model's parameters as NumPy arrays, as Flower sends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.errors import ParameterError


def get_arrays(model: nn.Module) -> list[npt.NDArray[Any]]:
    """Return copies of a model's parameters and buffers.

    Args:
        model: The model.

    Returns:
        One array per entry of the model's state dictionary, in its order.
    """
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def set_arrays(model: nn.Module, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Copy arrays into a model's parameters and buffers.

    Args:
        model: The model that is changed.
        arrays: One array per entry of the model's state dictionary, in its order and of its shapes.

    Raises:
        ParameterError: If the number of arrays, a shape or a type does not fit; the model is then unchanged.
    """
    state = model.state_dict()
    if len(arrays) != len(state):
        raise ParameterError(f"expected {len(state)} arrays, one per entry of the model's state; got {len(arrays)}")
    new: dict[str, torch.Tensor] = {}
    for (key, tensor), array in zip(state.items(), arrays, strict=True):
        values = np.asarray(array)
        if values.dtype.kind not in "fiub" or values.shape != tuple(tensor.shape):
            raise ParameterError(
                f"expected numbers of shape {tuple(tensor.shape)} for {key!r}; "
                f"got {values.dtype} of shape {values.shape}"
            )
        new[key] = torch.tensor(values, dtype=tensor.dtype)
    model.load_state_dict(new)
