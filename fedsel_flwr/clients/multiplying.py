"""How much a model computes: the multiplications of its forward pass, counted once."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.errors import ParameterError


def multiplications(model: nn.Module, example: npt.NDArray[np.float32]) -> int:
    """Count the multiplications of matrix products and convolutions in a forward pass over one example.

    They are counted while the model runs once on this machine, not timed: the same on every machine. The backward pass
    takes about two forward passes, whatever the model, so that the ratio of two models is that of their training.

    Args:
        model: The model; it stays as it is.
        example: One example, shape (...,).

    Returns:
        The count, above 0.

    Raises:
        ParameterError: None was counted: the model is made of operations that torch does not count.

    Example:
        >>> multiplications(nn.Linear(6, 3), np.zeros(6, dtype=np.float32))
        18
    """
    from torch.utils.flop_counter import FlopCounterMode  # here, as it takes a moment that few runs need

    two = torch.tensor(example).repeat(2, *[1] * example.ndim)  # batch normalization cannot take one alone
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
        copy.deepcopy(model).cpu().train()(two)
    count = counter.get_total_flops() // 4  # of two examples; a multiplication with its addition is two operations
    if count < 1:
        raise ParameterError(
            "clients.reference_multiplications needs a model with matrix products or convolutions, but none was "
            f"counted in {type(model).__name__}: set it to 0"
        )
    return int(count)
