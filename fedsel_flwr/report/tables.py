"""Tables of a comparison, with one row per selector: on the terminal, as data frames, as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedsel_flwr.report.paired import PairedEffect
from fedsel_flwr.report.progress import PipeSafeConsole
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.summary import (
    TARGET_ROUNDS,
    RunSummary,
    SelectorRow,
    Spread,
    aggregate,
    check_target,
    decimals_of,
    describe_settings,
)
from fedsel_flwr.report.verdict import SelectorVerdict, Verdict

if TYPE_CHECKING:
    import pandas as pd


FIRST_PART = 4
"""Number of columns in the first of two tables on a narrow terminal."""
_LATEX = {letter: rf"\{letter}" for letter in "&%$#_{}"} | {
    # TeX reads ^^5c as a backslash, and a bracket or star after the end of a row as an option of it.
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "\\": r"\textbackslash{}", "[": "{[}", "*": "{*}",
}  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that a spreadsheet would compute."""


def render_table(
    rows: Sequence[SelectorRow],
    target_accuracy: float,
    console: Console | None = None,
    *,
    verdict: Verdict | None = None,
    target_rounds: int = TARGET_ROUNDS,
    target_window: int = TARGET_ROUNDS,
) -> None:
    """Print the comparison of selectors: their figures, and the ratios to the reference if there is a verdict.

    A figure over several seeds is printed as ``mean ±sample standard deviation``. If not all runs reached the target,
    the cell is ``k of n reach it``, and if no run reached it, ``never``. Any other figure that no run has is ``-``.

    Args:
        rows: Rows that ``aggregate`` returned.
        target_accuracy: The target that time and energy refer to, a fraction in (0, 1].
        console: Console to print on; standard output by default. In a pipe the text is plain, and lines are not
            wrapped.
        verdict: Ratios to a reference, and the verdict on each selector.
        target_rounds: Number of measured rounds whose mean accuracy must reach the target.
        target_window: The smallest number of rounds in this mean, if a run has fewer measured rounds.

    Raises:
        ParameterError: ``target_accuracy`` is not a fraction.
    """
    check_target(target_accuracy)
    out = console or PipeSafeConsole()
    sign = _plus_minus(out.encoding)

    tables = [_figures_table(rows, target_accuracy, sign)]
    if verdict and any(math.isfinite(one.time.low) or one.time.censored for one in verdict.selectors):
        tables += [_ratios_table(verdict, target_accuracy), _profile_table(verdict)]
    natural = max(Measurement.get(out, out.options.update(width=1000), table).maximum for table in tables)
    if natural > out.width:
        # A pipe has no width. rich would assume 80 columns, and wrap lines that a program needs to read.
        if console is None and not out.is_terminal:
            out = PipeSafeConsole(width=natural)
        else:
            parts = slice(FIRST_PART), slice(FIRST_PART, None)
            tables[:1] = [_figures_table(rows, target_accuracy, sign, part) for part in parts]
    for table in tables:
        out.print(table)
    target = _describe_target(target_accuracy, target_rounds, target_window)
    for note in filter(None, (target, describe_settings(row.selector for row in rows))):
        out.print(note, markup=False, highlight=False)


def runs_frame(summaries: Sequence[RunSummary]) -> pd.DataFrame:
    """Return a data frame with a row per run, and a column per field of :class:`~fedsel_flwr.report.RunSummary`."""
    return load_optional("pandas").DataFrame([asdict(summary) for summary in summaries])


def safe_texts(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table in which an apostrophe precedes each text that a spreadsheet would compute; numbers are equal."""
    return table.map(lambda value: f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value)


def summary_frame(summaries: Sequence[RunSummary], verdict: Verdict | None) -> pd.DataFrame:
    """Return a data frame with a row per selector.

    Each figure has three columns: its mean over the seeds, its standard deviation (``…_sd``) and the number of seeds
    with a value (``…_seeds``). A verdict adds these columns:

    - Ratios to the reference with the ends of their 95 % intervals: ``time_ratio``, ``time_ratio_low``,
      ``time_ratio_high``. The same for ``seconds_per_round``, ``rounds``, ``energy`` and ``joules_per_round``.
    - Differences of accuracy, worst_tenth, jain and asked_per_round: ``accuracy_difference``, ``accuracy_low``,
      ``accuracy_high``, ...
    - ``verdict``, the p-value ``time_p`` after Holm's correction, and ``seeds_to_settle``, the number of seeds that
      would settle the question.

    Args:
        summaries: The summary of each run.
        verdict: Verdict on these runs; None if there is no reference.

    Returns:
        The data frame.
    """
    compared = {one.selector: _flat_verdict(one) for one in (verdict.selectors if verdict else ())}
    rows = []
    for row in aggregate(summaries):
        flat: dict[str, Any] = {"selector": row.selector, "seeds": row.seeds}
        for name, spread in row.figures.items():
            flat |= {name: spread.mean, f"{name}_sd": spread.deviation, f"{name}_seeds": spread.count}
        if verdict:
            flat |= compared.get(row.selector, {"verdict": "reference"})
        rows.append(flat)
    # pandas orders columns by the first row, and the reference lacks the ratios, so the longest row comes first.
    frame = load_optional("pandas").DataFrame(sorted(rows, key=len, reverse=True))
    return frame.set_index("selector").loc[[row["selector"] for row in rows]].reset_index()


def _flat_verdict(one: SelectorVerdict) -> dict[str, Any]:
    """Return the verdict on a selector, as columns of :func:`summary_frame`."""
    flat: dict[str, Any] = {"verdict": one.word, "time_p": one.p, "seeds_to_settle": one.seeds}
    for name in ("time", "seconds_per_round", "rounds", "energy", "joules_per_round"):
        effect: PairedEffect = getattr(one, name)
        flat |= {f"{name}_ratio": effect.estimate, f"{name}_ratio_low": effect.low, f"{name}_ratio_high": effect.high}
    for effect in one.sides:
        flat |= {f"{effect.figure}_difference": effect.estimate}
        flat |= {f"{effect.figure}_low": effect.low, f"{effect.figure}_high": effect.high}
    return flat


def latex_table(summaries: Sequence[RunSummary], verdict: Verdict | None, target_accuracy: float) -> str:
    """Return a LaTeX table (package booktabs): mean and standard deviation, time ratio and verdict.

    Args:
        summaries: The summary of each run.
        verdict: Verdict on these runs; None if there is no reference.
        target_accuracy: The target that time and energy refer to.

    Returns:
        A ``tabular`` environment.
    """
    target = rf"{100 * target_accuracy:g}\,\%"
    rows, compared = aggregate(summaries), {one.selector: one for one in (verdict.selectors if verdict else ())}
    columns: list[tuple[str, Callable[[SelectorRow], str]]] = [
        ("selector", lambda row: _escaped(row.selector)),
        (r"accuracy (\%)", lambda row: format_spread(row.accuracy, scale=100, decimals=1)),
        (f"time to {target} (s)", lambda row: format_spread(row.time_to_target_s, none="never")),
        (f"energy to {target} (J)", lambda row: format_spread(row.energy_to_target_j, none="never")),
        ("Jain index", lambda row: format_spread(row.jain, decimals=3)),
    ]
    if any(row.asked_per_round.count for row in rows):
        columns.append(("clients a round", lambda row: format_spread(row.asked_per_round, decimals=1)))
    if verdict:
        columns += [
            (f"time / {_escaped(verdict.reference)}",
             lambda row: format_ratio(compared[row.selector].time) if row.selector in compared else "1"),
            ("verdict", lambda row: compared[row.selector].word if row.selector in compared else "reference"),
        ]  # fmt: skip
    head = " & ".join(name for name, _ in columns)
    body = [" & ".join(cell(row) for _, cell in columns).replace("±", r"$\pm$") for row in rows]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}"
    lines = [r"\toprule", rf"{head} \\", r"\midrule", *(rf"{row} \\" for row in body), r"\bottomrule"]
    return "\n".join([begin, *lines, r"\end{tabular}", ""])


def format_spread(spread: Spread, *, scale: float = 1, decimals: int | None = None, none: str = "-") -> str:
    """Format one figure as "mean ±deviation (k of n)".

    The deviation is left out for a single seed, and the counts if all seeds have a value. If the target was not reached
    on some seeds, the figure is infinite there and has no mean. The result is then "k of n reach it".

    Args:
        spread: The figure.
        scale: Factor, such as 100 for percent.
        decimals: Number of decimals. If None, the number for three significant digits.
        none: Text for a figure that is infinite on every seed. "-" stands for an unknown figure.
    """
    if not spread.count:
        return none if spread.never else "-"
    if spread.never:
        return f"{spread.count} of {spread.total} reach it"
    mean, deviation = scale * spread.mean, scale * spread.deviation
    digits = decimals_of(mean) if decimals is None else decimals
    text = f"{mean:.{digits}f}"
    if math.isfinite(deviation):
        text += f" ±{deviation:.{digits}f}"
    return text if spread.count == spread.total else f"{text} ({spread.count} of {spread.total})"


def format_ratio(effect: PairedEffect) -> str:
    """Format a ratio with its interval, for example "0.77 (0.71-0.82)".

    If a run never reached the target, return how often the selector and the reference reached it, for example "19 of 20
    (against 18)".
    """
    if effect.censored:
        return f"{effect.reached} of {effect.pairs} (against {effect.reference_reached})"
    if math.isnan(effect.estimate):
        return "-"
    if math.isnan(effect.low):
        return f"{effect.estimate:.2f}"
    return f"{effect.estimate:.2f} ({effect.low:.2f}-{effect.high:.2f})"


def figure_cells(
    rows: Sequence[SelectorRow], target_accuracy: float, part: slice = slice(None)
) -> list[tuple[str, list[str]]]:
    """Return the columns of the comparison's table: head, in lines, and a cell for each row.

    Args:
        rows: Rows that ``aggregate`` returned.
        target_accuracy: The target that time and energy refer to, a fraction.
        part: The columns to return.
    """
    target = f"to {100 * target_accuracy:g} %"
    columns: list[tuple[str, Callable[[SelectorRow], str]]] = [
        ("accuracy\n%", lambda row: format_spread(row.accuracy, scale=100, decimals=1)),
        ("worst tenth\nof clients, %", lambda row: format_spread(row.worst_tenth, scale=100, decimals=1)),
        (f"time {target}\nsimulated s", lambda row: format_spread(row.time_to_target_s, none="never")),
        (f"energy\n{target}, J", lambda row: format_spread(row.energy_to_target_j, none="never")),
        ("MB down\n" + target, lambda row: format_spread(row.megabytes_down, none="never")),
        ("MB up\n" + target, lambda row: format_spread(row.megabytes_up, none="never")),
        ("Jain\nindex", lambda row: format_spread(row.jain, decimals=3)),
        ("failed\nclients", lambda row: format_spread(row.failed_clients, decimals=0 if row.seeds == 1 else 1)),
        ("asked\na round", lambda row: _format_asked(row.asked_per_round)),
        ("mean\nstaleness", lambda row: format_spread(row.staleness, decimals=2)),
    ]
    written = [(header, [cell(row) for row in rows]) for header, cell in columns[part]]
    # A figure that no run has, such as joules in a deployment without meters, gets no column.
    return [(header, cells) for header, cells in written if set(cells) != {"-"} or header.startswith("accuracy")]


def profile_cells(verdict: Verdict) -> list[list[str]]:
    """Return a row for each selector: its name, and the time ratio for each target of the profile."""
    return [
        [one.selector, *(format_ratio(effects[i]) for effects in verdict.profile.values())]
        for i, one in enumerate(verdict.selectors)
    ]


def _figures_table(
    rows: Sequence[SelectorRow], target_accuracy: float, plus_minus: str, part: slice = slice(None)
) -> Table:
    """Build the table with a part of the figures."""
    shown = figure_cells(rows, target_accuracy, part)
    body = [[row.selector, *(cells[i].replace("±", plus_minus) for _, cells in shown)] for i, row in enumerate(rows)]
    return _table(_caption(rows, plus_minus), [header for header, _ in shown], body)


def _ratios_table(verdict: Verdict, target_accuracy: float) -> Table:
    """Build the table of ratios to the reference: time = seconds per round x rounds, joules, and the verdict."""
    what = f"to {100 * target_accuracy:g} %, ratio to {verdict.reference} with 95 % interval"
    body = [
        [one.selector, *map(format_ratio, (one.time, one.seconds_per_round, one.rounds, one.energy)), one.word]
        for one in verdict.selectors
    ]
    heads = ["time", "seconds\na round", "rounds", "energy", "verdict\n(time)"]
    return _table(f"{what}; time = seconds a round x rounds", heads, body)


def _profile_table(verdict: Verdict) -> Table:
    """Build the table of time ratios over targets."""
    what = f"time ratio to {verdict.reference} by target accuracy, with 95 % interval"
    if any(effect.censored for effects in verdict.profile.values() for effect in effects):
        what += f"; k of n (against m): the selector reaches the target on k of n seeds, {verdict.reference} on m"
    return _table(what, [f"{100 * target:g} %" for target in verdict.profile], profile_cells(verdict))


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Build a table, in which a name is text and never markup."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), caption=Text(caption), caption_justify="left"
    )
    table.add_column("selector", overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _describe_target(target_accuracy: float, target_rounds: int, target_window: int) -> str:
    """Describe when the target counts as reached."""
    text = (
        f"{100 * target_accuracy:g} % is reached when the mean of {target_rounds} evaluated rounds in a row reaches it."
    )
    if target_window < target_rounds:
        text += f" A run with fewer is judged by the mean of all it has (here {target_window})."
    return text


def _format_asked(spread: Spread) -> str:
    """Format the mean number of clients asked per round; whole numbers have no decimals."""
    if not spread.count:
        return "-"
    return f"{spread.mean:.0f}" if spread.mean == round(spread.mean) else f"{spread.mean:.1f}"


def _caption(rows: Sequence[SelectorRow], plus_minus: str) -> str:
    counts = {row.seeds for row in rows}
    if counts <= {1}:
        return "one seed"
    seeds = f"{counts.pop()} seeds" if len(counts) == 1 else f"{min(counts)} to {max(counts)} seeds"
    return f"mean {plus_minus} sample standard deviation over {seeds}"


def _plus_minus(encoding: str) -> str:
    """Return "±", or "+/-" if the console cannot encode it."""
    # Some Windows consoles and the C locale lack the character, and printing it would raise an error.
    try:
        "±".encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return "+/-"
    return "±"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
