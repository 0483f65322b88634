"""A torch model as the function ``predict(arrays, inputs) -> logits`` that the server measures with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedsel_flwr.clients.batched.threads import ask_in_parts
from fedsel_flwr.clients.parameters import set_arrays
from fedsel_flwr.clients.training import held


def torch_predict(
    model: nn.Module, batch_size: int = 256
) -> Callable[[Sequence[npt.NDArray[Any]], npt.NDArray[np.float32]], npt.NDArray[np.float64]]:
    """Return ``predict`` for a torch model.

    Args:
        model: Scratch model; its parameters are overwritten at each call.
        batch_size: Examples at a time.

    Returns:
        A function from arrays (in the order of the model's state dictionary) and inputs, shape (n, ...), to logits,
        shape (n, n_classes), with dropout off.
    """

    def predict(arrays: Sequence[npt.NDArray[Any]], inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        set_arrays(model, list(arrays))
        return outputs(model, inputs, batch_size).numpy().astype(np.float64)

    return predict


def outputs(model: nn.Module, inputs: npt.NDArray[np.float32], batch_size: int = 256) -> torch.Tensor:
    """A model's outputs on examples, shape (n, ...), with dropout off; the model stays as it is."""
    was_training, examples = model.training, held(inputs)

    def ask(own: nn.Module, first: int) -> torch.Tensor:
        with torch.no_grad():
            said: torch.Tensor = own(examples[first : first + batch_size])
        return said

    model.eval()
    parts = ask_in_parts(model, range(0, len(inputs), batch_size), ask)
    model.train(was_training)
    return torch.cat(parts)
