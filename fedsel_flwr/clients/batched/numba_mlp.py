"""Backend "numba": trains perceptrons in small batches, one client at a time on each thread.

:func:`perceptron` reads a model's layers, or gives the reason why the compiled loops cannot train it.
:class:`NumbaKernel` trains the clients.
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
from fedsel_flwr.clients.batched.examples import order_of_examples
from fedsel_flwr.clients.batched.manual_backprop import Flatten, Linear, ReLU, plan
from fedsel_flwr.clients.batched.steps import Unsupported
from fedsel_flwr.clients.objectives import Loss, cross_entropy
from fedsel_flwr.clients.training import mean_loss
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

MOST_EXAMPLES = 32
"""Largest number of examples in a step. In larger batches torch's products of matrices are as fast, or faster."""
THREAD_OPERATIONS = 20e6
"""Arithmetic operations in the time that a thread takes to start (about half a millisecond)."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dense:
    """A dense layer: positions of its parameters in the model's state, its sizes, and whether a rectifier follows."""

    weight: int
    bias: int | None
    inputs: int
    units: int
    rectified: bool = False


def perceptron(
    model: nn.Module, loss: Loss, inputs: torch.Tensor, labels: torch.Tensor, settings: TrainingSettings
) -> list[Dense]:
    """Read the layers of a perceptron.

    Args:
        model: The model on the CPU, which is not changed.
        loss: Function of outputs and labels that returns the loss of each example.
        inputs: At least one example, shape (n, …).
        labels: Labels of the examples.
        settings: The settings of training.

    Raises:
        Unsupported: If the model or its training is of another kind.
    """
    if inputs.device.type != "cpu" or not inputs.is_contiguous() or inputs.dtype not in (torch.float32, torch.float64):
        raise Unsupported("it needs contiguous inputs of float32 or float64 on the CPU")
    if loss is not cross_entropy or labels.dtype != torch.int64 or labels.ndim != 1:
        raise Unsupported("it supports only the cross-entropy of classes")
    if settings.augmentation != "none":
        raise Unsupported("it does not support augmentation")
    if settings.batch_size > MOST_EXAMPLES:
        raise Unsupported(f"it is slower for batches of more than {MOST_EXAMPLES} examples")
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
            raise Unsupported("it supports only dense layers, with or without a ReLU after each")
    if layers[-1].rectified:
        raise Unsupported("its last layer must not be followed by a ReLU")
    return layers


class NumbaKernel:
    """Kernel of the backend "numba": trains clients one by one, each on one thread.

    A client's result depends neither on the other clients nor on the number of threads.

    Args:
        dense: The model's layers.

    Raises:
        Unsupported: If Numba is not installed.
    """

    def __init__(self, dense: Sequence[Dense]) -> None:
        # Imported here, because importing Numba takes a second, which most runs do not need to spend.
        from fedsel_flwr.clients.batched import numba_kernels

        if numba_kernels.MISSING:
            raise Unsupported(f"it needs Numba, which pip installs with 'fedsel-flwr[sim]': {numba_kernels.MISSING}")
        self._kernels, self._classes = numba_kernels, dense[-1].units
        width = dense[0].inputs
        layers: list[tuple[int, int, bool, bool]] = []
        # For each parameter: its position in the state, its first element in the vector, its padded shape, its shape.
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
        """Assign the next position in the vector of parameters; the position of a missing bias stays zero."""
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
            stacks: Receives the trained models, a stack for each parameter.
            received: The received model, a tensor for each parameter.
            rows: Rows of each client.
            data: The data set: inputs and classes.
            settings: The settings of training.
            generators: One generator for each client.
            threads: Largest number of threads.

        Returns:
            For each client the mean over its steps of the loss before the step, NaN if its training diverged, shape
            (n_clients,).

        Raises:
            ParameterError: If the labels have classes that the model does not have.
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
        # One iterator for all threads: each thread takes the next client as soon as it is free. The interpreter's lock
        # makes `next` of a range iterator atomic.
        remaining = iter(range(len(rows)))

        def work() -> None:
            memory = self._memory(settings, data[0].dtype)
            views = list(self._views(memory[0]))
            for client in remaining:
                order = order_of_examples(rows[client], settings, generators[client])
                # Otherwise the loops would read and write outside their arrays.
                self._check_classes(labels[order])
                own = np.empty(settings.steps(len(rows[client])), inputs.dtype)
                sizes = len(rows[client]), settings.batch_size
                self._kernels.train_one(
                    memory, start, self._layers, self._classes, (inputs, labels), order, sizes, constants, own
                )
                for parameter, place in views:
                    into[parameter][client] = place
                losses[client] = mean_loss(own.tolist())

        operations = 6.0 * self._size * sum(settings.steps(len(own)) for own in rows) * settings.batch_size
        # This thread trains too.
        others = max(0, min(threads, len(rows), int(operations / THREAD_OPERATIONS)) - 1)
        # The loops release the interpreter's lock. The pool starts no thread before a call.
        with ThreadPoolExecutor(others or 1, thread_name_prefix="fedsel-training") as pool:
            futures = [pool.submit(work) for _ in range(others)]
            work()
        # Raises the error of a thread.
        for future in futures:
            future.result()
        return losses

    def _memory(self, settings: TrainingSettings, dtype: torch.dtype) -> tuple[Array, Array, Array, Array]:
        """Return the arrays of one thread: parameters, velocity, activations and their gradients."""
        height = settings.batch_size + self._kernels.EXAMPLES - 1
        activations = height * int(self._layers[0, 0] + self._layers[:, 1].sum())
        sizes = self._size, self._size if settings.momentum else 0, activations, activations
        return tuple(self._vector(size, dtype) for size in sizes)  # type: ignore[return-value]  # of length four

    def _vector(self, size: int, dtype: torch.dtype) -> Array:
        """Return zeros."""
        # torch's allocator begins at a cache line, and NumPy's does not.
        return torch.zeros(size, dtype=dtype).numpy()

    def _views(self, vector: Array) -> Iterator[tuple[int, Array]]:
        """Yield the model's parameters in a vector, without the padding."""
        for parameter, begin, (height, width), (units, inputs) in self._places:
            yield parameter, vector[begin : begin + height * width].reshape(height, width)[:units, :inputs]

    def _check_classes(self, labels: IntArray) -> None:
        if labels.min() < 0 or labels.max() >= self._classes:
            raise ParameterError(
                f"expected classes from 0 to {self._classes - 1}, as many as the model has outputs; "
                f"got {labels.min()}…{labels.max()}. Give the model an output for each class."
            )
