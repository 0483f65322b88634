"""Dropout masks, drawn for each client from the stream that torch's own dropout would draw them from.

torch's dropout on the CPU is ``input * noise`` with ``noise = empty_like(input).bernoulli_(1 - p).div_(1 - p)``, drawn
from the global generator; with p = 0 or 1 nothing is drawn. A generator of one's own with the same seed draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draw:
    """One call of a dropout layer.

    Args:
        probability: Of dropping.
        shape: Of the mask, without the examples.
        memory_format: Of the layer's input, which the order of the draws follows.
    """

    probability: float
    shape: tuple[int, ...]
    memory_format: torch.memory_format = torch.contiguous_format


class MaskStreams:
    """A stream of masks for each client.

    Args:
        seeds: Of the clients.
        draws: The calls of a forward pass, in order.
        dtype: Of the masks.
        device: Where the masks go; they are always drawn on the CPU.
    """

    def __init__(self, seeds: Sequence[int], draws: Sequence[Draw], dtype: torch.dtype, device: torch.device) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds] if draws else []
        self._draws, self._dtype, self._device = draws, dtype, device

    def next(self, lengths: Sequence[int], width: int) -> list[torch.Tensor]:
        """Return the masks of the next step, one a call of a layer.

        Args:
            lengths: Examples in the batches of the clients that take the step, the first ones of all.
            width: Of the padded batches.

        Returns:
            Tensors of shape (n_active, width, …), zero in the padding.
        """
        if not self._draws:
            return []
        masks = [torch.zeros(len(lengths), width, *draw.shape, dtype=self._dtype) for draw in self._draws]
        for i, length in enumerate(lengths):
            for mask, draw in zip(masks, self._draws, strict=True):
                mask[i, :length] = self._noise(draw, int(length), i)
        return [mask.to(self._device) for mask in masks]

    def _noise(self, draw: Draw, length: int, client: int) -> torch.Tensor | float:
        keep = 1.0 - draw.probability
        if keep in (0.0, 1.0):
            return keep
        noise = torch.empty(length, *draw.shape, dtype=self._dtype, memory_format=draw.memory_format)
        return noise.bernoulli_(keep, generator=self._generators[client]).div_(keep)
