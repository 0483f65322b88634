"""Pages of reproduced figures, and the verdicts in the package: ``python tools/result_pages.py [FOLDER]``.

FOLDER is ``docs/results`` by default. The command draws the figures, and writes a page and a table of checks for each
paper, the counts on the page ``README.md``, and ``verdicts.json`` of the package. It simulates nothing. Every number
comes from the CSV files of the runs, and every verdict from :mod:`fedsel_flwr.simulations.reproductions.claims`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fedsel_flwr.simulations.reproductions as reproductions
from fedsel_flwr.report.run_folder import atomic_write
from fedsel_flwr.rounds.storage import read_file
from fedsel_flwr.simulations.reproductions.claims import (
    MAX_SEEDS,
    VERDICTS,
    FigureVerdict,
    Finding,
    Word,
    describe_words,
    verdict_of,
)
from fedsel_flwr.simulations.reproductions.figure_pictures import draw
from fedsel_flwr.simulations.reproductions.paper_figure import PAPERS, ArmName, PaperFigure, figure_names, load_figure
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


def write_pages(folder: Path, papers: Collection[str]) -> None:
    """Write the page and the pictures of papers, and the counts of all verdicts.

    Args:
        folder: Folder of the CSV files.
        papers: Keys of :data:`~fedsel_flwr.simulations.reproductions.paper_figure.PAPERS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for paper in (paper for paper in PAPERS if paper in papers):
        figures = [one for one in map(load_figure, figure_names()) if one.paper == paper]
        found = {one.name: results_of(one, folder) for one in figures}
        for one in figures:
            draw(one, found[one.name], folder)
        _write(folder / f"{paper}.md", paper_page(paper, figures, found, folder))
        write_checks(folder, paper)
    _write_counts(folder)


def record_verdicts(folder: Path, path: Path) -> None:
    """Write the verdicts of all figures to the package's file.

    Args:
        folder: Folder of the CSV files.
        path: The file.
    """
    recorded = {}
    for one in map(load_figure, figure_names()):
        results = results_of(one, folder)
        recorded[one.name] = verdict_facts(one, results)
    _write(path, json.dumps(recorded, indent=1) + "\n")


def verdict_facts(figure: PaperFigure, results: Results) -> dict[str, Any]:
    """Return what the package records about a figure: verdict, number of seeds, and minutes of one core."""
    seconds = sum(results.seconds.values())
    minutes = figure.minutes if results.missing or not seconds else seconds / 60
    if not figure.arms and not figure.left_out:
        minutes = 0.0
    return {
        "verdict": verdict_of(figure, results).word,
        "seeds": figure.seeds,
        "minutes": round(minutes, 1) if minutes < 10 else round(minutes),
    }


def paper_page(paper: str, figures: Sequence[PaperFigure], found: Mapping[str, Results], folder: Path) -> str:
    """Return the page of a paper."""
    verdicts = {one.name: verdict_of(one, found[one.name]) for one in figures}
    # Figures share runs, and each run counts once.
    seconds = {run: own for results in found.values() for run, own in results.seconds.items()}
    hours = sum(seconds.values()) / 3600
    lines = [
        f"# {PAPERS[paper]}: figures and tables",
        "",
        f"Verdicts: {describe_words([one.word for one in verdicts.values()])}. [The page of all verdicts]({COUNTS}) "
        "explains these words and the names of the outcomes.",
        "",
        "Written by `fedsel reproduce`. This command first simulates the runs that have no row in the CSV files:",
        "",
        "<!-- not run: takes hours without the CSV files -->",
        "```",
        f"fedsel reproduce {paper} --out docs/results",
        "```",
        "",
        f"The finished runs took {hours:.2f} hours of one core of an x86-64 server with 2 cores, which other programs "
        "used too. The minutes in the table are those of one core. Figures share runs, so their minutes sum to more.",
        "",
        "| figure | the paper's claim | verdict | seeds | minutes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in figures:
        facts = verdict_facts(one, found[one.name])
        seeds = f"{one.seeds} of {one.planned_seeds}" if one.planned_seeds > one.seeds else one.seeds
        size = f"{seeds} | {facts['minutes']}" if one.arms else " | "
        lines.append(f"| [{one.figure}](#{_anchor(one)}) | {one.claim} | {verdicts[one.name].word} | {size} |")
    for one in figures:
        lines += ["", *_section(one, verdicts[one.name], found[one.name], folder)]
    return "\n".join(lines) + "\n"


def _section(figure: PaperFigure, verdict: FigureVerdict, results: Results, folder: Path) -> Iterator[str]:
    """Yield the lines of a figure's section."""
    yield f'<a id="{figure.name}"></a>'
    yield ""
    yield f"## {figure.figure}: {verdict.word}"
    yield ""
    yield f"{figure.claim} `fedsel reproduce {figure.name}`"
    for text in (figure.data, figure.note.strip()):
        if text:
            yield ""
            yield text
    if figure.checked:
        yield ""
        yield f"*Checked before this verdict.* {figure.checked.strip()}"
    if figure.shortened:
        yield ""
        yield f'{figure.shortened} The verdict is therefore at most "direction only".'
    if figure.left_out:
        yield ""
        yield f"Not run: {figure.left_out} Estimated: {figure.minutes:.0f} minutes of one core."
    if results.missing:
        total = len(results.missing)
        yield ""
        yield (
            f"{total} runs of this figure are missing: {_missing(results)}. All runs of the figure take about "
            f"{figure.minutes / 60:.2f} core-hours."
        )
    if figure.planned_seeds > figure.seeds:
        yield ""
        yield _missing_seeds(figure, results)
    if verdict.readings:
        yield ""
        yield (
            "Verdict of each reading: " + "; ".join(f"{name}: {word}" for name, word in verdict.readings.items()) + "."
        )
    if verdict.word == "not settled" and not math.isnan(verdict.seeds_needed):
        yield ""
        yield f"To settle this verdict, a new run would probably need {_seeds_text(verdict.seeds_needed)}."
    if verdict.findings:
        yield ""
        yield from _findings_table(verdict.findings)
    if (folder / f"{figure.name}.png").exists():
        yield ""
        yield f"![{figure.figure}: {figure.claim}]({figure.name}.png)"
    for question in figure.questions:
        yield ""
        yield f"**{question.question}** {question.answer}".rstrip()
        yield ""
        arms, cells = question.arms or tuple(figure.arms), question.cells or figure.claimed_cells
        yield from _outcomes_table(figure, results, question.outcomes, arms, cells)
    if figure.has_runs:
        yield ""
        yield f"Runs: [{figure.paper}-{figure.runner}.csv]({figure.paper}-{figure.runner}.csv)."


def _findings_table(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the table of the checks."""
    yield "| check | outcome | left | right | ratio or difference, 95 % interval | paper | p (Holm) | verdict |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for one in findings:
        check, comparison = one.comparison.check, one.comparison
        arms = f"{comparison.left} {RELATIONS[check.relation]} {comparison.right}"
        reading = f" ({check.reading})" if check.reading else ""
        ends = f"{_number(one.estimate)} ({_number(one.low)} to {_number(one.high)})"
        sign = "x " if comparison.is_ratio else "difference "
        paper = "" if comparison.paper is None else _number(comparison.paper)
        p = "" if math.isnan(one.p) else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
        yield (
            f"| {check.says}{reading}: {arms} | `{check.outcome}` | {_number(one.left)} | {_number(one.right)} | "
            f"{sign}{ends} | {paper} | {p} | {_verdict_text(one)} |"
        )


def _verdict_text(finding: Finding) -> str:
    """Return the word of a check; for "not settled" with the seeds that would do."""
    if finding.word != "not settled":
        return finding.word
    small = f"; the interval is within {finding.comparison.check.margin * 100:.0f} %" if finding.is_small else ""
    if math.isnan(finding.seeds_needed):
        return f"{finding.word} (too few seeds to estimate how many would do{small})"
    return f"{finding.word} (a new run would need {_seeds_text(finding.seeds_needed)}{small})"


def _seeds_text(seeds: float) -> str:
    """Return a number of seeds, for example "about 9 seeds"."""
    return f"about {seeds:.0f} seeds" if math.isfinite(seeds) else f"more than {MAX_SEEDS:,} seeds"


def _outcomes_table(
    figure: PaperFigure, results: Results, outcomes: Sequence[str], arms: Sequence[str], cells: Sequence[str]
) -> Iterator[str]:
    """Yield a table of outcomes: mean and range over the seeds for each arm and cell."""
    yield "| cell | arm | " + " | ".join(f"`{name}`" for name in outcomes) + " | seeds |"
    yield "| --- | --- |" + " --- |" * (len(outcomes) + 1)
    for cell in cells:
        for arm in arms:
            if figure.arms[arm].only and cell not in figure.arms[arm].only:
                continue
            columns = [np.array(list(results.values(name, arm, cell).values())) for name in outcomes]
            if not len(columns[0]):
                continue
            shown = " | ".join(mean_text(values) for values in columns)
            yield f"| {cell or 'all'} | {arm} | {shown} | {len(columns[0])} |"


def mean_text(values: Any) -> str:
    """Return the mean of values with the smallest and the largest, for example "0.71 (0.69 to 0.73)"."""
    if not len(values) or not np.isfinite(values).all():
        reached = int(np.isfinite(values).sum()) if len(values) else 0
        return f"finite on {reached} of {len(values)} seeds" if reached else "none"
    if len(values) < 2 or values.std() == 0:
        return _number(float(values.mean()))
    return f"{_number(float(values.mean()))} ({_number(float(values.min()))} to {_number(float(values.max()))})"


def _missing(results: Results) -> str:
    """Describe the missing runs: for each cell and arm, the seeds."""
    seeds: dict[str, list[int]] = {}
    for cell in results.missing:
        name = str(ArmName((cell.arm,), cell.cell))
        seeds.setdefault(name, []).append(cell.scenario.seed)
    parts = [f"{name} (seeds {', '.join(map(str, own))})" for name, own in seeds.items()]
    shown = "; ".join(parts[:6])
    return shown if len(parts) <= 6 else f"{shown}; and {len(parts) - 6} more arms"


def _missing_seeds(figure: PaperFigure, results: Results) -> str:
    """Name the planned seeds without runs, and their minutes if they take as long as the others."""
    first, last = figure.seeds + 1, figure.planned_seeds
    several, joined = last > first, "and" if last == first + 1 else "to"
    which = f"seeds {first} {joined} {last}" if several else f"seed {last}"
    minutes = sum(results.seconds.values()) / figure.seeds * (last - figure.seeds) / 60
    return (
        f"The {which} of the {last} planned seeds {'are' if several else 'is'} missing. "
        f"{'They' if several else 'It'} would take about {max(minutes, 0.1):.1f} minutes of one core."
    )


def _write_counts(folder: Path) -> None:
    """Write the part of the page of all verdicts that this command owns."""
    page = folder / COUNTS
    before = read_file(page).decode() if page.exists() else f"# Results\n\n{BEGIN}\n{END}\n"
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    _write(page, f"{head}{BEGIN}\n{counts_table(folder)}{END}{tail}" if rest else before)


def counts_table(folder: Path) -> str:
    """Return the tables of verdicts by paper, with core-hours, and of figures by verdict."""
    lines = ["", "| paper | verdicts | core-hours |", "| --- | --- | --- |"]
    everything: list[Word] = []
    figures: dict[Word, dict[str, list[str]]] = {}
    total, cifar = dict[str, float](), dict[str, float]()
    for paper, title in PAPERS.items():
        words, seconds = list[Word](), dict[str, float]()
        for one in (one for one in map(load_figure, figure_names()) if one.paper == paper):
            results = results_of(one, folder)
            word = verdict_of(one, results).word
            words.append(word)
            figures.setdefault(word, {}).setdefault(paper, []).append(f"[{one.figure}]({paper}.md#{_anchor(one)})")
            # Figures share runs, and each run counts once.
            seconds |= results.seconds
            cifar |= results.seconds if one.has_runs and _data_set(one) == CIFAR else {}
        everything += words
        total |= seconds
        link = f"[{title}]({paper}.md)" if (folder / f"{paper}.md").exists() else title
        lines.append(f"| {link} | {describe_words(words) or 'none'} | {sum(seconds.values()) / 3600:.2f} |")
    hours, rest = (sum(runs.values()) / 3600 for runs in (total, cifar))
    lines.append(f"| all | {describe_words(everything)} | {hours:.2f} |")
    sentence = (
        "A core-hour is an hour of one core. "
        f"The finished runs of `fedsel reproduce all` took {hours:.2f} of them, "
        f"and {hours - rest:.2f} without the figures on CIFAR-10."
    )
    lines += ["", sentence, "", "| verdict | figures |", "| --- | --- |"]
    for word in VERDICTS:
        if word in figures:
            by_paper = (f"{PAPERS[paper].partition(',')[0]}: {', '.join(own)}" for paper, own in figures[word].items())
            lines.append(f"| {word} | {'; '.join(by_paper)} |")
    return "\n".join(lines) + "\n\n"


def _data_set(figure: PaperFigure) -> str:
    """Return the name of a figure's data set. All cells of a figure have the same one."""
    cell, arm, seed = next(figure.runs(1))
    return figure.scenario_of(arm, cell, seed).data.dataset


def _anchor(figure: PaperFigure) -> str:
    """Return the anchor of a figure's section without the verdict, which GitHub makes from its title."""
    return figure.name


def _number(value: float) -> str:
    """Return a number with three significant digits, without exponent.

    >>> _number(0.7345), _number(1234.5), _number(0.00012)
    ('0.735', '1,234', '0.000120')
    """
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


def main() -> None:
    """Write everything."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    record_verdicts(folder, RECORDED)
    write_pages(folder, PAPERS)


if __name__ == "__main__":
    main()
