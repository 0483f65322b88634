"""Layers of many models at once: forward, backward and the step, written out.

Between dense layers activations have the shape (n_active, width, features). Between convolutions they are one image
batch of shape (width, n_active * channels, height, width), channels last, in which each model is a group: that is what
a grouped convolution reads. ``x`` is a layer's input, ``y`` its output, ``g`` the gradient of the loss by ``y``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedsel_flwr.clients.batched.descent import Descent

aten = torch.ops.aten


@dataclass(frozen=True)
class Now:
    """What the layers of one forward pass see.

    Args:
        parameters: Of the models that take the step, each of shape (n_active, …).
        masks: Of the dropout, in the order of the calls.
    """

    parameters: Sequence[torch.Tensor]
    masks: Iterator[torch.Tensor]

    @property
    def active(self) -> int:
        """How many models take the step."""
        return self.parameters[0].shape[0]


class Layer(Protocol):
    """A layer of all models."""

    @property
    def trains(self) -> bool:
        """Whether it has parameters."""

    def forward(self, x: torch.Tensor, now: Now) -> tuple[torch.Tensor, Any]:
        """Return the output, and what `backward` needs."""

    def backward(self, g: torch.Tensor, kept: Any, descent: Descent, wanted: bool) -> torch.Tensor | None:
        """Take the parameters' step; return the gradient by the input, which is the caller's, if it is wanted."""


@dataclass(frozen=True)
class Linear:
    """y = x W' + b, for each model; ``weight`` and ``bias`` are places in the list of parameters."""

    weight: int
    bias: int | None
    trains = True

    def forward(self, x: torch.Tensor, now: Now) -> tuple[torch.Tensor, Any]:
        """Shapes (a, n, inputs) to (a, n, outputs)."""
        transposed = now.parameters[self.weight].transpose(1, 2)
        if self.bias is None:
            return torch.bmm(x, transposed), x
        return torch.baddbmm(now.parameters[self.bias].unsqueeze(1), x, transposed), x

    def backward(self, g: torch.Tensor, kept: Any, descent: Descent, wanted: bool) -> torch.Tensor | None:
        """dL/dx = g W; dL/dW = g' x; dL/db = sum of g over the examples."""
        by_input = torch.bmm(g, descent.first(g.shape[0])[self.weight]) if wanted else None
        descent.step_along_product(self.weight, g.transpose(1, 2), kept)
        if self.bias is not None:
            descent.step(self.bias, g.sum(1))
        return by_input


@dataclass(frozen=True)
class ReLU:
    """y = max(x, 0), in place: no layer before it keeps its own output."""

    trains = False

    def forward(self, x: torch.Tensor, now: Now) -> tuple[torch.Tensor, Any]:
        """Any shape."""
        y = x.relu_()
        return y, y

    def backward(self, g: torch.Tensor, kept: Any, descent: Descent, wanted: bool) -> torch.Tensor | None:
        """dL/dx = g where y > 0, else 0; in place."""
        return aten.threshold_backward.grad_input(g, kept, 0, grad_input=g)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Dropout:
    """y = x m with the mask m that was drawn; ``grouped``: between convolutions."""

    grouped: bool
    trains = False

    def forward(self, x: torch.Tensor, now: Now) -> tuple[torch.Tensor, Any]:
        """Any shape."""
        mask = next(now.masks)
        if self.grouped:
            mask = mask.transpose(0, 1).flatten(1, 2)
        return x * mask, mask

    def backward(self, g: torch.Tensor, kept: Any, descent: Descent, wanted: bool) -> torch.Tensor | None:
        """dL/dx = g m."""
        return g.mul_(kept)


@dataclass(frozen=True)
class Flatten:
    """From (a, n, …) to (a, n, features)."""

    trains = False

    def forward(self, x: torch.Tensor, now: Now) -> tuple[torch.Tensor, Any]:
        """Only a view."""
        return x.flatten(2), x.shape

    def backward(self, g: torch.Tensor, kept: Any, descent: Descent, wanted: bool) -> torch.Tensor | None:
        """The same view."""
        return g.view(kept)
