"""Advice: sentences that follow from the rows, for selectors with equal numbers of clients a round."""

from __future__ import annotations

import math
from collections.abc import Callable

from effects import World
from formats import interval, listed, probability, time_ratio
from lineup import REFERENCE
from references import CHANCE, GENIE, GROUPS

from fedsel_flwr.report.paired import PairedEffect

FAIR = 0.95
"""Jain's index from which shares count as equal."""


def advice(worlds: list[World]) -> str:
    """Return the advice of all worlds that have rows.

    Args:
        worlds: The worlds.
    """
    told = [world for world in worlds if world.complete and world.contenders]
    if not told:
        return "No world has rows yet.\n"
    parts = [_of_world(world) for world in told]
    if len(told) > 1:
        parts.append(_in_all(told))
    return "\n".join(parts)


def _of_world(world: World) -> str:
    few = f"{world.scenario.clients_per_round} clients a round"
    equal = [label for label in world.contenders if world.equal_cohort(label)]
    lines = [f"### World ({world.letter}): selectors that ask {few}, as `random` does\n"]
    for word in ("sooner", "no difference", "later", "not settled"):
        labels = sorted((one for one in equal if world.verdicts[one].word == word), key=lambda one: _size(world, one))
        ratios = [f"`{one}` {time_ratio(world.verdicts[one])}" for one in labels]
        shown = ratios if word in ("sooner", "later") else [f"`{one}`" for one in labels]
        lines.append(f"- **{word.capitalize()}** ({len(labels)}): {listed(shown)}.")
    fair = [one for one in _winners(world, equal) if world.mean(one, lambda row: row.jain) >= FAIR]
    lines.append(
        f"- **Sooner, with nearly equal shares** (Jain's index of at least {FAIR:g}): "
        f"{listed([f'`{one}`' for one in fair])}."
    )
    lines += [*_joules(world, equal), *_rounds(world, equal), *_bounds(world), *_more(world), *_noise(world)]
    return "\n".join(lines) + "\n"


def _size(world: World, label: str) -> float:
    estimate = world.verdicts[label].time.estimate
    return estimate if math.isfinite(estimate) else math.inf


def _winners(world: World, labels: list[str]) -> list[str]:
    return sorted((one for one in labels if world.verdicts[one].word == "sooner"), key=lambda one: _size(world, one))


def _joules(world: World, labels: list[str]) -> list[str]:
    effects = {one: world.verdicts[one].energy for one in labels}
    less = sorted((one for one in labels if effects[one].high < 1), key=lambda one: effects[one].estimate)
    shown = [f"`{one}` {interval(effects[one])}" for one in less]
    return [f"- **Fewer joules to the target** (the interval, not corrected, is below 1): {listed(shown)}."]


def _rounds(world: World, labels: list[str]) -> list[str]:
    """Say which selectors gain by shorter rounds, and which ones by fewer rounds."""

    def below(part: Callable[[str], PairedEffect]) -> str:
        return listed([f"`{one}`" for one in labels if part(one).high < 1])

    shorter = below(lambda one: world.verdicts[one].seconds_per_round)
    fewer = below(lambda one: world.verdicts[one].rounds)
    return [f"- **Shorter rounds**: {shorter}.", f"- **Fewer rounds**: {fewer}."]


def _bounds(world: World) -> list[str]:
    ceiling = world.ceiling
    if ceiling is None:
        return []
    found = {one: world.share(one) for one in world.contenders if world.equal_cohort(one)}
    fair = {one: s for one, s in found.items() if world.mean(one, lambda row: row.jain) >= FAIR}
    lines = []
    if fair:
        best = max(fair, key=lambda one: fair[one].estimate)
        lines.append(
            f"- **Share of the ceiling**: of the selectors with nearly equal shares, `{best}` reaches most of it, "
            f"{interval(fair[best], 100, 0)} %. The ceiling is {100 * (1 - ceiling.estimate):.0f} %."
        )
    if (groups := world.verdicts.get(GROUPS)) is not None:
        lines.append(
            f"- **`{GROUPS}` knows the latencies**, and its time ratio is {time_ratio(groups)}. "
            f"Its ratio of rounds is {interval(groups.rounds)}."
        )
    if (genie := world.verdicts.get(GENIE)) is not None:
        lines.append(f"- **`{GENIE}` always asks the fastest clients.** Its time ratio is: {time_ratio(genie)}.")
    return lines


def _more(world: World) -> list[str]:
    """Compare FedCS with itself at the others' cohort, and with random selection of more clients."""
    limited = f"fedcs-{world.scenario.clients_per_round}"
    if "fedcs" not in world.verdicts or world.equal_cohort("fedcs"):
        return []
    lines = [
        f"- **`fedcs` asks {world.asked('fedcs'):.3g} clients a round**, and `{REFERENCE}` "
        f"{world.asked(REFERENCE):.3g}. Its time ratio is {time_ratio(world.verdicts['fedcs'])}, and its ratio of "
        f"joules is {interval(world.verdicts['fedcs'].energy)}."
    ]
    if limited in world.verdicts:
        one = world.verdicts[limited]
        lines.append(
            f"- **With at most {world.scenario.clients_per_round} clients a round**, `{limited}`: "
            f"{time_ratio(one)}, {one.word} (Jain's index {world.mean(limited, lambda row: row.jain):.2f})."
        )
    for label in world.controls:
        rival, joules = (world.against("fedcs", label, one) for one in ("time_to_target_s", "energy_to_target_j"))
        if rival and joules and not rival.censored and rival.pairs > 1 and rival.low <= 1 <= rival.high:
            lines.append(
                f"- **No clear difference in time to `{label}`**: `fedcs` needs {interval(rival)} times its time and "
                f"{interval(joules)} times its joules."
            )
    return lines


def _noise(world: World) -> list[str]:
    if (again := world.verdicts.get(CHANCE)) is None:
        return []
    return [
        f"- **Chance alone**: `{CHANCE}` is random selection with other draws. Its time ratio to `{REFERENCE}` is "
        f"{time_ratio(again)} ({probability(again.p)})."
    ]


def _in_all(worlds: list[World]) -> str:
    common = [one for one in worlds[0].contenders if all(one in world.contenders for world in worlds)]
    letters = listed([f"({world.letter})" for world in worlds])
    lines = [f"### Worlds {letters} together\n"]
    for word in ("sooner", "later"):
        labels = [f"`{one}`" for one in common if all(world.verdicts[one].word == word for world in worlds)]
        lines.append(f"- **{word.capitalize()} in each of them**: {listed(labels)}.")
    return "\n".join(lines) + "\n"
