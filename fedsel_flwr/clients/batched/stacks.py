"""Where the models of a round stand: a stack for each entry of the model's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.batched.memory import Form

Stack = list[npt.NDArray[Any]]


class Stacks:
    """What stacks of a model look like.

    Args:
        model: The model, on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        state = list(model.state_dict(keep_vars=True).values())
        self._state = [(tuple(tensor.shape), tensor.dtype) for tensor in state]
        self._forms: list[Form] = [(tuple(tensor.shape), tensor.detach().numpy().dtype) for tensor in state]
        # of entries that are one tensor, the first
        self._owners = [next(i for i, other in enumerate(state) if other is tensor) for tensor in state]

    def new(self, count: int, device: str | torch.device) -> list[torch.Tensor]:
        """Stacks of so many models, not filled."""
        return [torch.empty((count, *shape), dtype=dtype, device=device) for shape, dtype in self._state]

    def forms(self, count: int) -> list[Form]:
        """All that a round of so many clients shares: the received model, the losses, the stacks."""
        stacks: list[Form] = [((count, *shape), dtype) for shape, dtype in self._forms]
        return [*self._forms, ((count,), np.float64), *stacks]

    def apart(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[Stack, FloatArray, Stack]:
        """Arrays of these forms: the received model, the losses, the stacks."""
        n = len(self._forms)
        return list(arrays[:n]), arrays[n], list(arrays[n + 1 :])

    def unsorted(
        self, stacks: Sequence[npt.NDArray[Any]], losses: FloatArray, order: IntArray
    ) -> tuple[Stack, FloatArray]:
        """Put what was trained in an order back into the clients' own; nothing is copied where that is the same."""
        layers = [stacks[i] for i in self._owners]
        if (order == np.arange(len(order))).all():
            return layers, losses
        back = np.argsort(order)
        return [layer[back] for layer in layers], losses[back]
