"""The scenario reference has every key of the schema, and the code enforces the ranges that it states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from scenario_keys import LARGE, Key, tables, text

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import names
from fedsel_flwr.selectors.registry import create, example, selector_class
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import inner_table, own_parameters

KEYS = {one.name: one for keys in tables().values() for one in keys}
BOUNDED = [one for one in KEYS.values() if re.search(r"\d", one.range) and not one.range.startswith('`"')]
CHOICES = {name: re.findall(r'`"([^"]*)"`', one.range) for name, one in KEYS.items() if one.range.startswith('`"')}


def test_the_page_lists_exactly_the_keys_of_the_schema() -> None:
    expected = []
    for top, field in Scenario.model_fields.items():
        table = inner_table(field)
        expected += [top] if table is None else [f"{top}.{key}" for key in table.model_fields]
    expected.remove("selectors")
    expected += [f"selectors.{name}.{key}" for name in names() for key in own_parameters(selector_class(name))]
    assert sorted(re.findall(r'^\| <a id="([^"]+)"></a>`\1` \|', text(), re.MULTILINE)) == sorted(expected)
    assert all(key.default and key.range and key.meaning for key in KEYS.values())


def probes(words: str, whole: bool) -> Iterator[tuple[float, bool]]:
    """Values at and just beyond the limits of a range, and whether they are allowed."""
    step = 1.0 if whole else 1e-6
    values = {sign: number for number, sign in LARGE.items()} | {"`clients_per_round`": 2}

    def read(number: str) -> float:
        return values[number] if number in values else float(number)

    both = re.search(r"([\d.]+) to ([\d.]+|10.|2..)(?![\d⁰-⁹])", words)
    lows = [("at least", both[1])] if both else re.findall(r"(at least|above) (\S+?)(?=[,;]|$)", words)
    highs = [("at most", both[2])] if both else re.findall(r"(at most|below) (\S+?)(?=[,;]|$)", words)
    for kind, number in lows:
        yield from ((read(number), kind == "at least"), (read(number) + (kind == "above") * step, True))
        yield read(number) - step, False
    for kind, number in highs:
        # The neighbours of 2^53 and 2^63 are not exact as floats.
        top = int(read(number)) if whole else read(number)
        yield from ((top, kind == "at most"), (top - (kind == "below") * (1 if whole else step), True))
        yield top + (1 if whole else step), False


def refusal(name: str, value: Any) -> str:
    """The error about a value of a key; empty if the value is allowed."""
    table, _, last = name.rpartition(".")
    if table.startswith("selectors."):
        selector = table.removeprefix("selectors.")
        params = {"clients_per_round": 2, **example(selector), last: value}
        try:
            create(selector, **params)
        except ParameterError as error:
            return str(error)
        return ""
    model = inner_table(Scenario.model_fields[table]) if table else Scenario
    assert model is not None
    try:
        model.model_validate({"name": "x", last: value} if model is Scenario else {last: value})
    except ValidationError as error:
        # Other keys may not fit to this value: such errors have no place.
        return "".join(str(fault["msg"]) for fault in error.errors() if fault["loc"])
    return ""


@pytest.mark.parametrize("key", BOUNDED, ids=lambda key: key.name)
def test_the_code_enforces_the_range_of_a_key(key: Key) -> None:
    limits, none = re.split("[,;] or ", key.range)[0], re.search(r"`(-?[\d.]+)` for none", key.range)
    credits, several = key.name == "selectors.tifl.credits", key.range.startswith("list")
    whole = "whole" in limits or credits
    tried = [(value, ok) for value, ok in probes(limits, whole) if not none or value != float(none[1])]
    assert len(tried) >= 2
    for number, allowed in tried:
        value = int(number) if whole else number
        given = [value] * (5 if credits else 1) if several else value
        assert (refusal(key.name, given) == "") is allowed, given
    if '`"auto"`' in key.range:
        assert refusal(key.name, "auto") == ""


@pytest.mark.parametrize("name", CHOICES)
def test_the_code_enforces_the_choices_of_a_key(name: str) -> None:
    assert [one for one in CHOICES[name] if refusal(name, one)] == []
    assert refusal(name, "no such choice")


def test_show_prints_the_meaning_of_each_key(fedsel: Any) -> None:
    text = " ".join(line.removeprefix("#").strip() for line in fedsel("show", "phones", "--meanings").splitlines())
    text = " ".join(text.split())
    shown = {name for name in KEYS if not name.startswith("selectors.") or name.startswith("selectors.bsfl.")}
    assert [name for name in (*shown, "selectors.fedcs.deadline") if KEYS[name].meaning not in text] == []
