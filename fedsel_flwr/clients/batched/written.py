"""Training of sequential models with the backward pass written out: no autograd, parameters changed in place."""

from __future__ import annotations

import torch

from fedsel_flwr.clients.augmenting import crop_flip
from fedsel_flwr.clients.batched.descent import Descent
from fedsel_flwr.clients.batched.kernel import Batch
from fedsel_flwr.clients.batched.layers import Now
from fedsel_flwr.clients.batched.planning import Plan
from fedsel_flwr.clients.objectives import Loss, cross_entropy


class WrittenKernel:
    """Batched matrix products and grouped convolutions.

    Args:
        plan: The model's layers.
        loss: From outputs and labels to the loss of each example.
    """

    def __init__(self, plan: Plan, loss: Loss) -> None:
        self._plan, self._loss = plan, loss
        self.draws = plan.draws
        self._first = next(i for i, layer in enumerate(plan.layers) if layer.trains)
        self._inputs = torch.empty(0)

    @property
    def convolves(self) -> bool:
        """Whether there are convolutions."""
        return self._plan.grouped

    def twin(self) -> WrittenKernel:
        """The same kernel with memory of its own, for another thread."""
        return WrittenKernel(self._plan, self._loss)

    @torch.no_grad()
    def step(self, descent: Descent, batch: Batch) -> torch.Tensor:
        """Take one step with the first models of the stack; return their losses before it, shape (n_active,)."""
        active = batch.rows.shape[0]
        now = Now(descent.first(active), iter(batch.masks))
        x = self._gather(batch)
        kept = []
        for layer in self._plan.layers:
            x, own = layer.forward(x, now)
            kept.append(own)
        losses, g = loss_and_gradient(self._loss, x, batch.labels, batch.weights)
        for i in range(len(kept) - 1, self._first - 1, -1):
            by_input = self._plan.layers[i].backward(g, kept.pop(), descent, wanted=i > self._first)
            if by_input is not None:
                g = by_input
        return losses

    def _gather(self, batch: Batch) -> torch.Tensor:
        """The batches' inputs in the first layer's layout, in a buffer that is used again."""
        shape = batch.inputs.shape[1:]
        rows = batch.rows.T if self._plan.grouped else batch.rows
        size = rows.numel() * shape.numel()
        if self._inputs.numel() < size or self._inputs.device != batch.inputs.device:
            self._inputs = torch.empty(size, dtype=batch.inputs.dtype, device=batch.inputs.device)
        into = self._inputs[:size].view(rows.numel(), *shape)
        torch.index_select(batch.inputs, 0, rows.reshape(-1), out=into)
        if batch.views is not None:
            into = crop_flip(into, (batch.views.T if self._plan.grouped else batch.views).reshape(-1))
        x = into.view(*rows.shape, *shape)
        return x.flatten(1, 2) if self._plan.grouped else x


def loss_and_gradient(
    loss: Loss, outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each model's weighted loss and its gradient by the outputs.

    Args:
        loss: From outputs and labels to the loss of each example.
        outputs: Shape (n_active, width, k).
        labels: Shape (n_active, width, …).
        weights: Shape (n_active, width).

    Returns:
        Shapes (n_active,) and (n_active, width, k).
    """
    if loss is cross_entropy and labels.dtype == torch.int64:  # classes, not their probabilities
        targets = labels.unsqueeze(-1)
        logs = torch.log_softmax(outputs, -1)
        losses = -(logs.gather(-1, targets).squeeze(-1) * weights).sum(1)
        g = logs.exp_()  # dL/dz = weight (softmax(z) - one-hot(label))
        g.scatter_add_(-1, targets, torch.full_like(g[..., :1], -1.0))
        return losses, g.mul_(weights.unsqueeze(-1))
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        weighted = loss(leaf.flatten(0, 1), labels.flatten(0, 1), reduction="none").view_as(weights) * weights
        (g,) = torch.autograd.grad(weighted.sum(), leaf)
    return weighted.detach().sum(1), g
