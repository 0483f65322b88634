"""Which way a model's clients are trained: the fastest that can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn

from fedsel_flwr.clients.batched.compiled import CompiledKernel
from fedsel_flwr.clients.batched.general import GeneralKernel
from fedsel_flwr.clients.batched.kernel import Kernel
from fedsel_flwr.clients.batched.perceptron import perceptron
from fedsel_flwr.clients.batched.planning import plan
from fedsel_flwr.clients.batched.refusal import Refused
from fedsel_flwr.clients.batched.written import WrittenKernel
from fedsel_flwr.clients.objectives import Loss
from fedsel_flwr.clients.settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

Way = Literal["auto", "compiled", "written", "general", "loop"]
WAYS: tuple[str, ...] = get_args(Way)


def choose(
    way: Way,
    model: nn.Module,
    loss: Loss,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    settings: TrainingSettings,
) -> tuple[Kernel | CompiledKernel | None, Way, dict[str, str]]:
    """Choose the way of training.

    Args:
        way: The way that is asked for; "auto": the first that can, but for the compiled one, which loads slowly.
        model: The model on the CPU, left as it is.
        loss: From outputs and labels to the loss of each example.
        inputs: At least one example on the device, shape (n, …).
        labels: Of the examples.
        settings: How to train.

    Returns:
        The kernel, None for the loop; the way; and by way why the ways before it were not taken.

    Raises:
        ParameterError: If the way that is asked for cannot train the model.
    """
    ways: dict[Way, Callable[[], Kernel | CompiledKernel]] = {
        "compiled": lambda: compiled(model, loss, inputs, labels, settings),
        "written": lambda: WrittenKernel(plan(model, inputs[:1].cpu()), loss),
        "general": lambda: GeneralKernel(copy.deepcopy(model).to(inputs.device), loss, inputs, labels),
    }
    reasons: dict[str, str] = {}
    for name, build in ways.items():
        if way != name and (way != "auto" or name == "compiled"):
            continue
        try:
            return build(), name, reasons
        except Refused as refusal:
            reasons[name] = str(refusal)
            if way == name:
                raise ParameterError(f"the model cannot be trained the {name} way: {refusal}; use 'auto'") from refusal
    return None, "loop", reasons


def compiled(
    model: nn.Module, loss: Loss, inputs: torch.Tensor, labels: torch.Tensor, settings: TrainingSettings
) -> CompiledKernel:
    """The compiled way; arguments as in :func:`choose`.

    Raises:
        Refused: It cannot train the model.
    """
    return CompiledKernel(perceptron(model, loss, inputs, labels, settings))
