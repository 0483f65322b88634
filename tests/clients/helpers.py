"""A clock that tests turn, for clients that measure and wait; and a model that keeps the batches it is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedsel_flwr.clients import torch_client
from fedsel_flwr.clients.system import SystemModel

WATT = 10**2.3 / 1000  # 23 dBm
SYSTEM = SystemModel(num_clients=20, seed=7)
DELAYS = SYSTEM.draw(3, 2)
FREQUENCY = 1e7 * DELAYS.computing_rate
"""Of client 3 in round 2."""


def same(left: list[npt.NDArray[Any]], right: list[npt.NDArray[Any]]) -> bool:
    """Whether two models are equal to the last bit."""
    return [a.tobytes() for a in left] == [a.tobytes() for a in right]


class Clock:
    """The clock of ``torch_client``: it moves with the steps that are made to last, and with naps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.naps, self._patch = 100.0, list[float](), patch
        patch.setattr(torch_client.time, "perf_counter", self.read)
        patch.setattr(torch_client.time, "sleep", self.nap)

    def read(self) -> float:
        return self.now

    def nap(self, seconds: float) -> None:
        self.naps.append(seconds)

    def lasting(self, **steps: float) -> None:
        """Make functions of ``torch_client`` last so many seconds each."""
        for name, seconds in steps.items():
            self._patch.setattr(torch_client, name, self._slow(getattr(torch_client, name), seconds))

    def _slow(self, original: Any, seconds: float) -> Any:
        def slow(*args: Any, **options: Any) -> Any:
            self.now += seconds
            return original(*args, **options)

        return slow


class Recorder(nn.Module):
    def __init__(self, features: int = 1, classes: int = 2) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(features, classes), list[npt.NDArray[np.float32]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.numpy().copy())
        return self.layer(x.flatten(1))
