"""vmap over the clients of a round: training of any model that torch.func can batch.

torch.func batches only functions without randomness and without side effects. Dropout layers are therefore replaced by
layers that read their masks from a tape (:class:`MaskTape`). The training draws the masks beforehand.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fedsel_flwr.clients.batched.steps import Batch, DropoutCall, StackedSGD, Unsupported
from fedsel_flwr.clients.objectives import Loss
from fedsel_flwr.clients.training_settings import TrainingSettings

FEATURE_WISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# The base class of all kinds of batch normalization, which is private in torch.
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
COMPARED, DRAWS = 4, 2
"""Number of examples whose outputs are compared, and number of random changes of the parameters."""

Named = dict[str, torch.Tensor]
"""Name of a parameter or buffer -> its value."""
PaddedBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]
"""A client's inputs, labels, weights and dropout masks."""


class VmapKernel:
    """Kernel of the backend "vmap": torch.func over a model of any kind.

    Args:
        model: The model, which is not changed.
        loss: Function of outputs and labels that returns the loss of each example.
        inputs: At least one example, shape (n, …).
        labels: Labels of the examples.

    Raises:
        Unsupported: If the model cannot be batched, with one of these reasons. It draws random numbers outside dropout
            layers. A forward pass fails for one example, or changes parameters, buffers or attributes. An example's
            result depends on the rest of its batch, as in batch normalization, so padding would change it. Or
            torch.func cannot batch one of its operations.
    """

    def __init__(self, model: nn.Module, loss: Loss, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        for name, module in model.named_modules():
            if isinstance(module, BATCH_NORMS):
                raise Unsupported(f"{type(module).__name__} at {name!r} uses statistics of the whole batch")
        self._model, self._tape = with_replayed_dropout(copy.deepcopy(model).train())
        self._loss = loss
        state = list(self._model.state_dict(keep_vars=True).values())
        # named_parameters() has a shared tensor once, but the state dictionary has it under each of its names.
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        self._places = {
            name: next(i for i, other in enumerate(state) if other is tensor)
            for name, tensor in tensors
            if any(other is tensor for other in state)
        }
        # A model that draws random numbers will be refused, but must not change the global generator.
        with torch.random.fork_rng(devices=[]):
            self._check_forward_passes(inputs)
            self._trained = self._used_parameters(inputs, labels)
        self.dropout_calls = tuple(self._tape.calls)
        self._gradient = vmap(grad_and_value(self._objective), randomness="error")
        self._check_vmap(inputs, labels)

    def step(self, sgd: StackedSGD, batch: Batch) -> torch.Tensor:
        """Take one step with the first models of the stack; return their losses before it, shape (n_active,)."""
        first = sgd.first(len(batch.rows))
        stack = {name: first[i] for name, i in self._places.items()}
        moved = {name: stack[name] for name in self._trained}
        rest = {name: stack[name] for name in stack if name not in moved}
        with torch.no_grad():
            examples = batch.seen(), batch.labels, batch.weights, list(batch.masks)
            gradients, losses = self._gradient(moved, rest, examples)
            for name in self._trained:
                sgd.step(self._places[name], gradients[name])
        return losses  # type: ignore[no-any-return]

    def _objective(self, moved: Named, rest: Named, examples: PaddedBatch) -> torch.Tensor:
        """Return one client's loss on its batch."""
        inputs, labels, weights, masks = examples
        self._tape.load(masks)
        outputs = functional_call(self._model, {**moved, **rest}, (inputs,))
        losses = self._loss(outputs, labels, reduction="none")
        if losses.shape != weights.shape:
            raise Unsupported(f"expected one loss for each of {len(weights)} examples, got shape {tuple(losses.shape)}")
        return (losses * weights).sum()

    def _check_forward_passes(self, inputs: torch.Tensor) -> None:
        """Compare the outputs for examples alone and in one batch, at the model's parameters and at random ones.

        A head or a gate that begins at zero hides its input, so the parameters of the model alone are not enough.
        """
        rows = sorted({i * (len(inputs) - 1) // (COMPARED - 1) for i in range(COMPARED)})
        rows = rows if len(rows) > 1 else rows * 2
        generator = torch.Generator().manual_seed(0)
        for draw in range(1 + DRAWS):
            tried = copy.deepcopy(self._model)
            for parameter in tried.parameters() if draw else ():
                if parameter.is_floating_point():
                    # About the size of usual initial weights; gains and biases have one axis.
                    fan_in = max(1, parameter[:1].numel()) if parameter.ndim > 1 else 4
                    noise = torch.randn(parameter.shape, generator=generator) * fan_in**-0.5
                    parameter.data += noise.to(parameter)
            before = copy.deepcopy(tried)
            try:
                together, *alone = (self._outputs(tried, inputs[own]) for own in (rows, *([row] for row in rows)))
            except Unsupported:
                raise
            # The sequential backend runs a single example only if a batch is that small. A model may raise any error.
            except Exception as error:
                raise Unsupported(f"a forward pass with one example fails: {type(error).__name__}: {error}") from error
            # Relative to the largest output, because random parameters may make all outputs large.
            scale = float(together.detach().nan_to_num().abs().max()) if together.numel() else 0.0
            if not torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-4 * scale, equal_nan=True):
                raise Unsupported(
                    "its outputs for an example depend on the rest of the batch, or on random numbers outside "
                    "nn.Dropout, or on earlier forward passes"
                )
            if changed := _changed(before, tried):
                raise Unsupported(f"a forward pass changes its {changed}")

    def _outputs(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        self._tape.load(None)
        outputs: torch.Tensor = model(inputs)
        return outputs

    def _used_parameters(self, inputs: torch.Tensor, labels: torch.Tensor) -> list[str]:
        """Record a forward pass's dropout, and return the names of the parameters that it uses."""
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        loss = self._loss(self._outputs(self._model, inputs[:1]), labels[:1], reduction="sum")
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return [name for name, gradient in zip(named, gradients, strict=True) if gradient is not None]

    def _check_vmap(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Batch two clients with one example each, and refuse operations that torch.func cannot batch."""
        stack = [torch.stack([tensor, tensor]) for tensor in self._model.state_dict().values()]
        rows = torch.zeros(2, 1, dtype=torch.int64, device=inputs.device)
        weights = torch.ones(2, 1, dtype=inputs.dtype, device=inputs.device)
        masks = [torch.ones(2, 1, *call.shape, dtype=inputs.dtype, device=inputs.device) for call in self.dropout_calls]
        still = TrainingSettings(learning_rate=1e-6, batch_size=1)
        try:
            self.step(StackedSGD(stack, [], still), Batch(inputs, rows, labels[rows], weights, masks))
        except Unsupported:
            raise
        # torch.func raises many kinds of errors.
        except Exception as error:
            said = str(error).strip().splitlines() or [""]
            raise Unsupported(f"torch.func cannot batch it: {type(error).__name__}: {said[0]}") from error


def _changed(before: nn.Module, after: nn.Module) -> str:
    """Return what forward passes changed in a model: "parameters", "buffers", "attributes", or nothing."""
    pairs = list(zip(before.modules(), after.modules(), strict=True))
    for kind, table in (("parameters", "_parameters"), ("buffers", "_buffers"), ("attributes", "__dict__")):
        if not all(_same(getattr(one, table), getattr(other, table)) for one, other in pairs):
            return kind
    return ""


def _same(one: Any, other: Any) -> bool:
    """Return whether two attributes have the same numbers; objects of unknown classes count as the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor | np.ndarray):
        # NaN differs from itself, but not from NaN in a copy.
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or one != one if isinstance(one, int | float | str) else True


class MaskTape:
    """Dropout masks of one forward pass, in the order of the layers' calls; without masks it records the calls.

    Attributes:
        calls: The recorded calls.
        masks: The masks that are not used yet; None while calls are recorded.
    """

    def __init__(self) -> None:
        self.calls: list[DropoutCall] = []
        self.masks: list[torch.Tensor] | None = None

    def load(self, masks: Sequence[torch.Tensor] | None) -> None:
        """Load the masks of the next forward pass; None records the pass instead, and drops nothing."""
        self.masks = None if masks is None else list(masks)
        if masks is None:
            self.calls = []


class ReplayedDropout(nn.Module):
    """Dropout layer that reads its masks from a tape.

    Args:
        layer: The dropout layer that it replaces.
        tape: The tape with the masks.
    """

    def __init__(self, layer: Any, tape: MaskTape) -> None:
        super().__init__()
        self._tape, self._probability, self._feature_wise = tape, float(layer.p), isinstance(layer, FEATURE_WISE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the tape's next mask."""
        if self._tape.masks is not None:
            return x * self._tape.masks.pop(0)
        # torch draws in the order of memory, and only these two layouts are supported here.
        channels_last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        if not (x.is_contiguous() or channels_last):
            raise Unsupported("a dropout layer's input is neither contiguous nor channels last")
        shape, layout = tuple(x.shape[1:]), torch.channels_last if channels_last else torch.contiguous_format
        if self._feature_wise:
            shape, layout = (*x.shape[1:2], *(1,) * (x.ndim - 2)), torch.contiguous_format
        self._tape.calls.append(DropoutCall(self._probability, shape, layout))
        # A new tensor, as with a mask, so that a model that writes to its input in place gets the same result.
        return x.clone()


def with_replayed_dropout(model: nn.Module) -> tuple[nn.Module, MaskTape]:
    """Replace a model's dropout layers in place; return the model and the tape.

    Raises:
        Unsupported: If the model has a kind of dropout whose masks are not supported here.
    """
    tape = MaskTape()
    taped: dict[nn.Module, ReplayedDropout] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and type(child) in (nn.Dropout, *FEATURE_WISE):
                # A layer in two places is replaced by one replacement.
                parent._modules[name] = taped.setdefault(child, ReplayedDropout(child, tape))
            elif isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise Unsupported(f"{type(child).__name__} is not supported: its masks cannot be drawn for each client")
    return model, tape
