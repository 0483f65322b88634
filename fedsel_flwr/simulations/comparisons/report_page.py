"""Reports of a comparison: the table and verdict on the terminal, figures as JSON, and the page ``report.html``.

The page shows what :mod:`fedsel_flwr.report.page` draws, collected from the comparison's runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from fedsel_flwr.errors import ParameterError, RunError, disk_errors
from fedsel_flwr.operating_system import shell_line
from fedsel_flwr.report.page.comparison_page import ComparisonFacts, comparison_document, shared_versions
from fedsel_flwr.report.page.comparison_tables import PageRun
from fedsel_flwr.report.page.document import missing_packages, write_page
from fedsel_flwr.report.run_folder import SCENARIO, atomic_write
from fedsel_flwr.report.summary import aggregate
from fedsel_flwr.report.tables import render_table
from fedsel_flwr.rounds.storage import lock_folder

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparisons.comparison import Comparison

PAGE = "report.html"
"""Name of the page in a comparison's folder."""


def report_scenarios(comparisons: Mapping[str, Comparison], folder: Path | None, *, as_json: bool = False) -> None:
    """Print comparisons of one or several scenarios, and write their pictures, summaries and page.

    With several scenarios, each one has a folder in ``folder``, and the page in ``folder`` has a menu of the scenarios.

    Args:
        comparisons: Scenario -> comparison.
        folder: The folder; None writes nothing.
        as_json: Whether to print the figures as JSON; with several scenarios, an object of them.

    Raises:
        ParameterError: A comparison has no finished run.
    """
    several = len(comparisons) > 1
    for number, (name, one) in enumerate(comparisons.items(), start=1):
        if folder or not one.runs:
            place = folder or Path(".")
            # If no run has finished, this raises the error with this message.
            write_report(one, place / f"{one.scenario.name}-{number}" if several else place)
        if not as_json:
            if several:
                print(f"scenario {name}" if number == 1 else f"\nscenario {name}")
            show_comparison(one)
    if several and folder and not missing_packages():
        write_report_page(comparisons, folder)
    if as_json:
        figures = {name: one.figures() for name, one in comparisons.items()}
        print(json.dumps(figures if several else next(iter(figures.values())), indent=2, allow_nan=False))


def write_report(comparison: Comparison, folder: Path) -> None:
    """Write the pictures, the summaries, the verdict and, with the extra ``report``, the page of a comparison.

    Args:
        comparison: The comparison.
        folder: The folder; created if needed.

    Raises:
        ParameterError: No run has finished.
        RunError: The folder cannot be written to. The error names the reason.
    """
    if not comparison.runs:
        rounds = [f"{run.selector!r} after {len(run.history.rounds)} rounds" for run in comparison.cut_off]
        raise ParameterError(
            f"no run has finished: {', '.join(rounds) or 'there are no runs'}. Finish at least one run. The "
            "comparison's cut_off holds the rounds so far"
        )
    with disk_errors(folder, ", then enter fedsel report"):
        lock = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A new lock removes what a killed process has left. If another process holds it, this one writes anyway.
            with contextlib.suppress(RunError):
                lock = lock_folder(folder)
            comparison.plot(folder / "comparison.png")
            comparison.plot_rounds(folder / "rounds.png", folder)
            comparison.to_csv(folder / "runs.csv")
            comparison.to_latex(folder / "comparison.tex")
            figures = comparison.figures()
            for name in figures.keys() & {"summary", "verdict"}:
                with atomic_write(folder / f"{name}.json") as temporary:
                    temporary.write_text(json.dumps(figures[name], indent=2, allow_nan=False) + "\n", encoding="utf-8")
            # Last, because the page is large.
            if not missing_packages():
                write_report_page({comparison.scenario.name: comparison}, folder)
        finally:
            # Removing the last reference releases the lock, also after an error.
            del lock


def write_report_page(comparisons: Mapping[str, Comparison], folder: Path) -> Path:
    """Write the page of comparisons to a folder.

    Args:
        comparisons: Scenario -> comparison, with at least one finished run. The page has a menu of the scenarios.
        folder: The folder.

    Returns:
        Path of the page.

    Raises:
        RunError: A package of the extra ``report`` is not installed.
    """
    documents = {name: comparison_document(page_facts(one, folder)) for name, one in comparisons.items()}
    return write_page(documents, folder / PAGE)


def page_facts(comparison: Comparison, folder: Path) -> ComparisonFacts:
    """Return what the page of a comparison shows; the regret is read from the folder."""
    scenario, lost = comparison.scenario, comparison.regret(folder)
    of_selector = {name: iter(curves) for name, curves in lost.items()}
    runs = [
        PageRun(
            run.selector,
            run.scenario.seed,
            run.history,
            run.scenario.model_bytes(sum(array.nbytes for array in run.result.arrays)),
            next(of_selector[run.selector]) if lost else (),
        )
        for run in comparison.runs
    ]
    return ComparisonFacts(
        title=f"{scenario.name}: {scenario.num_clients} clients, {scenario.clients_per_round} per round",
        description=scenario.description,
        runs=runs,
        summaries=comparison.summaries,
        verdict=comparison.verdict,
        num_clients=scenario.num_clients,
        target_accuracy=scenario.target_accuracy,
        target_rounds=scenario.target_rounds,
        remarks=remark_lines(comparison),
        scenario=tomli_w.dumps(scenario.model_dump()),
        commands=[
            f"fedsel run {shell_line(os.path.relpath(comparison.place(run, folder) / SCENARIO, folder))}"
            for run in comparison.runs
        ],
        latex=comparison.to_latex(),
        environment=shared_versions([run.result.versions for run in comparison.runs]),
        differences=_differences(comparison),
        max_latency_s=scenario.wireless.max_latency_s,
    )


def _differences(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the programs of which runs have different versions. Runs of different code or data are not pooled."""
    found = []
    for program, versions in shared_versions([run.result.versions for run in comparison.runs]):
        if ", " in versions:
            of_version: dict[str, list[str]] = defaultdict(list)
            for run in comparison.runs:
                of_version[run.result.versions.get(program, "unknown")].append(run.name)
            found.append((program, "; ".join(f"{one}: {', '.join(names)}" for one, names in of_version.items())))
    return found


def show_comparison(comparison: Comparison) -> None:
    """Print the table, the remarks and the verdict of a comparison with at least one finished run."""
    verdict, scenario, summaries = comparison.verdict, comparison.scenario, comparison.summaries
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
