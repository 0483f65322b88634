"""What is listed of selectors: the columns that they really ask for, and the citation of their docstring."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.selectors.about import about


@pytest.mark.parametrize("name", ["divfl", "fedcor", "local-accuracy", "lsh", "nccb"])
def test_the_probes_that_are_listed_are_those_that_are_asked(name: str) -> None:
    selector = create(name, clients_per_round=2)
    request = selector.probe(np.arange(3))
    assert request is not None
    assert about(type(selector))["probes"] == ", ".join(request.columns)


def test_a_class_that_says_little() -> None:
    class Own(Selector):
        """Mine."""

        def _select(self, available: np.ndarray) -> np.ndarray:
            return available[:1]

    assert about(Own) == {"parameters": "clients_per_round, seed=None"}


def test_the_citation_ends_with_its_section() -> None:
    class Own(Selector):
        """Mine.

        References:
            A. Author, On
            choosing.

        Notes:
            None of it.
        """

        def _select(self, available: np.ndarray) -> np.ndarray:
            return available[:1]

    assert about(Own)["paper"] == "A. Author, On choosing."
