"""The local training of a round's clients as one computation over stacked parameters."""

from __future__ import annotations

import copy
import math
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
from fedsel_flwr.clients.batched.descent import Descent
from fedsel_flwr.clients.batched.examples import Examples, as_examples
from fedsel_flwr.clients.batched.kernel import Kernel, descend
from fedsel_flwr.clients.batched.looped import train_in_turn
from fedsel_flwr.clients.batched.schedule import Schedule, longest_first
from fedsel_flwr.clients.batched.threads import one_thread_each
from fedsel_flwr.clients.batched.written import WrittenKernel
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective
from fedsel_flwr.clients.parameters import set_arrays
from fedsel_flwr.clients.settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

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
        way: "written": sequential models of common layers, with the backward pass written out; "general": whatever
            torch.func can batch; "loop": one client after the other, on the CPU; "auto": the first that can.

    Attributes:
        way: The way that was taken; "auto" before the first training.
        reasons: Why the ways before it were not, by way.

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
    ) -> None:
        self.way: Way = one_of("way", way, WAYS)  # type: ignore[assignment]
        self.reasons: dict[str, str] = {}
        self._scratch = copy.deepcopy(model).cpu()
        self._settings, self._objective = settings, objective
        self._device = torch.device(device)
        self._chunk = chunk if chunk is None else whole("chunk", chunk, 1)
        self._kernel: Kernel | None = None
        state = list(self._scratch.state_dict(keep_vars=True).values())  # where two entries are one tensor, the first
        self._owners = [next(i for i, other in enumerate(state) if other is tensor) for tensor in state]

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
        examples = as_examples(clients)
        if len(generators) != len(examples.rows):
            raise ParameterError(
                f"expected one generator for each client; got {len(generators)} for {len(examples.rows)} clients"
            )
        set_arrays(self._scratch, start)
        data = examples.on(self._device)
        if len(examples.rows):
            check_images(self._settings, data[0].ndim)
        if len(examples.rows) and (self._kernel is None and self.way != "loop"):
            self._kernel, self.way, self.reasons = choose(self.way, self._scratch, self._objective.loss, *data)
        if self._kernel is None or not len(examples.rows):
            return train_in_turn(self._scratch, start, examples, self._settings, generators, self._objective)
        return self._train_stacks(self._kernel, examples, data, generators)

    def _train_stacks(
        self,
        kernel: Kernel,
        examples: Examples,
        data: tuple[torch.Tensor, torch.Tensor],
        generators: Sequence[np.random.Generator],
    ) -> tuple[list[npt.NDArray[Any]], FloatArray]:
        received = [tensor.detach().to(self._device) for tensor in self._scratch.state_dict().values()]
        stacks = [tensor.new_empty((len(generators), *tensor.shape)) for tensor in received]
        losses = np.empty(len(generators))
        order = longest_first(examples.sizes, self._settings)
        if self._chunk is None:
            batch_size = min(self._settings.batch_size, max(examples.sizes))
            self._chunk = default_chunk(self._scratch, data[0][:1].cpu(), batch_size, self._device)
        size = self._chunk

        def train_chunk(first: int, own_kernel: Kernel) -> None:
            part = order[first : first + size]
            stack = [whole[first : first + size].copy_(own) for whole, own in zip(stacks, received, strict=True)]
            rows, own_generators = [examples.rows[i] for i in part], [generators[i] for i in part]
            schedule = Schedule(rows, self._settings, own_generators)
            descent = Descent(stack, received, self._settings)
            steps = descend(own_kernel, descent, schedule, data).cpu().numpy().astype(np.float64)
            sums = np.array([math.fsum(own) if np.isfinite(own).all() else math.nan for own in steps.T])
            losses[part] = sums / schedule.steps

        self._side_by_side(range(0, len(order), size), kernel, train_chunk)
        layers = [stacks[i].cpu().numpy() for i in self._owners]
        if (order == np.arange(len(order))).all():
            return layers, losses
        back = np.argsort(order)
        return [layer[back] for layer in layers], losses

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
