"""What any selector must do, whatever its paper: one function per promise.

Each check takes a factory, ``make(seed=...) -> Selector``; a broken promise raises :class:`AssertionError` that says
what was promised. The fleets grow with ``clients_per_round``, so that some clients are always left out.
"""

from __future__ import annotations

from collections.abc import Callable

from fedsel_flwr.testing.choosing import (
    check_all_failed,
    check_bad_input,
    check_choice,
    check_dead_client,
    check_determinism,
    check_empty_and_short,
    check_growth,
    check_input_order,
    check_many_clients,
    check_select_without_observe,
)
from fedsel_flwr.testing.keeping import check_foreign_state, check_forget, check_save_and_load, check_state_is_a_copy
from fedsel_flwr.testing.reading import check_missing_values, check_needs
from fedsel_flwr.testing.spawning import check_spawned_process
from fedsel_flwr.testing.warming import check_warm_up
from fedsel_flwr.testing.worlds import SelectorFactory, made

CHECKS: tuple[Callable[[SelectorFactory], None], ...] = (
    check_choice,
    check_input_order,
    check_determinism,
    check_spawned_process,
    check_save_and_load,
    check_state_is_a_copy,
    check_foreign_state,
    check_forget,
    check_needs,
    check_missing_values,
    check_growth,
    check_empty_and_short,
    check_all_failed,
    check_dead_client,
    check_select_without_observe,
    check_bad_input,
    check_many_clients,
    check_warm_up,
)
"""Every check, for ``pytest.mark.parametrize``."""


def check_selector(make: SelectorFactory) -> None:
    """Run every check.

    It may be called from a module, a script, a session or a notebook; the check in another process, where it cannot be
    made, is left out with a warning that says why. :func:`fedsel_flwr.testing.check_stateful` looks further.

    Args:
        make: Called as ``make(seed=...)``; returns a selector whose ``clients_per_round`` is 1 to 100 or None.

    Raises:
        AssertionError: A promise is broken; the message names it.
        ParameterError: ``make`` cannot be called so, or builds a selector of another number of clients a round.

    >>> from functools import partial
    >>> from fedsel_flwr.selectors import RoundRobin
    >>> check_selector(partial(RoundRobin, clients_per_round=3))
    """
    made(make)
    for check in CHECKS:
        check(make)
