"""What the base class does for a selector of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import Random, Selector, create


class Says(Selector):
    """Chooses what it was told to."""

    def __init__(self, choice: Any) -> None:
        super().__init__(clients_per_round=2, seed=0)
        self.choice = choice

    def _select(self, available: Any) -> Any:
        return self.choice


@pytest.mark.parametrize("choice", [[1, 999], [2, 2], [[1], [2]], [0, 1], [1.5, 2]])
def test_a_choice_that_cannot_be_asked_is_an_error_that_shows_it(choice: Any) -> None:
    """Available are 1, 2 and 3."""
    with pytest.raises(RunError, match=r"Says\._select must return an? .*array of .*indices.*, got \[+"):
        Says(np.array(choice)).select(np.array([3, 1, 2]))


def test_a_choice_may_be_a_list_in_any_order() -> None:
    assert Says([3, 1]).select(np.array([3, 1, 2])).tolist() == [1, 3]


def test_the_name_is_the_classs_where_none_is_given() -> None:
    class Mine(Random):
        """Keeps the name of what it builds on."""

    assert (Says.name, Mine.name) == ("Says", "random")


def test_a_selector_shows_its_parameters() -> None:
    assert repr(create("bsfl", clients_per_round=2, min_latency=0.1)) == (
        "BSFL(clients_per_round=2, min_latency=0.1, alpha=1.0, beta=1, data_weights=None, solver='exact', "
        "solver_steps=1000, exploration=1.0)"
    )
    many = repr(create("bsfl", clients_per_round=2, min_latency=0.1, data_weights=dict.fromkeys(range(500), 1.0)))
    assert len(many) < 200
