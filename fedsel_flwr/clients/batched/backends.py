"""Choice of the backend that trains a round's clients, with the reasons against the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from fedsel_flwr.clients.batched.manual_backprop import ManualKernel, plan
from fedsel_flwr.clients.batched.numba_mlp import NumbaKernel, perceptron
from fedsel_flwr.clients.batched.steps import Kernel, Unsupported
from fedsel_flwr.clients.batched.vmap import VmapKernel
from fedsel_flwr.clients.objectives import Loss
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

Backend = Literal["auto", "numba", "manual", "vmap", "sequential"]
BACKENDS: tuple[str, ...] = get_args(Backend)

NUMBA_STEPS = 25_000
"""Smallest number of local steps in a run, over all clients, for which the compiled loops pay off. In shorter runs they
save less time than their loading takes (about a second, at forty microseconds a step)."""
VMAP_CLIENTS = 8
"""Smallest number of clients that train together on a CPU with torch.func. With fewer clients, torch.func took 0.8 to
1.8 times as long as one client after the other. From this number on it took 0.3 to 0.8 times as long
(``benchmarks/batched_training.py``)."""


@dataclass(frozen=True)
class RunSize:
    """Size of a whole run, which decides the backends that pay off.

    Args:
        rounds: Number of rounds.
        clients_per_round: Number of clients that train in a round.
        steps: Mean number of local steps of a client in a round.
        largest: Number of examples of the largest client.
    """

    rounds: int
    clients_per_round: int
    steps: float
    largest: int


@dataclass(frozen=True)
class Choice:
    """A backend, ready to train.

    Args:
        backend: The backend's name; never "auto".
        kernel: Object that takes the steps; None for "sequential", which calls
            :func:`fedsel_flwr.clients.training.train`.
        reasons: Backend -> reason against it, for the backends before this one in the list.
    """

    backend: Backend
    kernel: Kernel | NumbaKernel | None
    reasons: dict[str, str]


def choose_backend(
    model: nn.Module,
    loss: Loss,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    settings: TrainingSettings,
    *,
    backend: Backend | None = None,
    size: RunSize | None = None,
    chunk: Callable[[], int] | None = None,
) -> Choice:
    """Choose the fastest backend for a model: the first of this list without a reason against it.

    1. ``"numba"``, compiled loops over one perceptron at a time (:mod:`~fedsel_flwr.clients.batched.numba_mlp`).
       Reasons against it:

       - the run has fewer than 25,000 local steps, or its size is unknown (unless the user asks for "numba");
       - the user asks for "auto", which leaves "numba" out, because its loops take seconds to load;
       - the inputs are not float32 or float64 in one piece on the CPU;
       - the loss is not the cross-entropy of classes;
       - images are augmented;
       - a step has more than 32 examples;
       - manual backprop cannot train the model, see 2;
       - a layer is neither dense nor a rectifier behind a dense layer, or the last layer has a rectifier;
       - Numba is not installed.
    2. ``"manual"``, manual backprop over stacked parameters
       (:mod:`~fedsel_flwr.clients.batched.manual_backprop`). Reasons against it:

       - the model is not an ``nn.Sequential`` of Flatten, Linear, ReLU, Dropout, Conv2d, MaxPool2d and Identity;
       - a layer has hooks, keeps axes, has groups, returns indices, or pads otherwise than with a number of zeros;
       - a parameter is frozen, shared or of another type than the inputs, or there are buffers;
       - a layer cannot read its input, or the outputs do not have the shape (n, k).
    3. ``"vmap"``, ``torch.func.vmap`` over the clients (:mod:`~fedsel_flwr.clients.batched.vmap`). Reasons against it:

       - fewer than 8 clients train together on a CPU, unless the user asks for "vmap". Either the round is that small,
         or no more clients fit into the caches with their activations and parameters;
       - a layer is a batch normalization, an AlphaDropout or a FeatureAlphaDropout;
       - the input of a dropout layer is neither contiguous nor channels last;
       - a forward pass changes parameters, buffers or attributes, or fails for a single example;
       - the outputs of an example depend on the rest of its batch, on chance outside dropout layers, or on earlier
         forward passes;
       - the loss is not a number for each example;
       - torch.func cannot batch one of the operations.
    4. ``"sequential"``, one client after the other. There is no reason against it.

    Kinds and sizes decide, never timing, so that the same scenario is always trained in the same way.

    Args:
        model: The model on the CPU, which is not changed.
        loss: Function of outputs and labels that returns the loss of each example.
        inputs: At least one example on the device of the training, shape (n, …).
        labels: Labels of the examples.
        settings: The settings of training.
        backend: The backend that the user asks for. The value "auto" takes the first possible one after "numba". None
            takes the first possible one.
        size: Size of the run.
        chunk: Returns the number of clients that fit into the caches together; None for no limit.

    Returns:
        The backend, its kernel, and the reasons.

    Raises:
        ParameterError: If the backend that the user asks for cannot train the model.

    Example:
        >>> inputs, labels = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
        >>> settings = TrainingSettings(learning_rate=0.1, batch_size=1)
        >>> model, loss = nn.Sequential(nn.Linear(2, 2)), nn.functional.cross_entropy
        >>> choice = choose_backend(model, loss, inputs, labels, settings)
        >>> choice.backend, choice.reasons
        ('manual', {'numba': 'the length of the run is unknown'})
    """
    builders: dict[Backend, Callable[[], Kernel | NumbaKernel | None]] = {
        "numba": lambda: NumbaKernel(perceptron(model, loss, inputs, labels, settings)),
        "manual": lambda: ManualKernel(plan(model, inputs[:1].cpu()), loss),
        "vmap": lambda: VmapKernel(copy.deepcopy(model).to(inputs.device), loss, inputs, labels),
        "sequential": lambda: None,
    }
    reasons: dict[str, str] = {}
    for name, build in builders.items():
        if backend not in (None, "auto", name):
            continue
        try:
            # Before the kernel is built, which imports Numba.
            if name == "numba" and backend != "numba":
                _check_numba_pays(backend, size)
            if name == "vmap" and backend != "vmap" and inputs.device.type == "cpu":
                _check_vmap_pays(size, chunk)
            kernel = build()
        except Unsupported as refusal:
            if backend == name:
                raise ParameterError(
                    f"backend = {name!r} cannot train this model: {refusal}. Use backend = 'auto'."
                ) from refusal
            reasons[name] = str(refusal)
            continue
        return Choice(name, kernel, reasons)
    raise ParameterError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}. Use backend = 'auto'.")


def convolves(model: nn.Module) -> bool:
    """Return whether a model has convolutions."""
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())


def step_operations(model: nn.Module, settings: TrainingSettings, clients: int) -> float:
    """Count the operations of one step of some clients: six for each parameter and example."""
    return 6.0 * sum(parameter.numel() for parameter in model.parameters()) * clients * settings.batch_size


def _check_numba_pays(backend: Backend | None, size: RunSize | None) -> None:
    if backend == "auto":
        raise Unsupported("backend = 'auto' skips it because its loops take seconds to load")
    if size is None:
        raise Unsupported("the length of the run is unknown")
    if size.rounds * size.clients_per_round * size.steps < NUMBA_STEPS:
        raise Unsupported(f"a run of fewer than {NUMBA_STEPS:,} local steps ends before the compiled loops are loaded")


def _check_vmap_pays(size: RunSize | None, chunk: Callable[[], int] | None) -> None:
    if chunk is not None and (fitting := chunk()) < VMAP_CLIENTS:
        raise Unsupported(
            f"only {fitting} clients fit into the caches, and fewer than {VMAP_CLIENTS} train faster one by one"
        )
    if size is not None and size.clients_per_round < VMAP_CLIENTS:
        raise Unsupported(
            f"a round has {size.clients_per_round} clients, and fewer than {VMAP_CLIENTS} train faster one by one"
        )
