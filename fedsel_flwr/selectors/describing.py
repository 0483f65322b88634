"""What a selector is, in a few lines: for the command line."""

from __future__ import annotations

import inspect

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.registry import selector_class


def described(name: str) -> list[str]:
    """Say what a selector does, its paper, what it reads and its parameters.

    Args:
        name: As :func:`~fedsel_flwr.selectors.registry.selector_class` reads it.

    Returns:
        A line each; of an installed selector that is broken one line, which says why.

    >>> for line in described("local-accuracy"):
    ...     print(line)
    Asks every available client for the current model's accuracy on its test data and takes the lowest m.
    paper: Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE TWC 2020, section V-B, \
"local accuracy based scheduling".
    reads: local_accuracy (by a probe)
    parameters: clients_per_round, seed=None
    """
    try:
        cls = selector_class(name)
    except ParameterError as error:
        return [f"cannot be loaded: {error}"]
    text = inspect.cleandoc(cls.__doc__ or "-")
    return [
        text.splitlines()[0],
        f"paper: {_references(text)}",
        f"reads: {_columns(cls)}",
        f"parameters: {', '.join(map(_parameter, inspect.signature(cls).parameters.values()))}",
    ]


def _references(text: str) -> str:
    """The section References of a docstring, on one line."""
    _, heading, after = text.partition("\nReferences:\n")
    return " ".join(after.split("\n\n")[0].split()) if heading else "-"


def _columns(cls: type[Selector]) -> str:
    needs = [] if isinstance(cls.needs, property) else sorted(cls.needs)
    return ", ".join([*needs, *(f"{name} (by a probe)" for name in sorted(cls.asks))]) or "nothing"


def _parameter(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
