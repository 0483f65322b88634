"""How many clients to train at once: as many as their activations and parameters fit into the processor's cache."""

from __future__ import annotations

import torch
from torch import nn

CACHED_BYTES = 12 * 2**20
"""About what caches hold. More clients at once wait for memory, fewer for Python; the optimum is flat."""
DEVICE_BYTES = 2 * 2**30
"""What the activations of a chunk may take of an accelerator's memory."""


def default_chunk(model: nn.Module, inputs: torch.Tensor, batch_size: int, device: torch.device) -> int:
    """Return how many clients to train at once.

    The choice follows from sizes alone. One by timing would vary between runs, and with it the last bits of the sums.

    Args:
        model: The model, in any mode; left as it is.
        inputs: At least one example, where the model is, shape (n, …).
        batch_size: Examples in a step.
        device: Where to train.

    Returns:
        At least 1.
    """
    seen = [0]

    def count(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and not list(module.children()):
            seen[0] += output.numel() * output.element_size()

    hooks = [module.register_forward_hook(count) for module in model.modules()]
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(inputs[:1])
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = CACHED_BYTES if device.type == "cpu" else DEVICE_BYTES
    return max(1, budget // max(1, seen[0] * batch_size + parameters))
