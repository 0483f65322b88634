"""Tables of the parameters: published values with their source, and the settings that were tried."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from effects import World
from formats import amount, table
from lineup import world_file
from runs import RunRow
from tuning import GRIDS, best, figures

Tunings = Mapping[str, Mapping[str, Mapping[float, list[RunRow]]]]
"""Letter of a world -> selector -> setting -> rows of the tuning."""


def published_values(worlds: list[World], tunings: Tunings) -> str:
    """Return the table of the values that the scenario files set and no tuning replaced, with the files' reason.

    Args:
        worlds: The worlds.
        tunings: Their tunings.
    """
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for world in worlds:
        for name, key, value, reason in _commented(world_file(world.scenario.name)):
            owner = "pczfl" if key == "energy_score_low" else name.removeprefix("selectors.")
            replaced = owner in tunings[world.letter] and GRIDS[world.scenario.name][owner][0] == key
            if (owner != name or key == "energy_score_low") and not replaced:
                found.setdefault((owner, key, value), {})[world.letter] = reason
    lines = [
        [f"`{owner}`", f"`{key}` = {value}", ", ".join(f"({letter})" for letter in reasons), "; ".join(
            dict.fromkeys(reasons.values())
        )]
        for (owner, key, value), reasons in sorted(found.items())
    ]  # fmt: skip
    return table(["selector", "value", "worlds", "source"], lines, left=4)


def tuning_table(worlds: list[World], tunings: Tunings) -> str:
    """Return the table of all settings that were tried: a line for each selector and world.

    Args:
        worlds: The worlds.
        tunings: Their tunings.
    """
    lines = []
    for world in worlds:
        for selector, (parameter, settings) in sorted(GRIDS[world.scenario.name].items()):
            runs = tunings[world.letter].get(selector)
            told = ["not finished; the value is the one above, or the default"]
            if runs:
                chosen = best(runs)
                told = [_tried(setting, runs[setting], setting == chosen) for setting in settings]
            lines.append([f"`{selector}`", f"({world.letter})", f"`{parameter}`", "; ".join(told)])
    return table(["selector", "world", "parameter", "settings, with seconds"], lines, left=4)


def _tried(setting: float, rows: list[RunRow], chosen: bool) -> str:
    missed, seconds, accuracy = figures(rows)
    told = f"{setting:g} ({100 * accuracy:.1f} %, {missed} missed)" if missed else f"{setting:g}: {amount(seconds)}"
    return f"**{told}**" if chosen else told


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
