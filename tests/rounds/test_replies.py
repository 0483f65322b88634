"""Whatever a client sends, reading it never raises and never lets a wrong number through (Hypothesis)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsel_flwr import selectors
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.replies import ClientResult, Reply, read_reply
from fedsel_flwr.rounds.roster import canonical_id, id_order
from fedsel_flwr.rounds.settings import MetricKeys, Settings
from tests.rounds.written import Written, core_of, play_round

KEYS = MetricKeys()
OURS = [getattr(KEYS, entry.name) for entry in fields(MetricKeys)]
REFERENCE: Sequence[np.ndarray] = [np.zeros((2, 3), dtype=np.float32), np.zeros(2, dtype=np.float32)]
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), FLOATS, st.floats(0, 20), st.text(max_size=20), st.binary(max_size=20),
    st.lists(FLOATS, max_size=3), st.complex_numbers(), st.fractions(), st.decimals(allow_nan=True), st.builds(object),
    st.builds(np.float32, st.floats(width=32)), st.builds(np.float16, st.floats(width=16)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)), st.builds(np.uint64, st.integers(0, 2**64 - 1)),
    st.builds(np.bool_, st.booleans()), hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=2, max_side=2)),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
METRICS = st.dictionaries(st.one_of(st.sampled_from(OURS), st.text(max_size=5)), ANYTHING, max_size=8)
DTYPES = st.one_of(
    hnp.floating_dtypes(), hnp.integer_dtypes(), hnp.boolean_dtypes(), hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(max_len=3), hnp.byte_string_dtypes(max_len=3), hnp.datetime64_dtypes(),
)  # fmt: skip
GOOD = st.tuples(
    hnp.arrays(np.float32, (2, 3), elements=st.floats(-10, 10, width=32)),
    hnp.arrays(np.float32, (2,), elements=st.floats(-10, 10, width=32)),
).map(list)
SHAPES = st.sampled_from([(2, 3), (2,), (3, 2), (), (0,), (6,)])
WEIRD = st.lists(DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)), max_size=3)
ARRAYS = st.one_of(st.none(), GOOD, WEIRD)
REPLIES = st.builds(
    Reply, arrays=ARRAYS, num_examples=st.one_of(ANYTHING, st.integers(1, 1000)), metrics=METRICS,
    observed_s=st.one_of(st.none(), st.floats(0, 1e6)),
    error=st.sampled_from(["", "", "", "no answer", "exception: ValueError: x"]),
)  # fmt: skip
CLOCKS = st.sampled_from(["virtual", "server"])


def read(reply: Reply, clock: Any = "virtual", max_latency: float = 5.0, slack: float = 0.5) -> ClientResult:
    settings = Settings(max_latency=max_latency, clock=clock, clock_slack=slack)
    return read_reply(reply, settings, reference=REFERENCE, client_id="7")


def good(**metrics: Any) -> Reply:
    """A sound update with these metrics."""
    return Reply(arrays=[a + 1 for a in REFERENCE], num_examples=3, metrics=metrics, observed_s=1.0)


@settings(max_examples=300, deadline=None)
@given(reply=REPLIES, clock=CLOCKS, max_latency=st.floats(1e-3, 1e3), slack=st.floats(0, 10))
def test_reading_never_raises_and_keeps_its_promises(reply: Reply, clock: Any, max_latency: float, slack: Any) -> None:
    metrics, before = dict(reply.metrics), None if reply.arrays is None else [a.tobytes() for a in reply.arrays]
    result = read(reply, clock, max_latency, slack)
    assert reply.metrics.keys() == metrics.keys()
    assert all(reply.metrics[key] is value for key, value in metrics.items())
    assert before == (None if reply.arrays is None else [a.tobytes() for a in reply.arrays])
    assert math.isfinite(result.latency_s)
    assert 0.0 <= result.latency_s <= max_latency
    assert result.completed or result.latency_s == max_latency
    assert all(math.isfinite(v) or math.isnan(v) for v in result.values.values())
    for name in ("energy", "download", "compute", "upload"):
        assert not result.values[name] < 0
    assert result.faulty_keys <= set(OURS) & reply.metrics.keys()
    assert all(isinstance(p, str) and p and len(p) < 400 for p in result.problems)
    if result.faulty_keys or not result.completed:
        assert result.problems
    if result.completed:
        assert result.num_examples >= 1
        assert reply.arrays is not None
        assert [a.shape for a in reply.arrays] == [a.shape for a in REFERENCE]
        for array, own in zip(reply.arrays, REFERENCE, strict=True):
            with np.errstate(over="ignore"):
                assert np.isfinite(array.astype(own.dtype)).all()
    else:
        assert not reply.error or reply.error in result.problems


@settings(max_examples=200, deadline=None)
@given(latency=st.floats(0, 100), kind=st.sampled_from([float, np.float64, np.float32]))
@example(latency=5.0, kind=float)
@example(latency=4.999, kind=float)
def test_a_sound_latency_is_believed_to_the_bit(latency: float, kind: Any) -> None:
    reported = kind(latency)
    result = read(good(latency_s=reported, client_id="7"))
    late = float(reported) >= 5.0
    assert result.completed != late
    assert result.latency_s == (5.0 if late else float(reported))
    assert bool(result.problems) == late


@settings(max_examples=200, deadline=None)
@given(reported=ANYTHING, observed=st.floats(0, 4), slack=st.floats(0, 2))
def test_the_servers_clock_bounds_every_report(reported: Any, observed: float, slack: float) -> None:
    reply = Reply(arrays=REFERENCE, num_examples=1, metrics={"latency_s": reported}, observed_s=observed)
    result = read(reply, "server", 5.0, slack)
    assert result.completed
    assert max(0.0, observed - slack) <= result.latency_s <= observed
    if isinstance(reported, float) and max(0.0, observed - slack) <= reported <= observed:
        assert result.latency_s == reported
        assert result.problems == ()
    elif isinstance(reported, str | bytes | list | dict | bool):
        assert result.problems
    absent = read(Reply(arrays=REFERENCE, num_examples=1, observed_s=observed), "server", 5.0, slack)
    assert (absent.latency_s, absent.latency_source, absent.problems) == (observed, "observed", ())


@settings(max_examples=100, deadline=None)
@given(metrics=METRICS)
def test_only_our_own_keys_are_looked_at(metrics: dict[str, Any]) -> None:
    foreign = {key: value for key, value in metrics.items() if key not in OURS}
    plain, mixed = read(good(latency_s=1.0)), read(good(latency_s=1.0, **foreign))
    assert (plain.completed, plain.problems, plain.faulty_keys) == (mixed.completed, mixed.problems, mixed.faulty_keys)
    assert plain.latency_s == mixed.latency_s == 1.0


@pytest.mark.parametrize("value", [-1, "fast", None, float("nan"), True, [1.0], b"1", -float("inf"), 10**400, 1j])
def test_an_unusable_latency_becomes_max_latency_and_the_update_is_kept(value: Any) -> None:
    result = read(good(latency_s=value))
    assert (result.completed, result.latency_s, result.faulty_keys) == (True, 5.0, {"latency_s"})
    assert len(result.problems) == 1


@pytest.mark.parametrize("key", ["energy_j", "download_s", "compute_s", "upload_s"])
@pytest.mark.parametrize("value", [-0.5, "much", float("inf"), True, [1.0]])
def test_an_unusable_part_is_unknown_and_the_rest_stays(key: str, value: Any) -> None:
    sound = {"energy_j": 1.0, "download_s": 2.0, "compute_s": 3.0, "upload_s": 4.0, "latency_s": 0.5}
    result = read(good(**{**sound, key: value}))
    assert (result.completed, result.latency_s, result.faulty_keys) == (True, 0.5, {key})
    assert math.isnan(result.values[key.rsplit("_", 1)[0]])
    assert sum(math.isfinite(v) for v in result.values.values()) == 3
    assert len(result.problems) == 1


@pytest.mark.parametrize("count", [0, -1, 1.0, 2.5, "10", None, True, float("nan"), float("inf"), [3], 2**53 + 1])
def test_num_examples_must_be_a_positive_integer_that_a_double_holds(count: Any) -> None:
    result = read(Reply(arrays=REFERENCE, num_examples=count, metrics={"latency_s": 1.0}))
    assert (result.completed, result.latency_s) == (False, 5.0)
    assert "num_examples: expected an integer from 1 to 9007199254740992" in result.problems[0]
    assert read(Reply(arrays=REFERENCE, num_examples=2**53, metrics={"latency_s": 1.0})).completed


@pytest.mark.parametrize(
    ("name", "told", "problems"),
    [
        ("loss", {"loss": 0.5}, ()), ("loss", {}, ("loss: not reported",)),
        ("loss", {"loss": "x"}, ("loss: 'x' cannot be used",)), ("energy_score", {}, ("energy_score: not reported",)),
        ("energy_score", {"energy_score": 0.5}, ()), ("energy_score", {"energy_j": 1.0}, ()),  # derived from joules
        ("energy_score", {"energy_score": 2.0}, ("energy_score: 2.0 cannot be used",)),
    ],
)  # fmt: skip
def test_a_column_that_is_wanted_is_read_or_said_to_be_missing(name: str, told: Any, problems: Any) -> None:
    reply = good(latency_s=1.0, **told)
    result = read_reply(reply, Settings(max_latency=5.0), client_id="7", wanted=frozenset({name}))
    assert (result.completed, result.problems) == (True, problems)


@pytest.mark.parametrize("power", [400, 5000])  # beyond a double; beyond the digits that Python prints
@pytest.mark.parametrize("key", ["latency_s", "energy_j", "client_id", "num_examples"])
def test_huge_integers_do_not_raise(key: str, power: int) -> None:
    for number in (10**power, -(10**power), Fraction(10**power, 3)):
        reply = good(**{key: number})
        if key == "num_examples":
            reply = Reply(arrays=REFERENCE, num_examples=number, metrics={"latency_s": 1.0}, observed_s=1.0)
        assert all(math.isfinite(read(reply, clock).latency_s) for clock in ("virtual", "server"))
    core = core_of(selectors.Random(clients_per_round=1))
    assert core.choose(["a"], None, Written({"a": {"client_id": 1, "num_examples": 10**power}})) == ["a"]


@settings(max_examples=300, deadline=None)
@given(claim=ANYTHING)
@example(1e308)
def test_an_identity_is_a_printable_text_of_bounded_length_or_nothing(claim: Any) -> None:
    name = canonical_id(claim)
    assert name is None or (isinstance(name, str) and 0 < len(name) <= 5000 and name.isprintable())
    if name is not None:
        id_order(name)
        assert canonical_id(name) == name or len(name) > 256


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("abc0123456789", min_size=1, max_size=4), st.tuples(ANYTHING, ANYTHING), max_size=6))
@example({"a": (1, -(2**63))})
@example({"a": (1, 1e308)})
def test_no_introduction_can_stop_a_round(said: dict[str, tuple[Any, Any]]) -> None:
    selector = selectors.CSUCB(clients_per_round=3, max_latency=5.0, seed=0)
    core = core_of(selector)
    facts = {node: {"client_id": c, "num_examples": n} for node, (c, n) in said.items()}
    chosen = play_round(core, list(said), model=None, transport=Written(facts))
    assert set(chosen) <= set(said)
    assert len(chosen) == min(3, len(set(core.parts.roster.ids)))
    assert all(np.isfinite(np.asarray(v, dtype=float)).all() for v in selector.state_dict().values())


@settings(max_examples=80, deadline=None)
@given(replies=st.lists(REPLIES, min_size=4, max_size=4), clock=CLOCKS)
def test_a_round_of_anything_leaves_the_selector_and_the_history_finite(replies: list[Reply], clock: Any) -> None:
    selector = selectors.BSFL(clients_per_round=4, min_latency=0.1, seed=0)
    core = core_of(selector, max_latency=5.0, channels=2, clock=clock, missing_columns="random")
    nodes = core.choose([str(k) for k in range(4)], REFERENCE, Written({str(k): {"client_id": k} for k in range(4)}))
    try:
        outcome = core.collect(dict(zip(nodes, replies, strict=True)))
    except RunError as error:
        # The one end of a run: all updates of its first round differ from the model for one reason.
        assert "no update has the structure of the global model" in str(error)  # noqa: PT017
        return
    core.finish()
    record = core.parts.history.rounds[-1]
    state = selector.state_dict()
    assert state["plays"].tolist() == [1, 1, 1, 1]
    assert np.isfinite(state["mean"]).all()
    assert ((state["mean"] > 0) & (state["mean"] <= 1)).all()
    assert 0 <= record.round_s <= 10.0
    assert math.isnan(record.energy_j) or 0 <= record.energy_j < math.inf
    assert record.num_completed == len(outcome.usable)
