"""The local training of a round's clients as one computation over stacked parameters.

Which way a model's clients are trained: the fastest that can.

How many clients to train at once: as many as their activations and parameters fit into the processor's cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import FloatArray, one_of, whole
from fedsel_flwr.clients.batched.examples import Examples, Schedule, longest_first, with_generators
from fedsel_flwr.clients.batched.manual_backprop import WrittenKernel, plan
from fedsel_flwr.clients.batched.numba_mlp import CompiledKernel, perceptron
from fedsel_flwr.clients.batched.steps import Descent, Kernel, Refused, Stacks, descend, mean_loss
from fedsel_flwr.clients.batched.vmap import GeneralKernel, train_in_turn
from fedsel_flwr.clients.objectives import CLASSIFICATION, Loss, Objective, set_arrays
from fedsel_flwr.clients.threads import one_thread_each
from fedsel_flwr.clients.training import check_images
from fedsel_flwr.clients.training_settings import TrainingSettings
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


CACHED_BYTES = 12 * 2**20
"""About what caches hold. More clients at once wait for memory, fewer for Python; the optimum is flat."""
DEVICE_BYTES = 2 * 2**30
"""What the activations of a chunk may take of an accelerator's memory."""


def default_chunk(model: nn.Module, inputs: torch.Tensor, batch_size: int, device: torch.device) -> int:
    """Return how many clients to train at once.

    The choice follows from sizes alone. One by timing would vary between runs, and with it the last bits of the sums.

    Args:
        model: The model, in any mode; left as it is.
        inputs: At least one example, where the model is, shape (n, …).
        batch_size: Examples in a step.
        device: Where to train.

    Returns:
        At least 1.
    """
    seen = [0]

    def count(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not list(module.children()):
            seen[0] += output.numel() * output.element_size()

    hooks = [module.register_forward_hook(count) for module in model.modules()]
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(inputs[:1])
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = CACHED_BYTES if device.type == "cpu" else DEVICE_BYTES
    return max(1, budget // max(1, seen[0] * batch_size + parameters))


Arrays = Sequence[npt.NDArray[Any]]
Pairs = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


class BatchedTrainer:
    """Trains the clients of a round together, as :func:`fedsel_flwr.clients.training.train` would one by one.

    Args:
        model: The model; it is copied and stays as it is.
        settings: How every client trains.
        device: Where: "cpu", "cuda", … Examples that are tensors there stay there.
        objective: What the steps minimise; cross-entropy if not given.
        chunk: How many clients at once, at least 1; None: by :func:`default_chunk`.
        way: "compiled": perceptrons that fit into a core's cache, by loops that Numba compiles, where it is installed;
            "written": sequential models of common layers, with the backward pass written out; "general": whatever
            torch.func can batch; "loop": one client after the other, on the CPU; "auto": the first that can, but for
            "compiled", which takes seconds to load.
        threads: On which clients are trained side by side the compiled way; None: as many as torch uses. It changes no
            result.

    Attributes:
        way: The way that was taken; "auto" before the first training.
        reasons: Why the ways before it were not, by way.
        settings: As given.
        stacks: What the stacks of the model look like.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> trainer = BatchedTrainer(model, TrainingSettings(learning_rate=0.1, batch_size=1))
        >>> inputs, labels = np.ones((3, 2), dtype=np.float32), np.array([0, 1, 1])
        >>> clients = Examples(inputs, labels, [np.array([0]), np.array([1, 2])])
        >>> start = [np.zeros((2, 2), dtype=np.float32), np.zeros(2, dtype=np.float32)]
        >>> layers, losses = trainer.train(start, clients, [np.random.default_rng(seed) for seed in range(2)])
        >>> [layer.shape for layer in layers], losses.round(4), trainer.way
        ([(2, 2, 2), (2, 2)], array([0.6931, 0.6238]), 'written')
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings,
        *,
        device: str | torch.device = "cpu",
        objective: Objective = CLASSIFICATION,
        chunk: int | None = None,
        way: Way = "auto",
        threads: int | None = None,
    ) -> None:
        self.way: Way = one_of("way", way, WAYS)  # type: ignore[assignment]
        self.reasons: dict[str, str] = {}
        self._scratch = copy.deepcopy(model).cpu()
        self.settings, self._objective = settings, objective
        self._device = torch.device(device)
        self._chunk = chunk if chunk is None else whole("chunk", chunk, 1)
        self._threads = threads if threads is None else whole("threads", threads, 1)
        self._kernel: Kernel | CompiledKernel | None = None
        self.stacks = Stacks(self._scratch)

    def train(
        self, start: Arrays, clients: Examples | Pairs, generators: Sequence[np.random.Generator]
    ) -> tuple[list[npt.NDArray[Any]], FloatArray]:
        """Train every client from the received model.

        Args:
            start: The received model, in the order of the model's state dictionary.
            clients: Who has what: rows of one data set, or pairs (inputs, labels), which are copied.
            generators: One a client; draws as in :func:`fedsel_flwr.clients.training.train`.

        Returns:
            The trained models, a stack a layer, shape (n_clients, …) each, in the order and types of the model's state
            dictionary; and for each client the mean over its steps of the batch's mean loss before the step, without
            the proximal term, NaN when its training diverged, shape (n_clients,).

        Raises:
            ParameterError: If the received model does not fit, there is not one generator for each client, or there are
                no images to augment.
        """
        examples = with_generators(clients, generators)
        self.prepare(start, examples)
        order = longest_first(examples.sizes, self.settings)
        stacks = self.stacks.new(len(order), "cpu" if self._kernel is None else self._device)
        losses = self.train_into(stacks, start, examples.of(order), [generators[i] for i in order])
        return self.stacks.unsorted([stack.cpu().numpy() for stack in stacks], losses, order)

    def recipe(self) -> dict[str, Any]:
        """The arguments of a trainer that trains like this one, once :meth:`prepare` has settled how."""
        return {
            "model": self._scratch, "settings": self.settings, "objective": self._objective, "chunk": self._chunk,
            "way": self.way,
        }  # fmt: skip

    def prepare(self, start: Arrays, examples: Examples) -> None:
        """Take the received model, and settle the way and the chunk, unless they are: both stay for later rounds."""
        set_arrays(self._scratch, start)
        if not len(examples.rows):
            return
        inputs, labels = examples.on(self._device)
        check_images(self.settings, inputs.ndim)
        if self._kernel is None and self.way != "loop":
            self._kernel, self.way, self.reasons = choose(
                self.way, self._scratch, self._objective.loss, inputs, labels, self.settings
            )
        if self._chunk is None:
            batch_size = min(self.settings.batch_size, max(examples.sizes))
            self._chunk = default_chunk(self._scratch, inputs[:1].cpu(), batch_size, self._device)

    def train_into(
        self,
        stacks: Sequence[torch.Tensor],
        start: Arrays,
        examples: Examples,
        generators: Sequence[np.random.Generator],
    ) -> FloatArray:
        """Train clients from the model that :meth:`prepare` was given, in the order of :func:`longest_first`.

        Args:
            stacks: Filled with the trained models: one an entry of the model's state dictionary.
            start: The received model.
            examples: Who has what.
            generators: One a client.

        Returns:
            The losses.
        """
        losses = np.empty(len(generators))
        kernel, size = self._kernel, self._chunk or 1
        if kernel is None or not len(losses):
            into = [stack.numpy() for stack in stacks] if kernel is None else []
            return train_in_turn(self._scratch, start, examples, self.settings, generators, self._objective, into)
        received = [tensor.detach().to(self._device) for tensor in self._scratch.state_dict().values()]
        data = examples.on(self._device)
        if isinstance(kernel, CompiledKernel):
            threads = self._threads or torch.get_num_threads()
            return kernel.train(stacks, received, examples.rows, data, self.settings, generators, threads)

        def train_chunk(first: int, own_kernel: Kernel) -> None:
            part = slice(first, first + size)
            stack = [whole[part].copy_(own) for whole, own in zip(stacks, received, strict=True)]
            schedule = Schedule(examples.rows[part], self.settings, generators[part])
            descent = Descent(stack, received, self.settings)
            steps = descend(own_kernel, descent, schedule, data).cpu().numpy().astype(np.float64)
            losses[part] = [mean_loss(own[:count]) for own, count in zip(steps.T, schedule.steps, strict=True)]

        self._side_by_side(range(0, len(generators), size), kernel, train_chunk)
        return losses

    def _side_by_side(self, firsts: Sequence[int], kernel: Kernel, train_chunk: Callable[[int, Kernel], None]) -> None:
        """Train the chunks, on a CPU with several threads each chunk on one of them, where that pays.

        Threads that share a chunk's convolutions wait for each other after each; small matrix products would wait for
        Python instead, which runs one thread at a time.
        """
        threads = min(torch.get_num_threads(), len(firsts)) if self._device.type == "cpu" else 1
        if threads < 2 or not isinstance(kernel, WrittenKernel) or not kernel.convolves:
            for first in firsts:
                train_chunk(first, kernel)
            return
        with one_thread_each(threads) as workers:
            chunks = [workers.submit(train_chunk, first, kernel.twin()) for first in firsts]
            for chunk in chunks:
                chunk.result()


def train_batched(
    model: nn.Module,
    start: Arrays,
    clients: Examples | Pairs,
    settings: TrainingSettings,
    generators: Sequence[np.random.Generator],
    *,
    device: str | torch.device = "cpu",
    objective: Objective = CLASSIFICATION,
    chunk: int | None = None,
) -> tuple[list[npt.NDArray[Any]], FloatArray]:
    """Train the clients of one round; arguments and result as in :class:`BatchedTrainer`, which is for many rounds."""
    return BatchedTrainer(model, settings, device=device, objective=objective, chunk=chunk).train(
        start, clients, generators
    )
