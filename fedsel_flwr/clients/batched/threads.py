"""Workers of one torch thread each: several small computations at a time in place of one on several threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


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
    try:
        with threadpool_limits(count):
            yield
    finally:
        torch.set_num_threads(before)
