"""Random streams that depend on what is drawn, for whom and when, and on nothing else.

A draw is named by (seed, purpose, partition, round). The order in which clients register, the engine that runs them,
and a restart in the middle therefore change no draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from types import MappingProxyType
from typing import Final

import numpy as np

from fedsel_flwr.clients.seeding import Given, states
from fedsel_flwr.errors import ParameterError

PURPOSES: Final[Mapping[str, int]] = MappingProxyType(
    {  # part of every recorded result: add at the end, never renumber or reuse
        "placement": 0,
        "latency": 1,
        "computing": 2,
        "energy": 3,
        "availability": 4,
        "dropout": 5,
        "data-order": 6,
        "model": 7,
        "phone": 8,
        "phone-round": 9,
        "partition": 10,
        "synthetic": 11,
        "sketch": 12,
        "mini-batch": 13,
        "failure": 14,
        "crash": 15,
    }
)


def stream(seed: int, purpose: str, partition_id: int, round: int = 0) -> np.random.Generator:
    """Return the generator of one purpose, one partition and one round.

    Args:
        seed: Seed of the run, in [0, 2**128).
        purpose: What is drawn, one of `PURPOSES`.
        partition_id: Whose draw it is: the partition's id, never its place in a roster; in [0, 2**32).
        round: Absolute round, in [0, 2**32); 0 for what is drawn once.

    Returns:
        A fresh generator; equal arguments give equal draws.

    Raises:
        ParameterError: If the purpose is unknown or a number is outside its range.

    Example:
        >>> round(float(stream(1, "placement", 0).random()), 6)
        0.378652
    """
    entropy, number = _whole("seed", seed, bits=128), _number(purpose)
    key = (number, _whole("partition_id", partition_id, bits=32), _whole("round", round, bits=32))
    sequence = np.random.SeedSequence(entropy=entropy, spawn_key=key)
    return np.random.Generator(np.random.PCG64(sequence))  # not default_rng: its bit generator may change


def streams(seed: int, purpose: str, partition_ids: Sequence[int], round: int = 0) -> list[np.random.Generator]:
    """Return :func:`stream` of several partitions, in a fifth of the time and less.

    Args:
        seed: Seed of the run, in [0, 2**128).
        purpose: What is drawn, one of `PURPOSES`.
        partition_ids: Whose draws they are, each in [0, 2**32).
        round: Absolute round, in [0, 2**32); 0 for what is drawn once.

    Returns:
        A fresh generator for each partition; the draws are those of the single streams.

    Raises:
        ParameterError: If the purpose is unknown or a number is outside its range.

    Example:
        >>> [round(float(generator.random()), 6) for generator in streams(1, "placement", [0, 1])]
        [0.378652, 0.212788]
    """
    if len(partition_ids) == 1:
        return [stream(seed, purpose, partition_ids[0], round)]
    entropy, number = _whole("seed", seed, bits=128), _number(purpose)
    ids = np.array([_whole("partition_id", k, bits=32) for k in partition_ids], dtype=np.int64)
    words = states(entropy, number, ids, _whole("round", round, bits=32))
    return [np.random.Generator(np.random.PCG64(Given(own))) for own in words]  # type: ignore[arg-type]  # NumPy takes it


def _number(purpose: str) -> int:
    """The number of a purpose."""
    if purpose not in PURPOSES:
        known = ", ".join(PURPOSES)
        raise ParameterError(f"purpose must be one of {known}; got {purpose!r}; use one of them or add it to PURPOSES")
    return PURPOSES[purpose]


def _whole(name: str, value: int, *, bits: int) -> int:
    # Larger numbers would take more words than SeedSequence sets aside, and two names could share a stream.
    try:
        number = index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**bits:
        raise ParameterError(f"{name} must be an integer in [0, 2**{bits}), got {value!r}; change {name}")
    return number
