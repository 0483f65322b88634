"""Section of one world: its ceiling, its tables, its controls, and its missing runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

from effects import World
from formats import UNKNOWN, amount, counted, interval, probability, table, time_ratio
from lineup import REFERENCE, REFERENCES, WITH_CONTROLS, world_file
from references import GROUPS

SECONDS_A_RUN = {"shards": 12.0, "cell": 12.5, "trace": 60.0, "cnn": 350.0}
"""World -> seconds of one core for a run, for the price of missing runs in a world without rows."""
TIME, ENERGY = "time_to_target_s", "energy_to_target_j"
NUMBER = re.compile(r"-(\d+)(?:-\d+s)?$")
"""The number of clients at the end of a label, before a deadline."""


def section(world: World, picture: str) -> str:
    """Return the section of a world.

    Args:
        world: The world.
        picture: Name of its picture's file.
    """
    s = world.scenario
    parts = [f"\n## ({world.letter}) {s.description}\n", _setup(world)]
    if not world.complete:
        return "\n".join([*parts, missing_sentence(world)]) + "\n"
    parts += [_seeds(world), _ceiling(world)]
    if world.missing:
        parts.append(missing_sentence(world) + "\n")
    parts += [f"### Time to {world.target}\n", time_table(world)]
    parts += [f"![Ratios to random selection in world ({world.letter})]({picture})\n"]
    curves = picture.replace(".png", "-curves.png")
    parts += [f"![Accuracy over simulated seconds in world ({world.letter})]({curves})\n"]
    parts += [f"### Energy, accuracy and server in world ({world.letter})\n", cost_table(world)]
    if world.controls:
        parts += ["### More clients a round, or a deadline\n", _controls_intro(world), controls_table(world)]
    return "\n".join(parts)


def core_hours(world: World) -> float:
    """Return the measured hours of one core for the rows of a world."""
    return sum(world.run_seconds) / 3600


def missing_hours(world: World) -> dict[str, float]:
    """Return the probable hours of one core for the missing runs: label -> hours.

    A row without runs costs as much as the mean run. If its label has a number of clients, the price follows from the
    runs of random selection and of FedCS, on a straight line over the clients asked.

    Args:
        world: The world.
    """
    ran = world.run_seconds
    usual = sum(ran) / len(ran) if ran else SECONDS_A_RUN[world.scenario.name]
    (few, cheap), (many, dear) = (
        (world.asked(label), world.mean(label, lambda row: row.run_s)) for label in (REFERENCE, "fedcs")
    )

    def price(label: str) -> float:
        own, number = world.mean(label, lambda row: row.run_s), NUMBER.search(label)
        if math.isfinite(own):
            return own
        if number and many > few:
            return cheap + (int(number[1]) - few) / (many - few) * (dear - cheap)
        return usual

    return {label: world.missing.count(label) * price(label) / 3600 for label in dict.fromkeys(world.missing)}


def missing_sentence(world: World, parts: str = "table controls") -> str:
    """Say how many runs are missing, of which rows, and how many core-hours they need.

    Args:
        world: The world.
        parts: Parts of the command that adds them. Only world (a) has several parts.
    """
    hours = missing_hours(world)
    rows = [f"`{label}` {world.missing.count(label)} ({hours[label]:.2f})" for label in hours]
    which = f"Runs of each row, with core-hours: {', '.join(rows)}" if world.run_seconds else "All runs are missing"
    command = f"python benchmarks/selectors --data-dir DIR --worlds {world.scenario.name}"
    command += f" --parts {parts}" if world.scenario.name == WITH_CONTROLS else ""
    return (
        f"**Missing: {len(world.missing):,} runs, about {sum(hours.values()):.1f} hours of one core.** "
        f"{which}. "
        f"This command adds the missing runs: `{command}`."
    )


def _setup(world: World) -> str:
    s, t = world.scenario, world.scenario.training
    trace = (
        " The clock of the simulation is the time of the trace, so a slow round costs trace time. Rounds follow each "
        "other without pauses."
    )
    return (
        f"A round has {t.local_steps} steps of SGD per client, with batches of {t.batch_size}, a learning rate of "
        f"{t.learning_rate:g} and the model `{s.model.name}`. A run has {s.rounds:,} rounds. The target "
        f"can be reached from round {s.target_rounds * s.evaluation_every} on, when the first window is full. "
        f"A client that takes {s.wireless.max_latency_s:g} s or longer has failed. `random` asks "
        f"{s.clients_per_round} clients a round."
        f"{trace if s.availability.kind == 'trace' else ''}\n"
    )


def _seeds(world: World) -> str:
    ran, planned = len(world.of(REFERENCE)), world.planned(REFERENCE)
    if not world.interim:
        return f"The tables compare the runs of {counted(planned, 'seed')}.\n"
    return (
        f"**Interim: `{REFERENCE}` ran on {ran} of {counted(planned, 'seed')}.** Runs are missing. The tables "
        "therefore have no verdicts and no p-values, and the page has no advice about this world.\n"
    )


def _ceiling(world: World) -> str:
    ceiling = world.ceiling
    if ceiling is None:
        return f"The ceiling is unknown, because `{GROUPS}` has no run on the seeds of `random`.\n"
    return (
        f"**The ceiling is {100 * (1 - ceiling.estimate):.0f} %.** With equal shares, no selection can shorten the "
        f"rounds by much more: `{GROUPS}` needs {interval(ceiling)} times the seconds a round of `random`. "
        f"On average, a round takes {_round_seconds(world, REFERENCE)} s with `random`, and "
        f"{_round_seconds(world, GROUPS)} s with `{GROUPS}`.\n"
    )


def _round_seconds(world: World, label: str) -> str:
    return amount(world.mean(label, lambda row: row.simulated_s / row.rounds))


def ordered(world: World) -> list[str]:
    """Return the labels of the tables: equal cohorts, then other cohorts, then the references.

    The order within a group is by time to the target. Labels that missed it on a seed are last, by the share of seeds
    on which they reached it.
    """

    def key(label: str) -> tuple[int, float, float]:
        group = 2 if label in REFERENCES else 0 if world.equal_cohort(label) else 1
        reached, seeds = world.reached(label)
        seconds = world.geometric_mean(label, TIME) if seeds else math.inf
        return group, seeds and -reached / seeds, seconds

    return sorted([*world.contenders, REFERENCE, *(one for one in REFERENCES if one in world.rows)], key=key)


def name(label: str) -> str:
    """Return a label as the tables print it; references are in italics."""
    return f"*{label}*" if label in REFERENCES else f"`{label}`"


def time_table(world: World) -> str:
    """Return the first table: clients asked, time, verdict, both factors, share of the ceiling, shares and probes."""
    heads = [
        "selector", "verdict", "p after Holm", "clients asked a round", f"seconds to {world.target}",
        f"rounds to {world.target}", "time ratio", "ratio of rounds", "ratio of seconds a round",
        "share of the ceiling, %", "Jain's index", "probes, % of the time", "probes, % of the joules",
    ]  # fmt: skip
    lines = []
    for label in ordered(world):
        one = world.verdicts.get(label)
        share = world.share(label)
        equal = world.equal_cohort(label)
        lines.append([
            name(label), verdict_text(world, label), _p(world, label), f"{world.asked(label):.3g}",
            seconds(world, label), rounds(world, label), "1" if one is None else time_ratio(one),
            "1" if one is None else interval(one.rounds), "1" if one is None else interval(one.seconds_per_round),
            "0" if one is None else interval(share, 100, 0) if equal else UNKNOWN,
            f"{world.mean(label, lambda row: row.jain):.2f}",
            f"{100 * world.mean(label, lambda row: row.probe_s / row.simulated_s):.1f}",
            f"{100 * world.mean(label, lambda row: row.probe_j / row.energy_j):.1f}",
        ])  # fmt: skip
    return table(heads, lines, left=2)


def verdict_text(world: World, label: str) -> str:
    """Return the verdict on a row in words; without a verdict if runs are missing.

    A selector with short rounds may miss the target in runs that end before random selection reaches it. The sign test
    can then decide on no seed, so the text says on how many seeds the target was missed, and the loss of accuracy.

    Args:
        world: The world.
        label: Label of the row.
    """
    one = world.verdicts.get(label)
    control = label in world.controls
    if one is None or label in REFERENCES:
        words = ["reference"]
    elif world.interim_controls if control else world.interim:
        words = [f"interim, {len(world.of(label))} of {counted(world.planned(label), 'seed')}"]
    else:
        words = [one.word]
    if missed := world.missed(label):
        if words == ["not settled"]:
            words = []
        told = f"missed the target on {missed} of {counted(len(world.of(label)), 'seed')}"
        accuracy = None if label == REFERENCE else world.against(label, REFERENCE, "accuracy_last10")
        words.append(f"{told}, accuracy {points(accuracy)} points" if accuracy else told)
    return "; ".join(words)


def _p(world: World, label: str) -> str:
    one = world.verdicts.get(label)
    if one is None or world.interim:
        return UNKNOWN
    # Each reference is a family of one, for which Holm's correction changes nothing.
    return probability(one.p).removeprefix("p ").removeprefix("= ") + ", not corrected" * (label in REFERENCES)


def seconds(world: World, label: str) -> str:
    """Return the geometric mean of the seconds to the target, or the number of seeds that reached it if not all did.

    A mean over the successful runs only would make a row that often misses the target look fast.
    """
    reached, seeds = world.reached(label)
    return f"{reached} of {counted(seeds, 'seed')}" if reached < seeds else amount(world.geometric_mean(label, TIME))


def rounds(world: World, label: str) -> str:
    """Return the mean rounds to the target, with a mark if the window limits them."""
    if world.missed(label):
        return UNKNOWN
    told = f"{world.mean(label, lambda row: row.rounds_to_target):.0f}"
    return f"{told}, limited by the window" if world.limited_by_window(label) else told


def cost_table(world: World) -> str:
    """Return the second table: joules, accuracy, failures, shares, and the server's processor time."""
    heads = [
        "selector", f"joules to {world.target}", "ratio of joules", "accuracy at the end, points to `random`",
        "worst tenth of the clients, points to `random`", "failed, %", "median selections of a client",
        "rounds until all were selected", "server, ms a round",
    ]  # fmt: skip
    lines = []
    for label in ordered(world):
        one = world.verdicts.get(label)
        accuracy, worst = (
            None if one is None else world.against(label, REFERENCE, figure)
            for figure in ("accuracy_last10", "worst_tenth")
        )
        all_seeds = all(math.isfinite(row.rounds_to_all) for row in world.of(label))
        lines.append([
            name(label),
            UNKNOWN if world.missed(label) else amount(world.geometric_mean(label, ENERGY)),
            "1" if one is None else interval(one.energy), points(accuracy), points(worst),
            f"{100 * world.mean(label, lambda row: row.failed_clients / (row.asked_per_round * row.rounds)):.1f}",
            f"{world.mean(label, lambda row: row.median_plays):.1f}",
            f"{world.mean(label, lambda row: row.rounds_to_all):.0f}" if all_seeds else "not on every seed",
            f"{world.mean(label, lambda row: row.server_ms):.1f}",
        ])  # fmt: skip
    return table(heads, lines)


def points(effect: object) -> str:
    """Format a difference of accuracies in points; "0" for random selection itself."""
    return "0" if effect is None else interval(effect, 100, 1, "+")  # type: ignore[arg-type]


def _controls_intro(world: World) -> str:
    seeds = max(world.reached(label)[1] for label in world.controls)
    return (
        f"These rows are `random` with more clients, and with a deadline at which the server stops waiting. "
        f"They ran on {counted(seeds, 'seed')}. The last two columns compare `fedcs` with the row, on the same seeds. "
        "A ratio below 1 means that `fedcs` needs less.\n"
    )


def controls_table(world: World) -> str:
    """Return the table of random selection with more clients or a deadline."""
    heads = [
        "row", "verdict", "clients asked a round", f"seconds to {world.target}", f"rounds to {world.target}",
        "time ratio", "ratio of joules", "failed, %", "`fedcs` to this row: time", "`fedcs` to this row: joules",
    ]  # fmt: skip
    lines = []
    for label in world.controls:
        one = world.verdicts[label]
        rivals = [world.against("fedcs", label, figure) for figure in ("time_to_target_s", "energy_to_target_j")]
        failed = world.mean(label, lambda row: row.failed_clients / (row.asked_per_round * row.rounds))
        lines.append([
            f"`{label}`", verdict_text(world, label), f"{world.asked(label):.3g}", seconds(world, label),
            rounds(world, label), time_ratio(one), interval(one.energy), f"{100 * failed:.1f}",
            *(UNKNOWN if rival is None else interval(rival) for rival in rivals),
        ])  # fmt: skip
    return table(heads, lines, left=2)


def hand_set_values(worlds: list[World]) -> str:
    """Return the table of the parameters that the scenario files set, with the reason from the file."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for world in worlds:
        for table_name, key, value, reason in _commented(world_file(world.scenario.name)):
            if table_name.startswith("selectors.") or key == "energy_score_low":
                owner = table_name.removeprefix("selectors.") if key != "energy_score_low" else "pczfl"
                found.setdefault((owner, key, value), {})[world.letter] = reason
    lines = [
        [f"`{owner}`", f"`{key}` = {value}", ", ".join(f"({letter})" for letter in reasons), "; ".join(
            dict.fromkeys(reasons.values())
        )]
        for (owner, key, value), reasons in sorted(found.items())
    ]  # fmt: skip
    return table(["selector", "value", "worlds", "reason"], lines, left=4)


def _commented(path: Path) -> list[tuple[str, str, str, str]]:
    """Return table, key, value and comment of each line of a scenario file; a table's comment covers its keys."""
    found, current, general = [], "", ""
    for line in path.read_text("utf-8").splitlines():
        code, _, comment = line.partition("#")
        code, comment = code.strip(), comment.strip()
        if code.startswith("["):
            current, general = code.strip("[]"), comment
        elif "=" in code:
            key, _, value = code.partition("=")
            found.append((current, key.strip(), value.strip(), comment or general))
    return found
