"""A model that batching gains little from: a small residual network, whose layers manual backprop does not know."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, with group normalisation, which needs no statistics of other clients."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, outputs) for _ in range(2))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Eight layers: a convolution of ``width`` channels, blocks of 1, 2 and 4 times as many, and a dense layer."""

    def __init__(self, channels: int, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (n, channels, h, w) to logits (n, num_classes)."""
        out: torch.Tensor = self.head(self.blocks(functional.relu(self.stem(x))).mean((2, 3)))
        return out
