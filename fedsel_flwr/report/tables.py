"""Tables of a comparison: on the terminal, as data frames, as LaTeX; one row per selector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedsel_flwr.report.progress import PipeSafeConsole
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.summary import RunSummary, SelectorRow, Spread, aggregate, check_target, decimals_of
from fedsel_flwr.report.verdict import Figure, PairedDifference, paired_differences

if TYPE_CHECKING:
    import pandas as pd


COMPARED: tuple[Figure, ...] = ("accuracy", "time_to_target_s", "energy_to_target_j")
"""The figures whose differences to the reference :func:`summary_frame` has."""


def render_table(rows: Sequence[SelectorRow], target_accuracy: float, console: Console | None = None) -> None:
    """Print the comparison of selectors.

    A figure with several seeds reads ``mean ±sample standard deviation``. If only k of n seeds have a value, such as
    the time to a target that was not always reached, the cell adds ``k of n``. If none has, time and energy to the
    target read ``never`` and any other figure ``-``. The energy of whole runs is in their summaries.

    Args:
        rows: What ``aggregate`` returned.
        target_accuracy: The target that time and energy refer to, a fraction in (0, 1].
        console: Where to print; standard output by default. In a pipe the text is plain and no line is wrapped.

    Raises:
        ParameterError: ``target_accuracy`` is not a fraction.
    """
    check_target(target_accuracy)
    out = console or PipeSafeConsole()
    table = _build(rows, target_accuracy, plus_minus=_plus_minus(out.encoding), before_count=" ")
    natural = Measurement.get(out, out.options.update(width=1000), table).maximum
    if natural > out.width:
        # A pipe has no width; rich assumes 80 columns there and would wrap the lines that a program wants to read.
        if console is None and not out.is_terminal:
            out = PipeSafeConsole(width=natural)
        else:
            table = _build(rows, target_accuracy, plus_minus=_plus_minus(out.encoding), before_count="\n")
    out.print(table)


def runs_frame(summaries: Sequence[RunSummary]) -> pd.DataFrame:
    """Return a data frame with a row a run and a column for each field of :class:`~fedsel_flwr.report.RunSummary`."""
    return load_optional("pandas").DataFrame([asdict(summary) for summary in summaries])


def summary_frame(summaries: Sequence[RunSummary], reference: str | None) -> pd.DataFrame:
    """Return a data frame with a row a selector.

    Args:
        summaries: One a run.
        reference: The selector to compare with; None: no differences.

    Returns:
        For each figure its mean over the seeds that have a value, its standard deviation (``…_sd``) and the number of
        these seeds (``…_seeds``). The figures of :data:`COMPARED` also have the paired difference to the reference
        (``…_difference``), the ends of its 95 % interval (``…_low``, ``…_high``) and Holm's p-value (``…_p``).
    """
    differences = _differences(summaries, reference)
    rows = []
    for row in aggregate(summaries):
        flat: dict[str, Any] = {"selector": row.selector, "seeds": row.seeds}
        for name, spread in row.figures.items():
            flat |= {name: spread.mean, f"{name}_sd": spread.deviation, f"{name}_seeds": spread.count}
            if found := differences.get((row.selector, name)):
                flat |= {f"{name}_difference": found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
                flat[f"{name}_p"] = found.p
        rows.append(flat)
    # pandas orders the columns by the first row, and the reference lacks the differences: the longest row comes first.
    frame = load_optional("pandas").DataFrame(sorted(rows, key=len, reverse=True))
    return frame.set_index("selector").loc[[row["selector"] for row in rows]].reset_index()


def latex_table(summaries: Sequence[RunSummary], reference: str | None, target_accuracy: float) -> str:
    """Return a LaTeX table (package booktabs): mean and standard deviation, and the paired difference in time.

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
        cells = [_escaped(row.selector), *map(_math, _format_figures(row))]
        if asked:
            cells.append(_math(format_spread(row.asked_per_round, decimals=1)))
        if differences:
            cells.append(_format_difference(differences.get((row.selector, "time_to_target_s"))))
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def format_spread(spread: Spread, *, scale: float = 1, decimals: int | None = None, none: str = "-") -> str:
    """Format one figure: "mean ±deviation (k of n)", without deviation for one seed, without counts if all have it.

    Args:
        spread: The figure.
        scale: Factor, such as 100 for percent.
        decimals: Number of decimals; None leaves three significant digits.
        none: Text for a figure that no seed has.
    """
    if not spread.count:
        return none
    mean, deviation = scale * spread.mean, scale * spread.deviation
    digits = decimals_of(mean) if decimals is None else decimals
    text = f"{mean:.{digits}f}"
    if math.isfinite(deviation):
        text += f" ±{deviation:.{digits}f}"
    return text if spread.count == spread.total else f"{text} ({spread.count} of {spread.total})"


def _format_figures(row: SelectorRow) -> list[str]:
    """Format accuracy, time and energy to the target, and Jain index."""
    return [
        format_spread(row.accuracy, scale=100, decimals=1),
        format_spread(row.time_to_target_s, none="never"),
        format_spread(row.energy_to_target_j, none="never"),
        format_spread(row.jain, decimals=3),
    ]


def _build(rows: Sequence[SelectorRow], target_accuracy: float, plus_minus: str, before_count: str) -> Table:
    """Build the table; ``before_count`` is a space, or a line break on a narrow terminal."""
    caption = _caption(rows, plus_minus)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("selector", overflow="fold")
    asked = any(row.asked_per_round.count for row in rows)
    target = f"to {100 * target_accuracy:g} %"
    for header in (
        "accuracy\n%",
        f"time {target}\nsimulated s",
        f"energy\n{target}, J",
        "Jain\nindex",
        "failed\nclients",
        *(["asked\na round"] if asked else []),
    ):
        table.add_column(header, justify="right", overflow="fold")
    for row in rows:
        cells = [*_format_figures(row), format_spread(row.failed_clients, decimals=0 if row.seeds == 1 else 1)]
        ready = [cell.replace(" (", f"{before_count}(") for cell in cells]
        if asked:
            # On a narrow terminal the deviations of the last two columns stand below their means.
            ready[-2:] = [cell.replace(" ±", f"{before_count}±") for cell in ready[-2:]]
            ready.append(_format_asked(row.asked_per_round))
        table.add_row(Text(row.selector), *(Text(cell.replace("±", plus_minus)) for cell in ready))
    return table


def _format_asked(spread: Spread) -> str:
    """Format the mean number of clients asked per round; a whole number without decimals."""
    if not spread.count:
        return "-"
    return f"{spread.mean:.0f}" if spread.mean == round(spread.mean) else f"{spread.mean:.1f}"


def _caption(rows: Sequence[SelectorRow], plus_minus: str) -> Text:
    counts = {row.seeds for row in rows}
    if counts <= {1}:
        return Text("one seed")
    seeds = f"{counts.pop()} seeds" if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"
    return Text(f"mean {plus_minus} sample standard deviation over {seeds}")


def _plus_minus(encoding: str) -> str:
    """Return "±", or "+/-" if the console cannot encode it."""
    # Some Windows consoles and the C locale lack the character, and printing it would raise.
    try:
        "±".encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return "+/-"
    return "±"


def _differences(summaries: Sequence[RunSummary], reference: str | None) -> Mapping[tuple[str, str], PairedDifference]:
    if reference is None:
        return {}
    found = [each for figure in COMPARED for each in paired_differences(summaries, reference, figure)]
    return {(each.selector, each.figure): each for each in found}


def _format_difference(difference: PairedDifference | None) -> str:
    if difference is None:
        return "reference"
    if math.isnan(difference.mean):
        return "--"
    if math.isnan(difference.low):
        return f"${difference.mean:+.4g}$"
    return f"${difference.mean:+.4g}$ [${difference.low:+.4g}$, ${difference.high:+.4g}$]"


def _math(text: str) -> str:
    return text.replace("±", r"$\pm$")


def _escaped(text: str) -> str:
    return "".join(rf"\{letter}" if letter in "&%$#_{}" else letter for letter in text)
