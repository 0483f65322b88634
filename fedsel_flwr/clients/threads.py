"""Threads on which torch runs single-threaded: several small computations at a time, one per thread."""

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
Answer = TypeVar("Answer")

_IDLE: ContextVar[int] = ContextVar("threads that torch had before a block of using_threads left it one", default=1)


@contextmanager
def single_threaded_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads on each of which torch uses one thread; after the block torch uses as many as before.

    Args:
        count: Number of threads.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        count, thread_name_prefix="fedsel-training", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        with pool:
            yield pool
    finally:
        # set_num_threads in a thread of the pool also sets the initial value of later threads.
        torch.set_num_threads(before)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Limit torch and NumPy's BLAS to some threads within the block.

    Args:
        count: Number of threads, at least 1.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    idle = _IDLE.set(before if count == 1 else 1)
    try:
        # BLAS too, because its threads keep a core busy for a while after each product, and another process needs that
        # core.
        with threadpool_limits(count):
            yield
    finally:
        _IDLE.reset(idle)
        torch.set_num_threads(before)


def map_on_threads(model: nn.Module, parts: Sequence[Part], ask: Callable[[nn.Module, Part], Answer]) -> list[Answer]:
    """Evaluate a model on each part, on several threads if :func:`using_threads` leaves torch only one of them.

    One thread evaluates a part in either case, so the answers are the same to the last bit.

    Args:
        model: The model, which is not changed. Each thread has a copy. A model that cannot be copied stays on this
            thread.
        parts: The parts, such as the first rows of batches.
        ask: Function of the model, or a copy of it, and a part.

    Returns:
        The answers, in the order of the parts.
    """

    def share(own: nn.Module, numbers: Sequence[int]) -> list[Answer]:
        return [ask(own, parts[i]) for i in numbers]

    threads = min(_IDLE.get(), len(parts))
    if threads < 2:
        return share(model, range(len(parts)))
    try:
        copies = [copy.deepcopy(model) for _ in range(threads)]
    # A user's model may hold objects that cannot be copied, such as a non-leaf tensor, and copying may raise any error.
    except Exception:
        return share(model, range(len(parts)))
    shares = np.array_split(np.arange(len(parts)), threads)
    with single_threaded_pool(threads) as pool:
        futures = [pool.submit(share, one, own.tolist()) for one, own in zip(copies, shares, strict=True)]
        return [answer for future in futures for answer in future.result()]
