"""One client after the other: the way for models that cannot be batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.batched.examples import Examples
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.clients.parameters import get_arrays, set_arrays
from fedsel_flwr.clients.settings import TrainingSettings
from fedsel_flwr.clients.training import train


def train_in_turn(
    model: nn.Module,
    start: Sequence[npt.NDArray[Any]],
    examples: Examples,
    settings: TrainingSettings,
    generators: Sequence[np.random.Generator],
    objective: Objective,
    into: Sequence[npt.NDArray[Any]],
) -> FloatArray:
    """Train each client by :func:`fedsel_flwr.clients.training.train`, on the CPU.

    Args:
        model: Scratch model on the CPU; its parameters are overwritten.
        start: The received model, in the order of the model's state dictionary.
        examples: Who has what.
        settings: How to train.
        generators: One a client.
        objective: What the steps minimise.
        into: Filled with the trained models as stacks, shape (n_clients, …) each.

    Returns:
        The mean loss of each client, shape (n_clients,).
    """
    losses = np.empty(len(generators))
    for client, generator in enumerate(generators):
        set_arrays(model, start)
        losses[client] = train(model, *examples.own(client), settings, generator, objective)
        for stack, array in zip(into, get_arrays(model), strict=True):
            stack[client] = array
    return losses
