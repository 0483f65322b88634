"""FedCA's model filter: the subset of a round's models whose averaged logits score best (Kim et al.)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Score = Literal["loss", "accuracy"]

MAX_EXACT = 20
"""Up to this many models every subset is searched."""
TIE = 1e-12
"""Scores closer than this are equal."""


def best_subset(logits: FloatArray, labels: IntArray, score: Score = "loss") -> tuple[BoolArray, float]:
    """Find the non-empty subset of models whose averaged logits score best on the validation set.

    Up to 20 models all 2^n - 1 subsets are searched: each model's logits come in once, and walking the subsets in the
    order of a Gray code costs one addition or subtraction of logits for each. Above that the search is greedy: from
    the best single model, the model whose addition scores best is added while that does not lower the score.

    Ties: the larger subset, then the lowest indices.

    Args:
        logits: Outputs of the models, shape (n_models, n_examples, n_classes).
        labels: Right classes, shape (n_examples,).
        score: "loss" for minus the cross-entropy of the averaged logits, "accuracy" for the fraction correct.

    Returns:
        Which models are kept, shape (n_models,), and their score: minus the mean cross-entropy in nats, or the
        fraction correct.

    Raises:
        ParameterError: A shape, a label or the score's name is wrong, or a logit is not finite.

    References:
        S. Kim et al., equation (4); the scores below it. The paper calls the accuracy "Dirac delta function".

    >>> logits = np.array([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 3.0], [0.0, 2.0]]])  # model 1 is wrong on example 0
    >>> kept, value = best_subset(logits, np.array([0, 1]))
    >>> kept.tolist(), round(value, 4)
    ([True, False], -0.2201)
    """
    stack, right = _checked(logits, labels, score)
    scorer = _Loss(stack, right) if score == "loss" else _Accuracy(stack, right)
    if len(stack) <= MAX_EXACT:
        members, value = _exact(stack, scorer)
    else:
        members, value = _greedy(stack, scorer)
    kept = np.zeros(len(stack), dtype=np.bool_)
    kept[list(members)] = True  # S_opt (4)
    return kept, value


class _Loss:
    """Minus the mean cross-entropy of summed logits / size; classes come first, examples last."""

    def __init__(self, stack: FloatArray, right: IntArray) -> None:
        self._right = right
        self._columns = np.arange(right.size)

    def __call__(self, total: FloatArray, size: int) -> float:
        mean = total * (1.0 / size)
        chosen = mean[self._right, self._columns]
        top = mean.max(axis=0)
        mean -= top
        np.exp(mean, out=mean)
        return float((chosen - top - np.log(mean.sum(axis=0))).mean())  # u(X, g), classification loss


class _Accuracy:
    """Fraction of examples whose first largest logit is the right class."""

    def __init__(self, stack: FloatArray, right: IntArray) -> None:
        self._right = right

    def __call__(self, total: FloatArray, size: int) -> float:
        return float((total.argmax(axis=0) == self._right).mean())  # u(X, g), Dirac delta


def _exact(stack: FloatArray, scorer: Any) -> tuple[tuple[int, ...], float]:
    """Every subset; the walk is cut into parts by the highest models, one thread for each processor."""
    n = len(stack)
    fixed = min(n - 1, 3)
    parts = [[k for k in range(fixed) if prefix >> k & 1] for prefix in range(1 << fixed)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(lambda part: _walk(stack, scorer, part, range(fixed, n)), parts))
    return _best([one for one in found if one is not None])


def _walk(stack: FloatArray, scorer: Any, fixed: list[int], free: range) -> tuple[tuple[int, ...], float] | None:
    """The best subset that holds ``fixed`` and any of ``free``."""
    total = stack[fixed].sum(axis=0) if fixed else np.zeros(stack.shape[1:])
    members = set(fixed)
    best = _candidate(members, scorer(total, len(members))) if members else None
    for k in _gray_flips(len(free)):
        model = free[k]
        if model in members:
            members.remove(model)
            total -= stack[model]
        else:
            members.add(model)
            total += stack[model]
        if len(members) <= 1:
            total = stack[next(iter(members))].copy() if members else np.zeros(stack.shape[1:])  # no rounding left over
        if members:
            one = _candidate(members, scorer(total, len(members)))
            best = one if best is None else _best([best, one])
    return best


def _gray_flips(bits: int) -> Iterator[int]:
    """Which bit changes at each step of the reflected Gray code, through all 2^bits - 1 non-zero words."""
    for step in range(1, 1 << bits):
        yield (step & -step).bit_length() - 1


def _greedy(stack: FloatArray, scorer: Any) -> tuple[tuple[int, ...], float]:
    best = _best([_candidate({k}, scorer(stack[k], 1)) for k in range(len(stack))])
    while len(best[0]) < len(stack):
        total, members = stack[list(best[0])].sum(axis=0), set(best[0])
        grown = _best(
            [_candidate(members | {k}, scorer(total + stack[k], len(members) + 1)) for k in range(len(stack))
             if k not in members]
        )  # fmt: skip
        if grown[1] < best[1] - TIE:
            break
        best = grown
    return best


def _candidate(members: set[int], value: float) -> tuple[tuple[int, ...], float]:
    return tuple(sorted(members)), value


def _best(found: list[tuple[tuple[int, ...], float]]) -> tuple[tuple[int, ...], float]:
    """The best score; among equals the larger subset, then the lowest indices."""
    top = max(value for _, value in found)
    equal = [one for one in found if one[1] >= top - TIE * max(1.0, abs(top))]
    return min(equal, key=lambda one: (-len(one[0]), one[0]))


def _checked(logits: FloatArray, labels: IntArray, score: str) -> tuple[FloatArray, IntArray]:
    """The logits with classes before examples, and the labels; both checked."""
    if score not in ("loss", "accuracy"):
        raise ParameterError(f"score must be 'loss' or 'accuracy', got {score!r}")
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
        raise ParameterError("logits must be finite; drop the models that give NaN or infinities first")
    return np.ascontiguousarray(stack.transpose(0, 2, 1)), right.astype(np.int64)
