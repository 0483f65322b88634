"""Text of a scenario with the unit and origin of every key: ``fedsel show``, as commented TOML or as JSON."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel

from fedsel_flwr.selectors.registry import label_of, selector_class
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import own_parameters

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


def unit_of(key: str) -> str:
    """Return the unit of a scenario key's value; empty if it has no unit.

    >>> unit_of("wireless.radius_km"), unit_of("selectors.bsfl.min_latency"), unit_of("training.momentum")
    ('km', 's', '')
    """
    pattern = re.sub(r"^selectors\.[^.]+", "selectors.*", key)
    return OWN_UNITS.get(pattern) or next((unit for ending, unit in UNITS.items() if key.endswith(ending)), "")


def scenario_lines(scenario: Scenario, overrides: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines of a scenario as TOML, with each value's unit and origin as a comment.

    Args:
        scenario: The scenario.
        overrides: Dotted keys that the command line has set.

    Yields:
        Lines of a scenario file for the same run. "default" marks values that neither the scenario's file nor the
        command line sets.
    """
    units, defaults = _units(scenario), set(_defaults(scenario))
    prefix = ""
    for line in tomli_w.dumps(scenario.model_dump()).splitlines():
        if header := re.fullmatch(r"\[(.+)\]", line):
            prefix = f"{header[1]}."
        key = prefix + line.partition(" = ")[0]
        origin = "command line" if key in overrides else "default" if key in defaults else ""
        comment = ", ".join(filter(None, (units.get(key, ""), origin)))
        yield f"{line:<{COMMENTS_AT}}  # {comment}" if comment else line
    if parameters := _unset_parameters(scenario):
        label = label_of(scenario.selector)
        yield ""
        yield f"# Further parameters of {label}, each with its default; set one with --set selectors.{label}.KEY=VALUE:"
        yield from (f"#   {name} = {value!r}" for name, value in parameters.items())


def scenario_facts(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario for ``fedsel show --json``.

    Returns:
        A dictionary with four entries: ``scenario`` (its tables) and ``units`` (dotted key -> unit), ``defaults`` (the
        dotted keys that nothing sets), and ``selector_parameters`` (the defaults of parameters that nothing sets).
    """
    return {
        "scenario": scenario.model_dump(mode="json"),
        "units": _units(scenario),
        "defaults": _defaults(scenario),
        "selector_parameters": _unset_parameters(scenario),
    }


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _units(scenario: Scenario) -> dict[str, str]:
    return {key: unit for key in _flat(scenario.model_dump()) if (unit := unit_of(key))}


def _defaults(table: BaseModel, prefix: str = "") -> list[str]:
    """Return the dotted keys of values that were not set."""
    keys = []
    for key in type(table).model_fields:
        value = getattr(table, key)
        if isinstance(value, BaseModel):
            keys += _defaults(value, f"{prefix}{key}.")
        # The tables of selectors hold only parameters that were set.
        elif key not in table.model_fields_set and not isinstance(value, Mapping):
            keys.append(f"{prefix}{key}")
    return keys


def _unset_parameters(scenario: Scenario) -> dict[str, Any]:
    """Return the parameters of the scenario's selector that keep their default."""
    cls = selector_class(scenario.selector)
    given = scenario.selectors.get(label_of(scenario.selector), {})
    defaults = {name: one.default for name, one in inspect.signature(cls).parameters.items()}
    unset = (name for name in own_parameters(cls) if name not in given)
    return {name: defaults[name] for name in unset if defaults[name] is not inspect.Parameter.empty}
