"""Layers of many models at once for manual backprop: forward pass, backward pass and step.

Between dense layers, activations have the shape (n_active, width, features). Between convolutions, they are one image
batch of shape (width, n_active * channels, height, width). Each model is a group of this batch, as in a grouped
convolution. The memory layout of groups is channels last, in which oneDNN's grouped convolution and torch's pooling are
several times faster. ``x`` is a layer's input, ``y`` its output, ``g`` the gradient of the loss with respect to ``y``.

A layer updates its own parameters in ``backward``. It must therefore compute the gradient with respect to its input
before the weights change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedsel_flwr.clients.batched.steps import StackedSGD

aten = torch.ops.aten


@dataclass(frozen=True)
class ForwardContext:
    """Parameters and dropout masks of one forward pass.

    Args:
        parameters: Parameters of the models that take the step, each of shape (n_active, …).
        masks: Dropout masks, in the order of the calls.
    """

    parameters: Sequence[torch.Tensor]
    masks: Iterator[torch.Tensor]

    @property
    def active(self) -> int:
        """Number of models that take the step."""
        return self.parameters[0].shape[0]


class Layer(Protocol):
    """A layer of all models."""

    @property
    def trains(self) -> bool:
        """Whether the layer has parameters."""

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Return the output, and the values that `backward` needs."""

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Update the parameters; if ``wanted``, return the input's gradient, which the caller may change."""


@dataclass(frozen=True)
class Linear:
    """y = x W' + b, for each model; ``weight`` and ``bias`` are positions in the list of parameters."""

    weight: int
    bias: int | None
    trains = True

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Shapes (a, n, inputs) to (a, n, outputs)."""
        transposed = context.parameters[self.weight].transpose(1, 2)
        if self.bias is None:
            return torch.bmm(x, transposed), x
        return torch.baddbmm(context.parameters[self.bias].unsqueeze(1), x, transposed), x

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """dL/dx = g W, dL/dW = g' x, dL/db = sum of g over the examples."""
        # Before the step, which changes W in place.
        by_input = torch.bmm(g, sgd.first(g.shape[0])[self.weight]) if wanted else None
        sgd.step_along_product(self.weight, g.transpose(1, 2), kept)
        if self.bias is not None:
            sgd.step(self.bias, g.sum(1))
        return by_input


@dataclass(frozen=True)
class ReLU:
    """y = max(x, 0), in place, because no layer before a rectifier keeps its own output."""

    trains = False

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Keep the shape."""
        y = x.relu_()
        return y, y

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """dL/dx = g where y > 0, else 0; in place."""
        return aten.threshold_backward.grad_input(g, kept, 0, grad_input=g)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Dropout:
    """y = x m with the drawn mask m. If ``grouped``, the layer is between convolutions."""

    grouped: bool
    trains = False

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Keep the shape."""
        mask = next(context.masks)
        # Masks are drawn client by client, but groups have the batch as the first axis.
        if self.grouped:
            mask = mask.transpose(0, 1).flatten(1, 2)
        return x * mask, mask

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """dL/dx = g m."""
        return g.mul_(kept)


@dataclass(frozen=True)
class Flatten:
    """Flatten layer: (a, n, …) becomes (a, n, features)."""

    trains = False

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Return a view of the input with one axis of features."""
        return x.flatten(2), x.shape

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Return a view of the gradient with the axes of the input."""
        return g.view(kept)


Pair = tuple[int, int]


@dataclass(frozen=True)
class Conv2d:
    """A convolution with one group for each model; ``weight`` and ``bias`` are positions in the list of parameters."""

    weight: int
    bias: int | None
    stride: Pair
    padding: Pair
    dilation: Pair
    trains = True

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Shapes (n, a * inputs, …) to (n, a * outputs, …)."""
        weight = context.parameters[self.weight].flatten(0, 1)
        bias = None if self.bias is None else context.parameters[self.bias].flatten()
        x = _channels_last(x)
        y = torch.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, context.active)
        return _channels_last(y), x

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Compute the gradients of a grouped convolution with respect to its input, weight and bias."""
        shape = sgd.stack[self.weight].shape[1:]
        active = g.shape[1] // shape[0]
        g = _channels_last(g)
        by_input, by_weight, _ = aten.convolution_backward(
            g,
            kept,
            sgd.first(active)[self.weight].flatten(0, 1),
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            active,
            (wanted, True, False),
        )
        sgd.step(self.weight, by_weight.view(active, *shape))
        if self.bias is not None:
            # Faster than the sum in convolution_backward, which therefore does not compute this gradient.
            sgd.step(self.bias, g.sum((0, 2, 3)).view(active, -1))
        return by_input  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MaxPool2d:
    """The maximum of each window."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool
    trains = False

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Shapes (n, channels, height, width) to (n, channels, fewer, fewer)."""
        x = _channels_last(x)
        y, places = aten.max_pool2d_with_indices(
            x, self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode
        )
        return y, (x, places)

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Return the gradient at the place of each maximum, and 0 elsewhere."""
        # Only the shape and layout of x are read, because a rectifier may have changed x in place.
        x, places = kept
        windows = (self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode)
        return aten.max_pool2d_with_indices_backward(g, x, *windows, places)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FlattenGroups:
    """Flatten layer after convolutions: groups (n, a * channels, h, w) become (a, n, channels * h * w)."""

    trains = False

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Return the features in the order (channel, row, column), as torch's Flatten does."""
        groups = x.view(len(x), context.active, -1, *x.shape[2:])
        return groups.transpose(0, 1).reshape(context.active, len(x), -1), groups.shape

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Return the gradient in the layout of groups."""
        n, active, channels, height, width = kept
        shape = (n, active * channels, height, width)
        by_input = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
        # Channels last here, because otherwise the next layer would copy it.
        by_input.view(kept).copy_(g.view(active, n, channels, height, width).transpose(0, 1))
        return by_input


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)
