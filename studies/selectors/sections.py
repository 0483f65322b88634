"""Section of one world: its ceiling, its tables, its controls, and its missing runs."""

from __future__ import annotations

import math
import re

from effects import World
from formats import UNKNOWN, amount, counted, interval, probability, table, time_ratio, won_and_lost
from lineup import REFERENCE, REFERENCES, WITH_CONTROLS, reads
from references import GENIE, GROUPS

from fedsel_flwr.report.verdict import LEVEL
from fedsel_flwr.selectors import names

SECONDS_A_RUN = {"shards": 12.0, "cell": 12.5, "trace": 60.0}
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
    parts += [f"![Accuracy over simulated seconds in world ({world.letter})]({curves})\n", _curves_caption(world)]
    parts += [f"### Energy, accuracy and server in world ({world.letter})\n", cost_table(world)]
    if world.ablations:
        parts += ["### Rows that separate two causes\n", _ablations_intro(world), ablations_table(world)]
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
    command = f"python studies/selectors --data-dir DIR --worlds {world.scenario.name}"
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
    transfers = (
        f" Each transfer has {s.system.payload_bytes / 1e6:g} MB, the size of MobileNetV2, because the trained model "
        "is so small that its transfers would take no time."
        if s.system.kind == "phones"
        else ""
    )
    return (
        f"A round has {t.local_steps} steps of SGD per client, with batches of {t.batch_size}, a learning rate of "
        f"{t.learning_rate:g} and the model `{s.model.name}`. A run has {s.rounds:,} rounds. The target "
        f"can be reached from round {s.target_rounds * s.evaluation_every} on, when the first window is full. "
        f"A client that takes {s.wireless.max_latency_s:g} s or longer has failed. `random` asks "
        f"{s.clients_per_round} clients a round."
        f"{transfers}"
        f"{trace if s.availability.kind == 'trace' else ''}\n"
    )


def _seeds(world: World) -> str:
    ran, planned = len(world.of(REFERENCE)), world.planned(REFERENCE)
    if not world.interim:
        return f"The tables compare the runs of {counted(planned, 'seed')}.\n"
    return (
        f"**Interim: `{REFERENCE}` ran on {ran} of {counted(planned, 'seed')}.** Runs are missing. The tables "
        "therefore have no verdicts and no p-values, and the page has no advice about this world. The rows of a group "
        "are in the order of their names, because they ran on different seeds. Each row is compared with "
        f"`{REFERENCE}` on its own seeds. In the cells of seconds, rounds and joules, the second number is "
        f"`{REFERENCE}` on the same seeds.\n"
    )


def _ceiling(world: World) -> str:
    ceiling = world.ceiling
    if ceiling is None:
        return f"The ceiling is unknown, because `{GROUPS}` has no run on the seeds of `random`.\n"
    seeds = world.common_seeds(GROUPS, REFERENCE)
    means = [amount(world.mean(one, lambda row: row.simulated_s / row.rounds, seeds)) for one in (REFERENCE, GROUPS)]
    told = (
        f"`{GROUPS}` needs {interval(ceiling)} times the seconds a round of `random`. On average over "
        f"{counted(len(seeds), 'common seed')}, a round takes {means[0]} s with `random`, and {means[1]} s with "
        f"`{GROUPS}`."
    )
    if not world.ceiling_holds:
        jain = world.mean(GROUPS, lambda row: row.jain)
        return (
            f"**No ceiling at equal shares.** {told} This number is an orientation only. Clients are often absent, so "
            f"`{GROUPS}` asks {world.asked(GROUPS):.3g} of {world.scenario.clients_per_round} clients a round, and "
            f"its Jain's index is {jain:.2f}. The table therefore has no share of the ceiling.\n"
        )
    return (
        f"**The ceiling is {100 * (1 - ceiling.estimate):.0f} %.** With equal shares, no selection can shorten the "
        f"rounds by much more: {told}\n"
    )


def _curves_caption(world: World) -> str:
    chosen = (
        f"Runs are missing, so the picture has only `{REFERENCE}`, `{GROUPS}` and `fedcs`, on their common seeds."
        if world.interim
        else f"Except for `{REFERENCE}`, `{GROUPS}` and `fedcs`, the picture has the five selectors with the smallest "
        "time ratios. They were chosen by the same runs."
    )
    return (
        f"A curve is the mean accuracy over the seeds. It crosses the target later than the mean time in the table. "
        f"That time is a geometric mean, in which slow seeds count less. {chosen}\n"
    )


def ordered(world: World) -> list[str]:
    """Return the labels of the tables: equal cohorts, then other cohorts, then the references.

    The order within a group is by time to the target. Labels that missed it on a seed are last, by the share of seeds
    on which they reached it. If runs are missing, the order is by name, because the rows ran on different seeds.
    """

    def key(label: str) -> tuple[int, float, float, str]:
        group = 2 if label in REFERENCES else 0 if world.equal_cohort(label) else 1
        if world.interim:
            return group, 0.0, 0.0, label
        reached, seeds = world.reached(label)
        seconds = world.geometric_mean(label, TIME) if seeds else math.inf
        return group, seeds and -reached / seeds, seconds, label

    return sorted([*world.contenders, REFERENCE, *(one for one in REFERENCES if one in world.rows)], key=key)


def name(label: str) -> str:
    """Return a label as the tables print it; references are in italics."""
    return f"*{label}*" if label in REFERENCES else f"`{label}`"


def time_table(world: World) -> str:
    """Return the first table: clients asked, time, verdict, both factors, share of the ceiling, shares and probes."""
    heads = [
        "selector", "reads", "verdict", "p after Holm", "clients asked a round", f"seconds to {world.target}",
        f"rounds to {world.target}", "time ratio", "ratio of rounds", "ratio of seconds a round until the target",
        "share of the ceiling, %", "Jain's index", "probes, % of the time", "probes, % of the joules",
    ]  # fmt: skip
    lines = []
    for label in ordered(world):
        one = world.verdicts.get(label)
        share = world.share(label)
        equal = world.equal_cohort(label)
        lines.append([
            name(label), reads_text(label), verdict_text(world, label), _p(world, label), f"{world.asked(label):.3g}",
            seconds(world, label, world.interim), rounds(world, label, world.interim),
            "1" if one is None else time_ratio(one), "1" if one is None else interval(one.rounds),
            "1" if one is None else interval(one.seconds_per_round),
            UNKNOWN if not equal or not world.ceiling_holds else "0" if one is None else interval(share, 100, 0),
            f"{world.mean(label, lambda row: row.jain):.2f}",
            f"{100 * world.mean(label, lambda row: row.probe_s / row.simulated_s):.1f}",
            f"{100 * world.mean(label, lambda row: row.probe_j / row.energy_j):.1f}",
        ])  # fmt: skip
    if not world.ceiling_holds:
        place = heads.index("share of the ceiling, %")
        heads, *lines = [[*cells[:place], *cells[place + 1 :]] for cells in (heads, *lines)]
    return table(heads, lines, left=3)


def reads_text(label: str) -> str:
    """Return what the selector of a row reads. A reference knows the latencies, except random selection."""
    if label in REFERENCES:
        return "true latencies" if label in (GENIE, GROUPS) else "nothing"
    return reads(label if label in names() else NUMBER.sub("", label))


def verdict_text(world: World, label: str) -> str:
    """Return the verdict on a row in words; without a verdict if runs are missing.

    A selector with short rounds may miss the target in runs that end before random selection reaches it. The sign test
    can then decide on no seed, so the text says on how many seeds the target was missed, on how many the sign test
    decides, and the loss of accuracy.

    Args:
        world: The world.
        label: Label of the row.
    """
    one = world.verdicts.get(label)
    early = world.interim
    if label in world.controls or label in world.ablations:
        early = world.interim_controls if label in world.controls else world.interim_ablations
    if one is None or label in REFERENCES:
        words = ["reference"]
    elif early:
        words = [f"interim, {len(world.of(label))} of {counted(world.planned(label), 'seed')}"]
    else:
        words = [one.word]
    if missed := world.missed(label):
        if words == ["not settled"]:
            words = []
        told = f"missed the target on {missed} of {counted(len(world.of(label)), 'seed')}"
        told += f" ({won_and_lost(one.time)})" if one else ""
        accuracy = None if label == REFERENCE else world.against(label, REFERENCE, "accuracy_last10")
        words.append(f"{told}, accuracy {points(accuracy)} points" if accuracy else told)
    return "; ".join(words)


def _p(world: World, label: str) -> str:
    one = world.verdicts.get(label)
    if one is None or world.interim:
        return UNKNOWN
    # Each reference is a family of one, for which Holm's correction changes nothing.
    told = probability(one.p).removeprefix("p ").removeprefix("= ") + ", not corrected" * (label in REFERENCES)
    if one.word == "not settled" and one.p <= LEVEL:
        # It is not called sooner, because it missed the target more often.
        told += ", more often sooner" if one.time.sooner > one.time.later else ", more often later"
    return told


def seconds(world: World, label: str, paired: bool = False) -> str:
    """Return the geometric mean of the seconds to the target, or the number of seeds that reached it if not all did.

    A mean over the successful runs only would make a row that often misses the target look fast.

    Args:
        world: The world.
        label: Label of the row.
        paired: Whether to add random selection on the same seeds.
    """
    reached, seeds = world.reached(label)
    return f"{reached} of {counted(seeds, 'seed')}" if reached < seeds else _mean(world, label, TIME, paired)


def _mean(world: World, label: str, figure: str, paired: bool) -> str:
    """Return a geometric mean; if paired, also that of random selection on the same seeds."""
    told = amount(world.geometric_mean(label, figure))
    if not paired or label == REFERENCE:
        return told
    return f"{told}; {amount(world.geometric_mean(REFERENCE, figure, world.common_seeds(label, REFERENCE)))}"


def rounds(world: World, label: str, paired: bool = False) -> str:
    """Return the mean rounds to the target, with a mark if the window limits them.

    Args:
        world: The world.
        label: Label of the row.
        paired: Whether to add random selection on the same seeds.
    """
    if world.missed(label):
        return UNKNOWN
    told = f"{world.mean(label, lambda row: row.rounds_to_target):.0f}"
    if paired and label != REFERENCE:
        told += f"; {world.mean(REFERENCE, lambda row: row.rounds_to_target, world.common_seeds(label, REFERENCE)):.0f}"
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
            UNKNOWN if world.missed(label) else _mean(world, label, ENERGY, world.interim),
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
        "A ratio below 1 means that `fedcs` needs less. [joules.md](joules.md) compares `fedcs` with the same rows on "
        "more seeds.\n"
    )


RIVALS = {"random-filtered": ("fedcm-ts", "fedcm-ucb"), "bsfl-auto": ("bsfl",)}
"""Row that separates two causes -> the rows of the tables that differ from it in one point."""


def _ablations_intro(world: World) -> str:
    seeds = max(world.reached(label)[1] for label in world.ablations)
    early = " Interim: runs are missing." if world.interim_ablations else ""
    return (
        f"`random-filtered` is `{REFERENCE}` with the filter and the averaging of FedCM. The rows of FedCM compared "
        f"with it show what their selection adds. The row itself shows what the filter adds. `bsfl-auto` is `bsfl` "
        f'with `min_latency` = "auto", the default of a deployment. It computes this value from measured latencies. '
        f"All rows are compared on {counted(seeds, 'common seed')}. The intervals are not corrected.{early}\n"
    )


def ablations_table(world: World) -> str:
    """Return the table of the rows that separate two causes, and of the rows compared with them."""
    heads = [
        "row", "compared with", f"reached {world.target}", "time ratio", "ratio of rounds",
        "ratio of seconds a round until the target", "ratio of joules", "accuracy at the end, points",
        "worst tenth of the clients, points",
    ]  # fmt: skip
    figures = (TIME, "rounds_to_target", "seconds_per_round", ENERGY, "accuracy_last10", "worst_tenth")
    pairs = [(label, REFERENCE) for label in world.ablations]
    pairs += [(one, label) for label in world.ablations for one in RIVALS[label] if one in world.rows]
    lines = []
    for label, other in pairs:
        effects = [world.against(label, other, figure) for figure in figures]
        time = effects[0]
        if time is None:
            continue
        shown = [UNKNOWN if one is None or one.censored else interval(one) for one in effects[:4]]
        lines.append([
            f"`{label}`", f"`{other}`",
            f"{counted(time.reached, 'seed')} of {time.pairs}" + (f"; {won_and_lost(time)}" if time.censored else ""),
            *shown, *(points(one) for one in effects[4:]),
        ])  # fmt: skip
    return table(heads, lines, left=2)


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
