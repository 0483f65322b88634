"""The least time that a round's arithmetic can take: its floating-point operations at the rate of large products."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def operations_per_round(
    model: torch.nn.Module, settings: dict[str, Any], examples: int, shape: tuple[int, ...]
) -> int:
    """Operations of the matrix products and convolutions of a round, forward and backward; a fused step counts as two.

    Args:
        model: The model.
        settings: Of the task.
        examples: Of each client.
        shape: Of one example.
    """
    batch = settings["batch_size"]
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, *shape)).sum().backward()
    model.zero_grad()
    steps = settings["clients_per_round"] * settings["local_epochs"] * -(-examples // batch)
    return int(counter.get_total_flops()) * steps


def rate(device: str, threads: int, size: int = 1024, seconds: float = 1.0) -> float:
    """Operations per second of products of square float32 matrices: the median of many."""
    torch.set_num_threads(threads)
    a, b = torch.rand(size, size, device=device), torch.rand(size, size, device=device)
    taken = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(taken) < 5:
        begin = time.perf_counter()
        torch.mm(a, b)
        if a.is_cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return 2 * size**3 / sorted(taken)[len(taken) // 2]
