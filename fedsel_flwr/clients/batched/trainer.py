"""The local training of a round's clients as one computation over stacked parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import FloatArray, one_of, whole
from fedsel_flwr.clients.augmenting import check_images
from fedsel_flwr.clients.batched.choosing import WAYS, Way, choose
from fedsel_flwr.clients.batched.chunks import default_chunk
from fedsel_flwr.clients.batched.compiled import CompiledKernel
from fedsel_flwr.clients.batched.descent import Descent
from fedsel_flwr.clients.batched.examples import Examples, with_generators
from fedsel_flwr.clients.batched.kernel import Kernel, descend, mean_loss
from fedsel_flwr.clients.batched.looped import train_in_turn
from fedsel_flwr.clients.batched.schedule import Schedule, longest_first
from fedsel_flwr.clients.batched.stacks import Stacks
from fedsel_flwr.clients.batched.threads import one_thread_each
from fedsel_flwr.clients.batched.written import WrittenKernel
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective
from fedsel_flwr.clients.parameters import set_arrays
from fedsel_flwr.clients.settings import TrainingSettings

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
