"""Page of a comparison: verdict, curves, ratios, choices, fairness, failures, parts of a round, and how to repeat it.

All figures are those of the comparison's summary and verdict, which the terminal, the JSON files and the picture show
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsel_flwr.report.page import charts
from fedsel_flwr.report.page import comparison_tables as tables
from fedsel_flwr.report.page.comparison_tables import ALL, PageRun
from fedsel_flwr.report.page.document import Chart, Code, Columns, Document, Grid, Menu, Section
from fedsel_flwr.report.page.glossary import selector_summaries, words_of_comparison
from fedsel_flwr.report.summary import RunSummary, aggregate
from fedsel_flwr.report.tables import figure_cells, format_ratio
from fedsel_flwr.report.verdict import Verdict


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


RATIOS = (
    "Each ratio is the geometric mean of the paired ratios, one for each seed. It differs from the ratio of the means "
    "in the table above. p: paired t-test of the logs of these ratios, after Holm's correction. If a run never reached "
    "the target, it is the exact sign test. To compare with another selector, write the page again: fedsel report "
    "FOLDER --reference NAME."
)


def comparison_document(facts: ComparisonFacts) -> Document:
    """Return the page of a comparison."""
    return _Builder(facts).document()


class _Builder:
    """Builds the page, section by section."""

    def __init__(self, facts: ComparisonFacts) -> None:
        self.facts = facts
        self.selectors = list(tables.by_selector(facts.runs))
        self.styles = charts.selector_styles(self.selectors)
        self.series = dict(enumerate(self.styles.values()))
        self.seeds = list(dict.fromkeys(run.seed for run in facts.runs))
        self.axes = [axis for axis in tables.AXES if any(np.isfinite(run.axis(axis)).any() for run in facts.runs)]
        self.tables: dict[str, Columns] = {}

    def document(self) -> Document:
        facts = self.facts
        built = [self.verdict(), self.curves(), self.choices(), self.rounds(), self.words(), self.record()]
        return Document(
            title=facts.title,
            lead=[facts.description] if facts.description else [],
            sections=[section for section in built if section.parts],
            tables=self.tables,
            menus=self.menus(),
            selectors=self.styles,
        )

    def menus(self) -> list[Menu]:
        seeds = {ALL: "all (mean)"} | {str(seed): str(seed) for seed in self.seeds}
        found = [
            Menu(name="axis", label="Over", options={axis: tables.AXES[axis] for axis in self.axes}),
            Menu(name="seed", label="Seed", options=seeds),
            Menu(name="selector", label="Selections and failures of", options={name: name for name in self.selectors}),
        ]
        if "ratios" in self.tables:
            found.append(Menu(name="measure", label="Ratio of", options={k: v[0] for k, v in tables.MEASURES.items()}))
        return found

    def verdict(self) -> Section:
        facts, found = self.facts, self.facts.verdict
        parts: list[str | Chart | Grid | Code] = []
        if found:
            parts += [line.removeprefix("- ") for line in found.sentence.splitlines()]
        parts += facts.remarks
        parts.append(self.figures())
        if found:
            parts += [self.ratios(found), RATIOS]
        if found and any(math.isfinite(one.time.low) for one in found.selectors):
            self.tables["ratios"] = tables.ratio_table(found, facts.summaries)
            words = {name: {charts.X_TITLE: title} for name, (title, _) in tables.MEASURES.items()}
            words = {name: {f"{old}, ratio to {found.reference}": f"{new}, ratio to {found.reference}"
                            for old, new in own.items()} for name, own in words.items()}  # fmt: skip
            parts.append(
                Chart(
                    name="ratios",
                    title=f"Ratios to {found.reference}",
                    text="Diamond: geometric mean of the paired ratios, with its 95 % interval. Points: the ratio on "
                    "each seed; the menu of seeds enlarges one. All values are those up to the target. A star marks a "
                    "time that differs after Holm's correction. Strong grey: within 5 %. Faint grey "
                    f"({found.reference} against itself): the ratio of {found.reference} to itself on other seeds, in "
                    "95 % of cases. The intervals compare runs on the same seeds, so they are usually narrower. An "
                    "interval may lie in the faint band and still differ from 1.",
                    table="ratios",
                    spec=charts.ratio_chart(
                        {i: s for i, s in self.series.items() if self.selectors[i] != found.reference}, found.reference
                    ),
                    menus={"measure": "measure"},
                    words={
                        "measure": words,
                        "seed": {str(seed): {charts.CHOSEN: str(seed)} for seed in self.seeds},
                    },
                )
            )
        return Section(name="verdict", title="Verdict", parts=parts)

    def figures(self) -> Grid:
        facts = self.facts
        rows = aggregate(facts.summaries)
        cells = figure_cells(rows, facts.target_accuracy)
        return Grid(
            title="Means and sample standard deviations over the seeds",
            head=["selector", "seeds", *(head.replace("\n", " ") for head, _ in cells)],
            rows=[[row.selector, str(row.seeds), *(own[i] for _, own in cells)] for i, row in enumerate(rows)],
        )

    def ratios(self, found: Verdict) -> Grid:
        return Grid(
            title=f"Ratios to {found.reference} up to the target with 95 % intervals: "
            "time = seconds per round x rounds",
            head=["selector", "time", "seconds per round", "rounds", "energy", "p (Holm)", "verdict"],
            rows=[
                [
                    one.selector,
                    *map(format_ratio, (one.time, one.seconds_per_round, one.rounds, one.energy)),
                    f"{one.p:.2g}" if math.isfinite(one.p) else "-",
                    one.word,
                ]
                for one in found.selectors
            ],
        )

    def curves(self) -> Section:
        facts, found = self.facts, self.facts.verdict
        self.tables["accuracy"] = tables.curve_table(facts.runs, facts.target_rounds, self.axes)
        values = [value for value in self.tables["accuracy"]["accuracy"] if math.isfinite(value)]
        is_fraction = not values or (min(values) >= 0 and max(values) <= 1)
        parts: list[str | Chart | Grid | Code] = [
            Chart(
                name="accuracy",
                title="Test accuracy",
                text=f"Mean of {facts.target_rounds} measured rounds. With all seeds: mean and one standard deviation. "
                "Dashed: the target. Long curves are drawn with a part of their points; all figures use every round.",
                table="accuracy",
                spec=charts.accuracy_chart(self.series, facts.target_accuracy, is_fraction=is_fraction),
                menus={"axis": "axis", "seed": "seed"},
                shown="selector",
                words={"axis": {axis: {charts.X_TITLE: tables.AXES[axis]} for axis in self.axes}},
            )
        ]
        if found and any(math.isfinite(effect.estimate) for own in found.profile.values() for effect in own):
            self.tables["targets"] = tables.profile_table(found)
            parts.append(
                Chart(
                    name="targets",
                    title=f"Time ratio to {found.reference} by target",
                    text="How the ratio of the times depends on the target accuracy, with 95 % intervals, not "
                    "corrected. A target that a run never reached has no ratio.",
                    table="targets",
                    spec=charts.profile_chart(self.series, found.reference, list(found.profile)),
                    shown="selector",
                )
            )
            parts.append(self.profile(found))
            if any(effect.censored for effects in found.profile.values() for effect in effects):
                parts.append(
                    f"k of n (against m): k of n runs reach the target, and m runs of {found.reference} reach it."
                )
                parts += tables.unreached(found)
        return Section(name="curves", title="Curves", parts=parts)

    def profile(self, found: Verdict) -> Grid:
        return Grid(
            title=f"Time ratio to {found.reference} by target, with 95 % intervals",
            head=["selector", *(f"{100 * target:g} %" for target in found.profile)],
            rows=[
                [one.selector, *(format_ratio(effects[i]) for effects in found.profile.values())]
                for i, one in enumerate(found.selectors)
            ],
        )

    def choices(self) -> Section:
        facts = self.facts
        self.tables["selections"], self.tables["tenths"] = tables.selection_table(facts.runs, facts.num_clients)
        self.tables["map"], with_map = tables.map_table(facts.runs, facts.num_clients)
        self.tables["fairness"] = tables.fairness_table(facts.summaries)
        own = {"seed": "seed", "selector": "selector"}
        mapped = "seed has" if with_map == 1 else f"{with_map} seeds have"
        limit = "" if with_map == len(self.seeds) else f" Of the single seeds, only the first {mapped} a map."
        parts: list[str | Chart | Grid | Code] = [
            Chart(
                name="map",
                title="Who was selected",
                text="Selections of groups of clients in groups of rounds; with all seeds, their mean. The clients are "
                f"in the order of their mean latency. A group without a colour was not selected.{limit}",
                table="map",
                spec=charts.map_chart(),
                menus=own,
            ),
            Chart(
                name="tenths",
                title="Selections by latency",
                text="A point per tenth of the clients, in the order of their mean latency: how often one client was "
                "selected in a run.",
                table="tenths",
                spec=charts.tenth_chart(self.series),
                menus={"seed": "seed"},
                shown="selector",
            ),
            Chart(
                name="selections",
                title="Selections of each client",
                text="A point per client. With all seeds: the clients of all seeds. If there are very many clients, a "
                "part of them.",
                table="selections",
                spec=charts.selection_chart(self.series),
                menus=own,
            ),
        ]
        for figure, title, text, axis, form in (
            ("jain", "Fairness", "Jain's index of the selection counts: 1 if all clients have equal shares.",
             "Jain's index", ".3~f"),
            ("worst_tenth", "The worst tenth", "Mean accuracy of the tenth of the clients with the lowest accuracy.",
             "accuracy of the worst tenth", ".1~%"),
        ):  # fmt: skip
            if any(math.isfinite(getattr(one, figure)) for one in facts.summaries):
                name = figure.replace("_", "-")
                self.tables[name] = _only(self.tables["fairness"], "figure", figure)
                parts.append(
                    Chart(
                        name=name,
                        title=title,
                        text=f"{text} With all seeds: mean and one standard deviation.",
                        table=name,
                        spec=charts.fairness_chart(self.series, axis, form),
                        menus={"seed": "seed"},
                        shown="selector",
                    )
                )
        del self.tables["fairness"]
        return Section(name="choices", title="Choices", parts=parts)

    def rounds(self) -> Section:
        facts = self.facts
        parts: list[str | Chart | Grid | Code] = []
        found = tables.part_table(facts.runs)
        shown = [
            part
            for part in tables.PARTS
            if any(own == part and seconds > 0 for own, seconds in zip(found["part"], found["seconds"], strict=True))
        ]
        if any(math.isfinite(value) for value in found["seconds"]):
            self.tables["parts"] = found
            parts.append(
                Chart(
                    name="parts",
                    title="Parts of a round",
                    text="Means over all rounds of a run, also those after the target. The ratios of seconds per round "
                    "are those up to the target, so the selectors may have another order there. Download, compute and "
                    "upload: means over the clients with a usable update. Failures: the seconds after the slowest "
                    "usable update, which only failed clients take. Waiting: the rest of the round, for the slowest "
                    "usable update.",
                    table="parts",
                    spec=charts.part_chart(len(self.selectors), shown),
                    menus={"seed": "seed"},
                    shown="selector",
                )
            )
        found = tables.failure_table(facts.runs)
        if found["reason"]:
            self.tables["failures"] = found
            parts.append(self.reasons())
            parts.append(
                Chart(
                    name="failures",
                    title="Failures",
                    text="Failed clients per round by reason, in groups of rounds; with all seeds, their mean.",
                    table="failures",
                    spec=charts.failure_chart(max(run.rounds[-1].round for run in facts.runs if run.rounds)),
                    menus={"seed": "seed", "selector": "selector"},
                    series="reason",
                )
            )
        else:
            parts.append("No client failed.")
        if any(len(run.theta) for run in facts.runs):
            self.tables["regret"] = tables.regret_table(facts.runs)
            parts.append(
                Chart(
                    name="regret",
                    title="Seconds lost",
                    text="Seconds lost per round so far, compared with the clients of the lowest mean latencies "
                    "(theta in the paper of Xia et al.). Selectors that select different numbers of clients cannot be "
                    "compared here.",
                    table="regret",
                    spec=charts.regret_chart(self.series),
                    menus={"seed": "seed"},
                    shown="selector",
                )
            )
        return Section(name="rounds", title="Rounds", parts=parts)

    def reasons(self) -> Grid:
        counts = tables.failure_counts(self.facts.runs)
        names = sorted(
            {reason for own in counts.values() for reason in own},
            key=lambda reason: (reason == "other", -sum(own.get(reason, 0) for own in counts.values())),
        )
        return Grid(
            title="Failed clients of a run by reason, means over the seeds",
            head=["selector", *names],
            rows=[[selector, *(f"{own.get(reason, 0):.1f}" for reason in names)] for selector, own in counts.items()],
        )

    def words(self) -> Section:
        facts = self.facts
        meanings = words_of_comparison(facts.target_rounds, facts.max_latency_s)
        parts: list[str | Chart | Grid | Code] = [Grid(head=["word", "meaning"], rows=[list(one) for one in meanings])]
        if summaries := selector_summaries(self.selectors):
            parts.append(Grid(title="Selectors", head=["selector", "summary"], rows=[list(one) for one in summaries]))
        return Section(name="words", title="Words", parts=parts)

    def record(self) -> Section:
        facts = self.facts
        parts: list[str | Chart | Grid | Code] = [
            Grid(title="Versions", head=["program", "version"], rows=[list(one) for one in facts.environment]),
        ]
        if facts.differences:
            rows = [list(one) for one in facts.differences]
            parts.append(Grid(title="What differs between the runs", head=["part", "values"], rows=rows))
        parts += [
            "The commands repeat one run each, in the folder of the comparison.",
            Code(title="Commands that repeat a run", text="\n".join(facts.commands), closed=True),
            Code(title="LaTeX", text=facts.latex, closed=True),
            Code(title="Scenario", text=facts.scenario, closed=True),
        ]
        return Section(name="record", title="Record", parts=parts)


def _only(columns: Columns, name: str, value: str) -> dict[str, list[object]]:
    """Return the rows of a table that have this value in a column, without the column."""
    places = [i for i, own in enumerate(columns[name]) if own == value]
    return {key: [values[i] for i in places] for key, values in columns.items() if key != name}


def shared_versions(versions: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return each program with its versions in all runs, for example ("numpy", "2.4.6").

    >>> shared_versions([{"numpy": "2.4.6"}, {"numpy": "2.3.0"}, {"numpy": "2.4.6"}])
    [('numpy', '2.4.6, 2.3.0')]
    """
    names = dict.fromkeys(name for one in versions for name in one)
    return [(name, ", ".join(dict.fromkeys(one[name] for one in versions if name in one))) for name in names]
