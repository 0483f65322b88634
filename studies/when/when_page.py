"""The page of ``when.py``, written from its CSV files; every number in it comes from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from when_cells import HIGH_RATIO, LOW_RATIO, NEAR_ZERO, SPREAD, Results
from when_check_tables import known_section, training_section
from when_fleet import DEADLINE_S, EXAMPLES, MEASURED, PAYLOAD_BITS, Fleet
from when_grid import GROUPS, MIN_LATENCY_S, RANDOM, Grid, variants
from when_markdown import (
    NOTHING,
    SPAN,
    cohort,
    label_of,
    listed,
    percent,
    plays_of,
    points,
    range_of,
    span_of,
    table,
    wrapped,
)
from when_picture import draw

from fedsel_flwr.simulations.reproductions.rows import Rows

DEFAULT = "bsfl auto"
"""BSFL as a deployment runs it."""
GREEDY = ("bsfl auto 0.1", "cs-ucb auto 0.1")
"""Selectors with the least exploration, and "auto" for the latency that scales their rewards."""
EXAMPLE = (0.78, 0.4)
"""Spread and noise of the fleet in the table of explorations: the measured phones."""
MACHINE = "Machine: "
Row = Mapping[str, str]


def write_page(page: Path, grid: Grid, rows: Rows, trained: Rows, worlds: Rows, machine: str) -> None:
    """Write the page and its picture."""
    text, results, fleets = page_text(page, grid, rows, trained, worlds, machine)
    page.write_text(text, encoding="utf-8")
    draw(results, fleets, grid.plays, page.with_suffix(".png"))


def page_text(
    page: Path, grid: Grid, rows: Iterable[Row], trained: Iterable[Row], worlds: Iterable[Row], machine: str
) -> tuple[str, Results, list[Fleet]]:
    """Return the text, the figures behind it, and the fleets in which each selector has a row.

    Args:
        page: Path of the page, for the names of the files next to it.
        grid: The whole grid, to name missing rows.
        rows: Rows of the grid.
        trained: Rows of the runs with training.
        worlds: Rows of the known worlds.
        machine: Description of the machine.
    """
    rows, trained, worlds = list(rows), list(trained), list(worlds)
    results = Results(rows)
    fleets = [fleet for fleet in grid.fleets if all(results.has(fleet, v.label) for v in variants())]
    cohorts = [list(own) for _, own in itertools.groupby(fleets, key=lambda fleet: (fleet.clients, fleet.per_round))]
    parts = [
        "# When client selection shortens rounds\n\n" + _interim(results, grid) + _rule(results, fleets, grid.plays),
        f"![Savings by spread, noise and plays]({page.with_suffix('.png').name})\n",
        _words(grid.plays),
        "## Shares of the ceiling\n\n" + _shares(results, cohorts, grid.plays),
        "## The ceiling of each fleet\n\n" + _ceilings(results, fleets),
        "## Exploration and clock\n\n" + _explorations(results, cohorts, grid.plays),
        "## Compared with runs that train\n\n" + training_section(trained),
    ]
    if worlds:
        parts.append("## Worlds that were measured before\n\n" + known_section(worlds))
    parts.append("## How this page was made\n\n" + _made(page, grid, rows, [*trained, *worlds], machine))
    return wrapped("\n".join(parts)), results, fleets


def machine_of(page: Path) -> str:
    """Return the description of the machine on an existing page."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(MACHINE):
            return line.removeprefix(MACHINE).removesuffix(".")
    return "unknown"


# ---- the rule ------------------------------------------------------------------------------------------------------


def _rule(results: Results, fleets: Sequence[Fleet], plays: Sequence[int]) -> str:
    zones = {fleet: results.zone(fleet) for fleet in fleets}
    above, below = ([fleet for fleet in fleets if zones[fleet] == zone] for zone in ("above", "below"))
    many = plays[-1]
    ceilings, low = (range_of(results.ceiling(fleet).value for fleet in above), _largest_ceiling(results, below))
    first = range_of(results.saving(f, DEFAULT, plays[0]).value for f in above)
    equal = sum(fleet.spread == 0 for fleet in below)
    return f"""**With {_fractions(fleets)} of the clients in a round, and all clients available: a selection that knows
each client's mean latency, and gives all clients equal shares, can shorten rounds by {ceilings} %, depending on the
fleet. This holds if the spread between the clients' latencies is at least
{SPREAD:g} and at least as large as the noise within a client. If the spread is at most {LOW_RATIO:g} times the noise,
such a selection can shorten rounds by {low:.1f} % at most. This page measures seconds a round, not the time to a target
accuracy.**

Spread is the standard deviation of the clients' mean log seconds. Noise is the standard deviation of one client's log
seconds. `fedsel advise` estimates both from a history of latencies, and predicts the saving for your number of clients
in a round. The rule does not hold for large shares of the clients: with 50 of 100 clients, a spread of 0.1 and a noise
of 0.1, ten log-normal fleets had ceilings of 3 to 6 %.

- {len(above)} of the {len(fleets)} fleets are above the limits, and {len(below)} are below the limits. Of the
  {len(below)} fleets below the limits, {equal} have no spread at all, so that no selection can save anything there.
  {_gaps(results, fleets)} The grid does not show what selection saves between these values. The rule rounds the
  ratio to one decimal.
- The limits were chosen on the same fleets. No other fleets tested them.
- The percentages are the ceiling. Real selectors must first learn the latencies.
- Shorter rounds alone do not make a better model. If slow clients have data that fast clients lack, the model may need
  more rounds.
  [selectors.md](selectors.md) compares the time to a target accuracy.

In a deployment, BSFL has by default `min_latency="auto"` and the paper's exploration of 1. After
{plays_of(plays[0])} of each client, this BSFL saves {first} %, because it has only measured the clients. Later, it
saves in the {len(above)} fleets above the limits, in percent:

{_course(results, above, plays[1:])}
{_dips(results, above, plays)}

An exploration of 0.1 gives larger savings at unequal shares, because fast clients are selected more often than slow
ones. No page measures the time to a target accuracy with this exploration. After {plays_of(many)}, the savings in
percent are:

{_unequal(results, above, below, many)}"""


def _course(results: Results, fleets: Sequence[Fleet], counts: Sequence[int]) -> str:
    """Return the table of a deployment's BSFL by the number of plays."""
    lines = [
        [
            str(count),
            range_of((results.saving(fleet, DEFAULT, count).value for fleet in fleets), SPAN),
            span_of(results.jain(fleet, DEFAULT, count) for fleet in fleets),
        ]
        for count in counts
    ]
    return table(["plays of each client", "saving, smallest…largest of the fleets", "Jain's index"], lines)


def _dips(results: Results, fleets: Sequence[Fleet], plays: Sequence[int]) -> str:
    """Say in how many fleets a saving is smaller after more plays."""
    said = []
    for early, late in itertools.pairwise(plays[1:]):
        fewer = [f for f in fleets if results.saving(f, DEFAULT, late).value < results.saving(f, DEFAULT, early).value]
        said.append(
            f"In {len(fewer) or 'none'} of these fleets, the saving is smaller after {plays_of(late)} than after "
            f"{plays_of(early)}."
        )
    return " ".join(said)


def _interim(results: Results, grid: Grid) -> str:
    """Return a warning if a fleet lacks seeds of a selector."""
    counts = [len(results.seeds(fleet, v.label)) for fleet in grid.fleets for v in variants()]
    if min(counts) >= grid.seeds:
        return ""
    seen = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"**Interim: {seen} of {grid.seeds} seeds of each run are done. The numbers on this page may change.**\n\n"


def _largest_ceiling(results: Results, fleets: Sequence[Fleet]) -> float:
    return 100 * max((results.ceiling(fleet).value for fleet in fleets), default=math.nan)


def _fractions(fleets: Sequence[Fleet]) -> str:
    return listed([f"{100 * one:g} %" for one in sorted({fleet.per_round / fleet.clients for fleet in fleets})])


def _gaps(results: Results, fleets: Sequence[Fleet]) -> str:
    """Return the sentences on the intervals of ratio and spread without a fleet."""
    latencies = [results.latency(fleet) for fleet in fleets]
    gaps = (
        ("ratio of spread to noise", [spread / noise for spread, noise in latencies], LOW_RATIO, HIGH_RATIO),
        ("spread", [spread for spread, _ in latencies], 0.0, SPREAD),
    )
    said = []
    for name, values, low, high in gaps:
        middle = (low + high) / 2
        ends = max([v for v in values if v < middle], default=math.nan), min([v for v in values if v > middle])
        said.append(f"No fleet has a {name} between {ends[0]:.2f} and {ends[1]:.2f}.")
    return " ".join(said)


def _unequal(results: Results, above: Sequence[Fleet], below: Sequence[Fleet], plays: int) -> str:
    """Return the table of the savings with little exploration, in fleets whose clients differ."""
    groups = [("above", above), ("below, spread above 0", [fleet for fleet in below if fleet.spread > 0])]
    lines = [
        [name, str(len(own)), range_of((results.ceiling(fleet).value for fleet in own), SPAN)]
        + [
            f"{range_of((results.saving(fleet, label, plays).value for fleet in own), SPAN)}, "
            f"{span_of(results.jain(fleet, label, plays) for fleet in own)}"
            for label in GREEDY
        ]
        for name, own in groups
        if own
    ]
    head = ["fleets", "number", "ceiling", *(f"{label}, Jain's index" for label in GREEDY)]
    return table(head, lines)


def _words(plays: Sequence[int]) -> str:
    return f"""The picture shows the mean saving over the seeds, with 95 % intervals. Its axes are keys of a scenario's
table `system`: `compute_log_sd` sets the spread between clients, `network_round_cv` the noise. The numbers in
parentheses are the spread and the noise of the latencies, which `fedsel advise` estimates too.

- **Saving**: how much shorter a round is than a round of random selection, in percent of random's seconds.
- **Ceiling**: the saving of sorted groups. Sorted groups know each client's mean latency, and select clients of
  similar latency together. Each client is selected equally often.
- **Share**: a selector's saving divided by the ceiling. If the ceiling is below {100 * NEAR_ZERO:g} %, there is no
  share.
- **Plays**: rounds x cohort / clients, the mean number of rounds in which a client was selected. The grid has
  {listed(plays)} plays.
- **Jain's index**: 1 if each client was selected equally often. A selector with a lower index moves rounds from slow
  to fast clients. Such a selector can exceed the ceiling.

No client trains in these runs. The latencies are those of the scenario `phones`: {PAYLOAD_BITS / 8e6:g} MB to receive
and to send, and a deadline of {DEADLINE_S:g} s. Each phone has {EXAMPLES} examples. A `compute_log_sd` of
{MEASURED:g} gives the measured phones. With another value, the keys
`download_log_sd` and `upload_log_sd` change in proportion, so that 0 gives equal phones. All clients report the same
loss to Oort, which falls from round to round. The numbers of Oort therefore hold only for clients with equal losses,
and the tables mark them. All clients report the same accuracy to TiFL. The seconds of TiFL include its probes.
"""


def _shares(results: Results, cohorts: Sequence[Sequence[Fleet]], plays: Sequence[int]) -> str:
    parts = [
        "This table has only the fleets above the limits of the rule. A cell has the mean share of the ceiling over "
        'these fleets, the smallest and the largest share as "smallest…largest", and the mean of Jain\'s index. These '
        "two shares are no interval. The number in a selector's "
        "name is the exploration. Without a number, the exploration is 1, as in the paper. With `auto`, the selector "
        f"computes its clock from the latencies. Without `auto`, BSFL has `min_latency` = {MIN_LATENCY_S:g} s, and "
        f"CS-UCB has `max_latency` = {DEADLINE_S:g} s.\n"
    ]
    labels = [v.label for v in variants() if v.label not in (RANDOM, GROUPS)]
    for own in cohorts:
        paying = [fleet for fleet in own if results.zone(fleet) == "above"]

        def cell(label: str, count: int, paying: Sequence[Fleet] = paying) -> str:
            found = [one.value for fleet in paying if (one := results.share(fleet, label, count)) is not None]
            if not found:
                return NOTHING
            jain = np.mean([results.jain(fleet, label, count) for fleet in paying])
            return f"{100 * np.mean(found):.0f} % ({range_of(found, SPAN)} %), {jain:.2f}"

        head = ["selector", *(plays_of(count) for count in plays)]
        lines = [[label_of(label), *(cell(label, count) for count in plays)] for label in labels]
        parts.append(f"{cohort(own[0])}, {len(paying)} fleet{'s' * (len(paying) > 1)}:\n\n" + table(head, lines))
        few, many = (
            np.mean([one.value for fleet in paying if (one := results.share(fleet, "cs-ucb", count)) is not None])
            for count in (plays[1], plays[-1])
        )
        parts.append(
            f"The mean share of CS-UCB with the paper's exploration is {100 * few:.0f} % after {plays_of(plays[1])}, "
            f"and {100 * many:.0f} % after {plays_of(plays[-1])}.\n"
        )
    return "\n".join(parts)


def _ceilings(results: Results, fleets: Sequence[Fleet]) -> str:
    head = [
        "clients", "a round", "`compute_log_sd`", "`network_round_cv`", "spread", "noise", "random, s", "ceiling, %",
        "rule", "seeds",
    ]  # fmt: skip
    lines = []
    for fleet in fleets:
        spread, noise = results.latency(fleet)
        lines.append([
            str(fleet.clients), str(fleet.per_round), f"{fleet.spread:g}", f"{fleet.noise:g}", f"{spread:.2f}",
            f"{noise:.2f}", f"{results.random_s(fleet):.1f}", percent(results.ceiling(fleet)),
            results.zone(fleet), str(len(results.seeds(fleet, GROUPS))),
        ])  # fmt: skip
    said = (
        "Spread and noise are those of the latencies. The column `rule` has the place of the fleet: above or below the "
        "limits of the rule, or between them.\n\n"
    )
    return said + table(head, lines)


def _explorations(results: Results, cohorts: Sequence[Sequence[Fleet]], plays: Sequence[int]) -> str:
    spread, noise = EXAMPLE
    parts = [
        f"The fleet with `compute_log_sd` = {spread:g} and `network_round_cv` = {noise:g}. A cell has three numbers: "
        "the saving of the whole run and of the last half of the rounds, both in percent, and Jain's index. The last "
        "half is rounded up to whole cycles. In a cycle, each client could be selected once.\n\n"
        "With an exploration of 1, the saving of BSFL can be smaller after 15 plays than after 5 plays, and larger "
        "again after 50 plays. The reason is the mixture of clients in a cohort. In the first cycles, all clients "
        "have the same number of plays. BSFL then orders the clients by speed, so that a cohort has clients of "
        "similar latency. After these cycles, fast clients have more plays than slow clients, and a cohort mixes "
        "fast and slow clients. After more cycles, the cohorts consist of similar clients again, and the share of "
        "fast clients grows.\n"
    ]
    for own in cohorts:
        (fleet,) = [one for one in own if (one.spread, one.noise) == EXAMPLE]
        spread, noise = results.latency(fleet)

        def cell(label: str, count: int, fleet: Fleet = fleet) -> str:
            whole, late = (results.saving(fleet, label, count, late=half) for half in (False, True))
            return f"{points(whole.value)} / {points(late.value)} / {results.jain(fleet, label, count):.2f}"

        head = ["selector", *(plays_of(count) for count in plays)]
        lines = [
            [label_of(v.label), *(cell(v.label, count) for count in plays)] for v in variants() if v.label != RANDOM
        ]
        parts.append(f"{cohort(fleet)}, spread {spread:.2f}, noise {noise:.2f}:\n\n" + table(head, lines))
    return "\n".join(parts)


# ---- how it was made -----------------------------------------------------------------------------------------------


def _made(page: Path, grid: Grid, rows: Sequence[Row], checks: Sequence[Row], machine: str) -> str:
    fingerprints = {row["fingerprint"] for row in rows}
    wanted = list(grid.runs())
    missing = [one for one in wanted if grid.fingerprint(one[0], one[2], one[1]) not in fingerprints]
    seconds: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        seconds.setdefault((int(row["clients"]), row["selector"]), []).append(float(row["cpu_s"]))
    hours = sum(float(row["cpu_s"]) for row in rows) / 3600
    check_hours = sum(float(row["cpu_s"]) for row in checks) / 3600
    if missing:
        needed = sum(np.mean(seconds.get((fleet.clients, v.label), [math.nan])) for fleet, _, v in missing) / 3600
        seeds = sorted({seed for _, seed, _ in missing})
        state = (
            f"{len(missing):,} rows are missing, all of them with seeds {seeds[0]} to {seeds[-1]}. They need "
            f"{needed:.2f} core-hours."
        )
    else:
        state = "No row is missing."
    stem = page.stem
    return f"""Written by `python studies/when/when.py`. The same command resumes an interrupted run.

{MACHINE}{machine}.

One core computed the {len(rows):,} rows of [{stem}.csv]({stem}.csv) in {hours:.2f} hours, and the checks in
{check_hours:.2f} hours. The grid has {len(wanted):,} rows: {len(grid.fleets)} fleets, {len(variants())} selectors and
references, {grid.seeds} seeds. {state}

A row is a run. Its columns `seconds_N` and `late_N` are the mean seconds a round after N plays: of all rounds, and of
the last half. The column `jain_N` is Jain's index. Savings are ratios of sums over the seeds, with Student's interval
of the linearized ratio.
"""
