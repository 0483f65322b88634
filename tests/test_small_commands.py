"""The commands that run nothing: list, show, cite, doctor."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import names, registry
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.simulations import doctor
from fedsel_flwr.simulations.doctor import Finding
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario, scenario_names
from tests.processes import run_python

# ---- list ------------------------------------------------------------------------------------------------------------


def test_list_as_json(fedsel: Any) -> None:
    facts = json.loads(fedsel("list", "--json"))
    described = [(name, load_scenario(name).description) for name in scenario_names()]
    assert [(one["name"], one["description"]) for one in facts["scenarios"]] == described
    assert [one["name"] for one in facts["selectors"]] == list(names())
    for one in facts["selectors"]:
        assert {*one["reads"], *one["probes"]} >= selector_class(one["name"]).needs | selector_class(one["name"]).asks
    bsfl = next(one for one in facts["selectors"] if one["name"] == "bsfl")
    assert bsfl["reads"] == ["latency"]
    assert bsfl["probes"] == []
    assert {"name": "alpha", "required": False, "default": 1.0} in bsfl["parameters"]
    assert {"name": "clients_per_round", "required": True} in bsfl["parameters"]


# ---- show ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scenario_names())
def test_what_show_prints_is_the_scenario(name: str, tmp_path: Path, fedsel: Any) -> None:
    (file := tmp_path / f"{name}.toml").write_text(fedsel("show", name))
    assert load_scenario(str(file)) == load_scenario(name)


def test_show_has_units_defaults_and_overrides(fedsel: Any) -> None:
    argv = ["phones", "--set", "wireless.max_latency_s=90,selectors.bsfl.alpha=2", "--rounds", "7", "--engine", "ray"]
    lines = [" ".join(line.split()) for line in fedsel("show", *argv, "--set", "selector=bsfl").splitlines()]
    for line in (
        "rounds = 7 # command line", 'engine = "ray" # command line', "max_latency_s = 90.0 # s, command line",
        "radius_km = 0.5 # km, default", "momentum = 0.0 # default", "alpha = 2 # command line", "# solver = 'exact'",
    ):  # fmt: skip
        assert line in lines, line
    assert not [line for line in lines if "min_latency" in line and line.startswith("#")]  # it has no default


def test_show_as_json(fedsel: Any) -> None:
    facts = json.loads(fedsel("show", "smoke", "--json", "--set", "training.learning_rate=0.05"))
    assert Scenario.model_validate(facts["scenario"]) == load_scenario("smoke", {"training.learning_rate": 0.05})
    assert facts["units"]["wireless.bandwidth_hz"] == "Hz"
    assert facts["units"]["system.download_bytes_per_s"] == "bytes/s"
    assert "training.learning_rate" not in facts["defaults"]
    assert "training.momentum" in facts["defaults"]


# ---- cite ------------------------------------------------------------------------------------------------------------


def test_cite_prints_each_entry_once(fedsel: Any, refused: Any) -> None:
    papers = registry.papers()
    assert fedsel("cite", "cs-ucb", "bsfl", "cs-ucb-q") == f"{papers['xia2020multi']}\n\n{papers['benami2025client']}\n"
    assert fedsel("cite") == f"{registry.package_entry()}\n"
    assert "did you mean 'bsfl'?" in refused("cite", "bsfll")


# ---- doctor ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "1000")


def texts(findings: Any, status: str) -> list[str]:
    return [finding.text for finding in findings if finding.status == status]


@pytest.mark.usefixtures("no_ray_address")
def test_doctor_finds_this_installation_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedsel: Any) -> None:
    monkeypatch.chdir(tmp_path)
    out = fedsel("doctor", "--data-dir", str(tmp_path))
    for word in ("Python: 3.", "flwr 1.", "numpy ", "extra sim: ", "GPU: ", "Ray: ", "holds no data set", "GB free"):
        assert word in out, out
    assert out.splitlines()[-1] == "No problem found"
    facts = json.loads(fedsel("doctor", "--data-dir", str(tmp_path), "--json"))
    assert facts["healthy"] is True
    assert {"topic", "status", "text", "cure"} == facts["findings"][0].keys()


@pytest.mark.usefixtures("no_ray_address")
def test_doctor_ends_with_1_and_the_command_that_mends(tmp_path: Path, monkeypatch: Any, fedsel: Any) -> None:
    monkeypatch.setenv("FEDSEL_DATA", str(tmp_path / "nowhere"))
    lines = fedsel("doctor", status=1).splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("problem  data: ")]
    assert "nowhere" in lines[at]
    assert lines[at + 1].strip() == "unset FEDSEL_DATA"
    assert lines[-1].startswith("1 problem found")
    assert json.loads(fedsel("doctor", "--json", status=1))["healthy"] is False


def test_data_sets_are_found_by_their_files(tmp_path: Path) -> None:
    (raw := tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").touch()
    sets, trace = doctor.check_data(str(tmp_path))
    assert f"{tmp_path} (--data-dir) holds mnist; a run that needs fashion-mnist or emnist or cifar-10" in sets.text
    assert (trace.status, "phones-704 needs the availability trace phones/" in trace.text) == ("note", True)
    (tmp_path / "phones").mkdir()
    (tmp_path / "phones" / "availability.csv").touch()
    (tmp_path / "cifar-10.tar.xz").touch()
    (sets,) = doctor.check_data(str(tmp_path))
    assert sets.status == "ok"
    assert "holds mnist, cifar-10; a run that needs fashion-mnist or emnist downloads it" in sets.text


def without(monkeypatch: pytest.MonkeyPatch, *missing: str, versions: dict[str, str] | None = None) -> None:
    """Let packages look as if they were not installed, or had another version."""
    real = importlib.metadata.distribution

    def distribution(name: str) -> Any:
        if name in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        if name in (versions or {}):
            found = real(name)
            return SimpleNamespace(version=(versions or {})[name], requires=found.requires, metadata=found.metadata)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_a_missing_or_old_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "filelock", versions={"flwr": "1.20.0"})
    (core,) = [finding for finding in doctor.check_packages() if finding.topic == "packages"]
    assert core.status == "problem"
    assert re.fullmatch(r"lacks filelock>=[\d.]+, flwr\S+ \(1\.20\.0 is installed\)", core.text)
    assert core.cure == "pip install 'fedsel-flwr'"


def test_the_extra_sim_may_be_absent_but_not_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def sim() -> Finding:
        (found,) = [finding for finding in doctor.check_packages() if finding.topic == "extra sim"]
        return found

    assert sim().status == "ok"
    with monkeypatch.context() as patch:
        without(patch, "torch", "ray", "flwr-datasets")
        assert sim().status == "note"
        assert re.fullmatch(r"lacks flwr-datasets>=[\d.]+, ray==[\d.]+, torch>=[\d.]+", sim().text)
        assert sim().cure == "pip install 'fedsel-flwr[sim]'"
    without(monkeypatch, "pyarrow", versions={"torch": "2.1.0"})
    assert sim().status == "problem"
    assert re.fullmatch(r"lacks pyarrow>=\d+, torch>=[\d.]+ \(2\.1\.0 is installed\)", sim().text)


def test_another_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.1")
    found = next(doctor.check_packages())
    assert (found.topic, found.status) == ("Python", "problem")
    assert "fedsel-flwr needs >=3.11" in found.text


def test_a_package_that_runs_without_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "fedsel-flwr")
    _, finding = doctor.check_packages()
    assert finding.status == "note"
    assert finding.cure.startswith("pip install -e '")


def test_an_address_without_ray_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    found = next(doctor.check_ray(start=False))
    assert (found.status, found.cure) == ("problem", "unset RAY_ADDRESS")
    for address in ("nonsense", f"127.0.0.1:{10**20}"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert next(doctor.check_ray(start=False)).status == "problem"


def test_ray_that_does_not_start_is_a_problem(no_ray_address: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Ray cannot be started on this machine: no memory"
    monkeypatch.setattr(doctor, "_start_ray", Mock(side_effect=RunError(said)))
    (found,) = doctor.check_ray(start=True)
    assert (found.status, found.text) == ("problem", said)
    monkeypatch.setattr(doctor, "_start_ray", lambda: None)
    (found,) = doctor.check_ray(start=True)
    assert found.status == "ok"


@pytest.mark.slow
def test_doctor_starts_ray(tmp_path: Path, no_ray_address: None) -> None:
    done = run_python("-m", "fedsel_flwr.cli", "doctor", "--start-ray", "--data-dir", tmp_path, cwd=tmp_path)
    assert done.stderr == ""
    assert "started and ended within" in done.stdout


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**6))
    disk = doctor.check_disk(tmp_path / "not" / "there")
    assert disk.status == "problem"
    assert f"run folders in {tmp_path}" in disk.text
    monkeypatch.setattr(doctor.os, "access", lambda folder, mode: False)
    assert "cannot be written to" in doctor.check_disk(tmp_path).text


# ---- a core installation ---------------------------------------------------------------------------------------------

CORE = """
import importlib.abc, importlib.metadata, sys

HIDDEN = ("torch", "torchvision", "ray", "pydantic", "flwr_datasets", "psutil", "pandas", "pyarrow", "scipy", "numba")
NAMES = {name.replace("_", "-") for name in HIDDEN}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

real = importlib.metadata.distribution

def distribution(name):
    if name in NAMES:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.distribution = distribution
sys.meta_path.insert(0, Absent())
from fedsel_flwr.cli import main
for argv in (["list"], ["list", "--json"], ["cite", "bsfl"], ["cite"], ["doctor"], ["doctor", "--json"]):
    assert main(argv) == 0, argv
"""


@pytest.mark.usefixtures("no_ray_address")
def test_list_cite_and_doctor_work_in_a_core_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSEL_DATA", raising=False)
    done = run_python("-c", CORE, cwd=tmp_path)
    assert done.stderr == ""
    assert "note     extra sim: lacks " in done.stdout
    assert "No problem found" in done.stdout
