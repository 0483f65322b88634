"""Formats of numbers on the pages."""

from __future__ import annotations

import math

from effects import Share

from fedsel_flwr.report.paired import PairedEffect
from fedsel_flwr.report.verdict import SelectorVerdict

UNKNOWN = "-"


def amount(value: float, digits: int = 3) -> str:
    """Format an amount with three significant digits, and with commas from 1,000.

    >>> [amount(x) for x in (10563.4, 97.08, 0.3871, 0.0, math.nan)]
    ['10,563', '97.1', '0.387', '0', '-']
    """
    if not math.isfinite(value):
        return UNKNOWN
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(6, decimals)}f}"


def interval(effect: PairedEffect | Share, scale: float = 1.0, digits: int = 2, sign: str = "") -> str:
    """Format an estimate with its interval, for example "0.75 (0.71 to 0.80)"."""
    if not math.isfinite(effect.estimate):
        return UNKNOWN
    told = f"{scale * effect.estimate:{sign}.{digits}f}"
    if math.isfinite(effect.low):
        told += f" ({scale * effect.low:{sign}.{digits}f} to {scale * effect.high:{sign}.{digits}f})"
    return told


def time_ratio(one: SelectorVerdict) -> str:
    """Format a time ratio; "-" if a run of the selector or of random selection missed the target."""
    return UNKNOWN if one.time.censored else interval(one.time)


def won_and_lost(effect: PairedEffect) -> str:
    """Return the seeds on which a selector was sooner, later, or neither by the sign test."""
    undecided = effect.pairs - effect.sooner - effect.later
    return f"sooner on {effect.sooner}, later on {effect.later}, undecided on {undecided}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "seed"), counted(20, "seed")
    ('1 seed', '20 seeds')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def probability(p: float) -> str:
    """Format a p-value, for example "p = 0.013"."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def listed(items: list[str]) -> str:
    """Join texts with commas and "and"; "none" if there are none.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    if len(items) < 2:
        return items[0] if items else "none"
    return f"{', '.join(items[:-1])} and {items[-1]}"


def table(heads: list[str], lines: list[list[str]], left: int = 1) -> str:
    """Return a Markdown table whose first columns are aligned to the left."""
    marks = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, marks, *lines)) + "\n"
