"""The page: a section a world, each with two tables and a picture, and at the end which selector when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from advice import advice
from cells import Cell
from figures import KNOWING, REFERENCE, SelectorFigures, difference_rows, run_rows, selector_figures, write_csv
from picture import draw

from fedsel_flwr.simulations import Scenario

HEAD = """# Selectors side by side

Written by `{command}`; every run's figures stand in [{runs_csv}]({runs_csv}), every difference in
[{differences_csv}]({differences_csv}). Machine: {machine}.
All runs together took {minutes:.0f} minutes of one core.

Every selector runs on the same seeds: the same shares of the data, devices, channels, first model and batches. A number
is the mean over {seeds} seeds. A difference is to `random` on the same seed, with Student's 95 % interval: in points
for accuracies, in percent for times and joules, from the mean of the logs of the ratios. It is **bold** where it
differs after Holm's correction over the selectors of the world. Nothing was tuned for a selector: parameters are the
defaults, those in the scenario files beside the command, and what the scenario says to all.

Two views: after {rounds} rounds (mean accuracy of the last ten that were measured), and at equal simulated time: the
moment at which the fastest selector of that seed had finished its rounds (mean of the {window} measured before). The
target is reached when the mean of {window} measured rounds is; "3 of 5" says on how many seeds, and there is no
difference then.

Rows under the line are no contenders. `genie` knows every client's true mean latency and takes the fastest in every
round; `sorted-groups` sorts the clients by it and takes groups of equals in turn, the least waiting that equal shares
allow. `random-again` is random with other draws: what differs no more than it does is noise.
"""
NOTHING = "-"
SCALES = {"accuracy_last10": 100.0, "accuracy_at_s": 100.0, "time_to_target_s": 1.0, "energy_to_target_j": 1.0}


def write_page(
    path: Path,
    worlds: Sequence[Scenario],
    plan: Sequence[Cell],
    missing: Mapping[str, str],
    left_out: Mapping[str, Mapping[str, str]],
    machine: str,
    command: str,
) -> None:
    """Write page, CSV files and pictures.

    Args:
        path: Of the page; the other files stand beside it.
        worlds: The scenarios.
        plan: Their runs, all of them played.
        missing: Worlds that could not run, and why.
        left_out: World -> selectors that cannot run there, and why.
        machine: Where this was run.
        command: What makes the page.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    runs_csv, differences_csv = path.with_name(f"{path.stem}-runs.csv"), path.with_name(f"{path.stem}-differences.csv")
    found = {w.name: run_rows([cell for cell in plan if cell.scenario.name == w.name]) for w in worlds}
    figures = {name: selector_figures(rows) for name, rows in found.items()}
    write_csv(runs_csv, [_run(row) for rows in found.values() for row in rows])
    write_csv(differences_csv, [row for name, own in figures.items() for row in difference_rows(name, own)])
    seeds = len({cell.scenario.seed for cell in plan})
    head = HEAD.format(
        command=command, machine=machine, seeds=seeds, rounds=worlds[0].rounds,
        window=worlds[0].target_rounds, runs_csv=runs_csv.name,
        differences_csv=differences_csv.name, minutes=sum(row.run_s for rows in found.values() for row in rows) / 60,
    )  # fmt: skip
    parts = [head]
    for letter, world in zip("abc", worlds, strict=False):
        picture = draw(figures[world.name], world, path.with_name(f"{path.stem}-{world.name}.png"))
        parts += [f"\n## ({letter}) {world.description}\n", _about(world, figures[world.name])]
        parts += [
            _reached(figures[world.name], world),
            f"\n![{world.description}: differences to random]({picture.name})\n",
        ]
        parts += ["\n" + _costs(figures[world.name])]
        parts += [f"\n`{label}` cannot run here: {why}.\n" for label, why in left_out[world.name].items()]
    parts += [f"\n{name} could not run: {why}\n" for name, why in missing.items()]
    parts += ["\n## Which selector when\n\n", advice(figures, {w.name: w for w in worlds})]
    path.write_text("".join(parts), encoding="utf-8")


def _run(row: object) -> dict[str, object]:
    values = asdict(row)  # type: ignore[call-overload]
    first = ("scenario", "selector", "seed")
    return {key: values[key] for key in first} | {key: v for key, v in values.items() if key not in first}


def _about(world: Scenario, figures: Mapping[str, SelectorFigures]) -> str:
    t = world.training
    equal = [row.equal_s for row in figures[REFERENCE].rows]
    first = min((own for own in figures.values() if own.label not in KNOWING), key=lambda own: own.mean("simulated_s"))
    return (
        f"\n{t.local_steps} steps of SGD a round, batches of {t.batch_size}, learning rate {t.learning_rate:g}, model "
        f"`{world.model.name}`; a client that takes longer than {world.wireless.max_latency_s:g} s has failed. Equal "
        f"time is {_amount(float(np.mean(equal)))} s (mean over the seeds), when {first.label} is through with its "
        "rounds first.\n\n"
    )


def _reached(figures: Mapping[str, SelectorFigures], world: Scenario) -> str:
    target = f"{100 * world.target_accuracy:g} %"
    lines = [
        f"| selector | accuracy after {world.rounds} rounds, % | to random | at equal time, % | to random "
        f"| seconds to {target} | to random | joules to {target} | to random |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    for own in _ordered(figures):
        cells = []
        for figure, scale in SCALES.items():
            cells += [_mean(own, figure, scale), _difference(own, figure, scale)]
        lines.append(" | ".join([f"| {_name(own)}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _costs(figures: Mapping[str, SelectorFigures]) -> str:
    lines = [
        "| selector | asked a round | rounds at equal time | seconds a round | joules a round | of these probes: s | J "
        "| server, ms of the processor a round | failed, % | Jain index | rounds until all had a turn |",
        "| --- " + "| ---: " * 10 + "|",
    ]
    for own in _ordered(figures):
        rows = own.rows
        a_round = (
            np.mean([row.simulated_s / row.rounds for row in rows]),
            np.mean([r.energy_j / r.rounds for r in rows]),
        )
        cells = [
            f"{np.mean([row.selections / row.rounds for row in rows]):.3g}", f"{own.mean('rounds_at_s'):.0f}",
            *(_amount(float(v)) for v in a_round), _amount(own.mean("probe_s")),
            _amount(own.mean("probe_j")), f"{own.mean('server_ms'):.1f}",
            f"{100 * np.mean([row.failed_clients / max(1, row.selections) for row in rows]):.1f}",
            f"{own.mean('jain'):.3f}", _mean(own, "rounds_to_all", 1.0),
        ]  # fmt: skip
        lines.append(" | ".join([f"| {_name(own)}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _ordered(figures: Mapping[str, SelectorFigures]) -> list[SelectorFigures]:
    """By time to the target, those that did not always reach it behind; then random, then the knowing ones."""

    def key(own: SelectorFigures) -> tuple[int, int, float]:
        reached = len(own.values("time_to_target_s"))
        return own.label in KNOWING, -reached, own.mean("time_to_target_s") if reached else -own.mean("accuracy_last10")

    return sorted(figures.values(), key=key)


def _name(own: SelectorFigures) -> str:
    return f"*{own.label}*" if own.label in KNOWING else own.label


def _mean(own: SelectorFigures, figure: str, scale: float) -> str:
    values = own.values(figure)
    if not values:
        return "never"
    told = f"{scale * float(np.mean(values)):.1f}" if scale > 1 else _amount(float(np.mean(values)))
    return told if len(values) == len(own.rows) else f"{told} ({len(values)} of {len(own.rows)})"


def _difference(own: SelectorFigures, figure: str, scale: float) -> str:
    found = own.against.get(figure)
    if found is None:
        return ""
    if math.isnan(found.mean):
        return NOTHING
    digits, unit = (0, " %") if found.effect.is_ratio else (1, "")
    told = f"{scale * found.mean:+.{digits}f}{unit}"
    if math.isfinite(found.low):
        told += f" ({scale * found.low:+.{digits}f} … {scale * found.high:+.{digits}f})"
    return f"**{told}**" if found.differs else told


def _digits(size: float) -> int:
    return max(0, 2 - math.floor(math.log10(abs(size)))) if size else 0


def _amount(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.{min(6, _digits(value))}f}" if value else "0"
