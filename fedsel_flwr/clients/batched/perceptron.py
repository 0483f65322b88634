"""Which models and trainings the compiled loops know: perceptrons in small batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from fedsel_flwr.clients.batched.layers import Flatten, Linear, ReLU
from fedsel_flwr.clients.batched.planning import plan
from fedsel_flwr.clients.batched.refusal import Refused
from fedsel_flwr.clients.objectives import Loss, cross_entropy
from fedsel_flwr.clients.settings import TrainingSettings

MOST_EXAMPLES = 32
"""In a step. Of larger batches the products of matrices are as fast in torch, or faster."""


@dataclass(frozen=True)
class Dense:
    """A layer: where its parameters stand in the model's state, its sizes, and whether a rectifier follows."""

    weight: int
    bias: int | None
    inputs: int
    units: int
    rectified: bool = False


def perceptron(
    model: nn.Module, loss: Loss, inputs: torch.Tensor, labels: torch.Tensor, settings: TrainingSettings
) -> list[Dense]:
    """Return the layers of a perceptron.

    Args:
        model: The model on the CPU, left as it is.
        loss: From outputs and labels to the loss of each example.
        inputs: At least one example, shape (n, …).
        labels: Of the examples.
        settings: How to train.

    Raises:
        Refused: The model is something else, or is trained in another way.
    """
    if inputs.device.type != "cpu" or not inputs.is_contiguous() or inputs.dtype not in (torch.float32, torch.float64):
        raise Refused("it reads float32 or float64 in one piece on the CPU")
    if loss is not cross_entropy or labels.dtype != torch.int64 or labels.ndim != 1:
        raise Refused("it knows the cross-entropy of classes only")
    if settings.augmentation != "none":
        raise Refused("it knows no augmentation")
    if settings.batch_size > MOST_EXAMPLES:
        raise Refused(f"it is slower from {MOST_EXAMPLES + 1} examples in a step on")
    own = plan(model, inputs[:1])
    shapes = [tensor.shape for tensor in model.state_dict().values()]
    layers: list[Dense] = []
    for layer in own.layers:
        if isinstance(layer, Linear):
            units, width = shapes[layer.weight]
            layers.append(Dense(layer.weight, layer.bias, width, units))
        elif isinstance(layer, ReLU) and layers:
            layers[-1] = replace(layers[-1], rectified=True)
        elif not isinstance(layer, Flatten):
            raise Refused("it knows dense layers and the rectifiers behind them only")
    if layers[-1].rectified:
        raise Refused("its last layer must have no rectifier behind it")
    return layers
