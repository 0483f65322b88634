"""Page about seconds against joules: every selector and random selection at several numbers of clients a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from effects import World
from formats import UNKNOWN, amount, counted, interval, listed, table
from lineup import ASKED, DEADLINES, MATCHED, REFERENCE, SINGLE, cohort_entry, matched_cohorts, random_entry
from matplotlib.ticker import LogLocator, NullFormatter
from page import MACHINE
from sections import ENERGY, TIME, core_hours, missing_sentence, rounds
from sections import points as in_points

from fedsel_flwr.report.paired import PairedEffect

COLORS = {
    REFERENCE: "#777777", "fedcs": "#d55e00", "oort": "#009e73", "bsfl": "#0072b2", "cs-ucb": "#56b4e9",
    "fedcm-ts": "#cc79a7", "fedcm-ucb": "#8a4fa0", "fedcor": "#b8860b",
}  # fmt: skip
MARKS = {0: "o", 40: "^", 60: "s", 90: "D"}
HEAD = """# Seconds against joules

Find out what a faster training costs in energy, and whether it is enough to ask more phones.

Written by `{command}`.

The rows are in [{rows}]({rows}). Every number on this page is computed from these rows. Machine: {machine}.
The runs of this page ({runs}) took {hours:.1f} core-hours.

The scenario is world (a) of [selectors.md](selectors.md): {description}. All runs are on seeds 1 to {seeds}. A row such
as `bsfl-20` asks 20 clients a round. A row such as `random-40-60s` also has a deadline of 60 s: the server then ignores
replies that have not arrived. In every row, a client that takes {timeout:g} s or longer has failed, and the round ends
then at the latest.

For `fedcs`, the number of clients is a limit. `fedcs` without a number has no limit. The deadline of `fedcs`, the
`min_latency` of `bsfl` and the values of all other parameters are those of
[selectors.md](selectors.md#values-of-parameters).

The page shows only some of the selectors. `fedcs`, `oort`, `bsfl` and `cs-ucb` prefer fast clients. `fedcm-ts` stands
for the selectors that reduce the number of rounds. These five selectors ask several numbers of clients. `fedcm-ts` asks
10 at most, because with 20 clients the filter of FedCM searches a million subsets in each round. The page also shows
{single}, but only with {few} clients, because [selectors.md](selectors.md) uses the same runs. The rows of FedCM also
filter models with examples on the server, and the other rows do not. The row `random-filtered` of
[selectors.md](selectors.md) shows how much the filter alone saves.
"""


@dataclass(frozen=True)
class Point:
    """A row of the page: time and energy to the target, compared with random selection.

    Attributes:
        label: The row's label.
        selector: Name of the selector.
        asked: Mean number of clients asked per round.
        deadline: Deadline in seconds; 0 for none.
        time: Ratio of the seconds to the target.
        energy: Ratio of the joules to the target.
    """

    label: str
    selector: str
    asked: float
    deadline: float
    time: PairedEffect
    energy: PairedEffect

    @property
    def reached(self) -> bool:
        """Whether both runs of every pair reached the target."""
        return math.isfinite(self.time.estimate)


def lines_of(world: World) -> dict[tuple[str, float], list[str]]:
    """Return the labels of each line of the picture, by selector and deadline, from few clients to many."""
    few, lines = world.scenario.clients_per_round, {}
    for deadline in DEADLINES:
        first = REFERENCE if not deadline else random_entry(few, deadline, 1).label
        lines[REFERENCE, float(deadline)] = [first, *(random_entry(asked, deadline, 1).label for asked in ASKED)]
    for name in MATCHED:
        first = cohort_entry(name, few, 1).label if name == "fedcs" else name
        lines[name, 0.0] = [first, *(cohort_entry(name, asked, 1).label for asked in matched_cohorts(name))]
    lines["fedcs", 0.0].append("fedcs")
    lines |= {(name, 0.0): [name] for name in SINGLE}
    return lines


def points_of(world: World) -> dict[str, Point]:
    """Return the points of all rows that ran on two seeds or more, except random selection, whose ratios are 1."""
    found = {}
    for (selector, deadline), labels in lines_of(world).items():
        for label in labels:
            if label == REFERENCE:
                continue
            time, energy = world.against(label, REFERENCE, TIME), world.against(label, REFERENCE, ENERGY)
            if time and energy and time.pairs > 1:
                found[label] = Point(label, selector, world.asked(label), deadline, time, energy)
    return found


def dominating(world: World, label: str, others: list[str]) -> list[str]:
    """Return the rows that need fewer seconds and fewer joules than a row; both intervals are below 1.

    Args:
        world: The world.
        label: The row.
        others: Labels of the other rows.
    """
    found = {}
    for other in set(others) - {label}:
        time, energy = world.against(other, label, TIME), world.against(other, label, ENERGY)
        if time and energy and time.high < 1 and energy.high < 1:
            found[other] = time.estimate
    return sorted(found, key=lambda other: found[other])


def write_frontier(path: Path, world: World, rows: str, command: str, seeds: int) -> None:
    """Write the page and its picture.

    Args:
        path: The page.
        world: World (a), with the rows of the frontier only.
        rows: Name of the CSV file.
        command: The command that writes the page.
        seeds: Number of seeds.
    """
    runs = len(world.run_seconds)
    parts = [
        HEAD.format(
            command=command, rows=rows, machine=MACHINE, runs=runs, hours=core_hours(world),
            description=world.scenario.description, seeds=seeds, few=world.scenario.clients_per_round,
            timeout=world.scenario.wireless.max_latency_s,
            single=" and ".join(f"`{name}`" for name in SINGLE),
        )
    ]  # fmt: skip
    if world.missing:
        parts.append(missing_sentence(world, "frontier") + "\n")
    points = points_of(world) if world.complete else {}
    if points:
        picture = path.with_name(f"{path.stem}.png")
        draw(world, points, picture)
        parts += [f"![Seconds and joules to the target in world (a)]({picture.name})\n", CAPTION]
        parts += ["## Why not just ask more phones?\n", NOT_YET if world.missing else _answer(world, points)]
        parts += ["## Selectors compared with random selection of the same number of clients\n", _matched(world)]
        parts += ["## All rows\n", _table(world, points)]
    path.write_text("\n".join(parts), encoding="utf-8")


CAPTION = """The picture shows geometric means over the seeds, with 95 % intervals of the ratio to `random`. It contains
only rows that reached the target on every seed. Rows near the lower left corner need few seconds and few joules.
Do not compare two rows by their intervals in the picture: each interval compares one row with `random`. The rows ran on
the same seeds, so a comparison of two rows can be clear although their intervals overlap. The last column of the last
table has such comparisons.
"""


NOT_YET = """**Not measured yet.** Runs are missing, and this page answers the question only when all runs are there.
"""


def _lead(reached: Mapping[str, Point], plain: Sequence[str], usual: float) -> str:
    """Return the answer in short: what more clients cost, and the fastest row that needs less of both.

    Args:
        reached: The rows that reached the target on every seed.
        plain: The rows of random selection among them.
        usual: Clients that random selection asks in a round.
    """
    crowds = [reached[label] for label in plain if reached[label].asked > usual]
    costly = bool(crowds) and all(point.time.high < 1 < point.energy.low for point in crowds)
    text = ""
    if costly:
        few, many = (pick(point.asked for point in crowds) for pick in (min, max))
        text = (
            f"**With random selection, more phones save seconds and cost joules.** The rows ask {few:.0f} to "
            f"{many:.0f} phones and are compared with `{REFERENCE}`, which asks {usual:g}. "
        )
        for told, some in (
            ("Without a deadline", [point for point in crowds if not point.deadline]),
            ("With a deadline", [point for point in crowds if point.deadline]),
        ):
            if some:
                time, cost = ([getattr(one, name).estimate for one in some] for name in ("time", "energy"))
                text += (
                    f"{told}, they need {min(time):.2f} to {max(time):.2f} times the seconds and {min(cost):.2f} to "
                    f"{max(cost):.2f} times the joules. "
                )
        text = text.rstrip() + "\n\n"
    both = {label: point for label, point in reached.items() if max(point.time.high, point.energy.high) < 1}
    if both:
        label = min(both, key=lambda one: both[one].time.estimate)
        text += (
            f"**{len(both)} of the {len(reached)} rows that reached the target on every seed have two intervals "
            f"below 1**, in seconds and in joules. The fastest of them is `{label}`: "
            f"{interval(both[label].time)} times the seconds and {interval(both[label].energy)} times the joules of "
            f"`{REFERENCE}`. This row was chosen among all rows, and the intervals are not corrected for this choice. "
        )
    else:
        text += "No row has two intervals below 1, in seconds and in joules. "
    return text + "In detail:\n"


def _answer(world: World, points: dict[str, Point]) -> str:
    few = world.scenario.clients_per_round
    reached = {label: point for label, point in points.items() if point.reached}
    plain = [label for label, point in reached.items() if point.selector == REFERENCE]
    others = [label for label in reached if label not in plain]

    def told(label: str) -> str:
        point = reached[label]
        return (
            f"{interval(point.time)} times the seconds and {interval(point.energy)} times the joules of `{REFERENCE}`"
        )

    def fastest(labels: list[str]) -> str:
        return min(labels, key=lambda label: reached[label].time.estimate)

    lines = [_lead(reached, plain, world.asked(REFERENCE))]
    if crowds := [label for label in plain if not reached[label].deadline]:
        many = max(crowds, key=lambda label: reached[label].asked)
        lines.append(f"- **More clients without a deadline**: `{many}` needs {told(many)}.")
    if plain:
        lines.append(f"- **More clients with or without a deadline**: the fastest row is `{fastest(plain)}`. "
                     f"It needs {told(fastest(plain))}.")  # fmt: skip
    if plain and others:
        rival = (
            world.against(fastest(others), fastest(plain), TIME),
            world.against(fastest(others), fastest(plain), ENERGY),
        )
        lines.append(
            f"- **The fastest row of a selector** is `{fastest(others)}`. Compared with `{fastest(plain)}`, it needs "
            f"{' times the seconds and '.join(interval(one) for one in rival if one)} times the joules. "
            "[selectors.md](selectors.md#which-selector-when) compares `fedcs` with random selection on fewer of these "
            "seeds, so its numbers differ."
        )
    if small := [label for label in others if world.equal_cohort(label)]:
        lines.append(
            f"- **The fastest of this page's selectors with {few} clients** is `{fastest(small)}`. It needs "
            f"{told(fastest(small))}."
        )
    labels = [REFERENCE, *reached]
    best = [label for label in labels if not dominating(world, label, labels)]
    mean = {label: [world.geometric_mean(label, figure) for figure in (TIME, ENERGY)] for label in labels}
    by_mean = [
        label for label in labels
        if not any(all(a < b for a, b in zip(mean[other], mean[label], strict=True)) for other in labels)
    ]  # fmt: skip

    def named(some: list[str]) -> str:
        return listed([f"`{label}`" for label in some])

    lines += [
        f"- **Smallest means**: no other row has smaller means of both seconds and joules than {named(by_mean)}. "
        f"Rows of random selection among them: {named([one for one in by_mean if one in (REFERENCE, *plain)])}.",
        f"- **Not shown to be beaten**: {named(best)}. For each of these rows, no other row has two ratios whose "
        "intervals are below 1, in seconds and in joules. This does not show that the row is among the best. "
        f"Rows of random selection among them: {named([one for one in best if one in (REFERENCE, *plain)])}.",
        f"- **Limited by the window**: {named([label for label in labels if world.limited_by_window(label)])}. These "
        "rows reach the target soon after the first window is full, and no run can reach it earlier. With a shorter "
        "window they would need fewer seconds and fewer joules. The page therefore underrates large numbers of "
        "clients.",
        "\nThe fastest rows were chosen on the seeds that measure them, so their advantage is somewhat too large.",
    ]
    return "\n".join(lines) + "\n"


def _matched(world: World) -> str:
    few = world.scenario.clients_per_round
    heads = ["selector", *(f"{asked} clients: {what}" for asked in (few, *ASKED[:-1]) for what in ("time", "joules"))]
    rivals = lines_of(world)[REFERENCE, 0.0]
    lines = []
    for name in MATCHED:
        cells = [f"`{name}`"]
        for label, rival in zip(lines_of(world)[name, 0.0], rivals[: len(ASKED)], strict=False):
            for figure in (TIME, ENERGY):
                effect = world.against(label, rival, figure)
                if effect is not None and effect.censored:
                    cells.append(f"reached on {effect.reached} of {counted(effect.pairs, 'seed')}")
                else:
                    cells.append(UNKNOWN if effect is None else interval(effect))
        lines.append(cells + [UNKNOWN] * (len(heads) - len(cells)))
    # Columns without any run would look like results.
    shown = [i for i in range(len(heads)) if not all(cells[i] == UNKNOWN for cells in lines)]
    heads, lines = [heads[i] for i in shown], [[cells[i] for i in shown] for cells in lines]
    return "The intervals are not corrected for their number.\n\n" + table(heads, lines)


def _table(world: World, points: dict[str, Point]) -> str:
    heads = [
        "row", "clients asked a round", "deadline of the round, s", f"seconds to {world.target}",
        f"rounds to {world.target}", "time ratio", f"joules to {world.target}", "ratio of joules",
        "accuracy at the end, points to `random`", "worst tenth of the clients, points to `random`", "failed, %",
        "Jain's index", "fastest row with fewer seconds and fewer joules",
    ]  # fmt: skip
    labels = [REFERENCE, *(label for label, point in points.items() if point.reached)]
    lines = []
    for label in [REFERENCE, *points]:
        point = points.get(label)
        reached, seeds = world.reached(label)
        whole, better = reached == seeds, dominating(world, label, labels)[:1]
        beaten = UNKNOWN if not whole else f"`{better[0]}`" if better else "no row"
        accuracy, worst = (
            in_points(None if point is None else world.against(label, REFERENCE, figure))
            for figure in ("accuracy_last10", "worst_tenth")
        )
        failed = world.mean(label, lambda row: row.failed_clients / (row.asked_per_round * row.rounds))
        lines.append([
            f"`{label}`", f"{world.asked(label):.3g}", _deadline(world, point),
            amount(world.geometric_mean(label, TIME)) if whole else f"{reached} of {seeds} seeds",
            rounds(world, label), interval(point.time) if point else "1",
            amount(world.geometric_mean(label, ENERGY)) if whole else UNKNOWN,
            interval(point.energy) if point else "1", accuracy, worst, f"{100 * failed:.1f}",
            f"{world.mean(label, lambda row: row.jain):.2f}", beaten,
        ])  # fmt: skip
    return TABLE_INTRO + table(heads, lines)


TABLE_INTRO = """The last column names the fastest row for which both intervals of the comparison with this row are
below 1, in seconds and in joules. The comparisons of pairs are not corrected for their number. Rows that missed the
target on a seed are not compared. The accuracies at the end are those of whole runs, which have equal numbers of
rounds. The worst tenth is the mean accuracy of the tenth of the clients with the lowest accuracy.

"""


def _deadline(world: World, point: Point | None) -> str:
    """Return the deadline of a row. FedCS plans the round for its own deadline, and does not end it then."""
    if point is not None and point.selector == "fedcs":
        return f"none; `fedcs` plans for {world.scenario.selectors['fedcs']['deadline']:g}"
    return f"{point.deadline:g}" if point is not None and point.deadline else "none"


def draw(world: World, points: dict[str, Point], path: Path) -> None:
    """Draw seconds against joules into a PNG file."""
    figure, axis = plt.subplots(figsize=(9, 6.5), layout="constrained")
    seconds, joules = (world.geometric_mean(REFERENCE, name) for name in (TIME, ENERGY))
    for (selector, deadline), labels in lines_of(world).items():
        drawn = [points[label] for label in labels if label in points and points[label].reached]
        spots = [(joules * p.energy.estimate, seconds * p.time.estimate, p.asked) for p in drawn]
        if labels[0] == REFERENCE:
            spots = [(joules, seconds, world.asked(REFERENCE)), *spots]
        name = selector if not deadline else f"{selector}, deadline {deadline:g} s"
        color, mark = COLORS[selector], MARKS[int(deadline)]
        if not spots:
            continue
        axis.plot(*zip(*[spot[:2] for spot in spots], strict=True), color=color, linewidth=0.8, alpha=0.6)
        axis.plot(*zip(*[spot[:2] for spot in spots], strict=True), mark, color=color, markersize=6, label=name)
        for p in drawn:
            x, y = joules * p.energy.estimate, seconds * p.time.estimate
            axis.plot([joules * p.energy.low, joules * p.energy.high], [y, y], color=color, linewidth=0.6, alpha=0.7)
            axis.plot([x, x], [seconds * p.time.low, seconds * p.time.high], color=color, linewidth=0.6, alpha=0.7)
        for x, y, asked in spots:
            axis.annotate(f"{asked:.0f}", (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7, color=color)
    for scale in (axis.set_xscale, axis.set_yscale):
        scale("log")
    for line in (axis.xaxis, axis.yaxis):
        line.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        line.set_major_formatter(lambda x, _: f"{x:,.0f}")
        line.set_minor_formatter(NullFormatter())
    axis.set_xlabel(f"joules to {world.target} accuracy")
    axis.set_ylabel(f"simulated seconds to {world.target} accuracy")
    axis.set_title("Numbers at the points: clients asked a round", fontsize=9)
    axis.grid(color="#eeeeee")
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
