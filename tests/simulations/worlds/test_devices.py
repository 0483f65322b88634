"""Your own devices: the file's rows reach the clients, and a wrong file is refused by its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.phones import PhoneModel
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.run_identity import identity
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.availability import devices_of
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World

HEADER = "seconds_per_example,download_bytes_per_s,upload_bytes_per_s"


def scenario(path: Path, text: str, **keys: object) -> Scenario:
    path.write_text(text)
    steady = {"system.network_round_cv": 0.0, "system.compute_round_cv": 0.0, "system.payload_bytes": 1e6}
    return load_scenario(
        "phones", {"num_clients": 3, "clients_per_round": 2, "rounds": 2, "system.devices": str(path), **steady, **keys}
    )


def test_each_client_has_its_own_row(tmp_path: Path) -> None:
    """By hand: 1 MB over 2 MB/s is 0.5 s, over 0.1 MB/s 10 s; client 2's row comes first."""
    given = scenario(
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
    drawn = devices_of(scenario(tmp_path / "d.csv", text, **keys))
    assert drawn is not None
    assert drawn.shape == (4000, 3)
    assert {tuple(row) for row in drawn.tolist()} == {(0.1, 1e6, 1e6), (0.9, 1e5, 1e4)}
    assert abs((drawn[:, 0] == 0.1).mean() - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 4000)
    again, other = (devices_of(scenario(tmp_path / "d.csv", text, **keys, seed=seed)) for seed in (1, 2))
    assert np.array_equal(again, drawn)
    assert not np.array_equal(other, drawn)
    equal = devices_of(scenario(tmp_path / "e.csv", f"{HEADER}\n0.1,1,1\n0.2,1,1\n", **keys))
    assert equal is not None
    assert abs((equal[:, 0] == 0.1).mean() - 0.5) < 4 * np.sqrt(0.25 / 4000)


def test_a_changed_file_is_another_scenario(tmp_path: Path) -> None:
    prints = []
    for seconds in ("0.1", "0.1", "0.2"):
        world = World(scenario(tmp_path / "d.csv", f"{HEADER}\n{seconds},1e6,1e6\n"))
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
def test_a_wrong_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=words):
        devices_of(scenario(tmp_path / "d.csv", text))


def test_a_file_needs_phones_and_must_be_there(tmp_path: Path) -> None:
    assert devices_of(load_scenario("phones", {})) is None
    with pytest.raises(ParameterError, match=r"system.kind is 'cell'. Set system.kind"):
        devices_of(load_scenario("smoke", {"system.devices": "d.csv"}))
    with pytest.raises(ParameterError, match=r"cannot read system.devices 'none.csv': the file is neither"):
        devices_of(load_scenario("phones", {"system.devices": "none.csv"}))
    with pytest.raises(ParameterError, match=r"shape \(1, 3\)"):
        PhoneModel(num_clients=2, seed=1, examples=[1, 1], payload_bits=8.0, devices=[[1.0, 1.0, 1.0]])
