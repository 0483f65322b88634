"""What a newcomer ran into when he wrote a selector: each is said where it happens."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.selectors import Selector
from fedsel_flwr.testing import check_selector


def test_scalar_state_with_values_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(ParameterError, match=r"scalar_state must be a tuple of names, .* \('_now',\)"):

        class Overdue(Selector):
            scalar_state = {"_now": 0}  # type: ignore[assignment]  # noqa: RUF012

            def _select(self, available):
                return available[:1]


def test_a_taken_name_is_said_as_it_was_written() -> None:
    with pytest.raises(ParameterError, match=r"the state '_round', but the base class already keeps .*self\.round is"):

        class Overdue(Selector):
            client_state = {"_round": 0}  # noqa: RUF012

            def _select(self, available):
                return available[:1]


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ([0, 0, 1], "0 is chosen 2 times"),
        ([1, 1000], "1000 is not available"),
        ([0.5], r"one-dimensional array of indices .* got \[0.5\]"),
        ([[0, 1]], r"one-dimensional array of indices .* got \[\[0, 1\]\]"),
    ],
)
def test_what_is_wrong_with_a_choice(chosen: list, why: str) -> None:
    class Wrong(Selector):
        def _select(self, available):
            return np.array(chosen)

    with pytest.raises(RunError, match=why):
        Wrong(clients_per_round=2).select(np.arange(4))


def test_the_first_message_of_the_checks_says_that_columns_of_failed_rows_are_nan() -> None:
    class Naive(Selector):
        needs = frozenset({"loss"})
        client_state = {"_loss": 0.0}  # noqa: RUF012

        def _select(self, available):
            return self._largest(self._loss, available)

        def _observe(self, report):
            self._loss[report.clients] = report.loss

    said = r"failed clients the columns \(loss\) are NaN: read them at report\.completed"
    with warnings.catch_warnings(action="ignore"), pytest.raises(AssertionError, match=said):
        check_selector(partial(Naive, clients_per_round=3))
