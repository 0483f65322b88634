"""LSH and NCCB counted again from the whole history, and clusters by trying every way to group, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

Hash = tuple[int, ...]


def hamming(one: Sequence[int], other: Sequence[int]) -> int:
    """How many bits differ."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def centre(hashes: Sequence[Hash]) -> Hash:
    """Each bit as more than half have it."""
    return tuple(int(2 * sum(bits) > len(hashes)) for bits in zip(*hashes, strict=True))


def scatter(groups: Iterable[Sequence[Hash]]) -> int:
    """The sum of the distances to the centres: what k-means lowers."""
    return sum(hamming(one, centre(group)) for group in groups for one in group)


def groupings(count: int, most: int) -> Iterator[list[int]]:
    """Every way to put ``count`` things into at most ``most`` groups."""

    def longer(start: list[int]) -> Iterator[list[int]]:
        if len(start) == count:
            yield start
            return
        for group in range(min(most, max(start, default=-1) + 2)):
            yield from longer([*start, group])

    yield from longer([])


def best_scatter(hashes: Sequence[Hash], most: int) -> int:
    """The least scatter of all groupings."""
    return min(
        scatter([[h for h, own in zip(hashes, grouping, strict=True) if own == g] for g in set(grouping)])
        for grouping in groupings(len(hashes), most)
    )


class GroupOracle:
    """The history of (client, utility); a failure has utility 0."""

    def __init__(self, exploration: float) -> None:
        """Start without a round."""
        self.exploration = exploration
        self.plays: list[tuple[int, float]] = []

    def bound(self, members: Iterable[int]) -> float:
        """Mean + sqrt(exploration ln(all plays) / plays) of a group."""
        members = set(members)
        mine = [utility for client, utility in self.plays if client in members]
        if not mine:
            return math.inf
        return sum(mine) / len(mine) + math.sqrt(self.exploration * math.log(len(self.plays)) / len(mine))

    def right(self, chosen: Sequence[int], available: Sequence[int], groups: Sequence[Iterable[int]]) -> bool:
        """Whether nobody left out has a larger bound than somebody chosen."""
        bounds = {k: self.bound(group) for group in groups for k in group}
        inside = [bounds[k] for k in chosen]
        outside = [bounds[k] for k in available if k not in chosen]
        return not outside or not inside or min(inside) >= max(outside) - 1e-9
