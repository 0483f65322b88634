"""What a selector's class says of itself: paper, needs and parameters, for lists."""

from __future__ import annotations

import inspect
import textwrap

from fedsel_flwr.selectors.base import Selector

WIDTH = 200
"""Characters of a paper's citation, at most."""


def about(cls: type[Selector]) -> dict[str, str]:
    """Describe a selector in a few lines.

    Args:
        cls: The selector's class.

    Returns:
        ``paper`` (the References of its docstring), ``needs`` (columns of reports), ``probes`` (columns that it asks
        for before a choice) and ``parameters`` with their defaults; without those that are empty.

    >>> from fedsel_flwr.selectors import CSUCB
    >>> about(CSUCB)["parameters"]
    'clients_per_round, max_latency, seed=None'
    """
    parameters = inspect.signature(cls).parameters.values()
    said = {
        "paper": textwrap.shorten(_references(cls), WIDTH, placeholder=" ..."),
        "needs": ", ".join(sorted(cls.needs)) if isinstance(cls.needs, frozenset) else "",
        "probes": ", ".join(sorted(cls.probes)),
        "parameters": ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters),
    }
    return {name: text for name, text in said.items() if text}


def _references(cls: type[Selector]) -> str:
    """The text below "References:" in the class's own docstring."""
    _, _, below = inspect.cleandoc(cls.__doc__ or "").partition("\nReferences:\n")
    lines: list[str] = []
    for line in below.splitlines():
        if not line.startswith(" "):
            break
        lines.append(line.strip())
    return " ".join(lines)
