"""Random streams by seed, purpose, partition and round, and by nothing else.

A stream has the name (seed, purpose, partition, round). Therefore no draw depends on the order in which clients
register, on the engine, or on a restart.

A round takes four to seven streams for each of its clients. NumPy's own streams cost 12 microseconds each.
:func:`streams` computes the seeds of all partitions at once, and costs 2 microseconds per stream. We measured how much
more processor time NumPy's streams would take, with one thread:

* 31 % in a round of the scenario "digits" with 500 clients (86 ms instead of 66 ms),
* 11 % in a round of "phones" with 10 clients,
* 6 % in the training of 1,000 of a million clients on 120 images each (914 ms instead of 865 ms).

NumPy promises that the numbers of a :class:`numpy.random.SeedSequence` never change. The second half of this room is
its algorithm, word for word, on arrays instead of numbers. The same holds for the first number of a
:class:`numpy.random.PCG64`. :func:`first_uniforms` therefore draws one number for each of a million clients in 0.1 s,
and creates no stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import index
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

from fedsel_flwr.checks import FloatArray, IntArray, one_of
from fedsel_flwr.errors import ParameterError

PURPOSES: Final[Mapping[str, int]] = MappingProxyType(
    # These numbers are part of every recorded result: add new ones at the end, and never renumber or reuse one.
    {
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
        "device-kind": 16,
    }
)


def stream(seed: int, purpose: str, partition_id: int, round: int = 0) -> np.random.Generator:
    """Return the generator of one purpose, one partition and one round.

    Args:
        seed: Seed of the run, in [0, 2**128).
        purpose: Purpose of the draw, one of `PURPOSES`.
        partition_id: Id of the partition that draws, in [0, 2**32); never its place in a roster.
        round: Absolute round, in [0, 2**32); 0 for draws that are made once.

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
    # Not default_rng, because its bit generator may change with NumPy.
    return np.random.Generator(np.random.PCG64(sequence))


def streams(seed: int, purpose: str, partition_ids: Sequence[int], round: int = 0) -> list[np.random.Generator]:
    """Return :func:`stream` of several partitions, in at most a fifth of the time.

    Args:
        seed: Seed of the run, in [0, 2**128).
        purpose: Purpose of the draws, one of `PURPOSES`.
        partition_ids: Ids of the partitions that draw, each in [0, 2**32).
        round: Absolute round, in [0, 2**32); 0 for draws that are made once.

    Returns:
        A fresh generator for each partition; the draws are those of the single streams.

    Raises:
        ParameterError: If the purpose is unknown or a number is outside its range.

    Example:
        >>> [round(float(generator.random()), 6) for generator in streams(1, "placement", [0, 1])]
        [0.378652, 0.212788]
    """
    # For one partition, NumPy's own stream is faster.
    if len(partition_ids) == 1:
        return [stream(seed, purpose, partition_ids[0], round)]
    entropy, number = _whole("seed", seed, bits=128), _number(purpose)
    words = seed_states(entropy, number, _partition_ids(partition_ids), _whole("round", round, bits=32))
    # NumPy accepts any seed sequence, but its annotations allow only its own class.
    return [np.random.Generator(np.random.PCG64(KnownState(own))) for own in words]  # type: ignore[arg-type]


def first_uniforms(seed: int, purpose: str, partition_ids: Sequence[int] | IntArray, round: int = 0) -> FloatArray:
    """Return ``stream(...).random()`` of several partitions, to the last bit, without creating the streams.

    Args:
        seed: Seed of the run, in [0, 2**128).
        purpose: Purpose of the draws, one of `PURPOSES`.
        partition_ids: Ids of the partitions that draw, each in [0, 2**32), shape (n,).
        round: Absolute round, in [0, 2**32); 0 for draws that are made once.

    Returns:
        The first number of each stream, uniform in [0, 1), shape (n,).

    Raises:
        ParameterError: If the purpose is unknown or a number is outside its range.

    Example:
        >>> first_uniforms(1, "placement", [0, 1]).round(6).tolist()
        [0.378652, 0.212788]
    """
    entropy, number = _whole("seed", seed, bits=128), _number(purpose)
    ids, now = _partition_ids(partition_ids), _whole("round", round, bits=32)
    drawn = np.empty(len(ids))
    # In blocks, because the words of a million partitions would take 400 bytes for each of them.
    for start in range(0, len(ids), BLOCK):
        block = slice(start, start + BLOCK)
        drawn[block] = (pcg64_first(seed_states(entropy, number, ids[block], now)) >> np.uint64(11)) * 2.0**-53
    return drawn


def _partition_ids(partition_ids: Sequence[int] | IntArray) -> IntArray:
    """Return the ids as an array; refuse ids outside [0, 2**32)."""
    if isinstance(partition_ids, range) or (isinstance(partition_ids, np.ndarray) and partition_ids.dtype.kind in "iu"):
        ids = np.asarray(partition_ids, dtype=np.int64)
        if ((ids >= 0) & (ids < 2**32)).all():
            return ids
    return np.array([_whole("partition_id", k, bits=32) for k in partition_ids], dtype=np.int64)


def _number(purpose: str) -> int:
    """Return the number of a purpose."""
    return PURPOSES[one_of("purpose", purpose, tuple(PURPOSES))]


def _whole(name: str, value: int, *, bits: int) -> int:
    # Larger numbers would take more words than SeedSequence reserves, and two names could share a stream.
    try:
        number = index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**bits:
        raise ParameterError(f"{name} must be an integer in [0, 2**{bits}), got {value!r}. Give such a number")
    return number


BLOCK = 2**14
"""Number of streams whose seeds are computed at once."""
POOL, MASK = 4, 0xFFFFFFFF
"""Number of words in a seed sequence's pool, and a mask of 32 bits. Words have 64 bits, and the mask cuts products."""


def _constants(first: int, factor: int, count: int) -> list[int]:
    """Return the constants of NumPy's hashmix: the n-th call uses the n-th constant and the next one."""
    return [first * pow(factor, n, 1 << 32) & MASK for n in range(count + 1)]


MIXING = _constants(0x43B0D7E5, 0x931E8875, POOL + POOL * (POOL - 1) + 3 * POOL)
WRITING = _constants(0x8B51F9DD, 0x58F38DED, 2 * POOL)
LEFT, RIGHT, SHIFT = 0xCA01F9DD, 0x4973F715, 16


class KnownState(ISeedSequence):
    """Seed sequence with a known state.

    Args:
        state: The words that it returns, uint64, shape (4,).
    """

    def __init__(self, state: npt.NDArray[np.uint64]) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[np.uint64]:
        """Return the words. Only PCG64 asks for them, and it asks for four words of uint64."""
        return self._state


def seed_states(seed: int, purpose: int, partition_ids: IntArray, round: int) -> npt.NDArray[np.uint64]:
    """Return the words of ``SeedSequence(seed, spawn_key=(purpose, k, round))`` for each partition k.

    Args:
        seed: The seed, in [0, 2**128).
        purpose: The number of the purpose, in [0, 2**32).
        partition_ids: The partitions k, in [0, 2**32), shape (n,).
        round: The round, in [0, 2**32).

    Returns:
        ``generate_state(4, numpy.uint64)`` of each sequence, shape (n, 4).

    Example:
        >>> int(seed_states(1, 2, np.array([5]), 3)[0, 0])
        14838326704995131547
        >>> int(np.random.SeedSequence(1, spawn_key=(2, 5, 3)).generate_state(4, np.uint64)[0])
        14838326704995131547
    """
    pool = _column(_pool(seed, purpose))
    last = MIXING[-2 * POOL - 1 :]
    pool = _mixed(pool, _hashed(partition_ids.astype(np.uint64), _column(last[:POOL]), _column(last[1 : POOL + 1])))
    pool = _mixed(pool, _hashed(np.uint64(round), _column(last[POOL:-1]), _column(last[POOL + 1 :])))
    words = _hashed(np.vstack([pool, pool]), _column(WRITING[:-1]), _column(WRITING[1:]))
    return np.ascontiguousarray((words[0::2] | words[1::2] << np.uint64(32)).T)


@lru_cache(maxsize=64)
def _pool(seed: int, purpose: int) -> tuple[int, ...]:
    """Return the pool after the words that all partitions share: the seed's four, and the purpose."""
    calls = pairwise(MIXING)
    pool = [_hashed(seed >> 32 * i & MASK, *next(calls)) for i in range(POOL)]
    for source in range(POOL):
        for target in range(POOL):
            if source != target:
                pool[target] = _mixed(pool[target], _hashed(pool[source], *next(calls)))
    return tuple(_mixed(word, _hashed(purpose, *next(calls))) for word in pool)


def _hashed(value: Any, before: Any, after: Any) -> Any:
    """Return NumPy's hashmix of a value."""
    value = (value ^ before) * after & MASK
    return value ^ value >> SHIFT


def _mixed(left: Any, right: Any) -> Any:
    """Return NumPy's mix of two values."""
    value = LEFT * left - RIGHT * right & MASK
    return value ^ value >> SHIFT


PCG64_FACTOR = (0x2360ED051FC65DA4, 0x4385DF649FCCF645)
"""Factor of PCG64's step, a word of 128 bits as its upper and its lower half."""


def pcg64_first(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the first 64 bits of PCG64 for each seed.

    Args:
        words: Seeds, of :func:`seed_states`, shape (n, 4).

    Returns:
        Shape (n,).

    Example:
        >>> words = seed_states(1, 2, np.array([5]), 3)
        >>> int(pcg64_first(words)[0]) == int(np.random.PCG64(KnownState(words[0])).random_raw())
        True
    """
    one = np.uint64(1)
    start, (upper, lower) = (words[:, 0], words[:, 1]), (words[:, 2], words[:, 3])
    increment = (upper << one | lower >> np.uint64(63), lower << one | one)
    # The first step from 0 gives the increment. Then the seed is added, and two more steps follow.
    state = _sum(increment, start)
    for _ in range(2):
        state = _sum(_times_factor(state), increment)
    high, low = state
    turn = high >> np.uint64(58)
    mixed = high ^ low
    return np.asarray(mixed >> turn | mixed << (np.uint64(64) - turn & np.uint64(63)))


Wide = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Words of 128 bits, as their upper and their lower halves."""


def _sum(left: Wide, right: Wide) -> Wide:
    low = left[1] + right[1]
    return left[0] + right[0] + (low < right[1]), low


def _times_factor(state: Wide) -> Wide:
    """Return the lower 128 bits of a product with :data:`PCG64_FACTOR`."""
    (high, low), (factor_high, factor_low) = state, map(np.uint64, PCG64_FACTOR)
    # The product of the two lower halves has 128 bits, and is computed from products of 32 bits.
    half, mask = np.uint64(32), np.uint64(MASK)
    a, b, c, d = low >> half, low & mask, factor_low >> half, factor_low & mask
    middle = a * d + (b * d >> half)
    carry = b * c + (middle & mask)
    upper = a * c + (middle >> half) + (carry >> half)
    return upper + high * factor_low + low * factor_high, low * factor_low


def _column(words: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.array(words, dtype=np.uint64)[:, np.newaxis]
