"""Availability, drawn or from a trace, and devices of the user's own: the file's rows reach the clients."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.run_identity import identity
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.availability import BernoulliAvailability, TraceAvailability, devices_of
from fedsel_flwr.simulations.worlds.image_files import find_file
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World

# ---- Bernoulli ----------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_client_and_round_only() -> None:
    one, other = BernoulliAvailability(0.5, seed=3), BernoulliAvailability(0.5, seed=3)
    cells = [(k, r) for k in range(20) for r in range(1, 21)]
    forward = {cell: one(str(cell[0]), cell[1], 0.0) for cell in cells}
    np.random.default_rng(0).shuffle(cells)
    np.random.seed(5)  # noqa: NPY002 - the global state must not matter
    assert forward == {(k, r): other(str(k), r, 1e6 * r) for k, r in cells}
    assert forward != {(k, r): BernoulliAvailability(0.5, seed=4)(str(k), r, 0.0) for k, r in cells}


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_frequency_is_the_probability_by_client_and_by_round(probability: float) -> None:
    model = BernoulliAvailability(probability, seed=1)
    drawn = np.array([[model(str(k), r, 0.0) for r in range(1, 201)] for k in range(40)], dtype=float)
    error = math.sqrt(probability * (1 - probability))
    assert abs(drawn.mean() - probability) < 4 * error / math.sqrt(drawn.size)
    assert np.abs(drawn.mean(axis=0) - probability).max() < 4.5 * error / math.sqrt(40)
    assert np.abs(drawn.mean(axis=1) - probability).max() < 4.5 * error / math.sqrt(200)
    centred = drawn - probability  # no memory from round to round, nor from client to client
    for neighbours in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(neighbours.mean() / error**2) < 4 / math.sqrt(drawn.size)


@pytest.mark.parametrize(
    "client_id", ["phone-7", "-3", str(2**32), str(2**63 + 5), "9" * 5000, "", "1.0", "1_0", " 1", "+1", "\u0663"]
)
def test_an_id_that_is_no_partition_id_is_named(client_id: str) -> None:
    model = BernoulliAvailability(0.5, seed=1)
    said = re.escape(f"a whole number below 2**32, but a client reports client_id = {client_id!r}")
    with pytest.raises(ParameterError, match=said):
        model(client_id, 1, 0.0)
    with pytest.raises(ParameterError, match=said):
        model.at(["1", client_id], 1, 0.0)


# ---- traces -------------------------------------------------------------------------------------------------------


def trace(folder: Path, text: str, **options: Any) -> TraceAvailability:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return TraceAvailability(path, **options)


def test_rounds_in_any_order_and_from_then_on(tmp_path: Path) -> None:
    there = trace(tmp_path, "round,client,state\n10,0,up\n1,0,down\n\n3,phone-7,down\n20,0,down\n")
    assert [there("0", r, 0.0) for r in (1, 2, 9, 10, 19, 20, 500)] == [False, False, False, True, True, False, False]
    assert [there("phone-7", r, 0.0) for r in (1, 2, 3, 4)] == [True, True, False, False]  # up before its first row
    assert all(there("unknown", r, 0.0) for r in (1, 100))


def test_seconds_go_by_the_simulated_clock(tmp_path: Path) -> None:
    there = trace(tmp_path, "second, client ,state\n 2.5 , 1 , down \n4,1,up\r\n0,4,down\n")
    assert [there("1", 1, s) for s in (0.0, 2.4999, 2.5, 3.9, 4.0, 1e9)] == [True, True, False, False, True, True]
    assert [there("1", r, 0.0) for r in (3, 5)] == [True, True]  # rounds do not matter
    assert not there("4", 1, 0.0)


def test_many_at_once_are_the_single_answers(tmp_path: Path) -> None:
    ids = ["2", "7", "0", "4000000000"]
    models = [
        BernoulliAvailability(0.5, seed=3),
        trace(tmp_path, "round,client,state\n10,0,up\n1,0,down\n3,7,down\n"),
        trace(tmp_path, "second,client,state\n2.5,0,down\n4,0,up\n3,2,down\n"),
    ]
    for model in models:
        answers = set()
        for number, seconds in [(1, 0.0), (3, 2.5), (3, 3.0), (9, 3.9), (10, 4.0)]:
            together = model.at(ids, number, seconds)
            assert together.dtype == np.bool_
            assert together.tolist() == [model(client_id, number, seconds) for client_id in ids]
            answers.add(tuple(together.tolist()))
        assert len(answers) >= 3
        assert model.at([], 1, 0.0).shape == (0,)


def test_seconds_per_round_map_rounds_onto_a_trace(tmp_path: Path) -> None:
    """Away from 4,000 s to 5,999 s: round 3 begins at (3 - 1) x 2,000 s, round 4 at 6,000 s."""
    there = trace(tmp_path, "second,client,state\n4000,1,down\n5999,1,up\n", seconds_per_round=2000.0)
    assert [there("1", r, 1e9) for r in range(1, 6)] == [True, True, False, True, True]
    assert [there.at(["0", "1"], r, 4500.0).tolist() for r in (2, 3)] == [[True, True], [True, False]]


def test_a_header_alone_is_everybody_and_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert trace(tmp_path, "round,client,state\n")("0", 1, 0.0)
    assert not trace(tmp_path, "\ufeffround,client,state\r\n1,0,down\r\n")("0", 1, 0.0)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("-1,0,down", "column 'round': expected a number of at least 0"),
        ("1,,down", "column 'client': expected a client id"),
        ("1,0,Down", "column 'state': expected 'up' or 'down', got 'Down'"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(row: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=rf"trace\.csv', line 4.*{said}"):
        trace(tmp_path, f"round,client,state\n1,0,down\n\n{row}\n2,0,up\n")


@pytest.mark.parametrize(
    "text", ["", "\n", "client,round,state\n", "round,client\n", "round,client,state,x\n", "hour,client,state\n"]
)
def test_a_wrong_header_says_what_it_must_be(text: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="first line must be 'round,client,state'"):
        trace(tmp_path, text)


@pytest.mark.parametrize(
    ("unit", "seconds", "said"),
    [
        *(("second", wrong, "seconds_per_round must be a finite number above 0") for wrong in (0.0, -1.0, math.inf)),
        ("round", 2000.0, r"trace\.csv' counts in rounds.*seconds_per_round"),
    ],
)
def test_seconds_per_round_must_be_seconds_of_a_trace_in_seconds(
    unit: str, seconds: float, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=said):
        trace(tmp_path, f"{unit},client,state\n", seconds_per_round=seconds)


def test_a_trace_is_found_here_or_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, data = tmp_path / "here", tmp_path / "data"
    for folder in (here, data):
        folder.mkdir()
    (data / "t.csv").touch()
    monkeypatch.chdir(here)
    monkeypatch.delenv("FEDSEL_DATA", raising=False)

    def found(path: str, data_dir: str | None) -> Path:
        return find_file(path, key="availability.trace", data_dir=data_dir)

    assert found("t.csv", str(data)) == data / "t.csv"
    monkeypatch.setenv("FEDSEL_DATA", str(data))
    assert found("t.csv", None) == data / "t.csv"
    (here / "t.csv").touch()
    assert found("t.csv", None).resolve() == here / "t.csv"
    assert found(str(data / "t.csv"), None) == data / "t.csv"
    for name, folder, said in (
        ("u.csv", None, r"trace 'u\.csv': the file is neither in the working directory nor in .*data\. "),
        ("u.csv", str(tmp_path / "nowhere"), r"nowhere .* does not exist"),
        (str(data), None, "is a folder"),
    ):
        with pytest.raises(ParameterError, match=said):
            found(name, folder)


# ---- devices of the user's own -------------------------------------------------------------------------------------

HEADER = "seconds_per_example,download_bytes_per_s,upload_bytes_per_s"


def with_devices(path: Path, text: str, **keys: object) -> Scenario:
    path.write_text(text)
    steady = {"system.network_round_cv": 0.0, "system.compute_round_cv": 0.0, "system.payload_bytes": 1e6}
    return load_scenario(
        "phones", {"num_clients": 3, "clients_per_round": 2, "rounds": 2, "system.devices": str(path), **steady, **keys}
    )


def test_each_client_has_its_own_row(tmp_path: Path) -> None:
    """By hand: 1 MB over 2 MB/s is 0.5 s, over 0.1 MB/s 10 s; client 2's row comes first."""
    given = with_devices(
        tmp_path / "d.csv",
        f"client,{HEADER}\n2,0.1,2e6,1e5\n0, 0.2,1e6,1e6\n1,0.3,5e5,2e5\n",
        **{"wireless.max_latency_s": 1e4},
    )
    world = World(given)
    assert isinstance(world.system, PhoneModel)
    delays = world.system.draws([0, 1, 2], 1)
    assert [one.download_s for one in delays] == [1.0, 2.0, 0.5]
    assert [one.upload_s for one in delays] == [1.0, 5.0, 10.0]
    worked = np.asarray(world.system.examples) * [0.2, 0.3, 0.1]
    assert [one.compute_s for one in delays] == pytest.approx(worked.tolist())
    total = [one.download_s + one.compute_s + one.upload_s for one in delays]
    assert mean_latencies(world.system).tolist() == pytest.approx(total)
    history = simulate(given, engine="vectorized").history
    assert {(row.client_id, row.upload_s) for row in history.clients} <= {("0", 1.0), ("1", 5.0), ("2", 10.0)}


def test_kinds_are_drawn_by_their_shares(tmp_path: Path) -> None:
    """Of 4,000 clients 3/4 within four standard errors; the seed decides; without shares all kinds are equal."""
    text = f"name,share,{HEADER}\nfast,3,0.1,1e6,1e6\nslow,1,0.9,1e5,1e4\n"
    keys = {"num_clients": 4000, "clients_per_round": 10}
    drawn = devices_of(with_devices(tmp_path / "d.csv", text, **keys))
    assert drawn is not None
    assert drawn.shape == (4000, 3)
    assert {tuple(row) for row in drawn.tolist()} == {(0.1, 1e6, 1e6), (0.9, 1e5, 1e4)}
    assert abs((drawn[:, 0] == 0.1).mean() - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 4000)
    again, other = (devices_of(with_devices(tmp_path / "d.csv", text, **keys, seed=seed)) for seed in (1, 2))
    assert np.array_equal(again, drawn)
    assert not np.array_equal(other, drawn)
    equal = devices_of(with_devices(tmp_path / "e.csv", f"{HEADER}\n0.1,1,1\n0.2,1,1\n", **keys))
    assert equal is not None
    assert abs((equal[:, 0] == 0.1).mean() - 0.5) < 4 * np.sqrt(0.25 / 4000)


def test_a_changed_file_is_another_with_devices(tmp_path: Path) -> None:
    prints = []
    for seconds in ("0.1", "0.1", "0.2"):
        world = World(with_devices(tmp_path / "d.csv", f"{HEADER}\n{seconds},1e6,1e6\n"))
        prints.append(identity(world, OwnParts(), {})["scenario"])
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seconds_per_example,download_bytes_per_s\n1,1\n", "must have a line for each device under the columns"),
        (f"{HEADER}\n", "must have a line for each device"),
        (f"{HEADER},battery\n1,1,1,1\n", "got 'seconds_per_example,download_bytes_per_s,upload_bytes_per_s,battery'"),
        (f"client,share,{HEADER}\n0,1,1,1,1\n", "at most one of client and share"),
        (f"{HEADER}\n1,1,1\n1,0,1\n", "line 3, column 'download_bytes_per_s': expected a number above 0, got '0'"),
        (f"share,{HEADER}\n-1,1,1,1\n", "line 2, column 'share': expected a number above 0"),
        (f"client,{HEADER}\n0,1,1,1\n1,1,1,1\n", "got 2 rows; the first client without a row is 2"),
        (f"client,{HEADER}\n0,1,1,1\n1,1,1,1\n1,1,1,1\n", "got 3 rows; the first client without a row is 2"),
        ("", "got an empty file"),
    ],
)
def test_a_wrong_file_of_devices_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=words):
        devices_of(with_devices(tmp_path / "d.csv", text))


def test_devices_need_phones_and_must_be_there(tmp_path: Path) -> None:
    assert devices_of(load_scenario("phones", {})) is None
    with pytest.raises(ParameterError, match=r"system.kind is 'cell'. Set system.kind"):
        devices_of(load_scenario("smoke", {"system.devices": "d.csv"}))
    with pytest.raises(ParameterError, match=r"cannot read system.devices 'none.csv': the file is neither"):
        devices_of(load_scenario("phones", {"system.devices": "none.csv"}))
    with pytest.raises(ParameterError, match=r"shape \(1, 3\)"):
        PhoneModel(num_clients=2, seed=1, examples=[1, 1], payload_bits=8.0, devices=[[1.0, 1.0, 1.0]])
