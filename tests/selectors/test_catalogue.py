"""The list of our selectors; that a selector is one file and one line of it stands in tests/test_new_column.py."""

from __future__ import annotations

from fedsel_flwr import selectors
from fedsel_flwr.selectors import catalogue, create, names
from fedsel_flwr.selectors.registry import example, selector_class


def test_every_class_of_the_catalogue_is_exported_and_has_a_name() -> None:
    ours = {key: cls for key, cls in vars(catalogue).items() if isinstance(cls, type)}
    assert {cls.name: getattr(selectors, key) for key, cls in ours.items()} == {
        name: selector_class(name) for name in names()
    }


def test_examples_are_of_our_selectors_and_are_all_that_they_need() -> None:
    assert catalogue.EXAMPLES.keys() <= set(names())
    for name in names():
        create(name, clients_per_round=1, **example(name))
