"""A draw depends on seed, purpose, partition and round, and on nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.streams import BLOCK, PURPOSES, first_uniforms, stream, streams
from fedsel_flwr.errors import ParameterError

RECORDED = ["placement", "latency", "computing", "energy", "availability", "dropout", "data-order", "model"]
RECORDED += ["phone", "phone-round", "partition", "synthetic"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((7, "placement", 3, 0), 3792206496410867882),
        ((7, "latency", 3, 2), 3672745802703101566),
        ((2**64, "model", 0, 0), 14470292454248957854),
    ],
)
def test_golden(arguments: tuple[int, str, int, int], word: int) -> None:
    """Raw words of the bit generator; a change here changes every recorded run."""
    assert stream(*arguments).bit_generator.random_raw() == word


def test_the_numbers_of_the_purposes_never_change() -> None:
    """New purposes are added at the end."""
    assert [PURPOSES[name] for name in RECORDED] == list(range(12))
    assert len(set(PURPOSES.values())) == len(PURPOSES)


def test_calls_do_not_disturb_each_other() -> None:
    first = stream(1, "energy", 2, 3).random(4)
    np.random.seed(0)  # noqa: NPY002
    stream(1, "energy", 2, 4).random(1000)
    again = stream(np.int64(1), "energy", np.int32(2), np.int64(3)).random(4)  # type: ignore[arg-type]
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(stream(1, "placement", 2).random(3), stream(1, "placement", 2, 0).random(3))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seed", (-1, "model", 0, 0)),
        ("seed", (2**128, "model", 0, 0)),
        ("seed", (None, "model", 0, 0)),  # not "from the system's entropy"
        ("partition_id", (1, "model", -1, 0)),
        ("partition_id", (1, "model", 2**32, 0)),
        ("round", (1, "model", 0, -1)),
        ("round", (1, "model", 0, 1.0)),
        ("purpose .*data-order.*got 'fading'", (1, "fading", 0, 0)),
    ],
)
def test_what_names_no_stream_is_refused(name: str, arguments: tuple[Any, ...]) -> None:
    seed, purpose, partition_id, round = arguments
    with pytest.raises(ParameterError, match=f"^{name}"):
        stream(*arguments)
    with pytest.raises(ParameterError, match=f"^{name}"):
        streams(seed, purpose, [2, partition_id], round)
    with pytest.raises(ParameterError, match=f"^{name}"):
        first_uniforms(seed, purpose, [2, partition_id], round)


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**96 + 5, 2**128 - 1])
def test_many_at_once_draw_what_single_ones_draw(seed: int) -> None:
    ids = [0, 1, 2, 2**31, 2**32 - 1]
    for purpose, round in itertools.product(PURPOSES, (0, 1, 2**32 - 1)):
        together = streams(seed, purpose, ids, round)
        alone = [stream(seed, purpose, k, round) for k in ids]
        for one, other in zip(together, alone, strict=True):
            assert one.bit_generator.state == other.bit_generator.state
    assert [own.standard_normal() for own in together] == [own.standard_normal() for own in alone]
    assert streams(seed, "energy", []) == []
    assert streams(seed, "energy", [3], 2)[0].random() == stream(seed, "energy", 3, 2).random()


@pytest.mark.parametrize("seed", [0, 7, 2**96 + 5, 2**128 - 1])
def test_the_first_numbers_are_those_of_the_streams(seed: int) -> None:
    """Without the streams, and also beyond one block of them."""
    ids = [*range(40), 2**31, 2**32 - 1]
    for purpose, round in itertools.product(("energy", "availability", "crash"), (0, 2**32 - 1)):
        alone = [stream(seed, purpose, k, round).random() for k in ids]
        assert first_uniforms(seed, purpose, ids, round).tolist() == alone
        np.testing.assert_array_equal(first_uniforms(seed, purpose, np.array(ids), round), alone)
    many = first_uniforms(seed, "energy", range(2 * BLOCK + 3))
    last = [own.random() for own in streams(seed, "energy", range(2 * BLOCK, 2 * BLOCK + 3))]
    assert many[2 * BLOCK :].tolist() == last
    assert first_uniforms(seed, "energy", []).tolist() == []


def test_ids_of_an_array_outside_the_range_are_refused() -> None:
    for wrong in (np.array([0, -1]), np.array([2**32]), range(2**32, 2**32 + 2), np.array([0.5])):
        with pytest.raises(ParameterError, match=r"^partition_id"):
            first_uniforms(1, "energy", wrong)  # type: ignore[arg-type]
