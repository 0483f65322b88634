"""``flwr run .`` of the repository, in a simulation that Flower's own SuperLink runs, and ``fedsel run`` beside it."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common import Context, RecordDict
from flwr.common.logger import log

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import read_history, read_model, read_table
from fedsel_flwr.simulations.on_flower import app, building
from fedsel_flwr.simulations.on_flower.app import client_of, drive, log_message_only, scenario_of
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import world_of
from tests.flwr_command import ANSI, Flwr, LocalSuperLink
from tests.processes import ROOT
from tests.simulations.inprocess import grid_of, play

SMOKE = load_scenario("smoke")
CORES = os.cpu_count() or 1
TEN_NODES = ("--federation-config", f"num-supernodes=10 client-resources-num-cpus=1 init-args-num-cpus={CORES}")


def context(**run_config: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=dotted(run_config))


def dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as scenarios have them: ``a.b`` for ``a__b``."""
    return {key.replace("__", "."): value for key, value in config.items()}


# ---- the run config ------------------------------------------------------------------------------------------------


def test_an_empty_run_config_is_the_demonstration() -> None:
    """As [tool.flwr.app.config] gives it: the scenario's name, everything else empty."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["flwr"]["app"]["config"]
    assert scenario_of(context(**config)) == scenario_of(context()) == load_scenario("digits")


def test_run_config_overrides_the_scenario() -> None:
    values = "training.learning_rate=0.05, selectors.bsfl.data_weights=1, 2, 3,api = message"
    overridden = scenario_of(context(scenario="smoke", runs_dir="anywhere", selector="cs-ucb", rounds=7, set=values))
    assert (overridden.name, overridden.selector, overridden.rounds) == ("smoke", "cs-ucb", 7)
    assert overridden.training.learning_rate == 0.05
    assert overridden.selectors["bsfl"]["data_weights"] == [1.0, 2.0, 3.0]
    assert overridden.api == "message"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scenario": "nosuch"}, "unknown scenario 'nosuch'"),
        ({"rounds": 0}, "scenario 'smoke': rounds = 0: "),
        ({"set": "bogus=1"}, "unknown key 'bogus'"),
        ({"set": "rounds"}, "set expects KEY=VALUE, "),
        ({"set": "api=, rounds=3"}, "set api= lacks a value"),
        ({"engine": "vectorized"}, "engine = 'vectorized'"),
    ],
)
def test_faults_in_the_run_config_end_the_run_with_their_message(
    config: dict[str, Any], message: str, lines: Lines
) -> None:
    with pytest.raises(ParameterError, match=message) as raised:
        app.main(None, context(**{"scenario": "smoke", **config}))  # type: ignore[arg-type]
    as_flower_does(raised.value)
    assert lines.said[1].startswith("ERROR ")
    assert message in lines.said[1]
    assert "Traceback" not in "".join(lines.said[1:])


def test_where_checkpoints_go(tmp_path: Path) -> None:
    assert app.checkpoint_options(context()) == app.checkpoint_options(context(checkpoint_dir="", resume="")) == {}
    here = {"checkpoint_dir": tmp_path, "resume": False}
    assert app.checkpoint_options(context(checkpoint_dir=str(tmp_path))) == here
    for resume in (True, "must"):
        assert app.checkpoint_options(context(checkpoint_dir=str(tmp_path), resume=resume)) == here | {"resume": resume}
    with pytest.raises(ParameterError, match="resume = True needs checkpoint_dir"):
        app.checkpoint_options(context(resume=True))
    with pytest.raises(ParameterError, match="resume must be true, false or 'must', got 'yes'"):
        app.checkpoint_options(context(checkpoint_dir=str(tmp_path), resume="yes"))


# ---- the log -------------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Everything that is logged, as a console shows it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {self.format(record)}")


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Listens to Flower's logger, which must have no filter left at the end."""
    logger, handler = logging.getLogger("flwr"), Lines()
    before = logger.filters[:]
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    assert logger.filters == before


def as_flower_does(error: Exception) -> None:
    """Flower 1.41 catches what a server app raises, and says so with the traceback; then comes its exit code."""
    log(logging.ERROR, "%s raised an exception", "Simulation", exc_info=error)
    log(logging.ERROR, "Exit Code: 700")


def test_the_message_of_an_error_stands_alone(lines: Lines) -> None:
    error = RunError("10 clients are wanted, 100 % of them:\n\n    use this")
    with pytest.raises(RunError) as raised, log_message_only():
        raise error
    assert raised.value is error
    as_flower_does(error)
    (debug, said, code) = lines.said
    assert debug.startswith("DEBUG where the error was raised:\nTraceback")
    assert said == "ERROR 10 clients are wanted, 100 % of them:\n\n    use this"
    assert code == "ERROR Exit Code: 700"
    as_flower_does(error)  # once only
    assert "Traceback" in lines.said[3]


def test_a_program_fault_keeps_its_traceback(lines: Lines) -> None:
    with pytest.raises(KeyError) as raised, log_message_only():
        raise KeyError("gone")
    as_flower_does(raised.value)
    assert len(lines.said) == 2
    assert "Traceback" in lines.said[0]


# ---- the rounds over a grid ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [9, 11])
def test_the_nodes_are_counted_before_the_data_are_read(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SETTLED_S", 0.1)
    monkeypatch.setattr(app, "world_of", lambda scenario: pytest.fail("the data were read"))
    with pytest.raises(RunError, match=f"'smoke' has 10 clients, but {num_nodes} SuperNodes are connected"):
        drive(grid_of(SMOKE, num_nodes), SMOKE)


def test_server_has_a_thread_for_each_client_that_may_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client waits for another, and its round trip holds the wait; GPFL asks everybody in round 1."""
    servers: list[Any] = []
    monkeypatch.setattr(building, "start_grid", lambda server, **kwargs: servers.append(server))
    monkeypatch.setattr(building, "server_arrays", lambda server: [])
    drive(grid_of(SMOKE), SMOKE)
    assert servers[0].max_workers == 10


@pytest.mark.parametrize("partition_id", [4, "4"])
def test_a_client_goes_by_the_partition_of_its_node(partition_id: Any) -> None:
    """An int or a str, depending on how the node was started."""
    node = {"partition-id": partition_id, "num-partitions": 10}
    context = Context(run_id=1, node_id=9, node_config=node, state=RecordDict(), run_config={})
    found = client_of(SMOKE, context).get_properties({})
    assert found == {"client_id": 4, "num_examples": world_of(SMOKE).num_examples()[4]}


# ---- flwr run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flwr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flwr]:
    """``flwr run . --stream`` with further arguments; all runs share one SuperLink, started by the first."""
    with LocalSuperLink(tmp_path_factory.mktemp("flwr")) as superlink:
        yield superlink.run


def run_config(runs: Path, **config: Any) -> str:
    """What pyproject.toml lists by itself, all other keys in ``set``."""
    pairs = {"scenario": "smoke", "runs_dir": str(runs)} | {k: v for k, v in config.items() if "__" not in k}
    if others := {k: v for k, v in config.items() if "__" in k}:
        pairs["set"] = ", ".join(f"{key}={value}" for key, value in dotted(others).items())
    return " ".join(f"{key}={value!r}" for key, value in pairs.items())


def state_of_the_repository() -> tuple[bytes, list[str]]:
    """What ``flwr run`` might touch: it rewrites a pyproject.toml of the old kind, and builds an archive."""
    return (ROOT / "pyproject.toml").read_bytes(), sorted(p.name for p in [*ROOT.glob("*.fab"), *ROOT.glob("runs/*")])


BSFL = {"selectors__bsfl__data_weights": [1, 2, 3, 4, 5, 5, 4, 3, 2, 1], "selectors__bsfl__alpha": 5.0}
FEDCA = {"aggregation__filter": "loss", "aggregation__averaging": "fedpdp", "api": "message"}
SLOW = pytest.mark.slow


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("selector", "config"),
    [
        pytest.param(
            "bsfl", {"rounds": 2, "seed": 4, "training__learning_rate": 0.05} | BSFL, marks=[SLOW, pytest.mark.e2e_ci]
        ),
        pytest.param("gpfl", {"rounds": 6, "api": "message"}, marks=SLOW),
        pytest.param("fedcm-ts", {"rounds": 6, "api": "message"}, marks=SLOW),
        pytest.param("pczfl", {"selectors__pczfl__warmup_rounds": 2, "clients__energy_score_low": 0.5}, marks=SLOW),
        pytest.param("random", FEDCA, marks=SLOW),
    ],
)
def test_flwr_run_trains_and_writes_the_history(
    selector: str, config: dict[str, Any], flwr: Flwr, tmp_path: Path
) -> None:
    before = state_of_the_repository()
    command = flwr("--run-config", run_config(tmp_path / "runs", selector=selector, **config), *TEN_NODES)
    assert command.wait(280) == 0, command.stdout[-3000:] + command.stderr[-3000:]
    said = ANSI.sub("", command.stdout + command.stderr)

    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(rf"smoke-{selector}-\d{{8}}-\d{{6}}", folder.name)
    assert str(folder) in said.replace("\n", "")
    history = read_history(folder)
    scenario = load_scenario("smoke", dotted(config) | {"selector": selector})
    assert [r.round for r in history.rounds] == list(range(1, scenario.rounds + 1))
    timing = read_table(folder / "timing.parquet")
    assert timing["round"].tolist() == [r.round for r in history.rounds]
    assert all((column > 0).all() for column in timing.values())
    assert load_scenario(str(folder / "scenario.toml")).selectors == scenario.selectors
    for record in history.rounds:
        assert f"round {record.round}: accuracy {record.accuracy:.4f}" in said

    # The same run without grid and Ray: the same choices and the same model.
    expected = play(scenario.model_copy(update={"api": "legacy"}))
    for ours, theirs in zip(history.clients, expected.history.clients, strict=True):
        assert (ours.round, ours.client_id, ours.latency_s) == (theirs.round, theirs.client_id, theirs.latency_s)
        assert (ours.completed, ours.energy_j) == (True, theirs.energy_j)
    if scenario.api == "legacy":
        assert repr(history.clients) == repr(expected.history.clients)
        assert repr(history.rounds) == repr(expected.history.rounds)
    tolerance = 0 if scenario.api == "legacy" else 1e-5  # answers come in other orders, and so do the mean's terms
    for ours, theirs in zip(expected.arrays, read_model(folder), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    assert state_of_the_repository() == before


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("config", "federation", "last"),
    [
        ({}, (), 'or change the size of the scenario: --run-config "num_clients=2 clients_per_round=1"'),
        ({"selectors__bsfl__alpha": -1.0}, TEN_NODES, "alpha must be a finite number of at least 0, got -1.0"),
    ],
    ids=["two SuperNodes", "a bad value"],
)
def test_a_failed_run_ends_with_its_message(
    config: dict[str, Any], federation: tuple[str, ...], last: str, flwr: Flwr, tmp_path: Path
) -> None:
    """``flwr run`` itself only shows the log, and ends with status 0; the run's own status is failed."""
    command = flwr("--run-config", run_config(tmp_path / "runs", **config), *federation)
    assert command.wait(120) == 0
    said = ANSI.sub("", command.stdout)
    assert "Traceback" not in said
    assert "[ROUND 1]" not in said
    assert said.count("ERROR") == 2
    after = said.partition(last)[2]  # Flower's exit code alone
    assert re.fullmatch(r"\s*ERROR :\s+Exit Code: 700\s.*flower\.ai/docs\S*\s*", after, flags=re.DOTALL), said[-3000:]
    assert not (tmp_path / "runs").exists()
    (number,) = re.findall(r"started run (\d+)", ANSI.sub("", command.stdout + command.stderr))
    listed = flwr(verb=("list", "--format", "json", "--run-id", number))
    assert listed.wait(60) == 0, listed.stderr
    assert "finished:failed" in listed.stdout
