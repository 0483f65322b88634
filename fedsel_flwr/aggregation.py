"""Aggregation of updates by Kim et al.: FedCA's combinatorial filter, and the averaging schemes. NumPy only.

The filter keeps the subset of a round's models whose averaged logits score best (Kim et al., (4)). A scheme of Table 1
sets each kept model's weight in the mean of the base strategy, then mixes that mean with the old model:
``w^t = old * w^{t-1} + new * mean``.

References:
    T. Kim, S. Bae, J. Lee, S. Yun, Accurate and fast federated learning via combinatorial multi-armed bandits, 2020,
    arXiv:2012.03270, equations (3)-(5) and Table 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, one_of
from fedsel_flwr.errors import ParameterError

__all__ = ["SCHEMES", "Averaging", "averaging", "best_subset"]

Score = Literal["loss", "accuracy"]
SCORES = ("loss", "accuracy")
Subset = tuple[tuple[int, ...], float]
"""A subset's members, ascending, and its score."""
MAX_EXACT = 20
"""Largest number of models for a search of every subset."""
TIE = 1e-12
"""Largest difference of equal scores; for scores above 1 in size, as a share of the score."""


def best_subset(logits: FloatArray, labels: IntArray, score: Score = "loss") -> tuple[BoolArray, float]:
    """Find the non-empty subset of models whose averaged logits score best on the validation set.

    Up to 20 models, the search covers all 2^n - 1 subsets. A depth-first walk adds the logits of one model per subset.
    Above 20 models the search is greedy. It starts with the best single model, and adds the best further model while
    the score does not fall.

    Of equal scores the larger subset wins, then the lowest indices.

    Args:
        logits: Outputs of the models, shape (n_models, n_examples, n_classes).
        labels: Right classes, shape (n_examples,).
        score: "loss" for minus the cross-entropy of the averaged logits, "accuracy" for the fraction correct.

    Returns:
        Whether each model is kept, shape (n_models,), and the score of the kept models: minus the mean cross-entropy in
        nats, or the fraction correct.

    Raises:
        ParameterError: A shape, a label or the score's name is wrong, or a logit is not finite.

    References:
        T. Kim et al., equation (4), and the scores below it. The paper calls the accuracy "Dirac delta function".

    >>> logits = np.array([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 3.0], [0.0, 2.0]]])  # model 1 is wrong on example 0
    >>> kept, value = best_subset(logits, np.array([0, 1]))
    >>> kept.tolist(), round(value, 4)
    ([True, False], -0.2201)
    """
    stack, right = _checked(logits, labels, score)
    cells = (right, np.arange(right.size))
    scorer = partial(_loss, cells=cells) if score == "loss" else partial(_accuracy, cells=cells)
    # Sums of huge logits overflow. Such subsets get the worst score, without a warning.
    with np.errstate(all="ignore"):
        members, value = _exact(stack, scorer) if len(stack) <= MAX_EXACT else _greedy(stack, scorer)
    kept = np.zeros(len(stack), dtype=np.bool_)
    kept[list(members)] = True  # S_opt (4)
    return kept, value


def _loss(total: FloatArray, size: int, cells: tuple[IntArray, IntArray]) -> float:
    """Return minus the mean cross-entropy of summed logits / size; ``cells`` index each example's right class."""
    mean = total * (1.0 / size)  # g-tilde (4)
    chosen = mean[cells]
    top = mean.max(axis=0)
    mean -= top
    np.exp(mean, out=mean)
    return float((chosen - top - np.log(mean.sum(axis=0))).mean())  # classification loss, below (4)


def _accuracy(total: FloatArray, size: int, cells: tuple[IntArray, IntArray]) -> float:
    """Return the fraction of examples whose first largest logit is the right class; ``cells`` as in :func:`_loss`."""
    top = total.max(axis=0)
    # argmax takes five times as long as the maximum, and is needed only if an example has several largest logits.
    single = np.count_nonzero(total == top) == top.size
    hits = total[cells] == top if single else total.argmax(axis=0) == cells[0]
    return float(hits.mean())  # Dirac delta, below (4)


def _exact(stack: FloatArray, scorer: Any) -> Subset:
    """Search every subset: one walk for each subset of the first three models, one thread per processor."""
    # Eight walks of equal length, in which NumPy releases the interpreter lock.
    n = len(stack)
    fixed = min(n - 1, 3)
    parts = [tuple(k for k in range(fixed) if prefix >> k & 1) for prefix in range(1 << fixed)]

    def walk(part: tuple[int, ...]) -> Subset:
        # NumPy's error state is separate in each thread.
        with np.errstate(all="ignore"):
            return _walk(stack, scorer, part, range(fixed, n))

    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        return _best(list(pool.map(walk, parts)))


def _walk(stack: FloatArray, scorer: Any, fixed: tuple[int, ...], free: range) -> Subset:
    """Return the best non-empty subset that holds ``fixed`` and any of ``free``, by a depth-first walk."""
    # One sum per depth, because after a subtraction the rounding error of huge logits would remain in the sum.
    sums = np.empty((len(free) + 1, *stack.shape[1:]))
    sums[0] = stack[list(fixed)].sum(axis=0)
    best = _candidate(fixed, scorer(sums[0], len(fixed))) if fixed else ((), -np.inf)

    def grow(members: tuple[int, ...], start: int, depth: int) -> None:
        nonlocal best
        for k in range(start, free.stop):
            total = np.add(sums[depth], stack[k], out=sums[depth + 1])
            larger = (*members, k)
            best = _best([best, _candidate(larger, scorer(total, len(larger)))])
            grow(larger, k + 1, depth + 1)

    grow(fixed, free.start, 0)
    return best


def _greedy(stack: FloatArray, scorer: Any) -> Subset:
    """Return the best single model, extended by the best further model while the score does not fall."""
    best = _best([_candidate((k,), scorer(stack[k], 1)) for k in range(len(stack))])
    while len(best[0]) < len(stack):
        total, members = stack[list(best[0])].sum(axis=0), best[0]
        others = [k for k in range(len(stack)) if k not in members]
        grown = _best(
            [_candidate(tuple(sorted((*members, k))), scorer(total + stack[k], len(members) + 1)) for k in others]
        )
        if not _reaches(grown[1], best[1]):
            break
        best = grown
    return best


def _candidate(members: tuple[int, ...], value: float) -> Subset:
    """Return a subset with its score; NaN, from overflowed sums, becomes the worst score."""
    return members, -np.inf if np.isnan(value) else value


def _reaches(value: float, top: float) -> bool:
    """Return whether a score is at least ``top``, up to rounding."""
    return bool(value >= top - TIE * max(1.0, abs(top)))


def _best(found: list[Subset]) -> Subset:
    """Return the subset with the best score; of equal scores the larger subset, then the lowest indices."""
    top = max(value for _, value in found)
    return min((one for one in found if _reaches(one[1], top)), key=lambda one: (-len(one[0]), one[0]))


def _checked(logits: FloatArray, labels: IntArray, score: str) -> tuple[FloatArray, IntArray]:
    """Check the arguments; return the logits with classes before examples, and the labels."""
    one_of("score", score, SCORES)
    stack, right = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if stack.ndim != 3 or min(stack.shape) < 1:
        raise ParameterError(f"logits must have shape (n_models, n_examples, n_classes), got {stack.shape}")
    if right.shape != stack.shape[1:2] or right.dtype.kind not in "iu":
        raise ParameterError(
            f"labels must be {stack.shape[1]} integers, one per example, got {right.dtype} of shape {right.shape}"
        )
    if right.min() < 0 or right.max() >= stack.shape[2]:
        raise ParameterError(f"labels must lie in 0..{stack.shape[2] - 1}, got {right.min()}..{right.max()}")
    if not np.isfinite(stack).all():
        raise ParameterError("logits must be finite. Drop the models that give NaN or infinities first")
    # Classes come first, so that maxima and sums over classes run over contiguous examples.
    return np.ascontiguousarray(stack.transpose(0, 2, 1)), right.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """FedCA's combinatorial filter.

    Args:
        score: "loss" or "accuracy", of the averaged logits on the validation set.
    """

    score: str = "loss"

    def __post_init__(self) -> None:
        """Check the score."""
        one_of("score", self.score, SCORES)

    def kept(self, logits: Sequence[FloatArray], labels: IntArray) -> BoolArray:
        """Return the models to keep, of those with finite logits.

        Args:
            logits: Logits of each model, shape (n_examples, n_classes).
            labels: Right classes, shape (n_examples,).

        Returns:
            Whether each model is kept, shape (n_models,).
        """
        return self.copies(logits, labels, np.ones(len(logits), dtype=np.int64)) > 0

    def copies(self, logits: Sequence[FloatArray], labels: IntArray, draws: IntArray) -> IntArray:
        """Return the copies to keep of a multiset of models, as FedProx draws it: (4) searches and averages the copies.

        Args:
            logits: Logits of each model, shape (n_examples, n_classes).
            labels: Right classes, shape (n_examples,).
            draws: Number of draws of each model's client, shape (n_models,).

        Returns:
            Number of kept copies of each model, shape (n_models,).

        >>> logits = np.array([[[1.0, 0.0]], [[0.0, 2.0]]])  # margins: right by 1, wrong by 2
        >>> Filter(score="accuracy").kept(logits, np.array([0]))
        array([ True, False])
        >>> Filter(score="accuracy").copies(logits, np.array([0]), np.array([3, 1]))  # the mean is right by 1 / 4
        array([3, 1])
        """
        copies = [i for i, one in enumerate(logits) if np.isfinite(one).all() for _ in range(int(draws[i]))]
        if not copies:
            return np.zeros(len(logits), dtype=np.int64)
        subset, _ = best_subset(np.stack([logits[i] for i in copies]), labels, cast(Score, self.score))  # (4)
        return np.bincount(np.array(copies)[subset], minlength=len(logits)).astype(np.int64)


SCHEMES = ("fedpdp", "fedpdp-exact", "fedavg-absent", "mean")
"""The schemes by name."""
READS_TOTAL_EXAMPLES = frozenset({"fedpdp-exact", "fedavg-absent"})
"""The schemes that read the number of examples of all clients, absent ones included."""


@dataclass(frozen=True)
class Averaging:
    """Weights and mix that turn a round's models into the new global one.

    Attributes:
        weights: Weight of each model in the base strategy's mean, shape (n,), positive.
        old: Factor of the old global model.
        new: Factor of the mean.
    """

    weights: FloatArray
    old: float
    new: float

    @property
    def mixes(self) -> bool:
        """Whether the new model differs from the mean."""
        return not (self.old == 0.0 and self.new == 1.0)

    def mix(self, before: Sequence[npt.NDArray[Any]], mean: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Return the new model: a mix of the old model and the mean of the round's models."""
        if not self.mixes:
            return list(mean)
        pairs = zip(before, mean, strict=True)
        return [np.asarray(self.old * b + self.new * m, dtype=m.dtype) for b, m in pairs]  # (3), (5)


def averaging(
    scheme: str, num_examples: FloatArray, total_examples: float, num_clients: int, draws: npt.ArrayLike | None = None
) -> Averaging:
    """Return a scheme's weights for the models of a round.

    ====================  ================  ==================================================
    scheme                Table 1           new model
    ====================  ================  ==================================================
    ``"fedpdp"``          FedPdp            mean weighted by p_k, with weights that sum to 1
    ``"fedpdp-exact"``    FedPdp            ``sum over S^t of p_k |S| / |S^t| w_k``, as printed
    ``"fedavg-absent"``   FedAvg            clients not in S^t keep the old model, p_k w^{t-1}
    ``"mean"``            FedProx           plain mean over the multiset of drawn clients
    ====================  ================  ==================================================

    The printed weights of FedPdp sum to 1 only on average, so the model grows and shrinks from round to round. The
    default is therefore normalized. FedProx samples by p_k with replacement
    (:class:`~fedsel_flwr.selectors.RandomBySize`). A client drawn c times counts c times in its mean.

    Args:
        scheme: One of the names above.
        num_examples: Number of examples behind each model of the round, shape (n,).
        total_examples: Number of examples of all clients, absent ones included.
        num_clients: Number of clients, ``|S|``.
        draws: Number of draws of the client behind each model, shape (n,), whole numbers of at least 1; None for once.

    Returns:
        The weights and the mix.

    Raises:
        ParameterError: The scheme is unknown, or a number is not positive.

    >>> averaging("fedavg-absent", np.array([10.0, 30.0]), 100.0, 5)
    Averaging(weights=array([10., 30.]), old=0.6, new=0.4)
    """
    if scheme not in SCHEMES:
        raise ParameterError(f"unknown averaging scheme {scheme!r}. Choose one of {', '.join(SCHEMES)}")
    weights = np.asarray(num_examples, dtype=np.float64)
    if weights.ndim != 1 or not weights.size or not (weights > 0).all() or not total_examples > 0:
        raise ParameterError(f"num_examples must be positive, one per model, got {weights}")
    counts = np.ones_like(weights) if draws is None else np.asarray(draws, dtype=np.float64)
    if counts.shape != weights.shape or not (counts >= 1).all():
        raise ParameterError(f"draws must be at least 1, one per model, got {counts}")
    share = float(weights.sum() / total_examples)  # sum of p_k over S^t
    if scheme == "fedpdp":
        return Averaging(weights, 0.0, 1.0)  # normalized (5)
    if scheme == "fedpdp-exact":
        return Averaging(weights, 0.0, share * num_clients / weights.size)  # (5)
    if scheme == "fedavg-absent":
        return Averaging(weights, round(1.0 - share, 15), share)  # (3)
    return Averaging(counts, 0.0, 1.0)  # Table 1, FedProx
