"""Training of any model that torch.func can batch: vmap over the clients of the gradient of the loss.

One client after the other: the way for models that cannot be batched.

Dropout layers that take their masks as inputs, so that a model with dropout is a function without chance.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.batched.examples import Examples
from fedsel_flwr.clients.batched.steps import Batch, Descent, Draw, Refused
from fedsel_flwr.clients.objectives import Loss, Objective, get_arrays, set_arrays
from fedsel_flwr.clients.training import train
from fedsel_flwr.clients.training_settings import TrainingSettings


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


FEATURE_WISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Tape:
    """The masks of one forward pass, in the order in which the layers ask; without masks it records who asks.

    Attributes:
        draws: What was recorded.
    """

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self._masks: list[torch.Tensor] | None = None

    def load(self, masks: Sequence[torch.Tensor] | None) -> None:
        """Give the masks of the next forward pass; None: record it instead, and drop nothing."""
        self._masks = None if masks is None else list(masks)
        if masks is None:
            self.draws = []

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What a dropout layer does."""
        if self._masks is not None:
            return x * self._masks.pop(0)
        channels_last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        if not (x.is_contiguous() or channels_last):
            raise Refused("a dropout layer's input is laid out in an order of its own")
        feature_wise = isinstance(layer, FEATURE_WISE)
        self.draws.append(
            Draw(
                float(layer.p),  # type: ignore[arg-type]
                tuple(x.shape[1:2]) + (1,) * (x.ndim - 2) if feature_wise else tuple(x.shape[1:]),
                torch.channels_last if channels_last and not feature_wise else torch.contiguous_format,
            )
        )
        return x.clone()


class TapedDropout(nn.Module):
    """Stands in a model where a dropout layer was.

    Args:
        layer: The dropout layer.
        tape: Where its masks come from.
    """

    def __init__(self, layer: nn.Module, tape: Tape) -> None:
        super().__init__()
        self._tape, self._layer = tape, [layer]  # in a list: not a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the tape has it."""
        return self._tape.apply(self._layer[0], x)


def with_taped_dropout(model: nn.Module) -> tuple[nn.Module, Tape]:
    """Put taped dropout into a model, in place.

    Raises:
        Refused: For kinds of dropout whose masks are not drawn here.
    """
    tape = Tape()
    taped: dict[nn.Module, TapedDropout] = {}

    def stand_in(module: nn.Module) -> TapedDropout:
        return taped.setdefault(module, TapedDropout(module, tape))

    if type(model) in (nn.Dropout, *FEATURE_WISE):
        return stand_in(model), tape
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and type(child) in (nn.Dropout, *FEATURE_WISE):
                parent._modules[name] = stand_in(child)
            elif isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise Refused(f"the masks of {type(child).__name__} are not drawn for each client")
    return model, tape


MIXING = (nn.modules.batchnorm._BatchNorm,)


class GeneralKernel:
    """torch.func over a model of any kind.

    Args:
        model: The model, left as it is.
        loss: From outputs and labels to the loss of each example.
        inputs: At least one example, shape (n, …).
        labels: Of the examples.

    Raises:
        Refused: If the model cannot be batched, with the reason: it uses chance other than dropout layers, changes
            buffers, treats an example differently for the rest of its batch (as batch normalization does; padding
            would change it), or torch.func cannot batch one of its operations.
    """

    def __init__(self, model: nn.Module, loss: Loss, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        for name, module in model.named_modules():
            if isinstance(module, MIXING):
                raise Refused(f"{type(module).__name__} at {name!r} reads and keeps statistics of whole batches")
        self._model, self._tape = with_taped_dropout(copy.deepcopy(model).train())
        self._loss = loss
        state = list(self._model.state_dict(keep_vars=True).values())
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]  # shared ones once
        self._places = {
            name: next(i for i, other in enumerate(state) if other is tensor)
            for name, tensor in tensors
            if any(other is tensor for other in state)
        }
        with torch.random.fork_rng(devices=[]):  # for a model that draws, and will be refused for it
            self._trained = self._look(inputs, labels)
        self.draws = tuple(self._tape.draws)
        self._gradient = vmap(grad_and_value(self._objective), in_dims=(0, 0, 0, 0, 0), randomness="error")
        self._try(inputs, labels)

    def step(self, descent: Descent, batch: Batch) -> torch.Tensor:
        """Take one step with the first models of the stack; return their losses before it, shape (n_active,)."""
        first = descent.first(len(batch.rows))
        stack = {name: first[i] for name, i in self._places.items()}
        moved = {name: stack[name] for name in self._trained}
        rest = {name: stack[name] for name in stack if name not in moved}
        with torch.no_grad():
            gradients, losses = self._gradient(
                moved, rest, batch.seen(), (batch.labels, batch.weights), list(batch.masks)
            )
            for name in self._trained:
                descent.step(self._places[name], gradients[name])
        return losses  # type: ignore[no-any-return]

    def _objective(
        self,
        moved: dict[str, torch.Tensor],
        rest: dict[str, torch.Tensor],
        inputs: torch.Tensor,
        targets: tuple[torch.Tensor, torch.Tensor],
        masks: list[torch.Tensor],
    ) -> torch.Tensor:
        """One client's loss on its batch."""
        labels, weights = targets
        self._tape.load(masks)
        outputs = functional_call(self._model, {**moved, **rest}, (inputs,))
        losses = self._loss(outputs, labels, reduction="none")
        if losses.shape != weights.shape:
            raise Refused(f"expected one loss for each of {len(weights)} examples, got shape {tuple(losses.shape)}")
        return (losses * weights).sum()

    def _look(self, inputs: torch.Tensor, labels: torch.Tensor) -> list[str]:
        """Record the dropout of a forward pass, check what batching relies on; return which parameters are used."""
        pair = [0, len(inputs) - 1]
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        outputs = []
        for rows in (pair, pair[:1]):
            self._tape.load(None)
            outputs.append(self._model(inputs[rows]))
        if not torch.allclose(outputs[0][:1], outputs[1], rtol=1e-3, atol=1e-4, equal_nan=True):
            raise Refused("its outputs for an example depend on the rest of the batch, or on chance beside nn.Dropout")
        if any(not torch.equal(before[name], buffer) for name, buffer in self._model.named_buffers()):
            raise Refused("a forward pass changes its buffers")
        loss = self._loss(outputs[1], labels[pair[:1]], reduction="sum")
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return [name for name, gradient in zip(named, gradients, strict=True) if gradient is not None]

    def _try(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Batch two clients with one example each; whatever torch.func cannot do shows here."""
        stack = [torch.stack([tensor, tensor]) for tensor in self._model.state_dict().values()]
        rows = torch.zeros(2, 1, dtype=torch.int64, device=inputs.device)
        weights = torch.ones(2, 1, dtype=inputs.dtype, device=inputs.device)
        masks = [torch.ones(2, 1, *draw.shape, dtype=inputs.dtype, device=inputs.device) for draw in self.draws]
        still = TrainingSettings(learning_rate=1e-6, batch_size=1)
        try:
            self.step(Descent(stack, [], still), Batch(inputs, rows, labels[rows], weights, masks))
        except Refused:
            raise
        except Exception as error:  # torch.func raises many kinds
            said = str(error).strip().splitlines() or [""]
            raise Refused(f"torch.func cannot batch it: {type(error).__name__}: {said[0]}") from error
