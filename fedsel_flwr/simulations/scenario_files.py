"""Scenario files: read TOML, override single keys, and name the faulty key in every error.

Names and content of a folder that another person may have made are checked before they are shown or become part of a
path. Files are opened by :func:`fedsel_flwr.rounds.storage.open_file`.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedsel_flwr.checks import AUTO, did_you_mean
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.references import absolute_reference, is_reference
from fedsel_flwr.rounds.untrusted import one_line, shown
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.registry import label_of, selector_class
from fedsel_flwr.simulations.listing import packaged_text, scenario_names
from fedsel_flwr.simulations.scenario import Scenario

REFERENCE_KEYS = ("selector", "model.name", "data.dataset")
"""Keys whose value may refer to the user's own code."""
COMMON_PARAMETERS = ("clients_per_round", "seed", "max_latency", "total_rounds", "channels")
"""Selector parameters that the scenario sets.

``max_latency`` may be "auto" in a selector's table. If a selector chooses the size of its cohort, its table may also
hold ``clients_per_round``, as a cap.
"""
EXPLAINED = ". docs/scenario-reference.md explains every key"
"""End of an error about an unknown key."""
EXPECTED = {
    "model_type": "expected a table. Set its keys one by one",
    "dict_type": "expected a table. Set its keys one by one",
    "tuple_type": "expected a list of numbers, such as 3, 4, 5",
}
"""Replacements for pydantic's messages about Python types: type of the error -> what the TOML file should hold."""


def load_scenario(
    source: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, selectors: Sequence[str] = ()
) -> Scenario:
    """Read a scenario and replace single keys.

    A key may refer to a file, as in ``selector = "./mine.py:Fastest"``. Such a path is relative to the TOML file. In an
    override it is relative to the working directory.

    Args:
        source: A name from :func:`scenario_names`, or the path of a TOML file.
        overrides: Dotted key -> value, as in ``{"training.learning_rate": 0.05}``. A value of None or "" keeps the
            scenario's value.
        selectors: References to other selectors whose parameters the scenario may hold.

    Returns:
        The checked scenario.

    Raises:
        ParameterError: The scenario does not exist, its TOML is broken, a key is unknown, or a value is not allowed.
    """
    if not isinstance(source, str | os.PathLike):
        raise ParameterError(f"scenario must be a name or the path of a TOML file, got {type(source).__name__}")
    if not isinstance(overrides, Mapping | None):
        raise ParameterError(f"overrides must map keys to values, as in {{'rounds': 5}}, got {overrides!r:.80}")
    source = os.fspath(source)
    name, text = _read(source)
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ParameterError(f"scenario {source!r} is not valid TOML: {error}") from error
    if not tables:
        raise ParameterError(f"scenario file {source!r} is empty. Set at least one key, such as rounds = 10")
    # Done before overrides are set, because paths in overrides are relative to another folder.
    for key in REFERENCE_KEYS:
        _locate(tables, key, Path(source).expanduser().parent)
    for key, value in (overrides or {}).items():
        if value is not None and value != "":
            _set_key(tables, key, value)
    for key in REFERENCE_KEYS:
        _locate(tables, key, Path.cwd())
    scenario = _validated(source, {"name": name} | tables)
    check_selector_tables(source, scenario, selectors)
    return scenario


def shipped_scenario(name: str) -> Scenario:
    """Return the shipped scenario of a name; without one, the scenario of the defaults."""
    return load_scenario(name) if name in scenario_names() else Scenario(name=name)


def replace_keys(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> Scenario:
    """Return a scenario made from its tables, with single keys replaced.

    Args:
        tables: The tables that ``Scenario.model_dump`` returns.
        changes: Dotted key -> value. None keeps the value in the tables.

    Raises:
        ParameterError: A key is unknown, or a value is not allowed.
    """
    # A deep copy, because keys are set in inner tables, which belong to the caller.
    changed = copy.deepcopy(dict(tables))
    for key, value in changes.items():
        if value is not None:
            _set_key(changed, key, value)
    return _validated(changed.get("name"), changed)


def _validated(source: str | None, tables: Mapping[str, Any]) -> Scenario:
    """Return the scenario of these tables; an error names every fault and the scenario's source."""
    try:
        return Scenario.model_validate(tables)
    except ValidationError as error:
        raise ParameterError(f"scenario {source!r}: {_explain(error)}") from None


def own_parameters(cls: type[Selector]) -> tuple[str, ...]:
    """Return the parameters that a selector's table in a scenario may hold."""
    parameters = inspect.signature(cls).parameters
    optional = {"clients_per_round"} if chooses_cohort_size(parameters) else set()
    return tuple(name for name in parameters if name not in COMMON_PARAMETERS or name in optional)


def chooses_cohort_size(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a selector with these parameters chooses the size of its cohort (FedCS, PCZFL)."""
    return "clients_per_round" in parameters and parameters["clients_per_round"].default is None


def _read(source: str) -> tuple[str, str]:
    if source in scenario_names():
        return source, packaged_text(source)
    path = Path(source).expanduser()
    if not source.strip():
        raise ParameterError(f"scenario must be a name or the path of a TOML file, got {source!r}")
    if path.is_dir():
        raise ParameterError(f"scenario {source!r} is a folder. Give the path of a TOML file in it")
    if not path.exists():
        hint = did_you_mean(source.removesuffix(".toml"), scenario_names())
        what = "there is no scenario file" if path.suffix == ".toml" else "unknown scenario"
        raise ParameterError(
            f"{what} {source!r}{hint}. Choose one of {', '.join(scenario_names())}, or give the path of a TOML file"
        )
    try:
        return path.stem, path.read_text("utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ParameterError(f"scenario file {source!r} cannot be read: {error}. Check that it is UTF-8") from error


def _locate(tables: dict[str, Any], key: str, folder: Path) -> None:
    """Make the path in the reference under a dotted key absolute."""
    *parents, last = key.split(".")
    for parent in parents:
        tables = tables.get(parent, {})
        if not isinstance(tables, dict):
            return
    if isinstance(tables.get(last), str):
        tables[last] = absolute_reference(tables[last], folder)


def _set_key(tables: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; create missing intermediate tables."""
    *parents, last = key.split(".")
    for parent in parents:
        tables = tables.setdefault(parent, {})
        if not isinstance(tables, dict):
            raise ParameterError(f"cannot set {key!r}: {parent!r} is a value, not a table. Check the key")
    tables[last] = value


def _keys(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a table and of its inner tables."""
    for key, field in table.model_fields.items():
        if (inner := inner_table(field)) is not None:
            yield from _keys(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def inner_table(field: FieldInfo) -> type[BaseModel] | None:
    """Return the table that a key holds; None if the key holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _similar(key: str) -> list[str]:
    """Return the keys that a user of an unknown key probably means."""
    known, own = list(_keys(Scenario)), key.rpartition(".")[2]
    # Users most often mean the same key in another table.
    return [one for one in known if one.rpartition(".")[2] == own] or difflib.get_close_matches(key, known, n=1)


def _explain(error: ValidationError) -> str:
    """Return the faults in one line: each key, its value and the allowed values."""
    lines, hint = [], ""
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            parent = key.rpartition(".")[0]
            known = [k for k in _keys(Scenario) if k.rpartition(".")[0] == parent]
            if not parent:
                known += [
                    f"[{name}]" for name, field in Scenario.model_fields.items() if inner_table(field) is not None
                ]
            same = _similar(key)
            meant = f" (did you mean {' or '.join(map(repr, same))}?)" if same else ""
            lines.append(f"unknown key {key!r}{meant}. The allowed keys are {', '.join(known)}")
            hint = EXPLAINED
        else:
            lines.append(_described(fault))
    return "; ".join(lines) + hint


def _described(fault: Mapping[str, Any]) -> str:
    """Return a fault in one line: the key, its value and the expected value."""
    # Keys and values come from the file; `shown` and `one_line` remove characters that would act on a terminal.
    key = one_line(".".join(map(str, fault["loc"])))
    expected = EXPECTED.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")
    return one_line(f"{key} = {shown(fault['input'])}: {expected}" if key else expected)


def check_selector_tables(source: str, scenario: Scenario, selectors: Sequence[str]) -> None:
    """Refuse an unknown selector, and parameters that a selector does not take.

    Args:
        source: Name of the scenario, for errors.
        scenario: The scenario.
        selectors: References of other selectors whose parameters it may hold.

    Raises:
        ParameterError: Names the selector or the key.
    """
    own = {label_of(name): selector_class(name) for name in (scenario.selector, *selectors) if is_reference(name)}
    selector_class(scenario.selector)
    for name, params in scenario.selectors.items():
        cls = own[name] if name in own else selector_class(name)
        allowed = sorted(own_parameters(cls))
        for key, value in params.items():
            # "auto" affects only the selector's rewards, not the latency from which a client counts as failed.
            if key == "max_latency" and value == AUTO and key in inspect.signature(cls).parameters:
                continue
            if key in COMMON_PARAMETERS and key not in allowed:
                instead = "wireless.max_latency_s" if key == "max_latency" else key
                raise ParameterError(f"scenario {source!r}: set {instead!r} instead of 'selectors.{name}.{key}'")
            if key not in allowed:
                close = difflib.get_close_matches(key, allowed, n=1)
                meant = f" (did you mean 'selectors.{name}.{close[0]}'?)" if close else ""
                raise ParameterError(
                    f"scenario {source!r}: unknown key 'selectors.{name}.{key}'{meant}. "
                    f"The allowed keys are {', '.join(allowed) or 'none'}{EXPLAINED}"
                )


MAX_DEPTH = 20
"""Largest nesting depth of a file. Our files have four levels."""
MAX_FAULTS = 3
"""Number of faults of a file that an error names. A file may have thousands."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except line ends and tabs, and surrogates, which no file can hold."""


def check_label(label: str) -> str:
    """Return the label of a selector if it is safe in tables, LaTeX, a terminal and the name of a folder.

    Args:
        label: The label. It is checked both when it is written and when it is read.

    Raises:
        ParameterError: The label cannot be part of a folder's name, or it contains control characters.

    >>> check_label("bsfl, alpha = 2")
    'bsfl, alpha = 2'
    """
    if not re.fullmatch(r"[^/\\]{1,100}", label) or not label.isprintable() or label.strip(". ") != label:
        raise ParameterError(
            f"label {shown(label)} cannot name a folder. Use 1 to 100 characters, no slash, no dot or space at the ends"
        )
    return label


def check_tree(tree: Any) -> None:
    """Refuse content of a file that is nested too deeply, or that has texts with control characters.

    Args:
        tree: Content of a JSON or TOML file.

    Raises:
        ParameterError: The content has such a fault. The error names it.
    """
    # Level by level, because recursion would fail on a deep tree.
    level, depth = [tree], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise ParameterError(f"it is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for one in level:
            if isinstance(one, str) and _CONTROL.search(one):
                raise ParameterError(f"the text {shown(one)} holds control characters")
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
        level = below


def describe_faults(error: Exception) -> str:
    """Return the first faults of a validation error in one line, or the message of any other error.

    Each fault has its key, its value and the expected value.
    """
    if not isinstance(error, ValidationError):
        return one_line(str(error))
    faults = error.errors(include_url=False)
    lines = [_described(fault) for fault in faults[:MAX_FAULTS]]
    more = len(faults) - MAX_FAULTS
    return one_line("; ".join([*lines, *([f"and {more} more"] if more > 0 else [])]))
