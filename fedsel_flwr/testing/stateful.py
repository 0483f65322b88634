"""A selector under random sequences of calls, by Hypothesis.

The state machine behind :func:`fedsel_flwr.testing.check_stateful`; needs Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors.base import Probe, Selector
from fedsel_flwr.selectors.columns import INFORMED, PROBED
from fedsel_flwr.testing.worlds import (
    SelectorFactory,
    fleet,
    made,
    promise,
    promise_finite,
    report_for,
    unlike,
    values_for,
)


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
        pass
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise RunError("check_stateful needs Hypothesis: pip install hypothesis") from error
    made(make)
    run_machine(make, sequences=sequences, steps=steps)


FEWEST, MOST = 6, 10
"""Clients at first and at most, for three a round: more than are chosen, but few, so that rows are given out again."""
MASKS = st.integers(0, 2**MOST - 1)
NUMBERS = st.integers(0, 99)


def run_machine(make: SelectorFactory, *, sequences: int, steps: int) -> None:
    """Run so many sequences of so many calls; always the same."""
    chosen = settings(
        max_examples=sequences,
        stateful_step_count=steps,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),  # to explain a failure, Hypothesis would trace every line
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(SelectorMachine, make), settings=chosen)  # type: ignore[arg-type]


class SelectorMachine(RuleBasedStateMachine):
    """A selector, a twin that moves through saved states, and what must be true of both.

    A number drawn by Hypothesis names the clients of a call by its bits (of those there are; with more than three a
    round a bit names several), another one the world that supplies the numbers.

    Args:
        make: The selector's factory.
    """

    def __init__(self, make: SelectorFactory) -> None:
        super().__init__()
        self.make = make
        self.selector, self.twin = make(seed=3), make(seed=3)
        self.size, self.most, self.round = fleet(self.selector, FEWEST), fleet(self.selector, MOST), 0
        self.registered: frozenset[int] = frozenset()
        self.chosen: IntArray | None = None  # the choice that waits for its report
        self.saved: tuple[Any, ...] | None = None

    @rule()
    def grow(self) -> None:
        """There is one more client."""
        self.size = min(self.size + 1, self.most)

    @rule(clients=MASKS, columns=MASKS, world=NUMBERS)
    def inform(self, clients: int, columns: int, world: int) -> None:
        """Tell some columns of some clients, some of it unknown."""
        told = self._some(clients)
        names = [name for bit, name in enumerate(sorted(INFORMED)) if columns >> bit & 1]
        self._inform(told, names, world)
        self.registered |= set(told.tolist())

    @rule(clients=MASKS, answered=st.booleans(), world=NUMBERS)
    def probe(self, clients: int, answered: bool, world: int) -> None:
        """Ask for the selector's question, and answer it or not."""
        available = self._some(clients, world)
        request: Probe | None = self.selector.probe(available.copy())
        other = self.twin.probe(available.copy())
        self.registered |= set(available.tolist())
        promise((request is None) == (other is None), "a loaded selector probes as one that never stopped")
        if request is None or other is None:
            return
        same = np.array_equal(request.clients, other.clients) and request.columns == other.columns
        promise(same, "a loaded selector asks the same as one that never stopped")
        promise(np.isin(request.clients, available).all(), "only available clients are probed")
        promise(PROBED.issuperset(request.columns), f"clients can be asked for {', '.join(sorted(PROBED))}")
        if answered:
            self._inform(request.clients, list(request.columns), world)

    @rule(clients=MASKS, world=NUMBERS)
    def select(self, clients: int, world: int) -> None:
        """Begin a round."""
        available = self._some(clients, world)
        before, expected = available.copy(), self.selector.expected_count(available.size)
        chosen = self.selector.select(available)
        promise(np.array_equal(available, before), "select leaves `available` as it was")
        promise(np.array_equal(chosen, self.twin.select(before)), "a loaded selector chooses as one that never stopped")
        promise(np.unique(chosen).size == chosen.size, "no client is chosen twice")
        promise(np.isin(chosen, available).all(), "every chosen client is available")
        promise(expected in (None, chosen.size), f"{expected} clients are chosen, as expected_count says")
        self.registered |= set(available.tolist())
        self.round, self.chosen = self.round + 1, chosen

    @rule(clients=MASKS, completed=MASKS, world=NUMBERS)
    def play(self, clients: int, completed: int, world: int) -> None:
        """A whole round: left to chance, few choices would ever be reported."""
        self.select(clients, world)
        self.observe(completed, world)

    @precondition(lambda self: self.chosen is not None)
    @rule(completed=MASKS, world=NUMBERS)
    def observe(self, completed: int, world: int) -> None:
        """Report the round, without clients that were forgotten since; some of them lack what they may lack."""
        rng = np.random.default_rng(world)
        clients = rng.permutation(np.asarray(self.chosen, dtype=np.int64))
        done = np.array([completed >> int(k) % MOST & 1 for k in clients], dtype=np.bool_)
        report = report_for(self.selector, clients, done, rng, missing=0.3, spares=0.2)
        self._both(lambda selector: selector.observe(report))
        self.chosen = None

    @rule(clients=MASKS)
    def forget(self, clients: int) -> None:
        """Some clients leave; their rows may be given to others."""
        gone = np.append(self._some(clients), self.most + 5)
        self._both(lambda selector: selector.forget(gone))
        self.registered -= set(gone.tolist())
        if self.chosen is not None:
            self.chosen = self.chosen[~np.isin(self.chosen, gone)]
        for attribute, value in self.selector.client_state.items():
            rows = getattr(self.selector, attribute)
            rows = rows[gone[gone < len(rows)]]
            new = np.broadcast_to(np.asarray(value), rows.shape)
            promise(np.array_equal(rows, new, equal_nan=new.dtype.kind == "f"), f"forget resets {attribute!r}")

    @rule()
    def save(self) -> None:
        """Keep the state for later."""
        self.saved = (self.selector.state_dict(), self.registered, self.round, self.chosen)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        """Go back to the kept state: the selector as it is, its twin as a new one."""
        assert self.saved is not None
        state, self.registered, self.round, self.chosen = self.saved
        self.twin = self.make(seed=7)
        self._both(lambda selector: selector.load_state_dict(state))

    @rule()
    def resume(self) -> None:
        """Stop the twin and continue it from the selector's state."""
        self.twin = self.make(seed=11)
        self.twin.load_state_dict(self.selector.state_dict())

    @invariant()
    def state_is_sound(self) -> None:
        """The state is finite, counts rightly, and is the twin's."""
        state = self.selector.state_dict()
        promise_finite(self.selector, "whatever happens", state)
        promise(self.selector.num_clients == len(self.registered), "clients informed or seen are registered, no others")
        promise(self.selector.round == self.round, "each select is a round")
        key = unlike(state, self.twin.state_dict())
        promise(not key, f"state {key!r} is the same after save, load, continue as without a stop")

    def _some(self, mask: int, order: int | None = None) -> IntArray:
        """The clients of a mask; in the order of a world, else ascending."""
        clients = np.array([k for k in range(self.size) if mask >> k % MOST & 1], dtype=np.int64)
        return clients if order is None else np.random.default_rng(order).permutation(clients)

    def _inform(self, clients: IntArray, names: list[str], world: int) -> None:
        rng = np.random.default_rng(world)
        told = {name: values_for(name, clients.size, rng) for name in names}
        for value in told.values():
            value[rng.uniform(size=clients.size) < 0.2] = np.nan
        self._both(lambda selector: selector.inform(clients, **told))

    def _both(self, act: Callable[[Selector], None]) -> None:
        act(self.selector)
        act(self.twin)
