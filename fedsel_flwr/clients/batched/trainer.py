"""Training of a round's clients as one computation over stacked parameters, with the backend that fits the model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.checks import FloatArray, one_of, whole
from fedsel_flwr.clients.batched.backends import BACKENDS, Backend, RunSize, choose_backend
from fedsel_flwr.clients.batched.examples import Examples, Schedule, longest_first
from fedsel_flwr.clients.batched.manual_backprop import ManualKernel
from fedsel_flwr.clients.batched.numba_mlp import NumbaKernel
from fedsel_flwr.clients.batched.steps import Kernel, StackedSGD, take_steps
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective, fresh_copy, get_arrays, set_arrays
from fedsel_flwr.clients.training import check_images, mean_loss, single_threaded_pool, train
from fedsel_flwr.clients.training_settings import TrainingSettings
from fedsel_flwr.errors import ParameterError

CACHED_BYTES = 12 * 2**20
"""Approximate size of the caches. More clients at once wait for memory, fewer for Python, and the optimum is flat."""
DEVICE_BYTES = 2 * 2**30
"""Memory of an accelerator for the activations of a chunk."""

Arrays = Sequence[npt.NDArray[Any]]
logger = logging.getLogger("fedsel_flwr")


class BatchedTrainer:
    """Batched trainer of a round's clients, equivalent to :func:`fedsel_flwr.clients.training.train` one by one.

    Args:
        model: The model. It is copied and not changed.
        settings: The settings of training, the same for every client.
        device: Device of the training: "cpu", "cuda", … Examples that are tensors on the device stay there.
        objective: The objective whose loss the steps minimise; the default is cross-entropy.
        chunk: Number of clients to train at once, at least 1; None takes :func:`default_chunk`.
        backend: The backend "numba", "manual", "vmap" or "sequential". The value "auto" takes the first possible one
            except "numba", whose loops take seconds to load. None takes the first possible one. See
            :func:`~fedsel_flwr.clients.batched.backends.choose_backend`.
        size: Size of the run, if it is known. Without it, ``backend=None`` does not take "numba".
        threads: Number of threads for the backend "numba"; None takes torch's number. It changes no result.

    Attributes:
        backend: The chosen backend; "auto" before the first training.
        reasons: Backend -> reason against it, for those before the chosen one, see
            :class:`~fedsel_flwr.clients.batched.backends.Choice`.
        settings: The given settings. Those of another round may differ in the learning rate.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> trainer = BatchedTrainer(model, TrainingSettings(learning_rate=0.1, batch_size=1))
        >>> inputs, labels = np.ones((3, 2), dtype=np.float32), np.array([0, 1, 1])
        >>> clients = Examples(inputs, labels, [np.array([0]), np.array([1, 2])])
        >>> start = [np.zeros((2, 2), dtype=np.float32), np.zeros(2, dtype=np.float32)]
        >>> layers, losses = trainer.train(start, clients, [np.random.default_rng(seed) for seed in range(2)])
        >>> [layer.shape for layer in layers], losses.round(4), trainer.backend
        ([(2, 2, 2), (2, 2)], array([0.6931, 0.6238]), 'manual')
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings,
        *,
        device: str | torch.device = "cpu",
        objective: Objective = CLASSIFICATION,
        chunk: int | None = None,
        backend: Backend | None = "auto",
        size: RunSize | None = None,
        threads: int | None = None,
    ) -> None:
        if backend is not None:
            one_of("backend", backend, BACKENDS)
        self.backend: Backend = backend or "auto"
        self.reasons: dict[str, str] = {}
        self._asked, self._size = backend, size
        # Received models are written into the copy, because the caller's model must not change.
        self._scratch = copy.deepcopy(model).cpu()
        self.settings, self._objective = settings, objective
        self._device = torch.device(device)
        self._chunk = chunk if chunk is None else whole("chunk", chunk, 1)
        self._threads = threads if threads is None else whole("threads", threads, 1)
        self._kernel: Kernel | NumbaKernel | None = None
        self._chosen = False
        state = list(self._scratch.state_dict(keep_vars=True).values())
        # Entries that are one tensor (tied weights) are trained at the position of the first entry.
        self._owners = [next(i for i, other in enumerate(state) if other is tensor) for tensor in state]

    def train(
        self, start: Arrays, examples: Examples, generators: Sequence[np.random.Generator]
    ) -> tuple[list[npt.NDArray[Any]], FloatArray]:
        """Train every client from the received model.

        Args:
            start: The received model, in the order of the model's state dictionary.
            examples: The clients' examples.
            generators: One generator for each client; draws as in :func:`fedsel_flwr.clients.training.train`.

        Returns:
            The trained models, a stack for each layer, shape (n_clients, …) each, in the order and types of the model's
            state dictionary. And each client's mean loss, shape (n_clients,), NaN if its training diverged. The mean
            runs over the client's steps, and takes the batch's mean loss before the step, without the proximal term.

        Raises:
            ParameterError: If the received model does not fit, there is not one generator for each client, or there are
                no images to augment.
        """
        if len(generators) != len(examples.rows):
            raise ParameterError(
                f"expected one generator for each client; got {len(generators)} for {len(examples.rows)} clients. Give "
                "as many generators as clients."
            )
        self._prepare(start, examples)
        # At every step, the clients that still train are then the first ones, and a step takes a slice of the stack.
        order = longest_first(examples.sizes, self.settings)
        # The sequential backend copies each trained model to the CPU.
        device = "cpu" if self._kernel is None else self._device
        stacks = [
            torch.empty((len(order), *tensor.shape), dtype=tensor.dtype, device=device)
            for tensor in self._scratch.state_dict().values()
        ]
        losses = self._train_into(stacks, start, examples.subset(order), [generators[i] for i in order])
        layers = [stacks[i].cpu().numpy() for i in self._owners]
        # Indexing would copy the stacks, the largest arrays of a round.
        if (order == np.arange(len(order))).all():
            return layers, losses
        back = np.argsort(order)
        return [layer[back] for layer in layers], losses[back]

    def _prepare(self, start: Arrays, examples: Examples) -> None:
        """Load the received model; at the first call with clients, choose the backend and the chunk for all rounds."""
        set_arrays(self._scratch, start)
        if not len(examples.rows):
            return
        inputs, labels = examples.to(self._device)
        check_images(self.settings, inputs.ndim)
        if self._chosen:
            return

        def chunk() -> int:
            # By the whole run, if known, because a resumed run begins with other clients and must choose the same
            # chunk.
            largest = max(examples.sizes) if self._size is None else self._size.largest
            return default_chunk(self._scratch, inputs[:1].cpu(), min(self.settings.batch_size, largest), self._device)

        choice = choose_backend(
            self._scratch, self._objective.loss, inputs, labels, self.settings, backend=self._asked, size=self._size,
            chunk=chunk,
        )  # fmt: skip
        self._kernel, self.backend, self.reasons = choice.kernel, choice.backend, choice.reasons
        against = "; ".join(f"not {name}: {reason}" for name, reason in choice.reasons.items())
        logger.info("backend %s trains the clients%s", choice.backend, f" ({against})" if against else "")
        self._chunk, self._chosen = self._chunk or chunk(), True

    def _train_into(
        self,
        stacks: Sequence[torch.Tensor],
        start: Arrays,
        examples: Examples,
        generators: Sequence[np.random.Generator],
    ) -> FloatArray:
        """Fill the stacks with the trained models, in the order of :func:`longest_first`; return the mean losses."""
        losses = np.empty(len(generators))
        kernel, size = self._kernel, self._chunk or 1
        # A round without clients may come before any kernel, and needs none.
        if kernel is None or not len(losses):
            template = self._scratch.to(self._device)
            for client, generator in enumerate(generators):
                model = fresh_copy(template, start)
                inputs, labels = examples.of_client(client)
                losses[client] = train(model, inputs, labels, self.settings, generator, self._objective)
                for stack, array in zip(stacks, get_arrays(model), strict=True):
                    stack.numpy()[client] = array
            return losses
        received = [tensor.detach().to(self._device) for tensor in self._scratch.state_dict().values()]
        data = examples.to(self._device)
        if isinstance(kernel, NumbaKernel):
            threads = self._threads or torch.get_num_threads()
            return kernel.train(stacks, received, examples.rows, data, self.settings, generators, threads)

        def train_chunk(first: int, own_kernel: Kernel) -> None:
            part = slice(first, first + size)
            stack = [whole[part].copy_(own) for whole, own in zip(stacks, received, strict=True)]
            schedule = Schedule(examples.rows[part], self.settings, generators[part])
            sgd = StackedSGD(stack, received, self.settings)
            # One transfer per chunk, because reading each loss at once would make an accelerator wait at every step.
            steps = take_steps(own_kernel, sgd, schedule, data).T.tolist()
            losses[part] = [mean_loss(own[:count]) for own, count in zip(steps, schedule.steps, strict=True)]

        self._train_chunks(range(0, len(generators), size), kernel, train_chunk)
        return losses

    def _train_chunks(self, firsts: Sequence[int], kernel: Kernel, train_chunk: Callable[[int, Kernel], None]) -> None:
        """Train the chunks one after the other; convolutions on a CPU with several threads, a chunk on each."""
        threads = min(torch.get_num_threads(), len(firsts)) if self._device.type == "cpu" else 1
        # Threads that share a chunk's convolutions wait for each other after each of them. Small matrix products would
        # wait for Python instead, which runs one thread at a time, so their chunks stay on this thread.
        if threads < 2 or not isinstance(kernel, ManualKernel) or not kernel.convolves:
            for first in firsts:
                train_chunk(first, kernel)
            return
        with single_threaded_pool(threads) as pool:
            # A kernel gathers its inputs in its own buffer, which two threads would overwrite.
            # The list waits for the threads, and raises an error of one.
            list(pool.map(train_chunk, firsts, [kernel.clone() for _ in firsts]))


def default_chunk(model: nn.Module, inputs: torch.Tensor, batch_size: int, device: torch.device) -> int:
    """Return the number of clients to train at once: as many as fit into the caches with activations and parameters.

    The choice follows only from sizes. A choice by timing would vary between runs, and so would the last bits of sums.

    Args:
        model: The model, in any mode, which is not changed.
        inputs: At least one example, on the model's device, shape (n, …).
        batch_size: Number of examples in a step.
        device: Device of the training.

    Returns:
        A number of clients, at least 1.
    """
    activations = 0

    def count(module: nn.Module, args: object, output: object) -> None:
        nonlocal activations
        # A container's output is that of its last layer, which is counted there.
        if isinstance(output, torch.Tensor) and not list(module.children()):
            activations += output.numel() * output.element_size()

    # A forward pass may change what a model holds, so a copy runs it.
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        copied(inputs[:1])
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = CACHED_BYTES if device.type == "cpu" else DEVICE_BYTES
    return max(1, budget // max(1, activations * batch_size + parameters))
