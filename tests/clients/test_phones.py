"""The phones: a draw by hand, the laws between and within clients, and joules."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from fedsel_flwr.clients.device import RoundDelays
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.clients.streams import stream

CLIENTS = 4_000
MEGABYTE = 8e6
PHONES = PhoneModel(num_clients=CLIENTS, seed=3, examples=np.full(CLIENTS, 10), payload_bits=MEGABYTE)


def test_a_draw_by_hand() -> None:
    """Own and round's deviates in the order computing, down, up; sd of the round sqrt(ln(1 + cv^2)).

    sqrt(ln 1.16) = .385253, sqrt(ln 1.0009) = .0299933.
    """
    phones = PhoneModel(num_clients=3, seed=11, examples=(5, 7, 9), payload_bits=4e6, seconds_per_example=0.02)
    own = stream(11, "phone", 2).standard_normal(3)
    now = stream(11, "phone-round", 2, 4).standard_normal(3)
    drawn = phones.draw(2, 4)
    per_example = 0.02 * math.exp(0.78 * own[0] + 0.0299933 * now[0])
    assert drawn.compute_s == pytest.approx(9 * per_example, rel=1e-6)
    assert drawn.computing_rate == pytest.approx(1 / per_example, rel=1e-6)
    assert drawn.download_s == pytest.approx(0.5 / (4.3 * math.exp(0.47 * own[1] + 0.385253 * now[1])), rel=1e-6)
    assert drawn.upload_s == pytest.approx(0.5 / (3.3 * math.exp(0.68 * own[2] + 0.385253 * now[2])), rel=1e-6)


def test_without_spread_everybody_takes_the_medians() -> None:
    """1 MB over 4.3 and 3.3 MB/s, 10 examples of .172 s; 3 W x 1.72 s + 1 W x (.2326 + .3030) s = 5.6956 J."""
    spread = ("compute_log_sd", "compute_round_cv", "download_log_sd", "upload_log_sd", "network_round_cv")
    alike = dataclasses.replace(PHONES, **dict.fromkeys(spread, 0.0))
    for k, t in ((0, 1), (77, 9)):
        drawn = alike.draw(k, t)
        assert dataclasses.astuple(drawn) == pytest.approx((1 / 4.3, 1.72, 1 / 3.3, 1 / 0.172), rel=1e-12)
        assert alike.energy_j(drawn) == pytest.approx(5.16 + 1 / 4.3 + 1 / 3.3, rel=1e-12)


def test_a_phone_stays_itself_in_a_smaller_fleet() -> None:
    fewer = PhoneModel(num_clients=20, seed=3, examples=[10] * 20, payload_bits=MEGABYTE)
    assert fewer.draw(7, 2) == PHONES.draw(7, 2)


@pytest.mark.parametrize(
    ("download", "compute", "upload", "measured", "joules"),
    [
        (2.0, 5.0, 3.0, None, 3 * 5.0 + 2.0 + 3.0),
        (2.0, 5.0, 3.0, 7.0, 3 * 7.0 + 2.0 + 3.0),
        (2.0, 50.0, 30.0, None, 3 * 50.0 + 2.0 + 8.0),  # 60 s are over while it sends
        (20.0, 50.0, 3.0, None, 3 * 40.0 + 20.0),  # while it trains
        (70.0, 5.0, 3.0, None, 60.0),  # while it receives
        (math.inf, 5.0, math.inf, None, 60.0),
    ],
)
def test_joules_up_to_the_deadline(
    download: float, compute: float, upload: float, measured: float | None, joules: float
) -> None:
    """3 W of the processor, 1 W of the radio either way; everything ends after 60 s."""
    delays = RoundDelays(download_s=download, compute_s=compute, upload_s=upload, computing_rate=1.0)
    assert PHONES.energy_j(delays, measured) == pytest.approx(joules, rel=1e-12)
