"""Models of all kinds, for images of one channel and 8x8 pixels and ten classes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Not sequential; normalization within an example; whole channels dropped, one layer of dropout called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.channels = nn.Dropout2d(0.4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.channels(torch.relu(self.first(x)))
        x = self.drop(x + torch.relu(self.norm(self.second(x))))
        return self.head(self.drop(x.flatten(1)))


class ChannelsLast(nn.Module):
    """Its dropout's input is laid out channels last, and torch draws in the order of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.drop, self.head = nn.Conv2d(1, 4, 3), nn.Dropout(0.5), nn.Linear(4 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.head(self.drop(x).flatten(1))


class Tied(nn.Module):
    """Two layers with one weight, a frozen one, one that is never called, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.frozen, self.idle, self.head = nn.Linear(64, 64), nn.Linear(3, 3), nn.Linear(64, 10)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.7))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        return self.head(self.frozen(torch.tanh(self.second(x))) * self.scale)


class Chance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.head(x.flatten(1)), 0.5, self.training)


class Centred(Chance):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x.flatten(1))
        return outputs - outputs.mean(0)


class Counting(Chance):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x.flatten(1))


class Branching(Chance):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x.flatten(1))
        return outputs if outputs.sum().item() > 0 else 2 * outputs


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 10))


def shared() -> nn.Module:
    """One rectifier and one dropout layer in several places."""
    relu, drop = nn.ReLU(), nn.Dropout(0.4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), relu, drop, nn.Linear(20, 20), relu, drop, nn.Linear(20, 10))


class Words(nn.Module):
    """Reads whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop, self.head = nn.Embedding(7, 5), nn.Dropout(0.2), nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.embedding(x.flatten(1)).mean(1)))


def pooled() -> nn.Module:
    """Rectified before the first layer that has parameters, and pooled."""
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(27, 10)
    )
