"""Computing rates and processor energy, worked by hand."""

from __future__ import annotations

import math

import pytest

from fedsel_flwr.clients.device import computing_rate_bounds, cpu_energy
from fedsel_flwr.errors import ParameterError


@pytest.mark.parametrize("num_clients", [1, 3, 10, 19, 20])
def test_up_to_twenty_clients_as_printed(num_clients: int) -> None:
    """k = 1 ... K: [(0.5k + 0.5) 20, (0.5k + 1.5) 20] = [10k + 10, 10k + 30], exactly."""
    for k in range(1, num_clients + 1):
        assert computing_rate_bounds(k - 1, num_clients) == (10.0 * k + 10, 10.0 * k + 30)


def test_the_three_clients_of_figs_4_and_5() -> None:
    """K = 3 are the three slowest of the print, with means 30, 40, 50 samples/s."""
    assert [computing_rate_bounds(k, 3) for k in range(3)] == [(20.0, 40.0), (30.0, 50.0), (40.0, 60.0)]


@pytest.mark.parametrize(
    ("index", "num_clients", "bounds"),
    [
        (0, 21, (20.0, 40.0)),  # k' = 1
        (10, 21, (115.0, 135.0)),  # k' = 1 + 19 x 10/20 = 10.5: (5.25 + 0.5) 20, (5.25 + 1.5) 20
        (20, 21, (210.0, 230.0)),  # k' = 20
        (0, 500, (20.0, 40.0)),
        (499, 500, (210.0, 230.0)),
        (250, 500, (20 + 190 * 250 / 499, 40 + 190 * 250 / 499)),  # 10 k' + 10 with k' = 1 + 19 x 250/499
    ],
)
def test_more_than_twenty_clients_share_the_span(index: int, num_clients: int, bounds: tuple[float, float]) -> None:
    """The first and the last client are as fast as Xia's first and twentieth."""
    assert computing_rate_bounds(index, num_clients) == pytest.approx(bounds, rel=1e-14)


def test_step_scales_the_bounds() -> None:
    """Client 2 of 20 with step 1: (1.5, 2.5)."""
    assert computing_rate_bounds(1, 20, step=1.0) == (1.5, 2.5)


@pytest.mark.parametrize(("index", "num_clients"), [(-1, 20), (20, 20), (0, 0)])
def test_no_such_client(index: int, num_clients: int) -> None:
    """The index is 0-based: client 20 of 20 has index 19."""
    with pytest.raises(ParameterError, match=f"^index must .* num_clients = {num_clients}, got {index}"):
        computing_rate_bounds(index, num_clients)


@pytest.mark.parametrize("step", [0.0, -20.0, math.inf, math.nan])
def test_wrong_step(step: float) -> None:
    """A step of 0 would stop every device."""
    with pytest.raises(ParameterError, match=r"^step must"):
        computing_rate_bounds(0, 20, step=step)


def test_cpu_energy() -> None:
    """1e-28 F x 2e7 cycles x (1e9 Hz)^2 = 2e-3 J; four times as much at twice the frequency."""
    assert cpu_energy(2e7, 1e9, 1e-28) == pytest.approx(2e-3, rel=1e-14)
    assert cpu_energy(2e7, 2e9, 1e-28) == pytest.approx(8e-3, rel=1e-14)
    assert cpu_energy(0.0, 1e9, 1e-28) == 0.0


@pytest.mark.parametrize("name", ["cycles", "frequency_hz", "effective_capacitance"])
@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_wrong_energy_arguments(name: str, value: float) -> None:
    """The message names the argument."""
    arguments = {"cycles": 1.0, "frequency_hz": 1.0, "effective_capacitance": 1.0, name: value}
    with pytest.raises(ParameterError, match=f"^{name} must be at least 0"):
        cpu_energy(**arguments)
