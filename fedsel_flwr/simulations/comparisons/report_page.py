"""Report page of a comparison: what :mod:`fedsel_flwr.report.page` shows, collected from the comparison's runs."""

from __future__ import annotations

import shlex
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from fedsel_flwr.report.page.comparison_page import ComparisonFacts, comparison_document, shared_versions
from fedsel_flwr.report.page.comparison_tables import PageRun
from fedsel_flwr.report.page.document import write_page
from fedsel_flwr.report.run_folder import SCENARIO, run_name
from fedsel_flwr.simulations.comparisons.terminal import remark_lines

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparisons.comparison import Comparison

PAGE = "report.html"
"""Name of the page in a comparison's folder."""


def write_report_page(comparison: Comparison, folder: Path) -> Path:
    """Write the page of a comparison to its folder.

    Args:
        comparison: The comparison, with at least one finished run.
        folder: The folder.

    Returns:
        Path of the page.

    Raises:
        RunError: A package of the extra ``report`` is not installed.
    """
    return write_page(comparison_document(page_facts(comparison, folder)), folder / PAGE)


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
            f"fedsel run {shlex.quote(f'{run_name(run.selector, run.scenario.seed)}/{SCENARIO}')}"
            for run in comparison.runs
        ],
        latex=comparison.to_latex(),
        environment=shared_versions([run.result.versions for run in comparison.runs]),
        differences=_differences(comparison),
    )


def _differences(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the parts of code and data whose fingerprints differ: between runs of a selector, or on a seed."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in comparison.runs:
        for part, print_ in run.result.fingerprints.items():
            group = run.selector if part == "selector" else f"seed {run.scenario.seed}"
            if part in ("data", "partition", "selector"):
                found[f"{part} of {group}"][print_].append(run.name)
            else:
                found[part][print_].append(run.name)
    for program, versions in shared_versions([run.result.versions for run in comparison.runs]):
        if ", " in versions:
            for run in comparison.runs:
                found[program][run.result.versions.get(program, "unknown")].append(run.name)
    return [
        (part, "; ".join(f"{value[:12]}: {', '.join(names)}" for value, names in values.items()))
        for part, values in found.items()
        if len(values) > 1
    ]
