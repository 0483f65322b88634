"""Training of any model that torch.func can batch: vmap over the clients of the gradient of the loss."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fedsel_flwr.clients.batched.descent import Descent
from fedsel_flwr.clients.batched.kernel import Batch
from fedsel_flwr.clients.batched.refusal import Refused
from fedsel_flwr.clients.batched.tape import with_taped_dropout
from fedsel_flwr.clients.objectives import Loss
from fedsel_flwr.clients.settings import TrainingSettings

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
