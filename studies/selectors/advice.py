"""Advice: sentences that follow from the rows, for selectors with equal numbers of clients a round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from effects import World
from formats import UNKNOWN, counted, interval, listed, probability, table, time_ratio
from lineup import REFERENCE
from references import CHANCE, GENIE, GROUPS
from sections import TIME, reads_text, seconds, verdict_text

from fedsel_flwr.report.advice import EVEN
from fedsel_flwr.report.paired import PairedEffect, holm
from fedsel_flwr.report.verdict import LEAST_PAIRS, LEVEL


def advice(worlds: list[World]) -> str:
    """Return the advice of all worlds that have rows.

    Args:
        worlds: The worlds.
    """
    told = [world for world in worlds if world.complete and world.contenders]
    if not told:
        return "No world has rows yet.\n"
    parts = [_of_world(world) for world in told]
    if len(final := [world for world in told if not world.interim]) > 1:
        parts.append(_in_all(final))
    return "\n".join(parts)


SOURCES = {
    "latency": "the latency, which the server measures; `cs-ucb-q` also numbers of examples",
    "loss": "losses that clients report after their training",
    "server data": "examples on the server", "probe": "answers to a probe before each round",
}  # fmt: skip
"""Word in the column "reads" -> what the server needs. The last word that a selector has decides."""
OTHER = "nothing, or numbers of examples"
"""What the server needs for all other selectors."""


def summary(worlds: list[World]) -> str:
    """Return the answers in a few lines: the worlds, and a table of the selectors that were sooner."""
    told = [one for one in worlds if one.complete and one.contenders]
    lines = [
        [source, *(_sooner(world, [one for one in _equal(world) if _source(one) == source]) for world in told)]
        for source in (*SOURCES.values(), OTHER)
    ]
    return (
        "".join(_counts(world) for world in told)
        + f"\nThe selectors that were sooner, with their times as multiples of that of `{REFERENCE}`. **Bold**: "
        "all clients train nearly equally often. Times include probes. Verdicts are corrected for the number of "
        "selectors, so an interval that excludes 1 may be not settled ([How to read the "
        "tables](#how-to-read-the-tables)).\n\n"
        + table(["what the selector reads", *(f"({world.letter})" for world in told)], lines, left=1 + len(told))
    )


def _source(label: str) -> str:
    found = [source for word, source in SOURCES.items() if word in reads_text(label)]
    return found[-1] if found else OTHER


def _equal(world: World) -> list[str]:
    return [label for label in world.contenders if world.equal_cohort(label)]


def _judged(world: World) -> bool:
    return not world.interim and len(world.of(REFERENCE)) >= LEAST_PAIRS


def _counts(world: World) -> str:
    """Say in a line what the world is, and on how many selectors there is which verdict."""
    head = f"- **({world.letter})** {world.scenario.description}"
    if not _judged(world):
        return f"{head}: no verdict from {counted(len(world.of(REFERENCE)), 'seed')}.\n"
    words = Counter(world.verdicts[one].word for one in _equal(world))
    ceiling = ""
    if world.ceiling and world.ceiling_holds:
        most = 100 * (1 - world.ceiling.estimate)
        ceiling = f" At equal shares, selection by latency saves at most {most:.0f} % of the seconds a round."
    again = ""
    if CHANCE in world.verdicts:
        again = f"; with other draws, chance makes it {_told_time(world, CHANCE)} times that"
    return (
        f"{head}: `{REFERENCE}` needs {seconds(world, REFERENCE)} s to {world.target}{again}. "
        f"{words['sooner']} of {words.total()} selectors are sooner, {words['later']} later.{ceiling}\n"
    )


def _sooner(world: World, labels: list[str]) -> str:
    if not _judged(world):
        return "no verdict"
    found = {one: f"`{one}` {time_ratio(world.verdicts[one])}" for one in _winners(world, labels)}
    return ", ".join(f"**{told}**" if _is_fair(world, one) else told for one, told in found.items()) or "none"


def _of_world(world: World) -> str:
    if world.interim:
        ran, planned = len(world.of(REFERENCE)), world.planned(REFERENCE)
        return (
            f"### World ({world.letter})\n\nNo advice yet, because runs are missing: `{REFERENCE}` ran on {ran} of "
            f"{counted(planned, 'seed')}.\n"
        )
    few = f"{world.scenario.clients_per_round} clients a round"
    equal = _equal(world)
    lines = [f"### World ({world.letter}): selectors that ask {few}, as `random` does\n"]
    lost = [one for one in equal if world.missed(one)]
    for word in ("sooner", "no difference", "later", "not settled"):
        labels = sorted((one for one in equal if world.verdicts[one].word == word), key=lambda one: _size(world, one))
        labels = [one for one in labels if word != "not settled" or one not in lost]
        ratios = [f"`{one}` {time_ratio(world.verdicts[one])}".removesuffix(f" {UNKNOWN}") for one in labels]
        shown = ratios if word in ("sooner", "later") else [f"`{one}`" for one in labels]
        lines.append(f"- **{word.capitalize()}** ({len(labels)}): {listed(shown)}.")
    if lost:
        lines.append(f"- **Missed the target** on at least one seed, with the accuracy compared with `{REFERENCE}`:")
        lines += [f"  - `{one}`: {verdict_text(world, one)}." for one in lost]
    fair = [one for one in _winners(world, equal) if _is_fair(world, one)]
    lines.append(
        f"- **Sooner, with nearly equal shares** (Jain's index of at least {EVEN:g} times that of `{REFERENCE}`, the "
        f"limit of `fedsel advise`): {listed([f'`{one}`' for one in fair])}."
    )
    lines += [*_joules(world, equal), *_rounds(world, equal), *_bounds(world), *_more(world), *_noise(world)]
    return "\n".join(lines) + "\n"


def _size(world: World, label: str) -> float:
    estimate = world.verdicts[label].time.estimate
    return estimate if math.isfinite(estimate) else math.inf


def _is_fair(world: World, label: str) -> bool:
    own, usual = (world.mean(one, lambda row: row.jain) for one in (label, REFERENCE))
    return own >= EVEN * usual


def _winners(world: World, labels: list[str]) -> list[str]:
    return sorted((one for one in labels if world.verdicts[one].word == "sooner"), key=lambda one: _size(world, one))


def _joules(world: World, labels: list[str]) -> list[str]:
    effects = {one: world.verdicts[one].energy for one in world.contenders}
    return [f"- **Fewer joules to the target** ({_MEANING}): {_below(effects, labels, ratios=True)}."]


_MEANING = f"p is at most {LEVEL:g} after Holm's correction over all selectors of the world"
"""Meaning of the lists without verdicts."""


def _rounds(world: World, labels: list[str]) -> list[str]:
    """Say which selectors have shorter rounds, in the whole run, and which ones need fewer rounds to the target."""
    shorter = {one: effect for one in world.contenders if (effect := world.round_ratio(one)) is not None}
    fewer = {one: world.verdicts[one].rounds for one in world.contenders}
    return [
        f"- **Shorter rounds** (seconds a round of the whole run; {_MEANING}): {_below(shorter, labels)}.",
        f"- **Fewer rounds to the target** (only selectors that reached the target on every seed; {_MEANING}): "
        f"{_below(fewer, labels)}.",
    ]


def _below(effects: Mapping[str, PairedEffect], labels: Sequence[str], ratios: bool = False) -> str:
    """List the labels whose ratio is below 1 after the correction, then those for which it is so only before.

    Args:
        effects: Label -> effect, of all selectors of the world, which are the family of the correction.
        labels: The labels to list.
        ratios: Whether to show the ratios, and to sort by them.
    """
    corrected = dict(zip(effects, holm([one.p for one in effects.values()]), strict=True))
    below = [one for one in labels if one in effects and effects[one].high < 1]
    if ratios:
        below.sort(key=lambda one: effects[one].estimate)
    told = {one: f"`{one}` {interval(effects[one])}" if ratios else f"`{one}`" for one in below}
    clear = [told[one] for one in below if corrected[one] <= LEVEL]
    unclear = [told[one] for one in below if corrected[one] > LEVEL]
    return listed(clear) + (f". Only before the correction: {listed(unclear)}" if unclear else "")


def _bounds(world: World) -> list[str]:
    ceiling = world.ceiling
    if ceiling is None:
        return []
    found = {one: world.share(one) for one in _equal(world)}
    fair = {one: share for one, share in found.items() if _is_fair(world, one)}
    lines = []
    if fair and world.ceiling_holds:
        best = max(fair, key=lambda one: fair[one].estimate)
        lines.append(
            f"- **Share of the ceiling**: of the selectors with nearly equal shares, `{best}` reaches most of it, "
            f"{interval(fair[best], 100, 0)} %. The ceiling is {100 * (1 - ceiling.estimate):.0f} %. This selector was "
            "chosen on the same seeds, so its share is probably somewhat too large."
        )
    if (groups := world.verdicts.get(GROUPS)) is not None:
        lines.append(
            f"- **`{GROUPS}` knows the latencies**, and its time ratio is {_told_time(world, GROUPS)}. "
            f"Its ratio of rounds is {interval(groups.rounds)}."
        )
    if GENIE in world.verdicts:
        lines.append(f"- **`{GENIE}` always asks the fastest clients.** Its time ratio is {_told_time(world, GENIE)}.")
    return lines


def _told_time(world: World, label: str) -> str:
    told = time_ratio(world.verdicts[label])
    seeds = counted(len(world.of(label)), "seed")
    return told if told != UNKNOWN else f"unknown: it missed the target on {world.missed(label)} of {seeds}"


def _more(world: World) -> list[str]:
    """Compare FedCS with itself at the others' cohort, and with random selection of more clients."""
    limited = f"fedcs-{world.scenario.clients_per_round}"
    if "fedcs" not in world.verdicts or world.equal_cohort("fedcs"):
        return []
    lines = [
        f"- **`fedcs` asks {world.asked('fedcs'):.3g} clients a round**, and `{REFERENCE}` "
        f"{world.asked(REFERENCE):.3g}. Its time ratio is {_told_time(world, 'fedcs')}, and its ratio of "
        f"joules is {interval(world.verdicts['fedcs'].energy)}."
    ]
    if limited in world.verdicts:
        told = "" if world.missed(limited) else f", time ratio {time_ratio(world.verdicts[limited])}"
        lines.append(
            f"- **With at most {world.scenario.clients_per_round} clients a round**, `{limited}`: "
            f"{verdict_text(world, limited)}{told} (Jain's index {world.mean(limited, lambda row: row.jain):.2f})."
        )
    whole = [label for label in world.controls if not world.missed(label) and not world.interim_controls]
    if whole:
        # Only the intervals: with few seeds, an interval that contains 1 does not show that two rows are equal.
        fastest = min(whole, key=lambda label: world.geometric_mean(label, TIME))
        rival, joules = (world.against("fedcs", fastest, one) for one in (TIME, "energy_to_target_j"))
        if rival and joules and not rival.censored:
            lines.append(
                f"- **The fastest row of `{REFERENCE}` with more clients or a deadline** is `{fastest}`. Compared with "
                f"it on {counted(rival.pairs, 'seed')}, `fedcs` needs {interval(rival)} times the seconds and "
                f"{interval(joules)} times the joules. [joules.md](joules.md#why-not-just-ask-more-phones) compares "
                "the same rows on more seeds, so its numbers differ."
            )
    return lines


def _noise(world: World) -> list[str]:
    if (again := world.verdicts.get(CHANCE)) is None:
        return []
    side = "small" if again.time.high < 1 else "large" if again.time.low > 1 else ""
    so = f" By chance, all ratios of this world are probably somewhat too {side}." if side else ""
    return [
        f"- **Chance alone**: `{CHANCE}` is random selection with other draws. Its time ratio to `{REFERENCE}` is "
        f"{_told_time(world, CHANCE)} ({probability(again.p)}, not corrected). The log ratio of a single seed has a "
        f"standard deviation of {again.time.deviation:.2f}.{so}"
    ]


def _in_all(worlds: list[World]) -> str:
    """Return the time ratios of the worlds side by side, for selectors that ask as many clients as random selection."""
    found = dict.fromkeys(one for world in worlds for one in world.contenders)
    columns = {
        world.letter: {one for one in world.contenders if world.equal_cohort(one)} for world in worlds
    }  # fmt: skip
    heads = ["selector", *(f"({world.letter}), {counted(world.planned(REFERENCE), 'seed')}" for world in worlds)]
    lines = [
        [f"`{label}`", *(_told_time(world, label) if label in columns[world.letter] else UNKNOWN for world in worlds)]
        for label in found
        if sum(label in column for column in columns.values()) > 1
    ]
    letters = listed([f"({world.letter})" for world in worlds])
    return (
        f"### Worlds {letters} together\n\n"
        f"The table shows time ratios of the selectors that ask as many clients as `{REFERENCE}` in at least two "
        "worlds. A world with few seeds has wide intervals. A wide interval that contains 1 does not show that there "
        f'is no difference. The intervals are not corrected. "{UNKNOWN}" means that the world does not '
        "have this selector, or that it asked another number of clients.\n\n" + table(heads, lines)
    )
