"""Inputs for the comparison with the authors' code, made from seeds: the maker of the traces and the tests share them.

Every number is rounded to six decimals, so that a platform's last bit of an exponential changes nothing. ``digest`` of
a family of inputs stands in the head of its trace: a NumPy whose streams differ shows there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FOLDER = Path(__file__).parent
DECIMALS = 6


def rounded(values: npt.ArrayLike) -> Floats:
    """The values to six decimals, none of them minus zero."""
    return np.round(np.asarray(values, dtype=np.float64), DECIMALS) + 0.0


def digest(arrays: Iterable[npt.ArrayLike]) -> str:
    """SHA-256 of the arrays' numbers as little-endian doubles, one array after the other."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class OortFleet:
    """A fleet that Oort chooses from: no failures, no spares, everybody tried in round 1.

    ===========  ================================================================================
    setting      what it is
    ===========  ================================================================================
    wide         losses of clients that differ up to 15-fold; slow is who is not among the 30 %
    narrow       losses that differ by 5 %
    unlimited    nobody counts as slow
    fedscale     as wide, with FedScale's copy of the code and its clip and cut-off
    ===========  ================================================================================
    """

    setting: str
    seed: int

    clients: int = 100
    chosen: int = 10
    rounds: int = 200  # rounds 2 to 201
    penalty: float = 2.0

    @property
    def clip(self) -> float:
        return 0.9 if self.setting == "fedscale" else 0.98

    @property
    def cut_off(self) -> float:
        return 0.05 if self.setting == "fedscale" else 0.7

    @property
    def percentile(self) -> float:
        return 100.0 if self.setting == "unlimited" else 30.0

    def clients_of(self) -> tuple[Floats, Floats, Floats]:
        """Number of examples, duration and first loss of each client."""
        draws = np.random.default_rng(self.seed)
        sizes = draws.integers(20, 200, self.clients)
        durations = draws.lognormal(1.0, 0.7, self.clients)
        if self.setting == "narrow":
            losses = 2.3 + 0.05 * draws.normal(size=self.clients)
        else:
            losses = draws.uniform(0.2, 3.0, self.clients)
        return rounded(sizes), rounded(durations), losses

    def losses(self, number: int) -> Floats:
        """Root mean square of the losses of every client in this round."""
        noise = np.random.default_rng([self.seed, number]).normal(size=self.clients)
        return rounded(self.clients_of()[2] * np.exp(0.05 * noise - number / 150.0))

    def arrays(self) -> Iterator[npt.ArrayLike]:
        yield from self.clients_of()[:2]
        for number in range(1, self.rounds + 2):
            yield self.losses(number)


OORT = [OortFleet(setting, seed) for setting in ("wide", "narrow", "unlimited") for seed in range(4)]
FEDSCALE = [OortFleet("fedscale", seed) for seed in range(3)]


@dataclass(frozen=True)
class FedCorCase:
    """Embeddings, shares of the examples and discounts, from which FedCor makes one greedy choice."""

    seed: int

    clients: int = 100
    dimension: int = 15
    chosen: int = 5
    total: int = 1_000_000  # examples of all clients

    def embedding(self) -> Floats:
        """Column k is client k's, of single precision as the authors' code keeps it."""
        draws = np.random.default_rng([self.seed, 1])
        scale = 10.0 ** draws.uniform(-1.5, 0.0) / np.sqrt(self.dimension)
        values = rounded(scale * draws.normal(size=(self.dimension, self.clients)))
        return values.astype(np.float32).astype(np.float64)

    def sizes(self) -> Ints:
        """Numbers of examples; they differ a hundredfold and more."""
        shares = np.random.default_rng([self.seed, 2]).exponential(size=self.clients)
        return np.maximum(1, np.round(self.total * shares / shares.sum())).astype(np.int64)

    def discounts(self) -> Floats:
        times = np.random.default_rng([self.seed, 3]).integers(0, 4, self.clients)
        return rounded(0.9**times)

    def arrays(self) -> Iterator[npt.ArrayLike]:
        yield from (self.embedding(), self.sizes(), self.discounts())


FEDCOR = [FedCorCase(seed) for seed in range(300)]


@dataclass(frozen=True)
class LossCase:
    """Sizes and losses of a fleet; Power-of-Choice and active federated learning make one choice each."""

    seed: int

    clients: int = 100
    dropped: float = 0.75
    temperature: float = 0.01
    uniform: float = 0.1

    def sizes(self) -> Ints:
        return np.random.default_rng([self.seed, 1]).integers(10, 500, self.clients)

    def losses(self) -> Floats:
        return rounded(np.random.default_rng([self.seed, 2]).gamma(2.0, 1.0, self.clients))

    def candidates(self) -> Ints:
        """Those that Power-of-Choice asks, drawn in proportion to their sizes."""
        sizes, count = self.sizes(), (10, 30, 100)[self.seed % 3]
        return np.random.default_rng([self.seed, 3]).choice(self.clients, count, replace=False, p=sizes / sizes.sum())

    def arrays(self) -> Iterator[npt.ArrayLike]:
        yield from (self.sizes(), self.losses(), self.candidates())


LOSSES = [LossCase(seed) for seed in range(500)]
POWER_OF_CHOICE_CHOSEN, ACTIVE_FL_CHOSEN = 5, 10


@dataclass(frozen=True)
class GradientFleet:
    """A fleet that DivFL chooses from; the gradients of the chosen clients change after each round."""

    kind: str  # "clusters": around eight centres; "normal": without any
    clients: int
    chosen: int
    seed: int

    length: int = 50
    rounds: int = 30

    def first(self) -> Floats:
        """The gradient of each client before round 1."""
        draws = np.random.default_rng([self.seed, self.clients, self.chosen, 1])
        gradients = draws.normal(size=(self.clients, self.length))
        if self.kind == "clusters":
            centres = 3.0 * draws.normal(size=(8, self.length))
            gradients += centres[draws.integers(0, 8, self.clients)]
        return rounded(gradients)

    def next(self, number: int, gradients: Floats) -> Floats:
        """The gradients of the clients of this round after it, given theirs before it."""
        draws = np.random.default_rng([self.seed, self.clients, self.chosen, 2, number])
        return rounded(0.97 * gradients + 0.3 * draws.normal(size=gradients.shape))

    def arrays(self) -> Iterator[npt.ArrayLike]:
        yield self.first()
        for number in range(1, self.rounds + 1):
            yield self.next(number, np.zeros((self.chosen, self.length)))


DIVFL = [
    GradientFleet(kind, clients, chosen, seed)
    for kind in ("clusters", "normal")
    for clients, chosen, seeds in ((100, 10, 5), (100, 5, 5), (704, 10, 2))
    for seed in range(seeds)
]


@dataclass(frozen=True)
class PiscesFleet:
    """A fleet that Pisces chooses from: some clients are away in a round, and updates are stale by some steps."""

    beta: float
    seed: int

    clients: int = 100
    chosen: int = 10
    rounds: int = 100
    presence: float = 0.4

    def sizes(self) -> Ints:
        return np.random.default_rng([self.seed, 1]).integers(20, 200, self.clients)

    def present(self, number: int) -> Ints:
        """The available clients of a round, ascending."""
        return np.flatnonzero(np.random.default_rng([self.seed, 2, number]).random(self.clients) < self.presence)

    def losses(self, number: int) -> Floats:
        """Root mean square of the losses of every client in this round."""
        first = np.random.default_rng([self.seed, 3]).uniform(0.2, 3.0, self.clients)
        noise = np.random.default_rng([self.seed, 4, number]).normal(size=self.clients)
        return rounded(first * np.exp(0.2 * noise - number / 100.0))

    def staleness(self, number: int) -> Ints:
        """Steps by which the update of every client would be stale in this round; some clients are slow."""
        slow = np.random.default_rng([self.seed, 5]).exponential(4.0, self.clients)
        share = np.random.default_rng([self.seed, 6, number]).uniform(0.0, 2.0, self.clients)
        return np.floor(slow * share).astype(np.int64)

    def arrays(self) -> Iterator[npt.ArrayLike]:
        yield from (self.beta, self.sizes())
        for number in range(1, self.rounds + 1):
            yield from (self.present(number), self.losses(number), self.staleness(number))


PISCES = [PiscesFleet(beta, seed) for beta in (0.2, 0.5, 0.8) for seed in range(4)]


@dataclass(frozen=True)
class LateCase:
    """Updates of a round in time, and late ones; two arrays each, of which the first has 12 numbers."""

    scale_coff: float
    seed: int

    numbers: int = 20
    first: int = 12

    def counts(self) -> tuple[int, int]:
        """How many are in time, and how many late."""
        return 1 + self.seed % 7, 1 + self.seed % 5

    def fresh(self) -> Floats:
        return rounded(np.random.default_rng([self.seed, 1]).normal(0.3, 1.0, (self.counts()[0], self.numbers)))

    def late(self) -> Floats:
        scale = np.random.default_rng([self.seed, 2]).uniform(0.1, 3.0, (self.counts()[1], 1))
        return rounded(scale * np.random.default_rng([self.seed, 3]).normal(0.2, 1.0, (len(scale), self.numbers)))

    def staleness(self) -> Ints:
        return np.random.default_rng([self.seed, 4]).integers(1, 6, self.counts()[1])

    def arrays(self) -> Iterator[npt.ArrayLike]:
        yield from (self.scale_coff, self.fresh(), self.late(), self.staleness())


REFL = [LateCase(scale_coff, seed) for scale_coff in (1.0, 10.0) for seed in range(40)]


def inputs(cases: Iterable[OortFleet | FedCorCase | LossCase | GradientFleet | PiscesFleet | LateCase]) -> str:
    """The digest of a family of inputs."""
    return digest(array for case in cases for array in case.arrays())
