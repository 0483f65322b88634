"""Manual backprop of sequential models: no autograd, many models at once, parameters changed in place.

:func:`plan` turns a torch model into layers of many models, or gives the reason why it cannot. :class:`ManualKernel`
runs them forward and backward. Each layer updates its parameters as soon as their gradient is computed, so no gradient
of the whole model is ever stored.

Between dense layers, activations have the shape (n_active, width, features). Between convolutions, they are one image
batch of shape (width, n_active * channels, height, width). Each model is a group of this batch, as in a grouped
convolution. The memory layout of groups is channels last, in which oneDNN's grouped convolution and torch's pooling are
several times faster. ``x`` is a layer's input, ``y`` its output, ``g`` the gradient of the loss with respect to ``y``.

A layer updates its own parameters in ``backward``. It must therefore compute the gradient with respect to its input
before the weights change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fedsel_flwr.clients.batched.steps import Batch, DropoutCall, StackedSGD, Unsupported
from fedsel_flwr.clients.objectives import Loss, cross_entropy
from fedsel_flwr.clients.training import crop_flip

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


class Layer(ABC):
    """A layer of all models.

    Attributes:
        trains: Whether the layer has parameters.
    """

    trains: ClassVar[bool] = False

    @abstractmethod
    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Return the output, and the values that `backward` needs."""

    @abstractmethod
    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Update the parameters; if ``wanted``, return the input's gradient, which the caller may change."""


@dataclass(frozen=True)
class Linear(Layer):
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


class ReLU(Layer):
    """y = max(x, 0), in place, because no layer before a rectifier keeps its own output."""

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Keep the shape."""
        y = x.relu_()
        return y, y

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """dL/dx = g where y > 0, else 0; in place."""
        return aten.threshold_backward.grad_input(g, kept, 0, grad_input=g)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Dropout(Layer):
    """y = x m with the drawn mask m. If ``grouped``, the layer is between convolutions."""

    grouped: bool

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


class Flatten(Layer):
    """Flatten layer: (a, n, …) becomes (a, n, features)."""

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Return a view of the input with one axis of features."""
        return x.flatten(2), x.shape

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Return a view of the gradient with the axes of the input."""
        return g.view(kept)


Pair = tuple[int, int]


@dataclass(frozen=True)
class Conv2d(Layer):
    """A convolution with one group for each model; ``weight`` and ``bias`` are positions in the list of parameters.

    Its geometry is the stride, the padding and the dilation.
    """

    weight: int
    bias: int | None
    geometry: tuple[Pair, Pair, Pair]
    trains = True

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Shapes (n, a * inputs, …) to (n, a * outputs, …)."""
        weight = context.parameters[self.weight].flatten(0, 1)
        bias = None if self.bias is None else context.parameters[self.bias].flatten()
        x = _channels_last(x)
        y = torch.conv2d(x, weight, bias, *self.geometry, context.active)
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
            *self.geometry,
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
class MaxPool2d(Layer):
    """The maximum of each window; the windows have a size, stride, padding and dilation, and torch's ``ceil_mode``."""

    windows: tuple[Pair, Pair, Pair, Pair, bool]

    def forward(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, Any]:
        """Shapes (n, channels, height, width) to (n, channels, fewer, fewer)."""
        x = _channels_last(x)
        y, places = aten.max_pool2d_with_indices(x, *self.windows)
        return y, (x, places)

    def backward(self, g: torch.Tensor, kept: Any, sgd: StackedSGD, wanted: bool) -> torch.Tensor | None:
        """Return the gradient at the place of each maximum, and 0 elsewhere."""
        # Only the shape and layout of x are read, because a rectifier may have changed x in place.
        x, places = kept
        return aten.max_pool2d_with_indices_backward(g, x, *self.windows, places)  # type: ignore[no-any-return]


class FlattenGroups(Layer):
    """Flatten layer after convolutions: groups (n, a * channels, h, w) become (a, n, channels * h * w)."""

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


@dataclass(frozen=True)
class Plan:
    """A model's layers.

    Args:
        layers: The layers in the order of the forward pass.
        grouped: Whether the first layer reads groups (a convolution) instead of dense inputs.
        dropout_calls: The calls of dropout layers, in the order of the forward pass.
    """

    layers: tuple[Layer, ...]
    grouped: bool
    dropout_calls: tuple[DropoutCall, ...]


def plan(model: nn.Module, inputs: torch.Tensor) -> Plan:
    """Translate a model into layers of many models.

    Args:
        model: An nn.Sequential, possibly nested, of Flatten, Linear, ReLU, Dropout, Conv2d, MaxPool2d and Identity.
        inputs: At least one example, shape (n, …).

    Returns:
        The layers, still without parameters.

    Raises:
        Unsupported: If the model contains any other layer, with the reason.
    """
    places = {name: i for i, name in enumerate(model.state_dict())}
    modules = _pool_first([(name, m) for name, m in _flat("", model) if not _does_nothing(m)])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A shared parameter comes once. A buffer or a frozen parameter does not come at all.
    if len(trained) != len(places):
        raise Unsupported("some entries of its state are frozen, shared or not parameters")
    if any(parameter.dtype != inputs.dtype for parameter in trained):
        raise Unsupported(f"parameters and inputs must share one type; the inputs are {inputs.dtype}")
    grouped = starts_grouped = inputs.ndim == 4 and any(isinstance(m, nn.Conv2d | nn.MaxPool2d) for _, m in modules)
    layers: list[Layer] = []
    dropout_calls: list[DropoutCall] = []
    x = inputs[:1]
    for name, module in modules:
        try:
            # Only shapes are needed, and a dropout layer would draw from the global generator.
            with torch.no_grad():
                x = nn.functional.relu(x) if isinstance(module, nn.ReLU | nn.Dropout) else module(x)
        except RuntimeError as error:
            raise Unsupported(f"{_named(name, module)} cannot read its input: {error}") from error
        if isinstance(module, nn.Flatten):
            layers.append(FlattenGroups() if grouped else Flatten())
            grouped = False
        elif isinstance(module, nn.Linear):
            if grouped or x.ndim != 2:
                raise Unsupported(f"{_named(name, module)} gets inputs that are not flat")
            layers.append(Linear(places[f"{name}weight"], places.get(f"{name}bias")))
        elif isinstance(module, nn.Dropout):
            dropout_calls.append(DropoutCall(module.p, tuple(x.shape[1:])))
            layers.append(Dropout(grouped))
        else:
            layers.append(ReLU() if isinstance(module, nn.ReLU) else _spatial(name, module, places))
    if x.ndim != 2 or not any(layer.trains for layer in layers):
        raise Unsupported(f"expected outputs of shape (n, k) from layers with parameters; got {tuple(x.shape)}")
    return Plan(tuple(layers), starts_grouped, tuple(dropout_calls))


def _flat(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in order, each with the prefix of its parameters' names."""
    # Manual backprop never calls the module, so its hooks would not run.
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise Unsupported(f"{_named(prefix, module)} has hooks")
    if type(module) is nn.Sequential:
        # named_children() omits a module that comes a second time.
        for name, child in module._modules.items():
            if child is not None:
                yield from _flat(f"{prefix}{name}.", child)
        return
    known = (nn.Flatten, nn.Linear, nn.ReLU, nn.Dropout, nn.Conv2d, nn.MaxPool2d, nn.Identity)
    # Exact types, because a subclass may compute something else.
    if type(module) not in known:
        raise Unsupported(f"{_named(prefix, module)} is not a layer that manual backprop supports")
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        raise Unsupported(f"{_named(prefix, module)} does not flatten all axes")
    yield prefix, module


def _does_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)


def _pool_first(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Rectify after pooling instead of before: the results are equal, and fewer values are rectified."""
    for i in range(len(modules) - 1):
        if isinstance(modules[i][1], nn.ReLU) and isinstance(modules[i + 1][1], nn.MaxPool2d):
            modules[i], modules[i + 1] = modules[i + 1], modules[i]
    return modules


def _spatial(name: str, module: nn.Module, places: dict[str, int]) -> Layer:
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise Unsupported(f"{_named(name, module)} has groups, or padding other than a fixed number of zeros")
        geometry = (_pair(module.stride), _pair(module.padding), _pair(module.dilation))
        return Conv2d(places[f"{name}weight"], places.get(f"{name}bias"), geometry)
    if not isinstance(module, nn.MaxPool2d) or module.return_indices:
        raise Unsupported(f"{_named(name, module)} is not a layer that manual backprop supports")
    size, stride = _pair(module.kernel_size), _pair(module.stride)
    return MaxPool2d((size, stride, _pair(module.padding), _pair(module.dilation), module.ceil_mode))


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _named(prefix: str, module: nn.Module) -> str:
    return f"{type(module).__name__} at {prefix.rstrip('.') or 'the top'!r}"


class ManualKernel:
    """Kernel of the backend "manual": batched matrix products and grouped convolutions.

    Args:
        plan: The model's layers.
        loss: Function of outputs and labels that returns the loss of each example.
    """

    def __init__(self, plan: Plan, loss: Loss) -> None:
        self._plan, self._loss = plan, loss
        self.dropout_calls = plan.dropout_calls
        # No gradient is needed below the first layer with parameters.
        self._first = next(i for i, layer in enumerate(plan.layers) if layer.trains)
        self._inputs = torch.empty(0)

    @property
    def convolves(self) -> bool:
        """Whether the model has convolutions."""
        return self._plan.grouped

    def clone(self) -> ManualKernel:
        """Return the same kernel with separate memory, for another thread."""
        return ManualKernel(self._plan, self._loss)

    @torch.no_grad()
    def step(self, sgd: StackedSGD, batch: Batch) -> torch.Tensor:
        """Take one step with the first models of the stack; return their losses before it, shape (n_active,)."""
        active = batch.rows.shape[0]
        context = ForwardContext(sgd.first(active), iter(batch.masks))
        x = self._gather(batch)
        kept = []
        for layer in self._plan.layers:
            x, own = layer.forward(x, context)
            kept.append(own)
        losses, g = loss_and_gradient(self._loss, x, batch.labels, batch.weights)
        for i in range(len(kept) - 1, self._first - 1, -1):
            # pop() frees each activation as the backward pass proceeds.
            by_input = self._plan.layers[i].backward(g, kept.pop(), sgd, wanted=i > self._first)
            if by_input is not None:
                g = by_input
        return losses

    def _gather(self, batch: Batch) -> torch.Tensor:
        """Gather the batches' inputs in the first layer's layout."""
        shape = batch.inputs.shape[1:]
        rows = batch.rows.T if self._plan.grouped else batch.rows
        size = rows.numel() * shape.numel()
        # One buffer for all steps, because the operating system supplies new memory of this size page by page.
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
    """Return each model's weighted loss, and the gradient of the loss by the outputs.

    Args:
        loss: Function of outputs and labels that returns the loss of each example.
        outputs: Shape (n_active, width, k).
        labels: Shape (n_active, width, …).
        weights: Shape (n_active, width).

    Returns:
        The losses, shape (n_active,), and the gradient, shape (n_active, width, k).
    """
    # Only for classes, not for their probabilities. The closed form avoids autograd, which costs more than the
    # arithmetic.
    if loss is cross_entropy and labels.dtype == torch.int64:
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
