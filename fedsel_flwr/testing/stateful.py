"""The state machine of ``check_stateful``: a selector under random sequences of calls from Hypothesis.

Only this module imports Hypothesis, and only :func:`fedsel_flwr.testing.check_stateful` imports this module.
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
from fedsel_flwr.selectors.base import Probe, Selector
from fedsel_flwr.selectors.columns import INFORMED, PROBED
from fedsel_flwr.testing.random_rounds import (
    SelectorFactory,
    choose,
    differing_key,
    fleet_size,
    loaded,
    promise,
    promise_finite,
    promise_forgotten,
    report_for,
    side_information,
)

FEWEST, MOST = 6, 10
"""Smallest and largest number of clients, for three a round. They are so small that rows are reused."""
MASKS = st.integers(0, 2**MOST - 1)
NUMBERS = st.integers(0, 99)


def run_sequences(make: SelectorFactory, *, sequences: int, steps: int) -> None:
    """Run ``sequences`` sequences of up to ``steps`` calls, the same ones in every run."""
    chosen = settings(
        max_examples=sequences,
        stateful_step_count=steps,
        deadline=None,
        # Without Phase.explain, for which Hypothesis traces every line of a failing sequence.
        phases=(Phase.generate, Phase.shrink),
        # The same sequences in every run, without a folder of examples in the author's project.
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(SelectorMachine, make), settings=chosen)  # type: ignore[arg-type]


class SelectorMachine(RuleBasedStateMachine):
    """A selector and its twin, which is saved and loaded in between; both must agree.

    Hypothesis draws two numbers for a call. The bits of the first name the clients. With more than three clients a
    round, a bit names several. The second is the seed of the values.

    Args:
        make: The selector's factory.
    """

    def __init__(self, make: SelectorFactory) -> None:
        super().__init__()
        self.make = make
        self.selector, self.twin = make(seed=3), make(seed=3)
        self.size, self.most, self.round = fleet_size(self.selector, FEWEST), fleet_size(self.selector, MOST), 0
        self.registered: frozenset[int] = frozenset()
        # The chosen clients that are not reported yet: those of the last choice, or in buffered rounds of several.
        self.chosen: IntArray | None = None
        self.saved: tuple[Any, ...] | None = None

    @rule()
    def grow(self) -> None:
        """Let one more client exist."""
        self.size = min(self.size + 1, self.most)

    @rule(clients=MASKS, columns=MASKS, seed=NUMBERS)
    def inform(self, clients: int, columns: int, seed: int) -> None:
        """Inform about some columns of some clients, with some NaN values."""
        informed = self._clients_of(clients)
        names = [name for bit, name in enumerate(sorted(INFORMED)) if columns >> bit & 1]
        self._inform(informed, names, seed)
        self.registered |= set(informed.tolist())

    @rule(clients=MASKS, answered=st.booleans(), seed=NUMBERS)
    def probe(self, clients: int, answered: bool, seed: int) -> None:
        """Take the selector's probe, with or without an answer."""
        available = self._clients_of(clients, seed)
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
            self._inform(request.clients, list(request.columns), seed)

    @rule(clients=MASKS, seed=NUMBERS, buffered=st.booleans())
    def select(self, clients: int, seed: int, buffered: bool = False) -> None:
        """Begin a round; in a buffered one, clients of earlier choices may be at work."""
        available, at_work = self._clients_of(clients, seed), np.zeros(0, dtype=np.int64)
        if buffered and self.selector.buffers and self.chosen is not None:
            at_work = self.chosen
        available = available[~np.isin(available, at_work)]
        chosen = choose(self.selector, available)
        same = np.array_equal(chosen, self.twin.select(available))
        promise(same, "a loaded selector chooses as one that never stopped")
        self.registered |= set(available.tolist())
        self.round, self.chosen = self.round + 1, np.concatenate([at_work, chosen])

    @rule(clients=MASKS, completed=MASKS, seed=NUMBERS)
    def play(self, clients: int, completed: int, seed: int) -> None:
        """Play a whole round, because random calls alone would report few choices."""
        self.select(clients, seed)
        self.observe(completed, seed)

    @precondition(lambda self: self.chosen is not None)
    @rule(completed=MASKS, seed=NUMBERS, arrived=MASKS)
    def observe(self, completed: int, seed: int, arrived: int = -1) -> None:
        """Report the round without clients forgotten since. Some clients lack optional columns.

        In buffered rounds, only the clients in ``arrived`` are reported, and the others stay at work.
        """
        rng, chosen = np.random.default_rng(seed), np.asarray(self.chosen, dtype=np.int64)
        here = np.array([not self.selector.buffers or bool(arrived >> int(k) % MOST & 1) for k in chosen], np.bool_)
        clients = rng.permutation(chosen[here])
        done = np.array([completed >> int(k) % MOST & 1 for k in clients], dtype=np.bool_)
        report = report_for(self.selector, clients, done, rng, missing=0.3, spares=0.2)
        self._both(lambda selector: selector.observe(report))
        self.chosen = None if here.all() else chosen[~here]

    @rule(clients=MASKS)
    def forget(self, clients: int) -> None:
        """Forget some clients. New clients may get their rows."""
        # The selector must ignore an index beyond the fleet.
        gone = np.append(self._clients_of(clients), self.most + 5)
        before = {attribute: np.array(getattr(self.selector, attribute)) for attribute in self.selector.client_state}
        self._both(lambda selector: selector.forget(gone))
        self.registered -= set(gone.tolist())
        if self.chosen is not None:
            self.chosen = self.chosen[~np.isin(self.chosen, gone)]
        for attribute, value in self.selector.client_state.items():
            promise_forgotten(attribute, before[attribute], getattr(self.selector, attribute), gone, value)

    @rule()
    def save(self) -> None:
        """Save the state for a later :meth:`load`."""
        self.saved = (self.selector.state_dict(), self.registered, self.round, self.chosen)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        """Load the saved state into the selector itself and into a new twin."""
        assert self.saved is not None
        state, self.registered, self.round, self.chosen = self.saved
        self.twin = self.make(seed=7)
        self._both(lambda selector: selector.load_state_dict(state))

    @rule()
    def resume(self) -> None:
        """Replace the twin by a new selector that loads the selector's state."""
        self.twin = loaded(self.make, self.selector.state_dict(), seed=11)

    @invariant()
    def state_is_sound(self) -> None:
        """Check that the state is finite, counts rounds and clients correctly, and equals the twin's."""
        state = self.selector.state_dict()
        promise_finite(self.selector, "whatever happens", state)
        known = self.selector.num_clients == len(self.registered)
        promise(known, "clients informed about or available are registered, and no others")
        promise(self.selector.round == self.round, "each select is a round")
        key = differing_key(state, self.twin.state_dict())
        promise(not key, f"state {key!r} is the same after save, load, continue as without a stop")

    def _clients_of(self, mask: int, seed: int | None = None) -> IntArray:
        """Return the clients of a mask, ascending, or in random order with a seed."""
        clients = np.array([k for k in range(self.size) if mask >> k % MOST & 1], dtype=np.int64)
        return clients if seed is None else np.random.default_rng(seed).permutation(clients)

    def _inform(self, clients: IntArray, names: list[str], seed: int) -> None:
        rng = np.random.default_rng(seed)
        informed = side_information(names, clients.size, rng, missing=0.2)
        self._both(lambda selector: selector.inform(clients, **informed))

    def _both(self, act: Callable[[Selector], None]) -> None:
        act(self.selector)
        act(self.twin)
