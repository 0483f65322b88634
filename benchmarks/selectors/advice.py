"""Which selector when: sentences made of the rows, so that none stands without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from figures import KNOWING, REFERENCE, SelectorFigures

from fedsel_flwr.simulations import Scenario

Figures = Mapping[str, SelectorFigures]
FAIR = 0.95
"""From this Jain index on clients count as chosen equally often."""


def advice(worlds: Mapping[str, Figures], scenarios: Mapping[str, Scenario]) -> str:
    """A list of needs, each with what the rows of every world say.

    Args:
        worlds: World -> label -> figures.
        scenarios: World -> scenario.
    """
    letters = dict(zip(worlds, "abc", strict=False))
    soon, joules = "time_to_target_s", "energy_to_target_j"
    asked: list[tuple[str, str, Callable[[SelectorFigures], bool], Callable[..., SelectorFigures]]] = [
        ("The target soon", soon, _any, min),
        (f"The target soon, every client equally often (Jain index of at least {FAIR:g})", soon, _fair, min),
        ("Few joules to the target", joules, _any, min),
        ("A good model after so many rounds, whatever they last", "accuracy_last10", _any, max),
        ("A good model at a fixed time", "accuracy_at_s", _any, max),
    ]
    lines = []
    for need, figure, fits, best in asked:
        said = [f"({letters[name]}) {_best(own, figure, fits, best)}" for name, own in worlds.items()]
        lines.append(f"- **{need}**: {'; '.join(said)}.")
    told = [f"({letters[name]}) {_listed(_alike(own))}" for name, own in worlds.items()]
    lines.append(
        f"- **At the target on every seed, but told apart from random in none of the columns**: {'; '.join(told)}."
    )
    told = [f"({letters[name]}) {_listed(_short_of_it(own))}" for name, own in worlds.items()]
    lines.append(f"- **Not at the target on every seed**: {'; '.join(told)}.")
    told = [f"({letters[name]}) {_listed(_worse(own))}" for name, own in worlds.items()]
    lines.append(f"- **Worse than random in a column and better in none**: {'; '.join(told)}.")
    always = [label for label in _contenders(worlds) if _sooner_everywhere(worlds, label)]
    lines.append(f"- **Sooner at the target than random in every world that they run in**: {_listed(always)}.")
    return "\n".join([*lines, _room(worlds, letters), _noise(worlds, letters), ""])


def _best(
    own: Figures, figure: str, fits: Callable[[SelectorFigures], bool], best: Callable[..., SelectorFigures]
) -> str:
    able = [one for one in own.values() if one.label not in KNOWING and one.always(figure) and fits(one)]
    if not able:
        return "nobody on every seed"
    found = best(able, key=lambda one: one.mean(figure))
    told = _told(found, figure)
    if found.label != REFERENCE and not found.better(figure):
        certain = [one for one in able if one.better(figure)]
        if certain:
            return f"{told}; of those that differ, {_told(best(certain, key=lambda one: one.mean(figure)), figure)}"
    return told


def _told(one: SelectorFigures, figure: str) -> str:
    scale, unit = {"time_to_target_s": (1.0, "s"), "energy_to_target_j": (1.0, "J")}.get(figure, (100.0, "%"))
    mean = scale * one.mean(figure)
    size = f"{mean:.{1 if scale > 1 else 0 if mean >= 100 else 1}f} {unit}"
    if one.label == REFERENCE:
        return f"{one.label} itself, {size}"
    found = one.against[figure]
    if found.mean != found.mean:
        return f"{one.label}, {size} (random not on every seed)"
    theirs = scale * found.effect.reference_mean
    return (
        f"{one.label}, {size} (random {theirs:.{1 if scale > 1 else 0 if theirs >= 100 else 1}f}"
        f"{'' if found.differs else ', no difference that can be told from chance'})"
    )


def _any(one: SelectorFigures) -> bool:
    return True


def _fair(one: SelectorFigures) -> bool:
    return one.mean("jain") >= FAIR


def _contenders(worlds: Mapping[str, Figures]) -> list[str]:
    return list(dict.fromkeys(label for own in worlds.values() for label in own if label not in (*KNOWING, REFERENCE)))


def _sooner_everywhere(worlds: Mapping[str, Figures], label: str) -> bool:
    return all(own[label].better("time_to_target_s") for own in worlds.values() if label in own)


def _alike(own: Figures) -> list[str]:
    return [
        label
        for label, one in own.items()
        if _plain(label) and one.always("time_to_target_s") and not any(d.differs for d in one.against.values())
    ]


def _short_of_it(own: Figures) -> list[str]:
    return [label for label, one in own.items() if _plain(label) and not one.always("time_to_target_s")]


def _worse(own: Figures) -> list[str]:
    return [
        label
        for label, one in own.items()
        if _plain(label) and any(map(one.worse, one.against)) and not any(map(one.better, one.against))
    ]


def _plain(label: str) -> bool:
    return label not in (*KNOWING, REFERENCE)


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels) if labels else "nobody"


def _room(worlds: Mapping[str, Figures], letters: Mapping[str, str]) -> str:
    """What the rows that know the truth leave to gain."""
    said = []
    for name, own in worlds.items():
        seconds = {
            label: sum(row.simulated_s for row in own[label].rows) / sum(row.rounds for row in own[label].rows)
            for label in own
        }
        fair = [label for label in own if _plain(label) and _fair(own[label])]
        best = min(fair, key=seconds.__getitem__, default="")
        equal = f", the fastest selector with equal shares ({best}) {seconds[best]:.3g}" if best else ""
        said.append(
            f"({letters[name]}) random {seconds[REFERENCE]:.3g}, sorted-groups {seconds['sorted-groups']:.3g}{equal}, "
            f"genie {seconds['genie']:.3g}"
        )
    return f"- **What is left to gain, seconds a round**: {'; '.join(said)}."


def _noise(worlds: Mapping[str, Figures], letters: Mapping[str, str]) -> str:
    """How far two randoms lie apart."""
    said = []
    for name, own in worlds.items():
        found = own["random-again"].against
        accuracy, seconds = found["accuracy_at_s"], found["time_to_target_s"]
        said.append(
            f"({letters[name]}) {100 * accuracy.mean:+.1f} points at equal time, {seconds.mean:+.0f} % of the time to "
            "the target"
        )
    return f"- **What chance makes (random-again to random)**: {'; '.join(said)}."
