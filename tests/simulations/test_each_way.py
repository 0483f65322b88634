"""The same simulation by each way: both of Flower's APIs in this process, without Ray, and the vectorized engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.common import Context, RecordDict

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.answering import answer
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.report.run_folder import read_history, read_model
from fedsel_flwr.selectors import Probe, RoundReport, Selector
from fedsel_flwr.simulations.on_flower import app
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.worlds.world import World
from tests.simulations.inprocess import WAYS, distance, grid_of, simulated

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("without_ray")]
EACH_WAY = pytest.mark.parametrize("way", WAYS)


def run(way: str, rounds: int, keys: Mapping[str, Any] | None = None, **options: Any) -> Any:
    scenario = load_scenario("smoke", {"rounds": rounds, "selector": "round-robin", **(keys or {})})
    return simulated(scenario, way, **options)


def bits(result: Any) -> list[bytes]:
    return [array.tobytes() for array in result.arrays]


# ---- who is asked, and nobody -------------------------------------------------------------------------------------


@EACH_WAY
def test_everyone_is_asked_and_the_first_replies_end_the_round(way: str) -> None:
    """The scenario's clients_per_round limits nothing, and without channels all eight send at once."""
    keys = {"num_clients": 8, "clients_per_round": 2, "selector": "everyone"}
    whole = run(way, 4, keys).history
    early = run(way, 4, keys | {"aggregation.wait_for": 5}).history
    waves = run(way, 4, keys | {"wireless.channels": 2}).history
    assert [one.num_selected for history in (whole, early) for one in history.rounds] == [8] * 8
    assert [(one.num_completed, one.num_spares) for one in early.rounds] == [(5, 3)] * 4
    for all_there, five, wave in zip(whole.rounds, early.rounds, waves.rounds, strict=True):
        latencies = sorted(row.latency_s for row in whole.clients if row.round == all_there.round)
        assert (all_there.round_s, five.round_s) == (latencies[-1], latencies[4])
        assert wave.round_s > all_there.round_s


@EACH_WAY
def test_a_round_without_clients_is_recorded_and_told(way: str, tmp_path: Path) -> None:
    absent = "".join(f"2,{k},down\n4,{k},up\n" for k in range(10))
    (tmp_path / "trace.csv").write_text(f"round,client,state\n{absent}")
    keys = {"availability.kind": "trace", "availability.trace": str(tmp_path / "trace.csv")}
    told: list[int] = []
    rounds = run(way, 4, keys, on_round=lambda record: told.append(record.round)).history.rounds
    assert ([one.num_available for one in rounds], told) == ([10, 0, 0, 10], [1, 2, 3, 4])
    assert [(one.num_selected, one.round_s, one.energy_j) for one in rounds[1:3]] == [(0, 0.0, 0.0)] * 2
    assert rounds[2].simulated_s == rounds[0].simulated_s > 0


# ---- what a selector asks of the clients --------------------------------------------------------------------------

ANSWERS = {
    "data.local_test_fraction": 0.25, "partition.kind": "dirichlet", "wireless.channels": 1, "clients_per_round": 3
}  # fmt: skip
COLUMNS = ("loss", "rms_loss", "local_accuracy", "gradient")


class Reading(Selector):
    """Reads everything that clients can answer with their updates, and keeps the reports."""

    name = "reading"
    needs = frozenset(COLUMNS)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.heard: list[Any] = []

    def _select(self, available: IntArray) -> IntArray:
        return available[: self.clients_per_round]

    def _observe(self, report: RoundReport) -> None:
        self.heard.append({column: getattr(report, column) for column in COLUMNS})


class Asking(Reading):
    """Asks the first two clients about everything before it chooses, and keeps the answers."""

    name = "asking"
    needs = frozenset()

    def _probe(self, available: IntArray) -> Probe:
        return Probe(clients=available[:2], columns=COLUMNS)

    def _inform(self, clients: IntArray, columns: Mapping[str, Any]) -> None:
        if "gradient" in columns:
            assert clients.tolist() == [0, 1]
            self.heard.append({name: np.array(columns[name]) for name in COLUMNS})

    def _observe(self, report: RoundReport) -> None:
        """Nothing."""


@EACH_WAY
@pytest.mark.parametrize(("kind", "count"), [(Reading, 3), (Asking, 2)])
def test_the_selector_reads_what_the_clients_answered_and_it_is_charged(way: str, kind: Any, count: int) -> None:
    selector = kind(clients_per_round=3, seed=1)
    history = run(way, 2, ANSWERS, selector=selector).history
    first, second = selector.heard
    assert not np.array_equal(first["loss"], second["loss"])
    world = World(load_scenario("smoke", ANSWERS))
    set_arrays(world.model, list(world.initial_arrays()))
    for row in range(count):  # of the first round, at the first model
        train, test = world.examples(row)
        assert train[1].size > test[1].size > 0
        said = answer(world.model, COLUMNS, train, test)
        expected = said | {"gradient": np.frombuffer(said["gradient"], dtype=np.float32)}
        for column in COLUMNS:
            np.testing.assert_allclose(first[column][row], expected[column], rtol=1e-5, atol=1e-7)

    def answering(k: int) -> float:
        """Three passes over the training data, and one over the test data; training reads its data once."""
        train, test = world.examples(k)
        return (3 + test[1].size / train[1].size) / 3

    for record in history.clients:  # a gradient beside the update
        delays = world.system.draw(int(record.client_id), record.round)
        more, uploads = (answering(int(record.client_id)), 2) if kind is Reading else (0, 1)
        assert record.compute_s == pytest.approx(delays.compute_s * (1 + more), rel=1e-12)
        assert record.upload_s == uploads * delays.upload_s
        assert (record.completed, record.problem) == (True, "")
    for record in history.rounds:  # one channel: the two answer one after the other
        draws = [(world.system.draw(k, record.round), answering(k)) for k in range(2 if kind is Asking else 0)]
        seconds = sum(d.download_s + d.compute_s * share + d.upload_s for d, share in draws)
        assert record.probe_s == pytest.approx(seconds, rel=1e-9)
        joules = sum(world.system.energy_j(d, d.compute_s * share) for d, share in draws)
        assert record.probe_j == pytest.approx(joules, rel=1e-9)


# ---- the caller's own stop signal: the same end as that of a shorter run --------------------------------------------

END = 3
RARELY = {"evaluation_every": 5}


def stop_at_the_end(done: int, history: Any) -> bool:
    return done >= END and history.rounds[-1].round == done


@EACH_WAY
def test_a_simulation_ends_with_the_round_of_the_signal(way: str, tmp_path: Path) -> None:
    told: list[tuple[int, bool]] = []
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 5}
    stopped = run(
        way, 6, RARELY, **options, should_stop=stop_at_the_end,
        on_round=lambda record: told.append((record.round, bool(np.isfinite(record.accuracy)))),
    )  # fmt: skip
    assert told == [(1, False), (2, False), (3, False), (3, True)]  # evaluated because it is the last
    assert sorted(path.stem for path in tmp_path.glob("round-*")) == ["round-000003"]
    for other in (run(way, 6, RARELY, **options, should_stop=stop_at_the_end, resume="must"), run(way, END, RARELY)):
        assert (repr(other.history), bits(other)) == (repr(stopped.history), bits(stopped))
    on, straight = run(way, 6, RARELY, **options, resume="must"), run(way, 6, RARELY)
    assert bits(on) == bits(straight)
    assert [one.client_id for one in on.history.clients] == [one.client_id for one in straight.history.clients]


def test_a_run_of_a_folder_that_the_signal_ended_has_finished(tmp_path: Path) -> None:
    first, again = (
        run("vectorized", 6, RARELY, folder=tmp_path, should_stop=stop_at_the_end, resume=resume)
        for resume in (False, True)
    )
    assert len(first.history.rounds) == END
    assert repr(again.history.rounds) == repr(first.history.rounds)
    assert not (tmp_path / "checkpoints").exists()


# ---- an error leaves the rounds and the last model in the run's folder ---------------------------------------------


class Mistake(Exception):
    """In somebody's own code."""


def mistake(record: Any, after: int = 2) -> None:
    if record.round == after:
        raise Mistake


@pytest.mark.parametrize(("way", "every"), [("legacy", 5), ("message", 0), ("vectorized", 0), ("vectorized", 5)])
def test_the_last_model_is_left_without_a_checkpoint_that_was_due(way: str, every: int, tmp_path: Path) -> None:
    with pytest.raises(Mistake) as caught:
        run(way, 3, folder=tmp_path, checkpoint_every=every, on_round=mistake)
    assert caught.value.__notes__[0].startswith("the model after round 2 is strategy.last_model")
    assert [array.tobytes() for array in read_model(tmp_path, "model-after-round-2.safetensors")] == bits(run(way, 2))
    assert len(read_history(tmp_path).rounds) == 2
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("round-*"))
    assert checkpoints == (["round-000002.safetensors"] if every else [])
    run(way, 3, folder=tmp_path, checkpoint_every=every, resume=True)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_flwr_run_leaves_it_too(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "_log_round", mistake)
    config: dict[str, Any] = {"scenario": "smoke", "api": api, "runs_dir": str(tmp_path)}
    context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(Mistake):
        app.main(grid_of(load_scenario("smoke", {"api": api})), context)
    (folder,) = tmp_path.iterdir()
    assert len(read_history(folder).rounds) == 2
    path = folder / "model-after-round-2.safetensors"
    assert read_model(folder, path.name)[0].dtype == np.float32
    assert f"the finished rounds, and the model after the last one: {path}" in caplog.text


# ---- rounds that end early ----------------------------------------------------------------------------------------

SLOW = {"num_clients": 8, "clients_per_round": 4, "selector": "random", "seed": 3, "wireless.max_latency_s": 0.16}


@EACH_WAY
@pytest.mark.parametrize(
    "options", [{"round_deadline_s": 0.15, "late": "use"}, {"wait_for": 2, "late": "damped"},
                {"over_selection": 0.5, "round_deadline_s": "auto", "late": "use", "max_staleness": 2}],
)  # fmt: skip
def test_late_updates_are_the_same_each_way(way: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Also after a stop with updates on their way: the continued run is the uninterrupted one."""
    keys = SLOW | {f"aggregation.{name}": value for name, value in options.items()}
    whole, expected = run(way, 8, keys), run("vectorized", 8, keys)
    assert sum(one.num_late for one in whole.history.rounds) > 3
    for name in ("note", "deadline_s", "num_late", "simulated_s"):
        told, own = ([getattr(one, name) for one in history.rounds] for history in (whole.history, expected.history))
        np.testing.assert_array_equal(told, own)
    assert distance(whole, expected) <= 1e-4
    with pytest.raises(Mistake):
        run(way, 8, keys, folder=tmp_path / "run", on_round=partial(mistake, after=4), checkpoint_every=1)
    resumed = run(way, 8, keys, folder=tmp_path / "run", resume=True)
    assert resumed.history == whole.history
    assert bits(resumed) == bits(whole)


def normalizing() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))


@EACH_WAY
@pytest.mark.parametrize(
    "options", [{"aggregation.round_deadline_s": 0.15, "aggregation.late": "damped"},
                {"aggregation.concurrency": 8, "clients_per_round": 2}],
)  # fmt: skip
def test_running_statistics_of_stale_updates_are_the_clients_own(way: str, options: dict[str, Any]) -> None:
    """A batch normalization's statistics are averaged as they are; as updates they would be moved to the model's."""
    if way == "legacy" and "aggregation.concurrency" in options:
        pytest.skip("the legacy API has no buffered rounds")
    keys = SLOW | {"training.batch_size": 17} | options
    result, expected = run(way, 5, keys, model=normalizing), run("vectorized", 5, keys, model=normalizing)
    stale = [row for row in result.history.clients if row.staleness]
    assert len(stale) + sum(one.num_late for one in result.history.rounds) > 2
    for name, array, own in zip(normalizing().state_dict(), result.arrays, expected.arrays, strict=True):
        # Flower's average of the legacy API leaves the integer that counts batches at 0.
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(array, own, rtol=1e-3, atol=1e-4)
