"""A selector under random sequences of calls, by Hypothesis."""

from __future__ import annotations

from fedsel_flwr.errors import RunError
from fedsel_flwr.testing.worlds import SelectorFactory, made


def check_stateful(make: SelectorFactory, *, sequences: int = 100, steps: int = 20) -> None:
    """Call a selector in every order: inform, probe, select, observe, forget, save, load, with a fleet that grows.

    At every step a twin that was saved, loaded and continued now and then does the same; both must agree. A sequence
    that breaks a promise is made as short as possible and printed. The sequences are the same in every run.

    Args:
        make: Called as ``make(seed=...)``; returns a selector whose ``clients_per_round`` is 1 to 100 or None.
        sequences: How many sequences.
        steps: How many calls in each, at most.

    Raises:
        AssertionError: A promise is broken; the message names it.
        ParameterError: ``make`` cannot be called so, or builds a selector of another number of clients a round.
        RunError: Hypothesis is not installed.

    >>> from functools import partial
    >>> from fedsel_flwr.selectors import Random
    >>> check_stateful(partial(Random, clients_per_round=3), sequences=5)
    """
    try:
        from fedsel_flwr.testing.machine import run_machine
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise RunError("check_stateful needs Hypothesis: pip install hypothesis") from error
    made(make)
    run_machine(make, sequences=sequences, steps=steps)
