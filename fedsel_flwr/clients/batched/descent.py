"""The step of stochastic gradient descent on stacked parameters, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedsel_flwr.clients.settings import TrainingSettings


class Descent:
    """What torch.optim.SGD does to one model, done to many at once.

    With the gradient g, the received model w0, mu, weight decay d, momentum m and step length r, each step sets
    v = m v + g + mu (w - w0) + d w, from v = 0, and w = w - r v. (FedProx: gradient of mu/2 |w - w0|².)

    Args:
        stack: The models, a tensor a parameter, each of shape (n_models, …); changed in place.
        start: The received model, in the same order, without the first axis.
        settings: How to train.
    """

    def __init__(
        self, stack: Sequence[torch.Tensor], start: Sequence[torch.Tensor], settings: TrainingSettings
    ) -> None:
        self.stack, self._start = stack, start
        self._rate, self._momentum = settings.learning_rate, settings.momentum
        self._decay, self._mu = settings.weight_decay, settings.proximal_mu
        self._shrink = 1 - self._rate * (self._decay + self._mu)
        self._velocity = [torch.zeros_like(w) for w in stack] if self._momentum else []
        self._first: list[torch.Tensor] = []

    def first(self, active: int) -> list[torch.Tensor]:
        """The first so many models, a tensor a parameter."""
        if not self._first or len(self._first[0]) != active:
            self._first = [w[:active] for w in self.stack]
        return self._first

    def step(self, i: int, gradient: torch.Tensor) -> None:
        """Move the first models along the gradient of parameter ``i``, shape (n_active, …), which may be changed."""
        w = self.first(gradient.shape[0])[i]
        if self._momentum:
            v = self._velocity[i][: gradient.shape[0]]
            self._move(i, w, v.mul_(self._momentum).add_(gradient))
        else:
            if self._shrink != 1:
                w.mul_(self._shrink)
            self._pull_back(i, w.sub_(gradient, alpha=self._rate))

    def step_along_product(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Move along the gradient left @ right, shapes (n_active, p, q) and (n_active, q, r), which is never formed."""
        w = self.first(left.shape[0])[i]
        if self._momentum:
            self._move(i, w, self._velocity[i][: left.shape[0]].baddbmm_(left, right, beta=self._momentum))
        else:
            self._pull_back(i, w.baddbmm_(left, right, beta=self._shrink, alpha=-self._rate))

    def _move(self, i: int, w: torch.Tensor, v: torch.Tensor) -> None:
        """Complete the velocity m v + g by its other terms, and move by it."""
        if self._decay or self._mu:
            v.add_(w, alpha=self._decay + self._mu)
        if self._mu:
            v.sub_(self._start[i], alpha=self._mu)
        w.sub_(v, alpha=self._rate)

    def _pull_back(self, i: int, w: torch.Tensor) -> None:
        """Without momentum w - r (g + d w + mu (w - w0)) = (1 - r (d + mu)) w - r g + r mu w0: add the last term."""
        if self._mu:
            w.add_(self._start[i], alpha=self._rate * self._mu)
