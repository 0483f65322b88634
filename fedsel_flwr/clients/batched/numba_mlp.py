"""Training of perceptrons by compiled loops: each client from its first step to its last, several at a time.

Which models and trainings the compiled loops know: perceptrons in small batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.batched.examples import num_steps, order_of_examples
from fedsel_flwr.clients.batched.layers import Flatten, Linear, ReLU
from fedsel_flwr.clients.batched.manual_backprop import plan
from fedsel_flwr.clients.batched.steps import Refused, mean_loss
from fedsel_flwr.clients.objectives import Loss, cross_entropy
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

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


THREAD_OPERATIONS = 20e6
"""Less arithmetic is done before a thread has started (about half a millisecond)."""

Array = npt.NDArray[Any]


class CompiledKernel:
    """Trains clients one by one, each on one thread: what a client gets depends on no other and on no thread.

    Args:
        dense: The model's layers.

    Raises:
        Refused: Numba is not there.
    """

    def __init__(self, dense: Sequence[Dense]) -> None:
        from fedsel_flwr.clients.batched import numba_kernels  # and Numba with it

        if numba_kernels.MISSING:
            raise Refused(f"it needs Numba, as pip installs it with 'fedsel-flwr[fast]': {numba_kernels.MISSING}")
        self._loops, self._classes = numba_kernels, dense[-1].units
        width = dense[0].inputs
        layers: list[tuple[int, int, bool, bool]] = []
        # of each parameter: which, where it begins in the vector, its padded shape there, its own
        self._places: list[tuple[int, int, tuple[int, int], tuple[int, int]]] = []
        self._size = 0
        for layer in dense:
            units = -(-layer.units // numba_kernels.UNITS) * numba_kernels.UNITS
            layers.append((width, units, layer.bias is not None, layer.rectified))
            self._place(layer.weight, (units, width), (layer.units, layer.inputs))
            self._place(layer.bias, (1, units), (1, layer.units))
            width = units
        self._layers = np.array(layers, dtype=np.int64)

    def _place(self, parameter: int | None, padded: tuple[int, int], true: tuple[int, int]) -> None:
        """The next place in the vector of parameters; one without parameter stays zero."""
        if parameter is not None:
            self._places.append((parameter, self._size, padded, true))
        self._size += padded[0] * padded[1]

    def train(
        self,
        stacks: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        rows: Sequence[IntArray],
        data: tuple[torch.Tensor, torch.Tensor],
        settings: TrainingSettings,
        generators: Sequence[np.random.Generator],
        threads: int,
    ) -> FloatArray:
        """Train clients.

        Args:
            stacks: Filled with the trained models, a stack a parameter.
            received: The received model, a tensor a parameter.
            rows: Of each client.
            data: The data set: inputs and classes.
            settings: How to train.
            generators: One a client.
            threads: How many train at a time, at most.

        Returns:
            The mean over each client's steps of the loss before it, NaN when its training diverged, shape (n_clients,).

        Raises:
            ParameterError: There are classes that the model does not know.
        """
        inputs, labels = data[0].flatten(1).numpy(), data[1].numpy()
        constants = np.array(
            [settings.learning_rate, settings.momentum, settings.weight_decay + settings.proximal_mu,
             settings.proximal_mu], inputs.dtype,
        )  # fmt: skip
        start = self._vector(self._size, data[0].dtype)
        for parameter, place in self._views(start):
            place[...] = received[parameter]
        into = [stack.numpy() for stack in stacks]
        losses = np.empty(len(rows))
        left = iter(range(len(rows)))  # of all threads: each takes the next client

        def work() -> None:
            memory = self._memory(settings, data[0].dtype)
            views = list(self._views(memory[0]))
            for client in left:
                order = order_of_examples(rows[client], settings, generators[client])
                self._check(labels[order])
                own = np.empty(num_steps(len(rows[client]), settings), inputs.dtype)
                sizes = len(rows[client]), settings.batch_size
                self._loops.train_one(
                    memory, start, self._layers, self._classes, (inputs, labels), order, sizes, constants, own
                )
                for parameter, place in views:
                    into[parameter][client] = place
                losses[client] = mean_loss(own)

        operations = 6.0 * self._size * sum(num_steps(len(own), settings) for own in rows) * settings.batch_size
        helpers = min(threads, len(rows), int(operations / THREAD_OPERATIONS)) - 1
        if helpers < 1:
            work()
            return losses
        with ThreadPoolExecutor(helpers, thread_name_prefix="fedsel-training") as pool:
            others = [pool.submit(work) for _ in range(helpers)]
            work()
        for other in others:
            other.result()
        return losses

    def _memory(self, settings: TrainingSettings, dtype: torch.dtype) -> tuple[Array, Array, Array, Array]:
        """What one thread needs: parameters, velocity, activations and their gradients."""
        height = settings.batch_size + self._loops.EXAMPLES - 1
        activations = height * int(self._layers[0, 0] + self._layers[:, 1].sum())
        sizes = self._size, self._size if settings.momentum else 0, activations, activations
        return tuple(self._vector(size, dtype) for size in sizes)  # type: ignore[return-value]  # of length four

    def _vector(self, size: int, dtype: torch.dtype) -> Array:
        """Zeros that begin where a line of the cache does, which torch sees to and NumPy does not."""
        return torch.zeros(size, dtype=dtype).numpy()

    def _views(self, vector: Array) -> Iterator[tuple[int, Array]]:
        """The model's parameters in a vector, without the padding."""
        for parameter, begin, (height, width), (units, inputs) in self._places:
            yield parameter, vector[begin : begin + height * width].reshape(height, width)[:units, :inputs]

    def _check(self, labels: IntArray) -> None:
        if labels.min() < 0 or labels.max() >= self._classes:
            raise ParameterError(
                f"expected classes from 0 to {self._classes - 1}, as many as the model has outputs; "
                f"got {labels.min()}…{labels.max()}"
            )
