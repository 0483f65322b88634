"""SimHash of a client's data, computed on the client: only the hash leaves it (LSH, NCCB).

Each bit says on which side of a random plane through the origin the mean of the client's examples lies. The planes are
drawn from the seed of the run, so all clients take the same. Two clients differ in a share theta / pi of the bits, in
expectation, where theta is the angle between their means (Charikar, STOC 2002).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedsel_flwr.clients.streams import stream
from fedsel_flwr.errors import ParameterError

SKETCH_BITS = 64
"""Bits of a hash."""


def sketch(inputs: npt.NDArray[np.float32], seed: int) -> npt.NDArray[np.float32]:
    """Return the hash of some examples.

    Args:
        inputs: The examples, shape (n, ...), n at least 1.
        seed: Seed of the run.

    Returns:
        Shape (64,), each 0 or 1.

    Raises:
        ParameterError: There are no examples.

    Example:
        >>> one, other = np.ones((3, 5), np.float32), -np.ones((2, 5), np.float32)
        >>> int((sketch(one, 7) == sketch(3 * one[:1], 7)).sum()), int((sketch(one, 7) == sketch(other, 7)).sum())
        (64, 0)
    """
    if not len(inputs):
        raise ParameterError("a sketch needs at least one training example, got none; give the client examples")
    mean = inputs.reshape(len(inputs), -1).mean(axis=0, dtype=np.float64)
    planes = stream(seed, "sketch", 0).standard_normal((SKETCH_BITS, mean.size))
    return np.asarray((planes * mean).sum(axis=1) > 0, dtype=np.float32)
