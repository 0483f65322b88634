"""Clients' texts and values in messages: one printable line, short, and never written out for that."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Error
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsel_flwr.rounds import untrusted
from fedsel_flwr.rounds.replies import Reply, read_reply
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import MAX_METRICS, column_value, indented_lines, one_line, shown
from fedsel_flwr.selectors.columns import COLUMNS, LARGEST
from fedsel_flwr.strategies.wrapping.failure_reasons import reason_in, reason_of

REFERENCE = [np.zeros((2, 3), dtype=np.float32)]
MB = 2**20
NASTY = "\n\r\x1b[2J\x00\x07\x85\u2028\u202e\ud800\x9b31m"
"""Line ends, a terminal's escapes, a bell, a text that runs backwards, half a character."""


def read(metrics: dict[str, Any], **kwargs: Any) -> Any:
    reply = Reply(**{"arrays": REFERENCE, "num_examples": 3, "metrics": metrics, **kwargs})
    return read_reply(reply, Settings(max_latency=5.0), client_id="7", reference=REFERENCE)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=50) | st.text(alphabet=NASTY + "a b", max_size=50))
def test_texts_are_one_printable_line_or_begin_no_line_of_their_own(text: str) -> None:
    for made in (one_line(text), shown(text), shown(ValueError(text)), shown([text]), one_line(f"{shown(text)}{text}")):
        assert made.isprintable()
        assert len(made) <= 300
        made.encode("utf-8")  # a lone surrogate cannot be written
    first, *others = indented_lines(text).split("\n")
    assert first.isprintable()
    assert all(line.startswith("    ") and line.isprintable() for line in others)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.arange(8), "[0, 1, 2, 3, 4, 5, 6, 7]"), (np.arange(9), "an array of shape (9,)"),
        (list(range(8)), "[0, 1, 2, 3, 4, 5, 6, 7]"), (list(range(9)), "a list of 9"), ({}, "a dict of 0"),
        (2**255, str(2**255)[:80]), (2**256, "an integer of 257 bits"), ("x" * 99, "'" + "x" * 79),
    ],
)  # fmt: skip
def test_a_large_value_is_described_and_not_written_out(value: Any, text: str) -> None:
    assert shown(value) == text


@contextlib.contextmanager
def cheap() -> Iterator[None]:
    """Neither a megabyte nor half a second."""
    tracemalloc.start()
    try:
        start = time.process_time()
        yield
        assert time.process_time() - start < 0.5
        assert tracemalloc.get_traced_memory()[1] < MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "metrics",
    [
        {"energy_j": "x" * (64 * MB)}, {"energy_j": b"\x00" * (64 * MB), "client_id": b"\x1b" * (64 * MB)},
        {"energy_j": [0.5] * (8 * MB)}, {"energy_j": [["x" * (32 * MB)], "\n" * (32 * MB)]},
        {"latency_s": 10 ** (4 * 10**5), "client_id": 10 ** (4 * 10**5)}, {"client_id": "\n" * (64 * MB)},
    ],
    ids=["text", "bytes", "list", "lists of texts", "integers", "identity"],
)  # fmt: skip
def test_64_mb_of_metrics_cost_neither_time_nor_memory(metrics: dict[str, Any]) -> None:
    metrics["latency_s"] = metrics.get("latency_s", 1.0)
    with cheap():
        result = read(metrics)
    assert result.problems
    assert all(problem.isprintable() and len(problem) <= 300 for problem in result.problems)


def test_a_reply_of_more_metrics_than_are_read_has_failed() -> None:
    assert read({"latency_s": 1.0, **dict.fromkeys(map(str, range(MAX_METRICS - 1)), 0)}).completed
    result = read({"latency_s": 1.0, **dict.fromkeys(map(str, range(MAX_METRICS)), 0)})
    assert not result.completed
    assert result.problems == ("metrics: 10001 reported, more than 10000",)


@pytest.mark.parametrize(
    "text", ["x" * (64 * MB), "Traceback (most recent call last)\n" * (2 * MB)], ids=["x", "lines"]
)
def test_a_long_reason_is_looked_at_at_both_ends(text: str) -> None:
    with cheap():
        reasons = [reason_of(Error(0, text)), reason_in(RuntimeError(text), 30.0, 1.0)]
    assert all(len(reason) < 30_000 for reason in reasons)


@pytest.mark.parametrize("name", ["loss", "rms_loss", "energy", "gradient", "sketch"])
def test_numbers_beyond_their_range_are_not_read(name: str) -> None:
    beyond = [1e308, -1e308, 2 * LARGEST, float("inf"), float("nan")]
    if COLUMNS[name].shape == "vector":
        assert [column_value(COLUMNS[name], np.array([0.0, one])) for one in beyond] == [None] * 5
        assert column_value(COLUMNS[name], np.array([-0.0, 5e-324, LARGEST])) is not None
    else:
        assert [column_value(COLUMNS[name], one) for one in beyond] == [None] * 5
        assert [column_value(COLUMNS[name], one) for one in (-0.0, 5e-324, LARGEST)] == [0.0, 5e-324, LARGEST]
    assert np.isnan(read({"latency_s": 1.0, "energy_j": 2 * LARGEST}).values["energy"])


def test_a_vector_longer_than_it_can_be_is_not_copied() -> None:
    assert untrusted.max_vector_length("gradient", REFERENCE) == 6
    assert column_value(COLUMNS["gradient"], np.zeros(6), 6) is not None
    assert column_value(COLUMNS["gradient"], np.zeros(7), 6) is None
    sent = np.zeros(16 * MB, dtype=np.float32).tobytes()
    with cheap():
        assert column_value(COLUMNS["sketch"], sent, untrusted.MAX_SKETCH) is None
