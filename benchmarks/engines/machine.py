"""The machine of a run: what it is, and how much of its processors' time went elsewhere meanwhile."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch


def machine(device: str) -> str:
    """Processor, cores, accelerator and versions, in words."""
    parts = [processor(), f"{os.cpu_count()} cores"]
    if device.startswith("cuda"):
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join([*parts, f"Python {platform.python_version()}", f"torch {torch.__version__}"])


def processor(table: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name where Linux says it, else its architecture."""
    lines = table.read_text().splitlines() if table.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


class Processors:
    """The processors' time from here on: what a virtual machine wanted and its host gave to others.

    Only Linux counts it; elsewhere the share is zero.
    """

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def stolen(self) -> float:
        """Share of the wanted time, 0 to 1."""
        spent = [after - before for after, before in zip(psutil.cpu_times(), self._before, strict=True)]
        named = dict(zip(self._before._fields, spent, strict=True))
        stolen = named.get("steal", 0.0)
        idle = named["idle"] + named.get("iowait", 0.0)
        guests = named.get("guest", 0.0) + named.get("guest_nice", 0.0)  # counted as user time as well
        wanted = sum(spent) - guests - idle
        return stolen / wanted if wanted > 0 else 0.0
