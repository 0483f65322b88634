"""The conformance suite catches selectors that break its promises, by the promise's words, and passes good ones.

It plays any number of clients a round from 1 to 100, and refuses others.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from fedsel_flwr.checks import IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random, RoundReport, create
from fedsel_flwr.selectors.base import Probe
from fedsel_flwr.testing import CHECKS, check_selector, check_stateful
from fedsel_flwr.testing import conformance as suite


class Greedy(Random):
    """Always the same clients, unavailable ones included."""

    def _select(self, available: IntArray) -> IntArray:
        return np.array([0, 1, 2])


class GlobalState(Random):
    """Draws from the global generator."""

    def _select(self, available: IntArray) -> IntArray:
        return np.random.permutation(available)[:3]  # noqa: NPY002


class Forgetful(Random):
    shift = 0

    def _select(self, available: IntArray) -> IntArray:
        self.shift += 1
        return np.roll(available, self.shift)[:3]


class Clinging(Random):
    """Asks client 0 whenever it is there, dead or alive."""

    def _select(self, available: IntArray) -> IntArray:
        score = np.zeros(max(available) + 1)
        score[0] = 1.0
        return self._largest(score, available)


class Stingy(Random):
    """Chooses one client fewer than it says."""

    def _select(self, available: IntArray) -> IntArray:
        return super()._select(available)[:-1]


class Generous(Random):
    """Takes both of two."""

    def _select(self, available: IntArray) -> IntArray:
        return available


class Odd(Random):
    """Has a number of clients that is none."""

    def __init__(self, *, clients_per_round: Any, seed: int | None = None) -> None:
        super().__init__(clients_per_round=3, seed=seed)
        self.clients_per_round = clients_per_round


class Averaging(Random):
    """Keeps a mean of what clients report, as it should: what is missing is left out."""

    needs: ClassVar[frozenset[str]] = frozenset({"loss", "gradient", "latency"})
    client_state: ClassVar[dict[str, Any]] = {
        "_mean": 0.0, "_plays": 0, "_direction": np.zeros(4), "_slow": False, "_hash": np.uint64(7),
    }  # fmt: skip
    free_state: ClassVar[dict[str, Any]] = {"_history": (np.float32, (2,))}
    scalar_state = ("_last",)

    _mean: Any
    _plays: Any
    _direction: Any
    _slow: Any
    _hash: Any
    _history: Any
    _last: Any = 0.0

    def _select(self, available: IntArray) -> IntArray:
        return self._largest(self._mean + self._direction.sum(axis=1) - self._slow - self._plays, available)

    def _observe(self, report: RoundReport) -> None:
        k = report.clients
        assert report.loss is not None
        assert report.gradient is not None
        known = np.isfinite(report.loss)
        self._plays[k] += 1
        self._mean[k[known]] = report.loss[known]
        self._slow[k] = report.latency > 1.0
        self._hash[k] *= np.uint64(3)
        rows = np.isfinite(report.gradient).all(axis=1)
        self._direction[k[rows]] = report.gradient[rows]
        self._last = float(report.latency.min())
        self._history = np.vstack([self._history, np.float32([[self._last, self.round]])])[-5:]


class Poisoned(Averaging):
    """Takes a missing loss into its mean."""

    def _observe(self, report: RoundReport) -> None:
        super()._observe(report)
        self._mean[report.clients[report.completed]] = np.asarray(report.loss)[report.completed]


class TookNaN(Random):
    """Takes side information as it comes."""

    client_state: ClassVar[dict[str, float]] = {"_size": 1.0}
    _size: Any

    def _inform(self, clients: IntArray, columns: Any) -> None:
        self._size[clients] = columns.get("num_examples", 1.0)


class Unread(Averaging):
    """Needs a column that it never looks at."""

    needs: ClassVar[frozenset[str]] = Averaging.needs | {"energy"}


class Remembered(Random):
    """Expects that ``remembers`` keeps what replies bring."""

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})
    remembers: ClassVar[dict[str, str]] = {"loss": "_loss"}
    client_state: ClassVar[dict[str, float]] = {"_loss": 0.0}


class Undeclared(Averaging):
    """Looks at a column that it does not need."""

    def _observe(self, report: RoundReport) -> None:
        super()._observe(report)
        if report.accuracy is not None and self.round > 3:
            self._last = float(np.nanmax(np.append(report.accuracy, 0.0)))


class Remembers(Averaging):
    """Knows clients by a table that is neither saved nor forgotten."""

    def __init__(self, *, clients_per_round: int, seed: int | None = None) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self._table: dict[int, int] = {}

    def _select(self, available: IntArray) -> IntArray:
        order = sorted(available.tolist(), key=lambda k: (self._table.get(k, 0), k))
        return np.array(order[: self.clients_per_round])

    def _observe(self, report: RoundReport) -> None:
        super()._observe(report)
        for k in report.clients.tolist():
            self._table[k] = self._table.get(k, 0) + 1


class Clings(Averaging):
    """Takes a client off the register but keeps its rows."""

    def forget(self, clients: IntArray) -> None:
        mean = self._mean.copy()
        super().forget(clients)
        self._mean = mean


class ForgetsAll(Averaging):
    """Takes the right clients off the register, and resets the rows of all."""

    def forget(self, clients: IntArray) -> None:
        super().forget(clients)
        self._mean[:] = 0.0


class NeverForgets(Averaging):
    """Keeps the client too."""

    def forget(self, clients: IntArray) -> None:
        pass


class ByIndex(Averaging):
    """A newcomer's row depends on which row it is."""

    def _admit(self, clients: IntArray) -> None:
        self._mean[clients] = clients


class OtherType(Averaging):
    """Puts fractions into an array that was declared to be of integers."""

    free_state: ClassVar[dict[str, Any]] = {"_history": (np.int64, (2,))}


class OtherNumber(Averaging):
    """Begins with an integer and goes on with a fraction."""

    _last = 0


class Narrows(Averaging):
    """Comes back with fewer digits than it was saved with."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._mean = self._mean.astype(np.float32)


class Fragile(Averaging):
    """Has no answer for a round in which everybody failed, if somebody was forgotten before."""

    scalar_state = ("_last", "_gone")
    _gone = False

    def forget(self, clients: IntArray) -> None:
        self._gone = self._gone or self.num_clients > 2
        super().forget(clients)

    def _observe(self, report: RoundReport) -> None:
        super()._observe(report)
        if self._gone and not report.completed.any():
            self._last = float("nan")


class OwnChoice(Averaging):
    """Learns of those that it chose itself, and of nobody else."""

    client_state: ClassVar[dict[str, Any]] = {**Averaging.client_state, "_mine": False}
    _mine: Any

    def _select(self, available: IntArray) -> IntArray:
        chosen = super()._select(available)
        self._mine[:] = False
        self._mine[chosen] = True
        return chosen

    def _observe(self, report: RoundReport) -> None:
        if self._mine[report.clients].any():
            super()._observe(report)


class Curious(Averaging):
    """Asks in every round."""

    def probe(self, available: IntArray) -> Probe | None:
        self._register(available)
        return Probe(clients=available, columns=("loss",))


class Promises(Averaging):
    """Says that it always takes three."""

    def expected_count(self, num_available: int) -> int | None:
        return min(3, num_available)


class Twice(Averaging):
    """Says that everybody was drawn twice, which holds for its own choice alone."""

    def draws(self, clients: IntArray) -> IntArray:
        return np.full(len(clients), 2)


class Stubborn(Averaging):
    """Lets nobody decide but itself."""

    def select(self, available: IntArray) -> IntArray:
        return super().select(available)[:3]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_good_selector_passes(check: Any) -> None:
    """State of every kind, an optional number and an optional vector."""
    check(partial(Averaging, clients_per_round=3))


@pytest.mark.parametrize(
    ("check", "broken", "promise"),
    [
        (suite.check_choice, Greedy, "every chosen client is available"),
        (suite.check_input_order, GlobalState, "the order of `available` does not matter"),
        (suite.check_determinism, GlobalState, "the same seed gives the same selections"),
        (suite.check_save_and_load, Forgetful, "save, load, continue"),
        (suite.check_needs, Unread, "columns in needs are read .* leave out energy"),
        (suite.check_needs, Remembered, "remembers keeps loss of the roll call and of probes only. Read report.loss"),
        (suite.check_needs, Undeclared, "columns that are read are in needs: add accuracy"),
        (suite.check_missing_values, Poisoned, "state 'mean' stays finite when columns .*gradient, loss.* are NaN"),
        (suite.check_missing_values, TookNaN, "state 'size' stays finite when columns .*none here.* are NaN"),
        (suite.check_forget, Remembers, "a forgotten client counts as a new client"),
        (suite.check_forget, Clings, "forget resets '_mean' of a client"),
        (suite.check_forget, ForgetsAll, "forget leaves '_mean' of the other clients as it is"),
        (suite.check_forget, NeverForgets, "a forgotten client is not registered"),
        (suite.check_forget, ByIndex, "a reused row is as new"),
        (suite.check_save_and_load, OtherType, "takes its own state: state 'history' must hold finite int64 numbers"),
        (suite.check_save_and_load, OtherNumber, "takes its own state: state 'last' must hold finite int64 numbers"),
        (suite.check_save_and_load, Narrows, "state 'mean' comes back with its numbers, shape and type"),
        (suite.check_save_and_load, Remembers, "save, load, continue"),
        (suite.check_warm_up, OwnChoice, "a selector learns from the reports of the warm-up"),
        (suite.check_warm_up, Curious, "no client is probed in the warm-up"),
        (suite.check_warm_up, Promises, "3 clients are chosen, as expected_count says"),
        (suite.check_warm_up, Twice, "in the warm-up each client is drawn once"),
        (suite.check_warm_up, Stubborn, "9 clients are chosen, as expected_count says"),
        (suite.check_warm_up, Remembers, "a loaded selector chooses as one that never stopped"),
    ],
)
def test_a_check_catches_its_offender(check: Any, broken: Any, promise: str) -> None:
    make = partial(broken, clients_per_round=3)
    with pytest.raises(AssertionError, match=f"broken promise: .*{promise}"):
        check(make)


def test_the_suite_runs_every_check_of_the_package() -> None:
    assert len(CHECKS) == len({check.__name__ for check in CHECKS}) == 18
    with pytest.raises(AssertionError, match="every chosen client is available"):
        check_selector(partial(Greedy, clients_per_round=3))


QUICK = [check for check in CHECKS if check not in (suite.check_spawned_process, suite.check_many_clients)]
"""The others take a second each whatever the number is, and play it in the suite's own tests."""
SELECTORS: dict[str, dict[str, Any]] = {
    "bsfl": {"min_latency": 0.1}, "gpfl": {"total_rounds": 100}, "power-of-choice": {}, "tifl": {},
}  # fmt: skip


@pytest.mark.parametrize("clients_per_round", [1, 8])
@pytest.mark.parametrize("name", SELECTORS)
def test_our_selectors_pass_with_one_client_and_with_many(name: str, clients_per_round: int) -> None:
    for check in QUICK:
        check(partial(create, name, clients_per_round=clients_per_round, **SELECTORS[name]))


@pytest.mark.parametrize("clients_per_round", [1, 3, 8, 20])
def test_broken_promises_are_found_whatever_the_number(clients_per_round: int) -> None:
    with pytest.raises(AssertionError, match="a client that never answers is not chosen for ever"):
        suite.check_dead_client(partial(Clinging, clients_per_round=clients_per_round))
    with pytest.raises(AssertionError, match=r"[12] clients are chosen, as expected_count says"):
        suite.check_empty_and_short(partial(Stingy, clients_per_round=clients_per_round))
    if clients_per_round == 1:
        with pytest.raises(AssertionError, match="no more clients are chosen than clients_per_round says"):
            suite.check_empty_and_short(partial(Generous, clients_per_round=1))


@pytest.mark.parametrize("number", [0, 101, 2.5, "3"])
@pytest.mark.parametrize("check", [check_selector, check_stateful])
def test_other_numbers_are_refused(check: Any, number: Any) -> None:
    with pytest.raises(ParameterError, match="clients_per_round must be a whole number from 1 to 100, or None"):
        check(partial(Odd, clients_per_round=number))


@pytest.mark.parametrize("check", [check_selector, check_stateful])
def test_a_class_that_needs_more_than_a_seed_is_refused_with_the_way_out(check: Any) -> None:
    with pytest.raises(ParameterError, match=r"clients_per_round.*partial\(MySelector, clients_per_round=3\)"):
        check(Random)


@pytest.mark.parametrize("clients_per_round", [1, 3, 8])
def test_a_good_selector_passes_in_every_order_of_calls(clients_per_round: int) -> None:
    check_stateful(partial(Averaging, clients_per_round=clients_per_round), sequences=10)


@pytest.mark.parametrize(
    ("broken", "promise", "steps"),
    [
        (Forgetful, "a loaded selector chooses as one that never stopped", 20),
        (TookNaN, "state 'size' stays finite", 10),
        (Clings, "forget resets '_mean'", 10),
        (ForgetsAll, "forget leaves '_mean' of the other clients as it is", 10),
        (NeverForgets, "clients .* are registered, and no others|forget resets", 10),
        (Fragile, "state 'last' stays finite", 14),
    ],
)
def test_the_machine_catches_broken_selectors(broken: Any, promise: str, steps: int) -> None:
    """And prints the calls that lead there."""
    with pytest.raises((AssertionError, ValueError), match=promise) as caught:
        check_stateful(partial(broken, clients_per_round=3), steps=steps)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert "state = SelectorMachine" in notes
    assert notes.count("state.state_is_sound()") > 1
