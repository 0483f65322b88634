"""What many models say of the same examples, in one pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedsel_flwr.clients.parameters import set_arrays
from fedsel_flwr.errors import ParameterError


def logits_batched(
    model: nn.Module,
    layers: Sequence[npt.NDArray[Any]],
    inputs: npt.NDArray[Any] | torch.Tensor,
    *,
    device: str | torch.device = "cpu",
    batch_size: int = 256,
) -> npt.NDArray[np.float64]:
    """Return the outputs of every model of a stack on the same examples, with dropout off.

    Models that torch.func cannot batch are asked one after the other.

    Args:
        model: The model; left as it is.
        layers: The models, a stack a layer, shape (n_models, …) each, in the order of the model's state dictionary.
        inputs: The examples, shape (n, …); used where they are if they are a tensor on the device.
        device: Where to compute.
        batch_size: Examples at a time; memory for that many times n_models activations is needed.

    Returns:
        Shape (n_models, n, …).

    Raises:
        ParameterError: If the stack does not fit the model.

    Example:
        >>> stack = [np.array([[[1.0, 2.0]], [[3.0, 4.0]]], dtype=np.float32)]
        >>> logits_batched(nn.Linear(2, 1, bias=False), stack, np.ones((1, 2), dtype=np.float32)).ravel()
        array([3., 7.])
    """
    scratch = copy.deepcopy(model).to(device).eval()
    state = scratch.state_dict()
    if [layer.shape[1:] for layer in layers] != [tuple(tensor.shape) for tensor in state.values()]:
        raise ParameterError(
            f"expected stacks of shapes {[tuple(tensor.shape) for tensor in state.values()]} behind the number of "
            f"models, got {[layer.shape for layer in layers]}; give one for each entry of the model's state"
        )
    stack = {
        name: torch.tensor(layer, dtype=tensor.dtype, device=device)
        for (name, tensor), layer in zip(state.items(), layers, strict=True)
    }

    def one(own: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(scratch, own, (x,))
        return outputs

    def in_turn(x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for i in range(len(layers[0])):
            set_arrays(scratch, [layer[i] for layer in layers])
            outputs.append(scratch(x))
        return torch.stack(outputs)

    examples = torch.as_tensor(inputs, device=device)
    parts = []
    together = True
    with torch.no_grad():
        for first in range(0, len(examples), batch_size):
            x = examples[first : first + batch_size]
            try:
                outputs = vmap(one, in_dims=(0, None))(stack, x) if together else in_turn(x)
            except (RuntimeError, ValueError, NotImplementedError):  # what torch.func raises for what it cannot batch
                together = False
                outputs = in_turn(x)
            parts.append(outputs.cpu().numpy())
    return np.concatenate(parts, axis=1).astype(np.float64)
