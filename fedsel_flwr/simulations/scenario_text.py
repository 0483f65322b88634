"""Text of a scenario with the unit, origin and meaning of every key: ``fedsel show``, as commented TOML or as JSON."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

import tomli_w

from fedsel_flwr.selectors.registry import label_of, parameter_texts, selector_class
from fedsel_flwr.simulations.scenario import Scenario, flat_settings
from fedsel_flwr.simulations.scenario_files import inner_table, own_parameters

UNITS = {
    "_bytes_per_s": "bytes/s", "_s": "s", "_w": "W", "_km": "km", "_hz": "Hz", "_dbm": "dBm", "_db": "dB",
    "_bits": "bit", "_bytes": "bytes",
}  # fmt: skip
"""Ending of a key -> unit. The first ending that fits counts."""
OWN_UNITS = {
    "joules": "J",
    "system.seconds_per_example": "s",
    "availability.seconds_per_round": "s",
    "wireless.path_loss_slope_db": "dB per decade of distance",
    "device.samples_per_round": "samples",
    "device.computing_step": "samples/s",
    "device.cycles_per_sample": "cycles",
    "device.effective_capacitance": "F",
    "clients.reference_multiplications": "multiplications per example",
    "selectors.*.deadline": "s",
    "selectors.*.max_latency": "s",
    "selectors.*.min_latency": "s",
}
"""Key -> unit, for keys whose ending does not name the unit."""
COMMENTS_AT = 48
"""Column of the comments on short lines."""
WIDTH = 100
"""Largest width of a line with a meaning, in columns."""


def unit_of(key: str) -> str:
    """Return the unit of a scenario key's value; empty if it has no unit.

    >>> unit_of("wireless.radius_km"), unit_of("selectors.bsfl.min_latency"), unit_of("training.momentum")
    ('km', 's', '')
    """
    pattern = re.sub(r"^selectors\.[^.]+", "selectors.*", key)
    return OWN_UNITS.get(pattern) or next((unit for ending, unit in UNITS.items() if key.endswith(ending)), "")


def text_of(key: str, selector: type | None = None) -> str:
    """Return the text that describes a scenario key; empty if there is none.

    Args:
        key: Dotted key, such as "system.network_round_cv" or "selectors.bsfl.alpha".
        selector: The selector's class, for a key in the table of a selector. None looks up the class by its name.

    >>> text_of("rounds"), text_of("selectors.bsfl.solver_steps")
    ('Number of rounds.', 'Steps of the annealing solvers in each round, at least 1.')
    """
    table, _, name = key.rpartition(".")
    if table.startswith("selectors."):
        text = parameter_texts(selector or selector_class(table.partition(".")[2])).get(name, "")
    else:
        model = inner_table(Scenario.model_fields[table]) if table else Scenario
        text = (model and model.model_fields[name].description) or ""
    # From the roles and literals of docstrings to plain code.
    return " ".join(re.sub(r":\w+:`~(?:\w+\.)*(\w+)`|:\w+:`([^`]+)`|``(.+?)``", r"`\1\2\3`", text).split())


def meaning_of(key: str, selector: type | None = None) -> str:
    """Return the meaning of a scenario key in one sentence: the first one of :func:`text_of`.

    >>> meaning_of("system.network_round_cv")
    'Coefficient of variation of each throughput of a phone from round to round.'
    """
    return re.split(r"(?<=\.)\s+(?=[A-Z\d\"`])", text_of(key, selector), maxsplit=1)[0]


def scenario_lines(scenario: Scenario, overrides: Collection[str] = (), *, meanings: bool = False) -> Iterator[str]:
    """Yield the lines of a scenario as TOML, with each value's unit and origin as a comment.

    Args:
        scenario: The scenario.
        overrides: Dotted keys that the command line has set.
        meanings: Whether comments above the keys explain them.

    Yields:
        Lines of a scenario file for the same run. "default" marks values that neither the scenario's file nor the
        command line sets.
    """
    units, defaults = _units(scenario), set(_defaults(scenario))
    explained = _meanings(scenario) if meanings else {}
    prefix = ""
    for line in tomli_w.dumps(scenario.model_dump()).splitlines():
        if header := re.fullmatch(r"\[(.+)\]", line):
            prefix = f"{header[1]}."
        key = prefix + line.partition(" = ")[0]
        yield from textwrap.wrap(explained.get(key, ""), WIDTH, initial_indent="# ", subsequent_indent="# ")
        origin = "command line" if key in overrides else "default" if key in defaults else ""
        comment = ", ".join(filter(None, (units.get(key, ""), origin)))
        yield f"{line:<{COMMENTS_AT}}  # {comment}" if comment else line
    if parameters := _unset_parameters(scenario):
        label = label_of(scenario.selector)
        yield ""
        yield f"# Further parameters of {label}, each with its default; set one with --set selectors.{label}.KEY=VALUE:"
        for name, value in parameters.items():
            meaning = explained.get(f"selectors.{label}.{name}", "")
            yield from textwrap.wrap(meaning, WIDTH, initial_indent="#   ", subsequent_indent="#   ")
            yield f"#   {name} = {value!r}"


def scenario_facts(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario for ``fedsel show --json``.

    Returns:
        A dictionary with five entries. ``scenario`` holds the tables. ``units`` and ``meanings`` map dotted keys to
        texts. ``defaults`` lists the dotted keys that nothing sets. ``selector_parameters`` holds the defaults of
        parameters that nothing sets.
    """
    return {
        "scenario": scenario.model_dump(mode="json"),
        "units": _units(scenario),
        "meanings": _meanings(scenario),
        "defaults": _defaults(scenario),
        "selector_parameters": _unset_parameters(scenario),
    }


def _units(scenario: Scenario) -> dict[str, str]:
    return {key: unit for key in flat_settings(scenario.model_dump()) if (unit := unit_of(key))}


def _meanings(scenario: Scenario) -> dict[str, str]:
    """Return the meanings of the scenario's keys, and of the parameters of its selector that nothing sets."""
    label, cls = label_of(scenario.selector), selector_class(scenario.selector)
    found, unset = {}, (f"selectors.{label}.{name}" for name in _unset_parameters(scenario))
    for key in [*flat_settings(scenario.model_dump()), *unset]:
        # The scenario's selector may be a class that has no registered name.
        own = cls if key.startswith(f"selectors.{label}.") else None
        if meaning := meaning_of(key, own):
            found[key] = meaning
    return found


def _defaults(scenario: Scenario) -> list[str]:
    """Return the dotted keys of values that were not set."""
    given = flat_settings(scenario.model_dump(exclude_unset=True))
    return [key for key in flat_settings(scenario.model_dump()) if key not in given]


def _unset_parameters(scenario: Scenario) -> dict[str, Any]:
    """Return the parameters of the scenario's selector that keep their default."""
    cls = selector_class(scenario.selector)
    given = scenario.selectors.get(label_of(scenario.selector), {})
    defaults = {name: one.default for name, one in inspect.signature(cls).parameters.items()}
    unset = (name for name in own_parameters(cls) if name not in given)
    return {name: defaults[name] for name in unset if defaults[name] is not inspect.Parameter.empty}
