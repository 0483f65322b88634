"""Workers of one torch thread each: several small computations at a time in place of one on several threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

Part = TypeVar("Part")
Said = TypeVar("Said")

_IDLE: ContextVar[int] = ContextVar("threads that torch had before a block of using_threads left it one", default=1)


@contextmanager
def one_thread_each(count: int) -> Iterator[ThreadPoolExecutor]:
    """Within the block: workers on whose threads torch uses that one thread; outside everything is as before.

    Args:
        count: How many.
    """
    before = torch.get_num_threads()
    workers = ThreadPoolExecutor(count, thread_name_prefix="fedsel-training", initializer=torch.set_num_threads,
                                 initargs=(1,))  # fmt: skip
    try:
        with workers:
            yield workers
    finally:
        torch.set_num_threads(before)  # a worker's number is also what later threads begin with


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Within the block torch and NumPy's BLAS use at most so many threads, outside as many as before.

    BLAS counts too: its threads spin for a while after each product, on the core that another process wants.

    Args:
        count: How many, at least 1.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    idle = _IDLE.set(before if count == 1 else 1)
    try:
        with threadpool_limits(count):
            yield
    finally:
        _IDLE.reset(idle)
        torch.set_num_threads(before)


def ask_in_parts(model: nn.Module, parts: Sequence[Part], ask: Callable[[nn.Module, Part], Said]) -> list[Said]:
    """Ask a model about each part, on several threads where :func:`using_threads` leaves torch one of them.

    A part is asked by one thread either way, so that the answers are the same to the last bit.

    Args:
        model: The model; left as it is. Each thread has a copy of its own; one that cannot be copied is asked here.
        parts: What to ask about.
        ask: Called with the model, or a copy of it, and a part.

    Returns:
        The answers, in the order of the parts.
    """

    def share(own: nn.Module, numbers: Sequence[int]) -> list[Said]:
        return [ask(own, parts[i]) for i in numbers]

    threads = min(_IDLE.get(), len(parts))
    if threads < 2:
        return share(model, range(len(parts)))
    try:
        copies = [copy.deepcopy(model) for _ in range(threads)]
    except Exception:  # a model of one's own that keeps what cannot be copied, such as what it computed last
        return share(model, range(len(parts)))
    shares = np.array_split(np.arange(len(parts)), threads)
    with one_thread_each(threads) as workers:
        asked = [workers.submit(share, one, own.tolist()) for one, own in zip(copies, shares, strict=True)]
        return [said for one in asked for said in one.result()]
