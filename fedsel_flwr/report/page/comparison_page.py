"""Page of a comparison: verdict, curves, ratios, choices, fairness, failures, parts of a round, and how to repeat it.

All figures are those of the comparison's summary and verdict, which the terminal, the JSON files and the picture show
too. The texts of the page are in ``comparison.html``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsel_flwr.report.page import charts
from fedsel_flwr.report.page import comparison_tables as tables
from fedsel_flwr.report.page.comparison_tables import ALL, PageRun
from fedsel_flwr.report.page.document import Chart, Columns, Document, Menu
from fedsel_flwr.report.summary import RunSummary, aggregate, selector_of
from fedsel_flwr.report.tables import figure_cells, format_ratio, profile_cells
from fedsel_flwr.report.verdict import Verdict
from fedsel_flwr.selectors.registry import describe, names

SECTIONS = {
    "verdict": "Verdict", "curves": "Curves", "choices": "Choices", "rounds": "Rounds", "words": "Words",
    "record": "Record",
}  # fmt: skip
"""Name of a section -> its heading."""


@dataclass(frozen=True, kw_only=True)
class ComparisonFacts:
    """Content of a comparison's page.

    Attributes:
        title: Title of the page.
        description: Description of the scenario.
        runs: The finished runs.
        summaries: Their figures.
        verdict: The verdict; None without a reference.
        num_clients: Number of clients.
        target_accuracy: The target, a fraction.
        target_rounds: Number of measured rounds whose mean must reach the target.
        remarks: Remarks on probable problems.
        scenario: The scenario as TOML.
        commands: A command for each run, which runs it again.
        latex: The comparison as a LaTeX table.
        environment: Program -> versions with which the runs were made.
        differences: Part -> what differs between the runs.
        max_latency_s: Seconds after which an update is late; NaN if it is unknown.
    """

    title: str
    description: str
    runs: Sequence[PageRun]
    summaries: Sequence[RunSummary]
    verdict: Verdict | None
    num_clients: int
    target_accuracy: float
    target_rounds: int
    remarks: Sequence[str]
    scenario: str
    commands: Sequence[str]
    latex: str
    environment: Sequence[tuple[str, str]]
    differences: Sequence[tuple[str, str]]
    max_latency_s: float = math.nan


def comparison_document(facts: ComparisonFacts) -> Document:
    """Return the page of a comparison."""
    runs = facts.runs
    selectors = list(tables.by_selector(runs))
    seeds = list(dict.fromkeys(str(run.seed) for run in runs))
    axes = {
        name: title for name, title in tables.AXES.items() if any(np.isfinite(run.axis(name)).any() for run in runs)
    }
    styles = charts.selector_styles(selectors)
    drawn, maps = _charts(facts, styles, seeds, axes)
    menus = {
        "axis": Menu(label="Over", options=axes),
        "seed": Menu(label="Seed", options={ALL: "all (mean)"} | {seed: seed for seed in seeds}),
        "selector": Menu(label="Selections and failures of", options={name: name for name in selectors}),
    }
    if any(one.name == "ratios" for one in drawn):
        menus["measure"] = Menu(label="Ratio of", options=tables.MEASURES)
    return Document(
        title=facts.title, lead=[facts.description] if facts.description else [], template="comparison.html",
        sections=SECTIONS, charts=drawn, facts=_texts(facts, selectors) | {"maps": maps, "seeds": len(seeds)},
        menus=menus, selectors=styles,
    )  # fmt: skip


def _charts(
    facts: ComparisonFacts,
    styles: Mapping[str, tuple[str, Sequence[int]]],
    seeds: Sequence[str],
    axes: Mapping[str, str],
) -> tuple[list[Chart], int]:
    """Return the charts, and the number of single seeds that have a map."""
    runs, found, series = facts.runs, facts.verdict, dict(enumerate(styles.values()))
    drawn = list[Chart]()

    def add(name: str, rows: Columns, spec: Mapping[str, Any], menus: Sequence[str] = ("seed",), **more: Any) -> None:
        # A reader hides selectors in a chart of all selectors.
        shown = "" if "selector" in menus or name == "ratios" else "selector"
        drawn.append(Chart(name=name, rows=rows, spec=spec, menus={menu: menu for menu in menus}, shown=shown, **more))

    if found and any(math.isfinite(one.time.low) for one in found.selectors):
        end = f", ratio to {found.reference}"
        compared = {i: style for i, (name, style) in enumerate(styles.items()) if name != found.reference}
        words = {
            "measure": {name: {f"{charts.X_TITLE}{end}": f"{title}{end}"} for name, title in tables.MEASURES.items()},
            "seed": {seed: {charts.CHOSEN: seed} for seed in seeds},
        }
        spec = charts.ratio_chart(compared, found.reference)
        add("ratios", tables.ratio_table(found, facts.summaries), spec, ["measure"], words=words)
    rows = tables.curve_table(runs, facts.target_rounds, list(axes))
    is_fraction = tables.are_fractions(rows["accuracy"])
    spec = charts.accuracy_chart(series, facts.target_accuracy, is_fraction=is_fraction)
    words = {"axis": {axis: {charts.X_TITLE: title} for axis, title in axes.items()}}
    add("accuracy", rows, spec, ["axis", "seed"], words=words)
    if found and any(math.isfinite(effect.estimate) for own in found.profile.values() for effect in own):
        spec = charts.profile_chart(series, found.reference, list(found.profile))
        add("targets", tables.profile_table(found), spec, [])
    rows, maps = tables.map_table(runs, facts.num_clients)
    add("map", rows, charts.map_chart(), ["seed", "selector"])
    selections, tenths = tables.selection_tables(runs, facts.num_clients)
    add("tenths", tenths, charts.tenth_chart(series))
    add("selections", selections, charts.selection_chart(series), ["seed", "selector"])
    for figure, title, form in (
        ("jain", "Jain's index", ".3~f"), ("worst_tenth", "accuracy of the worst tenth", ".1~%"),
    ):  # fmt: skip
        if any(math.isfinite(getattr(one, figure)) for one in facts.summaries):
            spec = charts.fairness_chart(series, title, form)
            add(figure.replace("_", "-"), tables.fairness_table(facts.summaries, figure), spec)
    rows = tables.part_table(runs)
    if any(map(math.isfinite, rows["seconds"])):
        positive = {part for part, seconds in zip(rows["part"], rows["seconds"], strict=True) if seconds > 0}
        add("parts", rows, charts.part_chart(len(styles), [part for part in tables.PARTS if part in positive]))
    rows = tables.failure_table(runs)
    if rows["reason"]:
        add("failures", rows, charts.failure_chart(tables.last_round(runs)), ["seed", "selector"], series="reason")
    if any(len(run.theta) for run in runs):
        add("regret", tables.regret_table(runs), charts.regret_chart(series))
    return drawn, maps


def _texts(facts: ComparisonFacts, selectors: Sequence[str]) -> dict[str, Any]:
    """Return the values of the template ``comparison.html``, except the numbers of seeds and maps."""
    found, summaries = facts.verdict, aggregate(facts.summaries)
    cells = figure_cells(summaries, facts.target_accuracy)
    counts, total = tables.failure_counts(facts.runs), Counter[str]()
    for own in counts.values():
        total.update(own)
    reasons = sorted(total, key=lambda reason: (reason == "other", -total[reason]))
    texts: dict[str, Any] = {
        "given": facts, "reference": found.reference if found else "", "summaries": selector_summaries(selectors),
        "sentences": [line.removeprefix("- ") for line in (found.sentence.splitlines() if found else ())],
        "figures": {
            "head": ["selector", "seeds", *(head.replace("\n", " ") for head, _ in cells)],
            "rows": [[row.selector, str(row.seeds), *(own[i] for _, own in cells)] for i, row in enumerate(summaries)],
        },
        "failures": {
            "head": ["selector", *reasons],
            "rows": [[name, *(f"{own.get(reason, 0):.1f}" for reason in reasons)] for name, own in counts.items()],
        },
        "max_latency": f" ({facts.max_latency_s:g} s)" if math.isfinite(facts.max_latency_s) else "",
    }  # fmt: skip
    texts["sentences"] += facts.remarks
    if found:
        texts["ratios"] = [
            [one.selector, *map(format_ratio, (one.time, one.seconds_per_round, one.rounds, one.energy)),
             f"{one.p:.2g}" if math.isfinite(one.p) else "-", one.word]
            for one in found.selectors
        ]  # fmt: skip
        head = ["selector", *(f"{100 * target:g} %" for target in found.profile)]
        texts["profile"] = {"head": head, "rows": profile_cells(found)}
        texts["unreached"] = tables.unreached(found)
    return texts


def selector_summaries(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return the labels of known selectors, each with the summary of its class.

    >>> selector_summaries(["round-robin", "mine"])[0][0]
    'round-robin'
    >>> len(selector_summaries(["round-robin", "mine"]))
    1
    """
    known = set(names())
    found = ((label, selector_of(label)) for label in labels)
    return [(label, str(describe(name).get("summary", "-"))) for label, name in found if name in known]


def shared_versions(versions: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return each program with its versions in all runs, for example ("numpy", "2.4.6").

    >>> shared_versions([{"numpy": "2.4.6"}, {"numpy": "2.3.0"}, {"numpy": "2.4.6"}])
    [('numpy', '2.4.6, 2.3.0')]
    """
    names = dict.fromkeys(name for one in versions for name in one)
    return [(name, ", ".join(dict.fromkeys(one[name] for one in versions if name in one))) for name in names]
