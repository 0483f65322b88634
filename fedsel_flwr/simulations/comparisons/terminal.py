"""A comparison on the terminal: table, remarks and verdict, or its figures as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fedsel_flwr.report.summary import aggregate
from fedsel_flwr.report.tables import render_table

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparisons.comparison import Comparison


def show_comparison(comparison: Comparison, as_json: bool = False) -> None:
    """Print a comparison.

    Args:
        comparison: The comparison, with at least one finished run.
        as_json: Whether to print its figures as JSON instead of the table, the remarks and the verdict.
    """
    if as_json:
        print(json.dumps(comparison.figures(), indent=2, allow_nan=False))
        return
    verdict, scenario = comparison.verdict, comparison.scenario
    summaries = comparison.summaries
    render_table(
        aggregate(summaries), scenario.target_accuracy, verdict=verdict, target_rounds=scenario.target_rounds,
        target_window=min(summary.target_window for summary in summaries),
    )  # fmt: skip
    for line in remark_lines(comparison):
        print(line)
    if verdict:
        print(verdict.sentence)


def remark_lines(comparison: Comparison) -> list[str]:
    """Return the remarks on a comparison: probable problems, and the runs and selectors that were left out."""
    lines = comparison.remarks()
    lines += [f"left out: {name}: {reason}" for name, reason in comparison.left_out.items()]
    lines += [f"left out: {run.name}, interrupted after {len(run.history.rounds)} rounds" for run in comparison.cut_off]
    return [*lines, comparison.agreement.sentence] if comparison.agreement else lines
