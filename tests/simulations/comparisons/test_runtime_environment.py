"""What travels to the nodes of a Ray cluster, without Ray: code, files, data sets, and versions that must be equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.references import WORKING_DIR, load_reference
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.comparisons.runtime_environment import (
    check_versions,
    own_modules,
    read_inputs,
    restored,
    runtime_environment,
)
from fedsel_flwr.simulations.run_identity import versions
from fedsel_flwr.simulations.worlds import data as data_sets
from fedsel_flwr.simulations.worlds import image_files
from fedsel_flwr.simulations.worlds.image_files import SENT_INPUTS
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from tests.processes import run_python

OWN = """
import numpy as np

from fedsel_flwr.selectors import Random


class Mine(Random):
    pass


def examples():
    numbers = np.load("examples.npy")
    return (numbers, np.arange(len(numbers)) % 3), (numbers, np.arange(len(numbers)) % 3)


def seeded(seed):
    return examples()
"""
# A process of a node: it has the packages that are installed, and the folder that Ray has sent.
ARRIVED = """
import importlib.metadata, json, sys
import fedsel_flwr
from fedsel_flwr.references import load_reference
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.on_flower.building import make_availability
from fedsel_flwr.simulations.worlds.availability import devices_of

found = load_reference(sys.argv[1], "selector")
scenario = load_scenario("phones", json.loads(sys.argv[2]))
print(json.dumps({
    "package": fedsel_flwr.__file__, "version": importlib.metadata.version("fedsel-flwr"),
    "selector": [found.__module__, sys.modules[found.__module__].__file__],
    "devices": devices_of(scenario)[0].tolist(), "trace": make_availability(scenario)("3", 2, 0.0),
}))
"""


def test_code_and_small_files_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has neither the user's file nor the CSV files, under the same relative paths."""
    home, node = tmp_path / "home", tmp_path / "node"
    home.mkdir()
    node.mkdir()
    (home / "my.own-1.py").write_text(OWN)
    (home / "d.csv").write_text("seconds_per_example,download_bytes_per_s,upload_bytes_per_s\n0.5,7,8\n")
    (home / "t.csv").write_text("round,client,state\n2,3,down\n")
    monkeypatch.chdir(home)
    keys = {"system.devices": "d.csv", "availability.kind": "trace", "availability.trace": "t.csv"}
    small = {"num_clients": 5, "clients_per_round": 2, "partition.kind": "iid"}
    scenario = load_scenario("phones", small | keys | {"selector": "./my.own-1.py:Mine"})
    here = load_reference("./my.own-1.py:Mine", "selector")
    with runtime_environment([scenario, scenario], 3) as sent:
        place = Path(sent["working_dir"])
        assert sent["env_vars"] | {"OMP_NUM_THREADS": "3", WORKING_DIR: str(home)} == sent["env_vars"]
        for path in home.iterdir():
            path.unlink()
        env = sent["env_vars"] | {"PYTHONPATH": str(place)}
        done = run_python("-c", ARRIVED, "./my.own-1.py:Mine", json.dumps(small | keys), cwd=node, **env)
    said = json.loads(done.stdout)
    assert Path(said["package"]) == place / "fedsel_flwr" / "__init__.py"
    assert said["version"] == versions()["fedsel-flwr"]
    assert said["selector"] == [here.__module__, str(place / f"{here.__module__}.py")]  # pickles by name work too
    assert (said["devices"], said["trace"]) == ([0.5, 7.0, 8.0], False)


def test_own_modules_are_those_that_are_not_installed() -> None:
    found = own_modules()
    assert found["tests"] == Path(__file__).resolve().parents[2]
    assert not found.keys() & {"numpy", "ray", "json", "pytest", "fedsel_flwr", "__main__"}


def test_a_data_set_is_read_once_and_needs_no_folder_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels keep their order in memory, on which the rounding of convolutions depends."""
    generator, reads = np.random.default_rng(0), []
    halves = [
        (generator.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8).transpose(0, 3, 1, 2), np.arange(200) % 10)
        for _ in range(2)
    ]

    def read(name: str, folder: Path) -> Any:
        reads.append((name, folder))
        return tuple(halves)

    for module in (image_files, data_sets):
        monkeypatch.setattr(module, "read_image_set", read)
    keys = {"data.dataset": "cifar-10", "data.data_dir": str(tmp_path), "model.name": "cnn"}
    scenarios = [load_scenario("smoke", keys | {"seed": seed}) for seed in (1, 2)]
    mine = data_sets.load_dataset("cifar-10", data_dir=tmp_path, seed=1)
    reads.clear()
    inputs = read_inputs(scenarios, OwnParts())
    assert (list(inputs), reads) == (["cifar-10"], [("cifar-10", tmp_path)])
    assert all(pixels.flags.c_contiguous for pixels, _, _ in inputs["cifar-10"])  # else Ray could not share them
    monkeypatch.setitem(SENT_INPUTS, "cifar-10", lambda: restored("cifar-10", inputs["cifar-10"]))
    theirs = data_sets.load_dataset("cifar-10", data_dir="/no/such/folder", seed=1)
    assert theirs.train.inputs.strides == mine.train.inputs.strides != np.ascontiguousarray(mine.train.inputs).strides
    np.testing.assert_array_equal(theirs.train.inputs, mine.train.inputs)
    assert len(reads) == 1


def test_own_data_by_reference_are_made_here(here: Path) -> None:
    (here / "data.py").write_text(OWN)
    np.save(here / "examples.npy", np.ones((9, 2)))
    made, drawn = (load_scenario("smoke", {"data.dataset": f"./data.py:{name}"}) for name in ("examples", "seeded"))
    inputs = read_inputs([made, drawn], OwnParts())
    assert list(inputs) == [made.data.dataset]  # a function of the seed travels as code
    np.testing.assert_array_equal(inputs[made.data.dataset].train[0], np.ones((9, 2)))


def test_other_versions_on_a_node_are_refused() -> None:
    check_versions(versions())
    with pytest.raises(RunError, match=r"has torch \S+ instead of 1.0, so .*Install the same versions"):
        check_versions(versions() | {"torch": "1.0"})
