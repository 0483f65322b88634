"""The checks of arguments: what passes, and the message where it does not."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.checks import by_client, fraction, lookup, one_of, real, whole
from fedsel_flwr.errors import ParameterError


@pytest.mark.parametrize("value", [2, 3.5, True, np.True_, "3", None, math.nan, math.inf, [3], np.array([3])])
def test_a_whole_number_of_any_type_becomes_an_int_and_nothing_else_does(value: Any) -> None:
    for good in (3, 3.0, np.int32(3), np.float64(3.0)):
        assert whole("n", good, 3) == 3
        assert type(whole("n", good, 3)) is int
    said = re.escape(f"n must be a whole number of at least 3, got {value!r}")
    with pytest.raises(ParameterError, match=f"^{said}$"):
        whole("n", value, 3)


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "said"),
    [
        ({"above": 0.0}, 1e-300, 0, "above 0"),
        ({"at_least": 0.0}, 0, -1e-300, "of at least 0"),
        ({"below": 1.0}, 0.5, 1, "below 1"),
        ({"at_most": 1.0}, 1, 1.5, "of at most 1"),
        ({"above": 0.0, "at_most": 1.0}, 1, 0.0, "above 0 and of at most 1"),
        ({"at_least": 0.0, "below": 1.0}, 0, 1.0, "of at least 0 and below 1"),
    ],
)
def test_a_number_within_its_limits(limits: dict[str, float], inside: float, outside: float, said: str) -> None:
    assert real("rate", inside, **limits) == inside
    assert type(real("rate", inside, **limits)) is float
    for bad in (outside, math.nan, math.inf, -math.inf, True, "1", None, np.array([0.5])):
        with pytest.raises(ParameterError, match=f"^rate must be a finite number {said}, got {re.escape(repr(bad))}$"):
            real("rate", bad, **limits)


def test_a_number_without_limits_a_fraction_with_its_ends_and_one_of_a_few_words() -> None:
    assert real("rate", np.float32(-2.5)) == -2.5
    assert [fraction("share", value) for value in (0, 0.25, 1)] == [0.0, 0.25, 1.0]
    assert one_of("kind", "a", ("a", "b")) == "a"
    for call, said in (
        (lambda: real("rate", math.nan), r"^rate must be a finite number, got nan$"),
        (lambda: real("rate", 10**400), r"^rate must be a finite number, got 10{400}$"),
        (lambda: fraction("share", -0.01), "share must be a finite number of at least 0 and of at most 1, got"),
        (lambda: fraction("share", 1.01), "share must be"),
        (lambda: fraction("share", math.nan), "share must be"),
        (lambda: one_of("kind", "c", ("a", "b")), "kind must be one of a, b, got 'c'"),
    ):
        with pytest.raises(ParameterError, match=said):
            call()


def test_numbers_by_client_are_looked_up_or_missed_by_name() -> None:
    growing: dict[int, float] = {}
    values = by_client("weights", growing)
    growing[3] = 2.0  # a mapping may be a view that grows
    assert lookup("weights", values, np.array([3])) == [2.0]
    with pytest.raises(ParameterError, match=r"weights covers 1 clients, but lacks \[4\]"):
        lookup("weights", values, np.array([3, 4]))
    with pytest.raises(ParameterError, match="each value of weights must be a finite number of at least 0, got -1"):
        by_client("weights", [1.0, -1.0])
