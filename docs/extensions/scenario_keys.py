"""The keys of a scenario with their units, defaults, ranges and meanings, from the schema.

:mod:`generated` puts the tables into the scenario reference. ``tests/site/test_scenario_reference.py`` tries
the ranges.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import Field as OptionField
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from fedsel_flwr.rounds import settings
from fedsel_flwr.selectors import names
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import inner_table, own_parameters
from fedsel_flwr.simulations.scenario_tables import Table
from fedsel_flwr.simulations.scenario_text import meaning_of, text_of, unit_of

DEFAULTS = {"name": "the file's name"}
"""Defaults that are no value."""
RANGES = {"selector": "a name of `fedsel list`, or a reference"}
"""Ranges that the type does not state."""
LARGE = {10**7: "10⁷", 10**9: "10⁹", 2**53: "2⁵³", 2**63: "2⁶³"}
OTHERWISE = {"client": '`"sizes"` (the numbers of examples)', "tier": "one number for all"}
DEADLINES = "[Two deadlines](simulations.md#two-deadlines) compares the client deadline with the round deadline."
SEE = dict.fromkeys(("wireless.max_latency_s", "aggregation.round_deadline_s"), DEADLINES)
"""Sentences with links, which only the page has."""
KINDS = {float: "number", int: "whole number", bool: "`true` or `false`", str: "text"}
LIMITS = (r"in ([\[(])([\d.]+), ([\d.]+)([\])])", r"(at least|above) (\d+|`clients_per_round`)")
"""Limits in the description of a selector's parameter."""
REPEATED = re.compile(
    r", (?:(?:each )?in [\[(][^\])]+[\])]|(?:at least|above|below) (?:\d+|`\w+`)|s|W|F|km|Hz|dBm|dB|bit|\w+/s)(?=[.;:])"
)
"""Limits and units in a meaning, which have their own columns on the page."""


@dataclass(frozen=True)
class Key:
    """A key of a scenario, as the page shows it; ``range`` is empty if the schema states none."""

    name: str
    unit: str
    default: str
    range: str
    meaning: str
    more: str
    number: bool
    share: bool

    @property
    def row(self) -> str:
        """Its row of a table."""
        cells = (
            f'<a id="{self.name}"></a>`{self.name}`',
            self.unit or "none",
            self.default,
            self.range,
            REPEATED.sub("", self.meaning),
        )
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def toml(value: object) -> str:
    """A value as a scenario file has it."""
    return f"`{tomli_w.dumps({'x': value}).partition(' = ')[2].strip()}`"


def choices(values: tuple[object, ...]) -> str:
    """The values that a key allows."""
    *others, last = map(toml, values)
    return f"{', '.join(others)} or {last}" if others else last


def limits(low: str, least: Any, high: str, most: Any) -> str:
    """A range in words. ``low`` is "above" or "at least", ``high`` is "below" or "at most"."""
    if (low, high) == ("at least", "at most") and least is not None and most is not None:
        return f"{LARGE.get(least, least)} to {LARGE.get(most, most)}"
    given = [f"{low} {LARGE.get(least, least)}"] if least is not None else []
    given += [f"{high} {LARGE.get(most, most)}"] if most is not None else []
    return ", ".join(given)


# ---- keys of tables: pydantic's fields -------------------------------------------------------------------------------


def of_field(name: str, field: FieldInfo, default: Callable[[], str]) -> Key:
    """The key of a field."""
    kind, found = field.annotation, field.metadata
    (check,) = [one.func for one in found if isinstance(one, AfterValidator)] or [None]
    if isinstance(check, partial):  # an option of a strategy
        words, kinds = of_option(check.args[0])
    elif get_origin(kind) is Literal:
        words, kinds = choices(get_args(kind)), {str}
    elif check is not None:  # a name or a reference
        known = inspect.getclosurevars(check).nonlocals["names"]
        words, kinds = f"{choices(known)[: -len(toml(known[-1])) - 4]}, {toml(known[-1])} or a reference", {str}
    elif get_origin(kind) is tuple:
        (inner, _) = get_args(kind)
        words, kinds = f"list of whole numbers, each {of_metadata(inner.__metadata__[0].metadata)}", {int}
    else:
        assert isinstance(kind, type)
        words, kinds = ", ".join(filter(None, (KINDS[kind], of_metadata(found)))), {kind}
    return key(name, default(), words, kinds)


def of_metadata(found: list[Any]) -> str:
    """The range that annotations of a field state."""
    bound = {name: getattr(one, name) for one in found for name in ("gt", "ge", "lt", "le") if hasattr(one, name)}
    low = ("above", bound["gt"]) if "gt" in bound else ("at least", bound.get("ge"))
    high = ("below", bound["lt"]) if "lt" in bound else ("at most", bound.get("le"))
    return limits(*low, *high)


def of_option(option: OptionField[Any]) -> tuple[str, set[type]]:
    """The range of a strategy's option, and its types."""
    check = option.metadata["check"]
    given = check.keywords if isinstance(check, partial) else {}
    # The annotations are texts; their names are in the module of the options.
    kind = eval(str(option.type), vars(settings))
    kinds = {one for one in get_args(kind) if isinstance(one, type)} or {kind}
    kinds.discard(type(None))
    words = []
    if "allowed" in given:
        words.append(choices(given["allowed"]))
    else:
        if int in kinds:
            given = {"at_least": given.get("minimum", 1), "at_most": 2**53}
        low = ("above", given["above"]) if "above" in given else ("at least", given.get("at_least"))
        high = ("below", given["below"]) if "below" in given else ("at most", given.get("at_most"))
        (word,) = [KINDS[one] for one in kinds]
        whole = [None if one is None else int(one) for one in (low[1], high[1])]
        words.append(", ".join(filter(None, (word, limits(low[0], whole[0], high[0], whole[1])))))
        words += [toml(one) for inner in get_args(kind) if get_origin(inner) is Literal for one in get_args(inner)]
    if option.default is None:
        words.append(f"{toml(option.metadata['unset'])} for none")
    return ", or ".join(words), kinds


# ---- keys of selectors: parameters of their constructors -------------------------------------------------------------


def of_parameter(selector: str, parameter: inspect.Parameter) -> Key:
    """The key of a selector's parameter. Its description states its limits, which the test compares with the class."""
    cls, name = selector_class(selector), f"selectors.{selector}.{parameter.name}"
    annotation = str(parameter.annotation)
    default = parameter.default
    shown = "required" if default is parameter.empty else "none" if default is None else toml(default)
    text = text_of(name)
    if "str" in annotation:
        words, kinds = choices(tuple(re.findall(r'"([\w-]+)"', text))), {str}
    elif "bool" in annotation:
        words, kinds = KINDS[bool], {bool}
    else:
        kinds = {int} if re.match(r"int\b", annotation) else {float}
        words = ", ".join(filter(None, (KINDS[min(kinds, key=str)], stated(text))))
        if "Seconds" in annotation:
            words += ', or `"auto"`'
        if "Sequence" in annotation or parameter.name in cls.by_client:
            owner = "client" if parameter.name in cls.by_client else "tier"
            words = f"list with a number for each {owner}, {stated(text)}"
            words += f"; or {OTHERWISE[owner]}"
    return key(name, shown, words, kinds)


def stated(text: str) -> str:
    """The limits that a description states, as :func:`limits` writes them."""
    for pattern in LIMITS:
        if found := re.search(pattern, text):
            if len(found.groups()) == 2:
                return f"{found[1]} {found[2]}"
            low = "at least" if found[1] == "[" else "above"
            high = "at most" if found[4] == "]" else "below"
            return limits(low, found[2], high, found[3])
    return ""


# ---- the page --------------------------------------------------------------------------------------------------------


def key(name: str, default: str, words: str, kinds: set[type]) -> Key:
    """The key with its unit and its texts."""
    text, meaning = text_of(name), meaning_of(name)
    share = bool(re.search(r"0 to 1\b|(at least|above) 0, (at most|below) 1\b", words))
    return Key(
        name,
        unit_of(name),
        default,
        RANGES.get(name, words),
        meaning,
        text[len(meaning) :].strip(),
        float in kinds,
        share,
    )


def tables() -> dict[str, list[Key]]:
    """Table -> its keys; "" is the scenario itself, and ``selectors.NAME`` the table of a selector."""
    found: dict[str, list[Key]] = {"": []}
    plain = Scenario(name="x")
    phones = Scenario.model_validate({"name": "x", "system": {"kind": "phones"}})

    def shown(name: str) -> str:
        table, _, last = name.rpartition(".")
        one, other = (getattr(getattr(scenario, table) if table else scenario, last) for scenario in (plain, phones))
        return toml(one) if one == other or name == "system.kind" else f"{toml(one)}, for phones {toml(other)}"

    for top, field in Scenario.model_fields.items():
        if (table := inner_table(field)) is not None:
            found[top] = [
                of_field(f"{top}.{name}", inner, partial(shown, f"{top}.{name}"))
                for name, inner in table.model_fields.items()
            ]
        elif top != "selectors":
            found[""].append(
                of_field(top, field, partial(DEFAULTS.get, top) if top in DEFAULTS else partial(shown, top))
            )
    for name in names():
        cls = selector_class(name)
        parameters = inspect.signature(cls).parameters
        found[f"selectors.{name}"] = [of_parameter(name, parameters[own]) for own in own_parameters(cls)]
    return found


def about(table: type[Table]) -> str:
    """The docstring of a table, as Markdown."""
    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`|``(.+?)``", r"`\1\2`", inspect.getdoc(table) or "")
    return "\n\n".join(fill(part) for part in text.split("\n\n"))


def fill(text: str, further: str = "") -> str:
    """A paragraph in lines of the pages' width."""
    return textwrap.fill(text, 120, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def lines(keys: list[Key]) -> Iterator[str]:
    """The lines of a table, and of the details below it."""
    yield from ("| key | unit | default | range | meaning |", "| --- | --- | --- | --- | --- |")
    yield from (one.row for one in keys)
    if details := [(one.name, more) for one in keys if (more := f"{one.more} {SEE.get(one.name, '')}".strip())]:
        yield ""
        yield from (fill(f"- `{name}`: {more}", "  ") for name, more in details)
    yield ""


def text() -> str:
    """The generated part of the page."""
    found, parts = tables(), list[str]()
    for name, keys in found.items():
        if name.startswith("selectors."):
            continue
        table = Scenario if not name else inner_table(Scenario.model_fields[name])
        assert table is not None
        parts += [f"## {name or 'Keys outside tables'}", "", about(table), "", *lines(keys)]
    parts += ["## selectors", "", fill(SELECTORS), ""]
    for name, keys in found.items():
        if name.startswith("selectors.") and keys:
            parts += [f"### {name}", "", *lines(keys)]
    without = [
        f"`{name.partition('.')[2]}`" for name, keys in found.items() if name.startswith("selectors.") and not keys
    ]
    parts += [fill(f"These selectors have no keys: {', '.join(without)}."), ""]
    return "\n".join(parts)


AUTO = " and ".join(
    f"`{name}`" for name in names() if "max_latency" in inspect.signature(selector_class(name)).parameters
)
SELECTORS = f"""\
The table `selectors.NAME` holds the parameters of the selector NAME. The paper of a selector defines its symbols
([papers](papers/README.md)). The scenario sets `clients_per_round`, `seed`, `total_rounds` and `channels` for all
selectors. It also sets `max_latency` for {AUTO}, whose tables accept only `max_latency = "auto"`. The default "none"
means that the key is left out."""
