"""Dropout layers that take their masks as inputs, so that a model with dropout is a function without chance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedsel_flwr.clients.batched.masks import Draw
from fedsel_flwr.clients.batched.refusal import Refused

FEATURE_WISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Tape:
    """The masks of one forward pass, in the order in which the layers ask; without masks it records who asks.

    Attributes:
        draws: What was recorded.
    """

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self._masks: list[torch.Tensor] | None = None

    def load(self, masks: Sequence[torch.Tensor] | None) -> None:
        """Give the masks of the next forward pass; None: record it instead, and drop nothing."""
        self._masks = None if masks is None else list(masks)
        if masks is None:
            self.draws = []

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What a dropout layer does."""
        if self._masks is not None:
            return x * self._masks.pop(0)
        channels_last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        if not (x.is_contiguous() or channels_last):
            raise Refused("a dropout layer's input is laid out in an order of its own")
        feature_wise = isinstance(layer, FEATURE_WISE)
        self.draws.append(
            Draw(
                float(layer.p),  # type: ignore[arg-type]
                tuple(x.shape[1:2]) + (1,) * (x.ndim - 2) if feature_wise else tuple(x.shape[1:]),
                torch.channels_last if channels_last and not feature_wise else torch.contiguous_format,
            )
        )
        return x.clone()


class TapedDropout(nn.Module):
    """Stands in a model where a dropout layer was.

    Args:
        layer: The dropout layer.
        tape: Where its masks come from.
    """

    def __init__(self, layer: nn.Module, tape: Tape) -> None:
        super().__init__()
        self._tape, self._layer = tape, [layer]  # in a list: not a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the tape has it."""
        return self._tape.apply(self._layer[0], x)


def with_taped_dropout(model: nn.Module) -> tuple[nn.Module, Tape]:
    """Put taped dropout into a model, in place.

    Raises:
        Refused: For kinds of dropout whose masks are not drawn here.
    """
    tape = Tape()
    taped: dict[nn.Module, TapedDropout] = {}

    def stand_in(module: nn.Module) -> TapedDropout:
        return taped.setdefault(module, TapedDropout(module, tape))

    if type(model) in (nn.Dropout, *FEATURE_WISE):
        return stand_in(model), tape
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and type(child) in (nn.Dropout, *FEATURE_WISE):
                parent._modules[name] = stand_in(child)
            elif isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise Refused(f"the masks of {type(child).__name__} are not drawn for each client")
    return model, tape
