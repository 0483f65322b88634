"""The worker's side of the comparison: a round when the driver says so, and its seconds.

A worker is a process of its own with one framework in it. It says when it is ready, takes a round for each line
"round" on its standard input, says how long each took, and at the line "end" writes the model it has trained. Between
the rounds it waits in a blocking read. What frameworks print goes to the log, not to the driver.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


class Turns:
    """Says and hears what the driver and a worker say to each other, a line of JSON each way.

    Attributes:
        plan: What the driver wants: ``task`` (folder), ``out`` (where the model goes), ``rounds`` (at most so many),
            ``device``, and the settings of the variant such as ``threads`` and ``processes``.
    """

    def __init__(self) -> None:
        self.plan: dict[str, Any] = json.loads(sys.argv[1])
        self._driver = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what frameworks print
        self._begin: float | None = None
        self._more = True

    def next(self, **facts: object) -> bool:
        """Say how long the round took that ends here (before the first: that all is ready), and wait for an order.

        Args:
            facts: More about that round, such as the seconds of its training.

        Returns:
            Whether to take another round, which begins now.
        """
        if not self._more:
            return False
        _finish_device()
        now = time.perf_counter()
        self.say({"ready": True} if self._begin is None else {"seconds": now - self._begin, **facts})
        order = sys.stdin.readline()
        if not order:  # the driver is gone: frameworks would go on without being told
            os._exit(1)
        self._more = order.strip() == "round"
        self._begin = time.perf_counter()
        return self._more

    def end(self, arrays: Iterable[Any], **facts: object) -> None:
        """Write the trained model, its arrays in the order of the state dictionary, and say so."""
        own = [np.asarray(array.detach().cpu() if hasattr(array, "detach") else array) for array in arrays]
        np.savez(self.plan["out"], **{f"{i:04d}": array for i, array in enumerate(own)})
        self.say({"done": True, **facts})

    def say(self, what: dict[str, object]) -> None:
        """Send one line to the driver."""
        self._driver.write(json.dumps(what) + "\n")
        self._driver.flush()


class Task:
    """What all workers train: the same tensors, the same shares, the same first model.

    Args:
        folder: Where the driver wrote it.

    Attributes:
        settings: ``clients``, ``clients_per_round``, ``batch_size``, ``local_epochs``, ``learning_rate``, ….
        inputs: All examples, float32, mapped into memory, so that workers share it.
        labels: Their classes, int64.
        rows: For each client the rows of its examples, shape (clients, examples each).
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self.settings: dict[str, Any] = json.loads((self._folder / "settings.json").read_text())
        self.inputs = np.load(self._folder / "inputs.npy", mmap_mode="r")
        self.labels = np.load(self._folder / "labels.npy")
        self.rows = np.load(self._folder / "rows.npy")

    def model(self) -> Any:
        """A copy of the first model."""
        import torch

        return torch.load(self._folder / "model.pt", weights_only=False)

    def tensors(self, client: int, device: str = "cpu") -> tuple[Any, Any]:
        """A client's inputs and labels."""
        import torch

        rows = self.rows[client]
        return torch.tensor(self.inputs[rows], device=device), torch.tensor(self.labels[rows], device=device)


def batches(x: Any, y: Any, size: int) -> Iterable[tuple[Any, Any]]:
    """A client's examples in a new order, cut into batches: the fastest way, for the frameworks that let us choose."""
    import torch

    order = torch.randperm(len(y), device=y.device)
    return zip(x[order].split(size), y[order].split(size), strict=True)


def _finish_device() -> None:
    """Wait for what a GPU still computes."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
