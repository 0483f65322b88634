"""Whatever a hostile client sends, in either API: the conformance suite's fleet keeps every promise.

Hypothesis makes up the replies: arrays, a number of examples, metrics, and the way in which each comes. Each round has
one, from a client of the fleet. One more client answers probes and evaluations with generated metrics.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedsel_flwr.rounds.settings import MetricKeys
from fedsel_flwr.testing import harness, strategy_conformance
from fedsel_flwr.testing.fleet import Fault, Fleet, FleetPlan, NoReply, Reply
from fedsel_flwr.testing.random_rounds import nonfinite_key
from tests.strategies.helpers import SHAPES
from tests.testing.strategies_under_test import APIS, ARRAYS, BASES, SELECTORS, wrapped

ROUNDS, LIAR = 12, 6
"""Rounds with a generated reply, and the number of the client whose probes and evaluations are generated."""
LEFT_OUT = (
    # What a generated reply costs is not known in advance, and an update in another type reaches the base converted.
    strategy_conformance.check_failures_are_named,
    strategy_conformance.check_base_gets_kept_updates,
    # These play the rounds again.
    strategy_conformance.check_same_seed,
    strategy_conformance.check_save_and_load,
)
EXTREME = st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 1.0, 9e17, 1e19, 3e38, 1e300, -1e308, 2.0**53, 2.0**63])
NUMBER = st.one_of(EXTREME, st.floats())
DTYPES = ("f4", "f4", "f8", "f2", "i8", "u1", "?", "c8", "U3", "M8[s]")
TEXT = st.one_of(st.text(max_size=12), st.sampled_from(["../../x", "\x1b[2J\nINFO : fine", "h0", "nan", "\ud800"]))
SCALAR = st.one_of(
    NUMBER, NUMBER, st.integers(-(2**63), 2**63 - 1), st.booleans(), TEXT, st.binary(max_size=12), st.just(10**400),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(
        [getattr(MetricKeys(), key) for key in MetricKeys.__dataclass_fields__]
        + ["loss", "rms_loss", "local_accuracy", "gradient", "sketch", "accuracy", "num-examples", "norm_bit"]
    ),
    TEXT,
)
METRICS = st.dictionaries(KEYS, SCALAR, max_size=8)


class Trap:
    """Unpickled, it raises."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle was read')",))


def _pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def _huge() -> bytes:
    """The header of an array of 2^40 numbers, and nothing behind it."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


RAW = st.one_of(st.binary(max_size=40), st.sampled_from([_pickled(), _huge(), b"PK\x03\x04", b""]))


@st.composite
def models(draw: Any) -> list[np.ndarray] | bytes:
    """Arrays near a model's form, with a number that is odd here and there, or bytes that are none."""
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return draw(RAW)
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shapes = SHAPES if kind > 1 else draw(st.lists(st.sampled_from([*SHAPES, (), (0,), (2, 3)]), max_size=3))
    value, odd = draw(st.floats(-3, 3)), draw(NUMBER)
    arrays = []
    with np.errstate(all="ignore"):
        for shape in shapes:
            numbers = np.full(shape, value)
            if kind > 4 and numbers.size:
                numbers.flat[-1] = odd
            arrays.append(numbers.astype("i8").astype(dtype) if dtype.kind == "M" else numbers.astype(dtype))
    return arrays


WAYS = ("sent", "sent", "sent", "sent", "not at all", "as an error", "as a refusal")


@st.composite
def replies(draw: Any) -> tuple[str, Any, Any, dict[str, Any]]:
    """A way, a model, a number of examples and metrics, of which the latency is sound in every second reply."""
    metrics = dict(draw(METRICS))
    if draw(st.booleans()):  # the rest is more often looked at where the latency is sound
        metrics["latency_s"] = draw(st.floats(0.1, 4.0))
    return draw(st.sampled_from(WAYS)), draw(models()), draw(st.one_of(st.integers(1, 99), SCALAR)), metrics


def _recordable(value: Any) -> Any:
    """A value in a type that Flower's records take."""
    if isinstance(value, bytes):
        return [float(len(value))]
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else [2**62, -(2**62)]
    return value


def _fault(api: str, way: str, arrays: Any, count: Any, metrics: Mapping[str, Any]) -> Fault:
    """A generated reply as a fault of the fleet."""

    def change(reply: Reply) -> Reply:
        if way == "not at all":
            raise NoReply
        if way == "as an error":
            raise ValueError(str(metrics))
        told: dict[str, Any] = {**reply.metrics, **metrics}
        own = replace(reply, arrays=arrays, num_examples=count, refused=str(metrics) if way == "as a refusal" else "")
        if api == "legacy":
            return replace(own, metrics=told)
        return replace(own, num_examples=_recordable(count), metrics={k: _recordable(v) for k, v in told.items()})

    return Fault("never answers" if way == "not at all" else "sends what Hypothesis made up", change)


@dataclass(frozen=True, kw_only=True)
class HostilePlan(FleetPlan):
    """The plan of a fleet whose faults are generated; its last rounds need two of the usual ones.

    Attributes:
        generated: The faults, one for each round.
        odd: The metrics of the liar, one mapping for each round.
    """

    generated: tuple[Fault, ...]
    odd: tuple[dict[str, Any], ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        usual = [one for one in super().faults if one.name in ("raises an exception", "sends NaN")]
        return (*self.generated, *usual)


class HostileFleet(Fleet):
    """A fleet with a liar."""

    def evaluation_reply(self, node: str, config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        loss, count, metrics = super().evaluation_reply(node, config)
        assert isinstance(self.plan, HostilePlan)
        if self.numbers[node] == LIAR:
            metrics |= self.plan.odd[self.round % len(self.plan.odd)]
            # Flower sends a loss of another type over no connection.
            loss = metrics["loss"] if isinstance(metrics.get("loss"), float) else loss
        return loss, count, metrics


def _check(api: str, selector: str, base: str, sent: list[Any], odd: list[dict[str, Any]]) -> None:
    """Play the replies, and check the promises that a single run shows."""
    own = harness.StrategyHarness(partial(wrapped, api, selector, base, missing_columns="random"), ARRAYS)
    told = odd if api == "legacy" else [{key: _recordable(value) for key, value in one.items()} for one in odd]
    own.plan = HostilePlan(**vars(own.plan), generated=tuple(_fault(api, *one) for one in sent), odd=tuple(told))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Flower's averages, on metrics that overflow
        patch.setattr(harness, "Fleet", HostileFleet)
        for check in strategy_conformance.STRATEGY_CHECKS:
            if check not in LEFT_OUT:
                check(own)
    run = own.full_run
    for seen in run.rounds:
        odd_ones = {str(LIAR), *(run.fleet.id_of(node) for node in seen.broken)}
        for row in run.rows(seen.number):
            # Of the fleet's clients one fails each evaluation, and so each probe.
            sound = row.completed and row.problem in ("", "probe: OSError: the battery, is: empty")
            assert sound or row.client_id in odd_ones, row
            assert row.problem.isprintable()
            assert row.client_id.isprintable()
    assert all(np.isfinite(array).all() for seen in run.rounds for array in seen.after)
    assert not nonfinite_key(run.strategy.selector), nonfinite_key(run.strategy.selector)
    for record in run.strategy.history.rounds:
        assert np.isfinite([record.round_s, record.simulated_s]).all()
        assert not np.isinf([record.energy_j, record.total_energy_j]).any()


def _generated(api: str, examples: int) -> None:
    """Play so many generated courses."""

    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        sent=st.lists(replies(), min_size=ROUNDS, max_size=ROUNDS),
        odd=st.lists(METRICS, min_size=4, max_size=4),
        selector=st.sampled_from(sorted(SELECTORS)),
        base=st.sampled_from(sorted(BASES["legacy"])),
    )
    def play(sent: list[Any], odd: list[dict[str, Any]], selector: str, base: str) -> None:
        _check(api, selector, base, sent, odd)

    play()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("api", sorted(APIS))
def test_some_dozen_hostile_replies(api: str) -> None:
    _generated(api, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("api", sorted(APIS))
def test_some_thousand_hostile_replies(api: str) -> None:
    _generated(api, 400)


def test_the_traps_are_traps() -> None:
    """The generated bytes that must not be unpickled would raise, if they were."""
    with pytest.raises(SystemExit):
        pickle.loads(pickle.dumps(Trap()))
