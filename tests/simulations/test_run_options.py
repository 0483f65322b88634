"""Options of a run: declared once, and shown as the arguments of the functions that take them."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.engine import Arguments


def test_a_function_shows_every_option_with_its_default_and_its_text() -> None:
    parameters, text = inspect.signature(simulate).parameters, inspect.getdoc(simulate) or ""
    assert {name: one.default for name, one in parameters.items() if name != "scenario"} == {
        option.name: option.default for option in fields(Arguments) if option.name != "scenario"
    }
    assert next(iter(parameters)) == "scenario"
    for name in parameters:
        assert text.count(f"\n    {name}: ") == 1, name
    assert [text.count(section) for section in ("\nArgs:\n", "\nReturns:\n", "\nRaises:\n")] == [1, 1, 1]


def test_options_are_keywords() -> None:
    smoke = load_scenario("smoke", {"rounds": 1})
    assert len(simulate(scenario=smoke, engine="vectorized", quiet=True).history.rounds) == 1
    with pytest.raises(TypeError, match="positional"):
        simulate(smoke, "vectorized")  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'rounds'"):
        simulate(smoke, rounds=3)  # type: ignore[call-arg]
