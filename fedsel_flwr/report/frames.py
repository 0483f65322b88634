"""A comparison as data frames and as a LaTeX table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedsel_flwr.report.files import load_optional
from fedsel_flwr.report.paired import Figure, PairedDifference, paired_differences
from fedsel_flwr.report.summary import RunSummary, Spread, aggregate
from fedsel_flwr.report.table import cell

if TYPE_CHECKING:
    import pandas as pd

COMPARED: tuple[Figure, ...] = ("accuracy", "time_to_target_s", "energy_to_target_j")
"""The figures whose differences to the reference a summary gives."""


def runs_frame(summaries: Sequence[RunSummary]) -> pd.DataFrame:
    """A row a run, a column for each field of :class:`~fedsel_flwr.report.RunSummary`."""
    return load_optional("pandas").DataFrame([asdict(summary) for summary in summaries])


def summary_frame(summaries: Sequence[RunSummary], reference: str | None) -> pd.DataFrame:
    """A row a selector.

    Args:
        summaries: One a run.
        reference: The selector to compare with; None: no differences.

    Returns:
        For each figure its mean over the seeds that have a value, its standard deviation (``…_sd``) and how many they
        are (``…_seeds``); for those of :data:`COMPARED` the paired difference to the reference (``…_difference``), the
        ends of its 95 % interval (``…_low``, ``…_high``) and Holm's p-value (``…_p``).
    """
    differences = _differences(summaries, reference)
    rows = []
    for row in aggregate(summaries):
        flat: dict[str, Any] = {"selector": row.selector, "seeds": row.seeds}
        for name, spread in vars(row).items():
            if isinstance(spread, Spread):
                flat |= {name: spread.mean, f"{name}_sd": spread.deviation, f"{name}_seeds": spread.count}
                found = differences.get((row.selector, name))
                if found:
                    flat |= {f"{name}_difference": found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
                    flat[f"{name}_p"] = found.p
        rows.append(flat)
    frame = load_optional("pandas").DataFrame(sorted(rows, key=len, reverse=True))  # the reference lacks columns
    return frame.set_index("selector").loc[[row["selector"] for row in rows]].reset_index()


def latex(summaries: Sequence[RunSummary], reference: str | None, target_accuracy: float) -> str:
    """A LaTeX table (package booktabs): mean and standard deviation, and the paired difference in time.

    Args:
        summaries: One a run.
        reference: The selector to compare with; None: no differences.
        target_accuracy: The target that time and energy refer to.

    Returns:
        A ``tabular`` environment.
    """
    target = rf"{100 * target_accuracy:g}\,\%"
    heads = ["selector", r"accuracy (\%)", f"time to {target} (s)", f"energy to {target} (J)", "Jain index"]
    rows = aggregate(summaries)
    asked = any(row.asked_per_round.count for row in rows)
    if asked:
        heads.append("clients a round")
    differences = _differences(summaries, reference)
    if differences:
        heads.append(f"time against {_escaped(str(reference))} (s)")
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", " & ".join(heads) + r" \\", r"\midrule"]
    for row in rows:
        cells = [
            _escaped(row.selector),
            _math(cell(row.accuracy, scale=100, decimals=1)),
            _math(cell(row.time_to_target_s, none="never")),
            _math(cell(row.energy_to_target_j, none="never")),
            _math(cell(row.jain, decimals=3)),
        ]
        if asked:
            cells.append(_math(cell(row.asked_per_round, decimals=1)))
        if differences:
            cells.append(_against(differences.get((row.selector, "time_to_target_s"))))
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _differences(summaries: Sequence[RunSummary], reference: str | None) -> Mapping[tuple[str, str], PairedDifference]:
    if reference is None:
        return {}
    found = [each for figure in COMPARED for each in paired_differences(summaries, reference, figure)]
    return {(each.selector, each.figure): each for each in found}


def _against(difference: PairedDifference | None) -> str:
    if difference is None:
        return "reference"
    if difference.mean != difference.mean:
        return "--"
    if difference.low != difference.low:
        return f"${difference.mean:+.4g}$"
    return f"${difference.mean:+.4g}$ [${difference.low:+.4g}$, ${difference.high:+.4g}$]"


def _math(text: str) -> str:
    return text.replace("±", r"$\pm$")


def _escaped(text: str) -> str:
    return "".join(rf"\{letter}" if letter in "&%$#_{}" else letter for letter in text)
