"""Callbacks: what they hand over, what happens when the library fails, and each library itself where it is installed.

The tests of a library run if it is installed: ``pip install tensorboard``, ``wandb`` or ``mlflow``.
"""

from __future__ import annotations

import importlib.util
import logging
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.callbacks import MLflow, Recorder, TensorBoard, WandB, figures, together
from fedsel_flwr.callbacks.trackers import client_figures
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.records import RoundRecord
from fedsel_flwr.selectors import Random
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.strategies import SelectionStrategy
from tests.simulations.cut_off_runs import cut_off, smoke
from tests.strategies.helpers import Federation, fedavg, fleet

ROUNDS = 4


def needs(package: str) -> Any:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed: pip install {package}")


class Broken(Recorder):
    """Its library raises in rounds 2 and 3, and at the end."""

    def __init__(self) -> None:
        self.written: dict[int, Mapping[str, float]] = {}
        self.ended: list[bool] = []

    def write(self, round: int, values: Mapping[str, float]) -> None:
        if round in (2, 3):
            raise ConnectionError("the tracking server\nis away")
        self.written[round] = values

    def end(self, *, failed: bool) -> None:
        self.ended.append(failed)
        raise OSError("still away")


def played(on_round: Callable[[RoundRecord], None]) -> list[RoundRecord]:
    """The rounds of a strategy with this callback: evaluated but for round 3, joules from round 1 on."""
    base = fedavg(evaluate_fn=lambda r, arrays, config: (1.0 / r, {"accuracy": r / 8}) if r not in (0, 3) else None)
    strategy = SelectionStrategy(Random(clients_per_round=2, seed=0), base, max_latency=10.0, on_round=on_round)
    Federation(strategy, fleet(3)).play(ROUNDS)
    return list(strategy.history.rounds)


def expected(rounds: list[RoundRecord]) -> dict[str, list[tuple[int, float]]]:
    """Figure -> its known values by round."""
    columns: dict[str, list[tuple[int, float]]] = {}
    for record in rounds:
        for name, value in figures(record).items():
            columns.setdefault(name, []).append((record.round, value))
    return columns


def test_every_known_figure_is_handed_over() -> None:
    rounds = played(lambda record: None)
    columns = expected(rounds)
    assert columns["accuracy"] == [(1, 0.125), (2, 0.25), (4, 0.5)]
    assert columns["num_selected"] == [(r, 2.0) for r in (1, 2, 3, 4)]
    assert columns.keys() == {
        "num_available", "num_selected", "num_completed", "num_kept", "num_timeouts", "round_s", "simulated_s",
        "energy_j", "total_energy_j", "accuracy", "loss", "probe_s", "probe_j", "num_probed", "num_spares",
    }  # fmt: skip


def test_a_library_that_fails_ends_nothing_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, seen = Broken(), list[int]()
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"), broken as entered:
        rounds = played(together(entered, lambda record: seen.append(record.round)))
    assert (len(rounds), seen, sorted(broken.written)) == (ROUNDS, [1, 2, 3, 4], [1, 4])
    [said] = [message for message in caplog.messages if "Broken" in message]
    assert "Broken failed in round 2" in said
    assert "ConnectionError: the tracking server is away" in said
    assert broken.ended == [False]


def test_a_run_that_is_cut_off_has_failed_and_its_error_comes_out() -> None:
    broken = Broken()
    with pytest.raises(KeyboardInterrupt), broken:
        raise KeyboardInterrupt
    assert broken.ended == [True]


@pytest.mark.parametrize(
    ("make", "package"), [(lambda: TensorBoard("x"), "tensorboard"), (MLflow, "mlflow"), (WandB, "wandb")]
)
def test_a_library_that_is_not_installed_is_named(
    make: Callable[[], Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RunError, match=rf"pip install {package}$"):
        make()


# ---- the libraries themselves ----------------------------------------------------------------------------------------


def of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if "_hparams_" not in tag]
    assert all(tag.startswith(("fedsel/", "client/")) for tag in tags)
    return {
        tag.removeprefix("fedsel/"): [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)]
        for tag in tags
    }


def of_wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What an offline run's file holds."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    return of_wandb_file(path)


def of_wandb_file(path: Path) -> dict[str, list[tuple[int, float]]]:
    """What a file of W&B holds: records of protobuf in the frames of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    def records() -> Iterator[Any]:
        data, place, whole = path.read_bytes(), 7, b""
        while place + 7 <= len(data):
            if (left := 2**15 - place % 2**15) < 7:
                place += left
                continue
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            whole += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a record's last frame
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                whole = b""
                yield record

    deadline = time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in records()):  # its service writes
        assert time.monotonic() < deadline
        time.sleep(0.1)
    columns: dict[str, list[tuple[int, float]]] = {}
    for record in records():
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: float(item.value_json) for item in record.history.item}
            for name, value in row.items():
                columns.setdefault(name, []).append((int(row["_step"]), value))
    return {name: values for name, values in columns.items() if not name.startswith("_")}


def of_mlflow(folder: Path, run_id: str, file: str = "runs.db") -> dict[str, list[tuple[int, float]]]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / file}")
    found = {name: client.get_metric_history(run_id, name) for name in client.get_run(run_id).data.metrics}
    return {name: sorted((one.step, one.value) for one in values) for name, values in found.items()}


def in_single(columns: Mapping[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """In single precision, which is what event files hold."""
    return {name: [(r, float(np.float32(value))) for r, value in values] for name, values in columns.items()}


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=needs(name)) for name in ("tensorboard", "wandb", "mlflow")]
)
def test_each_library_has_every_figure_of_a_run(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard has them before it is closed: a run that dies leaves its rounds."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(name, value)
    callback: Any = {
        "tensorboard": lambda: TensorBoard(tmp_path),
        "wandb": lambda: WandB("selection", dir=str(tmp_path), config={"selector": "random"}),
        "mlflow": lambda: MLflow(tracking_uri=f"sqlite:///{tmp_path / 'runs.db'}"),
    }[package]()
    read: Callable[[], Any] = {
        "tensorboard": lambda: of_tensorboard(tmp_path),
        "wandb": lambda: of_wandb(tmp_path),
        "mlflow": lambda: of_mlflow(tmp_path, callback.run_id),
    }[package]
    with callback:
        result = simulate(load_scenario("smoke"), engine="vectorized", on_round=callback, folder=tmp_path / "run")
        wanted = in_single(expected(list(result.history.rounds)))
        assert package != "tensorboard" or read().keys() == wanted.keys()
        assert package != "wandb" or callback.run.config["selector"] == "random"
    assert in_single(read()) == wanted


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=needs(name)) for name in ("tensorboard", "wandb", "mlflow")]
)
def test_each_library_by_the_option(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round, and the clients' figures; a resumed run is a run of its own, with the rounds before."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    options = {"folder": tmp_path / "study", "track": package, "track_clients": [2, 5]}
    cut_off(smoke(6), after=4, checkpoint_every=2, **options)
    result = simulate(smoke(6), resume=True, **options)
    wanted = expected(list(result.history.rounds))
    for row in result.history.clients:
        for name, value in client_figures(row).items() if row.client_id in "25" else ():
            wanted.setdefault(name, []).append((row.round, value))
    if package == "wandb":
        logs = tmp_path.glob("wandb/offline-run-*/*.wandb")
        found = of_wandb_file(max(logs, key=lambda path: path.stat().st_mtime))
    elif package == "mlflow":
        client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{tmp_path / 'study' / 'mlflow.db'}")
        place = client.get_experiment_by_name("fedsel-smoke").experiment_id
        [run] = [one for one in client.search_runs([place]) if one.info.status == "FINISHED"]
        found = of_mlflow(tmp_path / "study", run.info.run_id, "mlflow.db")
    else:
        found = of_tensorboard(tmp_path / "study" / "tensorboard" / "bsfl-seed1-2")
    assert in_single(found) == in_single(wanted)


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(180)
def test_a_run_of_mlflow_has_its_state_and_can_be_resumed(tmp_path: Path) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    with MLflow("selection", tracking_uri=uri, run_name="first", params={"selector": "random", "seed": 0}) as run:
        played(run)
        assert client.get_run(run.run_id).info.status == "RUNNING"
    made = client.get_run(run.run_id)
    assert (made.info.status, made.info.run_name, made.data.params) == (
        "FINISHED", "first", {"selector": "random", "seed": "0"},
    )  # fmt: skip
    assert mlflow.active_run() is None
    with pytest.raises(KeyboardInterrupt), MLflow("selection", tracking_uri=uri) as other:
        raise KeyboardInterrupt
    assert client.get_run(other.run_id).info.status == "FAILED"
    resumed = MLflow("selection", tracking_uri=uri, run_id=run.run_id)
    assert client.get_run(run.run_id).info.status == "RUNNING"
    resumed(RoundRecord(round=5, num_available=1, num_selected=0, num_completed=0, round_s=0.0, simulated_s=0.0,
                        energy_j=0.0, total_energy_j=0.0))  # fmt: skip
    resumed.close()
    assert [step for step, _ in of_mlflow(tmp_path, run.run_id)["num_selected"]] == [1, 2, 3, 4, 5]
