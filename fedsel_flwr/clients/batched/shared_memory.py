"""Shared memory of several processes: files without a name, which vanish however a process ends."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ArraySpec = tuple[tuple[int, ...], npt.DTypeLike]
"""Shape and type of an array."""
ALIGNED = 64
"""Arrays begin at multiples of this many bytes, as torch's own do: the last bits of products may depend on that."""


class Block:
    """A piece of shared memory.

    Args:
        nbytes: Its size, at least 1.
        fd: Descriptor of a block that another process has made; it is closed. None makes a new block.
        writable: Whether this process writes to it.

    Attributes:
        nbytes: Its size.

    Raises:
        OSError: There is not enough memory.
    """

    def __init__(self, nbytes: int, fd: int | None = None, *, writable: bool = True) -> None:
        self.nbytes = nbytes
        self.fd = -1
        own = _nameless(nbytes) if fd is None else fd
        try:
            self._map = mmap.mmap(own, nbytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        except BaseException:
            os.close(own)
            raise
        if fd is None:
            self.fd = own
            weakref.finalize(self, os.close, own)
        else:
            os.close(own)
        self._lent: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def free(self) -> bool:
        """Whether nobody holds an array of the last :meth:`arrays`."""
        return self._lent is None or self._lent() is None

    def arrays(self, specs: Sequence[ArraySpec]) -> list[npt.NDArray[Any]]:
        """Return arrays of these specs, one behind the other from the block's beginning; they keep the memory alive."""
        whole = np.frombuffer(self._map, dtype=np.uint8)
        # every array below has it as its base: the block is free when the last of them is collected
        self._lent = weakref.ref(whole)
        found, begin = [], 0
        for shape, dtype in specs:
            count = nbytes_of([(shape, dtype)], aligned=False)
            found.append(whole[begin : begin + count].view(dtype).reshape(shape))
            begin += -(-count // ALIGNED) * ALIGNED
        return found


def nbytes_of(specs: Sequence[ArraySpec], *, aligned: bool = True) -> int:
    """Count the bytes that a block needs for arrays of these specs.

    >>> nbytes_of([((2, 3), "float32"), ((1,), "float64")])
    128
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in specs]
    return sum(-(-size // ALIGNED) * ALIGNED if aligned else size for size in sizes)


def _nameless(nbytes: int) -> int:
    """Make a file of this size that no folder lists; return its descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fedsel")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            # memory that is only promised would end the process (SIGBUS) at the first write to it
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
