"""Pages of reproduced figures, and the verdicts in the package: ``python tools/result_pages.py [FOLDER]``.

FOLDER is ``docs/results`` by default. The command writes a page and a table of checks for each paper, the counts on the
page ``README.md``, and ``verdicts.json`` of the package. It simulates and draws nothing; ``fedsel reproduce`` does.
Every number comes from the CSV files of the runs, and every reason from the file of the figure.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fedsel_flwr.simulations.reproductions as reproductions
from fedsel_flwr.report.run_folder import atomic_write
from fedsel_flwr.simulations.reproductions.claims import (
    MAX_SEEDS,
    VERDICTS,
    WORST_FIRST,
    FigureVerdict,
    Finding,
    Word,
    describe_words,
    verdict_of,
)
from fedsel_flwr.simulations.reproductions.paper_figure import PAPERS, PaperFigure, figure_names, load_figure
from fedsel_flwr.simulations.reproductions.reproducing import write_checks
from fedsel_flwr.simulations.reproductions.rows import Results, results_of

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RECORDED = Path(reproductions.__file__).parent / "verdicts.json"
COUNTS = "README.md"
"""Name of the page that counts the verdicts."""
CIFAR = "cifar-10"
"""Name of the data set whose figures take longest."""
BEGIN, END = "<!-- reproduce: begin -->", "<!-- reproduce: end -->"
"""Marks of the part of the page :data:`COUNTS` that the command writes."""
RELATIONS = {"below": "<", "above": ">", "equal": "="}
PAGE = """# {title}: figures and tables

{words}. [The page of all verdicts]({counts}#the-verdicts) explains these words and the names of the outcomes.

<!-- not run: takes hours without the CSV files -->
```
fedsel reproduce {paper} --out docs/results
```

The command simulates the runs that have no row. The finished runs took {hours:.2f} hours of one core of an x86-64
server with 2 cores, which other programs used too. Figures share runs, so the minutes of the table sum to more.

Each row shows the check that decides: the first one with the worst verdict. All checks are in
[{paper}-checks.csv]({paper}-checks.csv), and the runs in {runs}.
The settings, deviations and questions of each figure are in `fedsel_flwr/simulations/reproductions/figures/{paper}`.

| figure | verdict | parts shown | the deciding check | its ratio or difference, 95 % | seeds | minutes |
|{rule}
"""
Judged = Mapping[str, tuple[PaperFigure, Results, FigureVerdict]]


def judged(folder: Path) -> dict[str, dict[str, tuple[PaperFigure, Results, FigureVerdict]]]:
    """Return the figures of each paper, with the outcomes of their runs and their verdicts."""
    found: dict[str, dict[str, tuple[PaperFigure, Results, FigureVerdict]]] = {paper: {} for paper in PAPERS}
    for figure in map(load_figure, figure_names()):
        results = results_of(figure, folder)
        found[figure.paper][figure.name] = figure, results, verdict_of(figure, results)
    return found


def facts(figure: PaperFigure, results: Results, verdict: FigureVerdict) -> dict[str, Any]:
    """Return what the package records about a figure: verdict, number of seeds, and minutes of one core."""
    seconds = sum(results.seconds.values())
    minutes = figure.minutes if results.missing or not seconds else seconds / 60
    if not figure.arms and not figure.left_out:
        minutes = 0.0
    rounded = round(minutes, 1) if minutes < 10 else round(minutes)
    return {"verdict": verdict.word, "seeds": figure.seeds, "minutes": rounded}


def paper_page(paper: str, figures: Judged, folder: Path) -> str:
    """Return the page of a paper: a table, then the claim, the reason and the picture of each figure."""
    words = [verdict.word for _, _, verdict in figures.values()]
    runs = dict.fromkeys(f"{paper}-{figure.runner}.csv" for figure, *_ in figures.values() if figure.has_runs)
    text = PAGE.format(
        title=PAPERS[paper], words=describe_words(words), counts=COUNTS, paper=paper, hours=_hours(figures),
        runs=" and ".join(f"[{name}]({name})" for name in runs), rule=" --- |" * 7,
    )  # fmt: skip
    rows = (_row(*one, folder) for one in figures.values())
    sections = (line for one in figures.values() for line in _section(*one, folder))
    return text + "\n".join([*rows, *sections]) + "\n"


def _row(figure: PaperFigure, results: Results, verdict: FigureVerdict, folder: Path) -> str:
    """Return the row of a figure."""
    seeds = f"{figure.seeds} of {figure.planned_seeds}" if figure.planned_seeds > figure.seeds else str(figure.seeds)
    size = [seeds, str(facts(figure, results, verdict)["minutes"])] if figure.arms else ["", ""]
    word, check = str(verdict.word), ["", "", ""]
    if findings := verdict.findings:
        worst = min(findings, key=lambda one: WORST_FIRST.index(one.word))
        word += f" ({worst.reason})" if worst.reason and verdict.word == "not seen" else ""
        shown, parts = verdict.parts_shown
        check = [f"{shown} of {parts}", *_check(worst)]
        needed, low, high = verdict.seeds_needed
        if math.isfinite(low):
            size[0] += f" (needs {_count(needed)}: {_count(low)} to {_count(high)})"
        elif not math.isnan(needed):
            size[0] += f" (needs {_count(needed)})"
    return "| " + " | ".join([_link(figure, folder), word, *check, *size]) + " |"


def _count(seeds: float) -> str:
    return f"{seeds:.0f}" if math.isfinite(seeds) else f"over {MAX_SEEDS}"


def _check(finding: Finding) -> list[str]:
    """Return a check in words, and its estimate with the interval and with the paper's number."""
    comparison = finding.comparison
    check = comparison.check
    reading = f" ({check.reading})" if check.reading else ""
    says = f"{check.says}{reading}: {comparison.left} {RELATIONS[check.relation]} {comparison.right}"
    sign = "x " if comparison.is_ratio else "difference "
    effect = finding.effect
    estimate = f"{sign}{_number(effect.estimate)} ({_number(effect.low)} to {_number(effect.high)})"
    if effect.censored:
        estimate = f"sooner on {effect.sooner} of {effect.pairs} seeds, later on {effect.later}; some never got there"
    return [says, estimate if comparison.paper is None else f"{estimate}; in the paper {_number(comparison.paper)}"]


def _section(figure: PaperFigure, results: Results, verdict: FigureVerdict, folder: Path) -> Iterator[str]:
    """Yield the lines of a figure's section; none for an illustration without a picture."""
    if not _has_section(figure, folder):
        return
    yield from (
        "",
        f'<a id="{figure.name}"></a>',
        "",
        f"## {figure.figure}: {verdict.word}",
        "",
        f"**Claim:** {figure.claim}",
    )
    if figure.data:
        yield from ("", f"**Data:** {figure.data}")
    if reason := figure.reason or figure.left_out:
        yield from ("", f"**Why:** {reason}")
    if results.missing:
        yield from ("", f"{len(results.missing)} of its runs are missing.")
    if (folder / f"{figure.name}.png").exists():
        yield from ("", f"![{figure.figure} in our runs]({figure.name}.png)")


def _has_section(figure: PaperFigure, folder: Path) -> bool:
    return not figure.illustration or (folder / f"{figure.name}.png").exists()


def _link(figure: PaperFigure, folder: Path, page: str = "") -> str:
    """Return the name of a figure, with a link to its section."""
    return f"[{figure.figure}]({page}#{figure.name})" if _has_section(figure, folder) else figure.figure


def counts_table(papers: Mapping[str, Judged], folder: Path) -> str:
    """Return the tables of verdicts by paper, with core-hours, and of figures by verdict."""
    lines = ["", "| paper | verdicts | core-hours |", "| --- | --- | --- |"]
    figures: dict[Word, dict[str, list[str]]] = {}
    for paper, own in papers.items():
        for figure, _, verdict in own.values():
            link = _link(figure, folder, f"{paper}.md")
            figures.setdefault(verdict.word, {}).setdefault(paper, []).append(link)
        words = describe_words([verdict.word for _, _, verdict in own.values()])
        lines.append(f"| [{PAPERS[paper]}]({paper}.md) | {words} | {_hours(own):.2f} |")
    every = {name: one for own in papers.values() for name, one in own.items()}
    cifar = {name: one for name, one in every.items() if one[0].has_runs and _data_set(one[0]) == CIFAR}
    hours = _hours(every)
    lines += [
        f"| all | {describe_words([verdict.word for _, _, verdict in every.values()])} | {hours:.2f} |",
        "",
        "A core-hour is an hour of one core. "
        f"The finished runs of `fedsel reproduce all` took {hours:.2f} of them, "
        f"and {hours - _hours(cifar):.2f} without the figures on CIFAR-10.",
        "",
        "| verdict | figures |",
        "| --- | --- |",
    ]
    for word in (word for word in VERDICTS if word in figures):
        by_paper = (f"{PAPERS[paper].partition(',')[0]}: {', '.join(links)}" for paper, links in figures[word].items())
        lines.append(f"| {word} | {'; '.join(by_paper)} |")
    return "\n".join(lines) + "\n\n"


def _hours(figures: Judged) -> float:
    """Return the core-hours of finished runs. Figures share runs, and each run counts once."""
    seconds = {run: own for _, results, _ in figures.values() for run, own in results.seconds.items()}
    return sum(seconds.values()) / 3600


def _data_set(figure: PaperFigure) -> str:
    """Return the name of a figure's data set. All cells of a figure have the same one."""
    cell, arm, seed = next(figure.runs(1))
    return figure.scenario_of(arm, cell, seed).data.dataset


def _number(value: float) -> str:
    """Return a number with three significant digits, without exponent: 0.735, 1,234 and 0.000120."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "infinite"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 8)}f}"


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Write everything."""
    folder = Path(arguments[0]) if arguments else RESULTS
    papers = judged(folder)
    recorded = {name: facts(*one) for own in papers.values() for name, one in own.items()}
    _write(RECORDED, json.dumps(recorded, indent=1) + "\n")
    for paper, own in papers.items():
        write_checks(folder, paper, {name: verdict for name, (_, _, verdict) in own.items()})
        _write(folder / f"{paper}.md", paper_page(paper, own, folder))
    counts = folder / COUNTS
    before = counts.read_text("utf-8") if counts.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    head, _, rest = before.partition(BEGIN)
    _write(counts, f"{head}{BEGIN}\n{counts_table(papers, folder)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])
