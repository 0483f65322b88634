"""Evaluation of many models on the same examples, in one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedsel_flwr.clients.batched.manual_backprop import Dropout, ForwardContext, Plan, plan
from fedsel_flwr.clients.batched.steps import Unsupported
from fedsel_flwr.clients.batched.trainer import default_chunk
from fedsel_flwr.clients.training import device_of, map_on_threads, read_only_tensor
from fedsel_flwr.errors import ParameterError

MODELS = 50
"""Number of models evaluated at once. More take longer, because their outputs leave the processor's cache."""
Stack = Sequence[torch.Tensor]
Evaluator = Callable[[nn.Module, Stack, torch.Tensor], torch.Tensor]


def logits_batched(
    model: nn.Module,
    layers: Sequence[npt.NDArray[Any]],
    inputs: npt.NDArray[Any] | torch.Tensor,
    *,
    device: str | torch.device = "cpu",
    batch_size: int = 64,
) -> npt.NDArray[np.float64]:
    """Return the outputs of every model of a stack on the same examples, with dropout off.

    Models that torch.func cannot batch are evaluated one after the other.

    Args:
        model: The model, which is not changed.
        layers: The models, a stack for each layer, shape (n_models, …) each, in the order of the model's state
            dictionary.
        inputs: The examples, shape (n, …). A tensor on the device stays there.
        device: Device of the computation.
        batch_size: Number of examples at a time. Large batches leave the processor's cache.

    Returns:
        Outputs of shape (n_models, n, …).

    Raises:
        ParameterError: If the stack does not fit the model.

    Example:
        >>> stack = [np.array([[[1.0, 2.0]], [[3.0, 4.0]]], dtype=np.float32)]
        >>> logits_batched(nn.Linear(2, 1, bias=False), stack, np.ones((1, 2), dtype=np.float32)).ravel()
        array([3., 7.])
    """
    scratch = copy.deepcopy(model).to(device).eval()
    state = scratch.state_dict()
    if [layer.shape[1:] for layer in layers] != [tuple(tensor.shape) for tensor in state.values()]:
        raise ParameterError(
            "expected stacks whose shapes after the first axis are "
            f"{[tuple(tensor.shape) for tensor in state.values()]}, got {[layer.shape for layer in layers]}. Give "
            "one stack for each entry of the model's state."
        )
    stack = [
        torch.tensor(layer, dtype=tensor.dtype, device=device)
        for layer, tensor in zip(layers, state.values(), strict=True)
    ]
    examples = torch.as_tensor(inputs, device=device)
    evaluate = _evaluator(scratch, examples)

    def ask(own: nn.Module, first: int) -> npt.NDArray[Any]:
        nonlocal evaluate
        x = examples[first : first + batch_size]
        with torch.no_grad():
            try:
                outputs = evaluate(own, stack, x)
            # torch.func raises these for an operation that it cannot batch. The remaining batches are evaluated one by
            # one too.
            except (RuntimeError, ValueError, NotImplementedError):
                evaluate = _one_by_one
                outputs = evaluate(own, stack, x)
        return outputs.cpu().numpy()

    firsts = range(0, len(examples), batch_size)
    # Grouped convolutions use all threads themselves.
    parts = map_on_threads(scratch, firsts, ask) if evaluate is _by_vmap else [ask(scratch, first) for first in firsts]
    return np.concatenate(parts, axis=1).astype(np.float64)


def stack_predict(
    model: nn.Module,
) -> Callable[[Sequence[npt.NDArray[Any]], npt.NDArray[Any]], npt.NDArray[np.float64]]:
    """Return :func:`logits_batched` for a model, on its device, with a suitable batch size.

    Batches are small on a CPU, unless all layers are linear.
    """
    layers = [module for module in model.modules() if list(module.parameters(recurse=False))]
    device = device_of(model)
    batch_size = 64 if device.type == "cpu" and not all(isinstance(layer, nn.Linear) for layer in layers) else 1000

    def predict(stack: Sequence[npt.NDArray[Any]], inputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        examples = read_only_tensor(inputs, device)
        parts = ([layer[i : i + MODELS] for layer in stack] for i in range(0, len(stack[0]), MODELS))
        logits = [logits_batched(model, part, examples, device=device, batch_size=batch_size) for part in parts]
        return np.concatenate(logits)

    return predict


def _evaluator(model: nn.Module, examples: torch.Tensor) -> Evaluator:
    """Choose grouped convolutions if manual backprop knows the model and it has convolutions, else vmap."""
    try:
        planned = plan(model.cpu(), examples[:1].cpu())
    except Unsupported:
        return _by_vmap
    # Module.cpu() has moved the caller's model.
    finally:
        model.to(examples.device)
    return partial(_by_groups, planned) if planned.grouped else _by_vmap


def _by_groups(planned: Plan, model: nn.Module, stack: Stack, x: torch.Tensor) -> torch.Tensor:
    """Evaluate all models by grouped convolutions, as many at once as in training."""
    chunk = default_chunk(model, x, len(x), x.device)
    outputs = []
    for first in range(0, len(stack[0]), chunk):
        context = ForwardContext([layer[first : first + chunk] for layer in stack], iter(()))
        copies = x.repeat(1, context.active, 1, 1)
        for layer in planned.layers:
            if not isinstance(layer, Dropout):
                copies, _ = layer.forward(copies, context)
        outputs.append(copies)
    return torch.cat(outputs)


def _by_vmap(model: nn.Module, stack: Stack, x: torch.Tensor) -> torch.Tensor:
    """Evaluate all models by torch.func."""
    named = dict(zip(model.state_dict(), stack, strict=True))
    outputs: torch.Tensor = vmap(lambda own: functional_call(model, own, (x,)))(named)
    return outputs


def _one_by_one(model: nn.Module, stack: Stack, x: torch.Tensor) -> torch.Tensor:
    """Evaluate one model after the other."""
    models = (dict(zip(model.state_dict(), own, strict=True)) for own in zip(*stack, strict=True))
    return torch.stack([functional_call(model, own, (x,)) for own in models])
