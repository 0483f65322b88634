"""The columns that a class says it asks for are those that its probe asks for."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.selectors import create


@pytest.mark.parametrize("name", ["divfl", "fedcor", "local-accuracy", "lsh", "nccb"])
def test_the_probe_asks_for_what_the_class_says(name: str) -> None:
    selector = create(name, clients_per_round=2)
    request = selector.probe(np.arange(3))
    assert request is not None
    assert type(selector).asks == set(request.columns)
