"""Models to arrays and back: order, copies, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.objectives import get_arrays, set_arrays
from fedsel_flwr.errors import ParameterError


def bytes_of(arrays: list[npt.NDArray[Any]]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def test_order_is_that_of_the_state_buffers_included() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    shapes = [array.shape for array in get_arrays(model)]
    assert shapes == [(3, 2), (3,), (3,), (3,), (3,), (3,), ()]  # weight, bias; weight, bias, mean, variance, count
    assert get_arrays(model)[-1].dtype == np.int64


def test_round_trip_keeps_every_bit_and_type() -> None:
    source, target = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    source(torch.randn(8, 2))  # moves the running statistics
    set_arrays(target, get_arrays(source))
    assert bytes_of(get_arrays(target)) == bytes_of(get_arrays(source))
    assert [array.dtype for array in get_arrays(target)] == [array.dtype for array in get_arrays(source)]


def test_arrays_and_model_share_no_memory() -> None:
    model = nn.Linear(2, 1)
    arrays = get_arrays(model)
    before = bytes_of(arrays)
    with torch.no_grad():
        model.weight.add_(1.0)
    assert bytes_of(arrays) == before
    given = [np.ones((1, 2), dtype=np.float32), np.ones(1, dtype=np.float32)]
    set_arrays(model, given)
    given[0][:] = 5.0
    assert get_arrays(model)[0].tolist() == [[1.0, 1.0]]


def test_doubles_become_the_models_type() -> None:
    model = nn.Linear(2, 1)
    set_arrays(model, [np.array([[0.1, 0.2]]), np.array([3.0])])
    assert get_arrays(model)[0].dtype == np.float32
    assert get_arrays(model)[0].tolist() == [[np.float32(0.1), np.float32(0.2)]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.ones((1, 2))], r"expected 2 arrays.*got 1"),
        ([np.ones((1, 2)), np.ones(2)], r"shape \(1,\) for 'bias'; got float64 of shape \(2,\)"),
        ([np.ones((2, 1)), np.ones(1)], r"shape \(1, 2\) for 'weight'; got float64 of shape \(2, 1\)"),
        ([np.array([["a", "b"]]), np.ones(1)], r"'weight'; got <U1"),
        ([np.ones((1, 2), dtype=object), np.ones(1)], r"'weight'; got object"),
        ([np.ones((1, 2), dtype=complex), np.ones(1)], r"'weight'; got complex128"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(arrays: list[npt.NDArray[Any]], message: str) -> None:
    model = nn.Linear(2, 1)
    before = bytes_of(get_arrays(model))
    with pytest.raises(ParameterError, match=message):
        set_arrays(model, arrays)
    assert bytes_of(get_arrays(model)) == before
