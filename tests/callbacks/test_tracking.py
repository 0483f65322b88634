"""Tracking: each round reaches the tracker, or is lost with it; callbacks; and which tracker an option names."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedsel_flwr.callbacks import MLflow, Recorder, TensorBoard, WandB, figures, together, trackers
from fedsel_flwr.callbacks.trackers import TrackedRun
from fedsel_flwr.callbacks.tracking import Tracking
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy
from tests.report.made import client
from tests.strategies.helpers import Federation, fedavg, fleet

NAN = float("nan")


class Fake:
    """A tracker's server: its runs, with the rounds of each in the order in which they came; and a run's history."""

    def __init__(self) -> None:
        self.history = History()
        self.runs: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
        self.ended: dict[str, bool] = {}
        self.tried = 0
        self.away = False

    def open(self) -> Recorder:
        self.tried += 1
        self.reach()
        return FakeRun(self, f"run{len(self.runs)}")

    def reach(self) -> None:
        if self.away:
            raise ConnectionError("away")

    def follow(self, **options: Any) -> TrackedRun:
        """Track the run."""
        return TrackedRun("fake", self.open, **options).follow(self.history)

    def play(self, tracked: TrackedRun, rounds: int, away: bool = False) -> None:
        """Play rounds, during which the server may be away."""
        self.away = away
        for _ in range(rounds):
            tracked(add_round(self.history))

    def rounds(self, run_id: str = "run0") -> list[int]:
        return [round for round, _ in self.runs[run_id]]


class FakeRun(Recorder):
    def __init__(self, server: Fake, run_id: str) -> None:
        self.run_id, self.server = run_id, server
        server.runs.setdefault(run_id, [])

    def write(self, round: int, values: Mapping[str, float]) -> None:
        self.server.reach()
        self.server.runs[str(self.run_id)].append((round, values))

    def end(self, *, failed: bool) -> None:
        self.server.reach()
        self.server.ended[str(self.run_id)] = failed


def add_round(history: History, accuracy: float = 0.5) -> RoundRecord:
    """A round in which clients 0 and 1 took part; 1 failed, and reported no joules."""
    number = len(history.rounds) + 1
    parts = {"round": number, "download_s": 0.1, "compute_s": 0.2, "upload_s": 0.3, "train_loss": 1.5}
    rows = [client(str(k), number + k / 10, client=k, completed=not k, energy_j=(0.5, NAN)[k], **parts) for k in (0, 1)]
    history.append(round=number, num_available=9, round_s=1.0, clients=rows)
    history.record_evaluation(number, loss=accuracy, accuracy=accuracy)
    return history.rounds[-1]


@pytest.fixture(autouse=True)
def tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "RETRY", 0.0)


# ---- each round ------------------------------------------------------------------------------------------------------


def test_a_round_without_server_is_lost_and_the_run_continues(caplog: pytest.LogCaptureFixture) -> None:
    server = Fake()
    with caplog.at_level(logging.WARNING, "fedsel_flwr"), server.follow() as tracked:
        for rounds, away in ((2, False), (2, True), (1, False), (0, True)):
            server.play(tracked, rounds, away)
    assert server.rounds() == [1, 2, 5]
    [said] = caplog.messages
    assert said.startswith("fake failed in round 3. The run continues, and further failures are not logged: Connection")


def test_a_server_that_is_away_at_first_gets_the_rounds_before_as_after_a_resume() -> None:
    server = Fake()
    server.away = True
    tracked = server.follow()
    server.play(tracked, 2, away=True)
    server.play(tracked, 1)
    assert server.rounds() == [1, 2, 3]
    server.play(server.follow(), 2)
    assert server.rounds("run1") == [1, 2, 3, 4, 5]


def test_a_server_that_stays_away_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "RETRY", 1e9)
    server = Fake()
    server.away = True
    with server.follow() as tracked:
        server.play(tracked, 3, away=True)
    assert server.tried == 1
    assert server.ended == {}


def test_a_round_that_is_evaluated_later_is_sent_again() -> None:
    server = Fake()
    with server.follow() as tracked:
        tracked(add_round(server.history, NAN))
        tracked(add_round(server.history, NAN))
        server.history.record_evaluation(2, loss=1.0, accuracy=0.75)
        tracked(server.history.rounds[-1])
    assert [(number, values.get("accuracy")) for number, values in server.runs["run0"]] == [
        (1, None), (2, None), (2, 0.75),
    ]  # fmt: skip


def test_clients_have_figures_of_their_own() -> None:
    server = Fake()
    with server.follow(clients=("1", "8")) as tracked:
        add_round(server.history)
        tracked(add_round(server.history))
    names = [f"client/1/{name}" for name in ("latency_s", "download_s", "compute_s", "upload_s", "train_loss")]
    for number, values in server.runs["run0"]:
        own = {name: value for name, value in values.items() if name.startswith("client/")}
        assert own == dict(zip(names, (number + 0.1, 0.1, 0.2, 0.3, 1.5), strict=True)) | {"client/1/completed": 0.0}


def test_a_run_that_an_error_ends_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Fake()
    tracked = server.follow()
    server.play(tracked, 1)
    with pytest.raises(KeyboardInterrupt), tracked:
        raise KeyboardInterrupt
    assert server.ended == {"run0": True}
    monkeypatch.setattr(trackers, "RETRY", 1e9)
    again = server.follow()
    for rounds, away in ((1, False), (1, True), (0, False)):
        server.play(again, rounds, away)
    with pytest.raises(KeyboardInterrupt), again:
        raise KeyboardInterrupt
    assert server.ended == {"run0": True}  # Ctrl-C does not wait for a server a second time


# ---- a library as a callback of a strategy --------------------------------------------------------------------------


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


def test_every_known_figure_is_handed_over() -> None:
    history = History()
    known, unknown = figures(add_round(history, 0.25)), figures(add_round(history, NAN))
    assert (known["accuracy"], known["num_selected"], known["simulated_s"]) == (0.25, 2.0, 1.0)
    assert known.keys() - unknown.keys() == {"accuracy", "loss"}
    assert known.keys() == {
        "num_available", "num_selected", "num_completed", "num_kept", "num_timeouts", "round_s", "simulated_s",
        "energy_j", "total_energy_j", "accuracy", "loss", "probe_s", "probe_j", "num_probed", "num_spares", "num_late",
        "late_j",
    }  # fmt: skip


def test_a_library_that_fails_ends_nothing_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    broken, seen = Broken(), list[int]()
    with caplog.at_level(logging.WARNING, logger="fedsel_flwr"), broken as entered:
        on_round = together(entered, lambda record: seen.append(record.round))
        strategy = SelectionStrategy(Random(clients_per_round=2), fedavg(), max_latency=10.0, on_round=on_round)
        Federation(strategy, fleet(3)).play(4)
    assert (len(strategy.history.rounds), seen, sorted(broken.written)) == (4, [1, 2, 3, 4], [1, 4])
    [said] = [message for message in caplog.messages if "Broken" in message]
    assert "Broken failed in round 2" in said
    assert "ConnectionError: the tracking server is away" in said
    assert broken.ended == [False]


@pytest.mark.parametrize(
    ("make", "package"), [(lambda: TensorBoard("x"), "tensorboard"), (MLflow, "mlflow"), (WandB, "wandb")]
)
def test_a_library_that_is_not_installed_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RunError, match=rf"pip install {package}$"):
        make()


# ---- the option ----------------------------------------------------------------------------------------------------


class Own(Recorder):
    """A tracker of the user's."""

    def __init__(self, *, name: str, params: Mapping[str, object]) -> None:
        self.name, self.params = name, params

    def write(self, round: int, values: Mapping[str, float]) -> None: ...

    def end(self, *, failed: bool) -> None: ...


class Greedy(Own):
    def __init__(self, **given: Any) -> None:
        self.given = given


def test_a_class_of_ones_own_gets_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedsel_flwr.callbacks import Recorder\nclass Mine(Recorder):\n    def write(self, round, values): pass\n"
        "    def __init__(self, name): self.name = name\n    def end(self, failed): pass\n"
    )
    mine = Tracking.of(f"{tmp_path / 'mine.py'}:Mine", "smoke", 10).open("bsfl-seed1", {"seed": 1})
    assert mine.name == "bsfl-seed1"  # type: ignore[attr-defined]
    own = Tracking.of(Own, "smoke", 10, folder=tmp_path).open("bsfl-seed1", {"seed": 1})
    assert (own.name, own.params) == ("bsfl-seed1", {"comparison": tmp_path.name, "seed": 1})  # type: ignore[attr-defined]
    greedy = Tracking.of(Greedy, "smoke", 10).open("a", {})
    assert greedy.given.keys() == {"name", "params", "run_id", "group", "folder"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("track", "message"),
    [
        ("tensorbord", r"track must be one of tensorboard, mlflow, wandb, .* got 'tensorbord'"),
        ("", "track must be one of"),
        (3, "track must be a text such as 'tensorboard', or a class .* got int"),
        (dict, "got type"),
        ("fedsel_flwr.selectors:Random", "must be a class derived from fedsel_flwr.callbacks.Recorder"),
        ("./nothing.py:Mine", "there is no file"),
    ],
)
def test_what_names_no_tracker_is_refused(track: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Tracking.of(track, "smoke", 10)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [(50, [str(k) for k in range(10)]), (5, ["0", "2", "4", "6", "8"]), (0, []), ([3, 1], ["3", "1"])],
)
def test_clients_are_spread_or_named(given: Any, chosen: list[str]) -> None:
    assert list(Tracking.of(Own, "smoke", 10, track_clients=given).clients) == chosen


@pytest.mark.parametrize(
    ("given", "message"),
    [(-1, "at least 0"), ([10], "track_clients has 10, but the clients are 0 to 9"), ("5", "track_clients must be")],
)
def test_clients_that_are_not_there_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Tracking.of(Own, "smoke", 10, track_clients=given)


# ---- the libraries, replaced ---------------------------------------------------------------------------------------


def put(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """MLflow's client, which notes its calls, and fails if the address says so."""
    calls: dict[str, list[Any]] = {}
    # Set first, so that what the tracker sets in the environment goes with the test.
    for name in ("TRACKING_URI", "EXPERIMENT_NAME", "HTTP_REQUEST_TIMEOUT", "HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")
        monkeypatch.delenv(f"MLFLOW_{name}")

    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            self.uri = tracking_uri

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.uri == "http://away":
                    raise ConnectionError("x" * 500)
                limit = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT")
                calls.setdefault(name, []).append((self.uri, *args, kwargs, limit))
                known = {"get_experiment_by_name": None, "create_experiment": "7"}
                return known.get(name, SimpleNamespace(info=SimpleNamespace(run_id="abc")))

            return call

    put(monkeypatch, "mlflow", MlflowClient=Client)
    entities: dict[str, Any] = {"Metric": lambda *given: given, "Param": lambda *given: given}
    put(monkeypatch, "mlflow.entities", **entities)
    return calls


def test_mlflow_gets_bounded_requests_and_gives_up_soon(mlflow: dict[str, list[Any]], tmp_path: Path) -> None:
    said: list[str] = []
    tracking = Tracking.of("mlflow", "smoke", 10, folder=tmp_path).begin(None, said.append)
    assert said == []
    recorder = tracking.open("bsfl-seed1", dict.fromkeys(map(str, range(150)), 0))
    recorder.write(1, dict.fromkeys(map(str, range(1200)), 0.0))
    recorder.end(failed=False)
    sizes = [len(call[2].get("params", call[2].get("metrics"))) for call in mlflow["log_batch"]]
    assert sizes == [100, 51, 1000, 200]
    assert {call[-1] for calls in mlflow.values() for call in calls} == {"10"}
    assert mlflow["create_experiment"][0][:2] == (f"sqlite:///{tmp_path / 'mlflow.db'}", "fedsel-smoke")
    assert mlflow["set_terminated"][0][1:3] == ("abc", "FINISHED")


def test_mlflow_as_the_user_has_set_it(mlflow: dict[str, list[Any]], monkeypatch: Any, tmp_path: Path) -> None:
    for name, value in (("TRACKING_URI", "http://mine"), ("EXPERIMENT_NAME", "ours"), ("HTTP_REQUEST_TIMEOUT", "77")):
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    MLflow("ours", run_id="run7")
    assert mlflow["update_run"] == [(None, "run7", {"status": "RUNNING"}, "77")]
    Tracking.of("mlflow", "smoke", 10).open("a", {})
    assert mlflow["create_experiment"].pop() == ("http://mine", "ours", {}, "77")
    Tracking.of("mlflow:http://yours", "smoke", 10, folder=tmp_path).open("a", {})
    assert mlflow["create_experiment"] == [("http://yours", "ours", {}, "77")]
    MLflow("other", tracking_uri="http://mine")
    assert mlflow["create_experiment"][1][:2] == ("http://mine", "other")


def test_mlflow_that_does_not_answer_is_a_warning(mlflow: dict[str, list[Any]]) -> None:
    said: list[str] = []
    Tracking.of("mlflow:http://away", "smoke", 10).begin(None, said.append)
    [warning] = said
    assert warning.startswith("mlflow does not answer. The runs continue, and mlflow lacks their rounds until")
    assert len(warning) < 350
    with pytest.raises(ParameterError, match=r"track = 'mlflow' needs a place for its files\. Give folder="):
        Tracking.of("mlflow", "smoke", 10)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """W&B: its mode, the answer of its login, and the arguments of each run."""
    state = SimpleNamespace(mode="online", key=True, runs=[], torn_down=0)

    def login(prompt: bool) -> bool:
        assert prompt is False
        if isinstance(state.key, Exception):
            raise state.key
        return bool(state.key)

    def init(**given: Any) -> Any:
        state.runs.append(given)
        return SimpleNamespace(id=given.get("id", "new"), log=print, finish=print)

    def teardown() -> None:
        state.torn_down += 1

    setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode=state.mode))  # noqa: E731
    put(monkeypatch, "wandb", setup=setup, login=login, init=init, teardown=teardown)
    for name in ("WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return state


def test_wandb_has_a_group(wandb: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tracking = Tracking.of("wandb", "smoke", 10, folder=tmp_path)
    assert tracking.open("bsfl-seed1", {"seed": 1}).run_id == "new"
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    tracking.open("a", {})
    Tracking.of("wandb:mine", "smoke", 10).open("a", {})
    assert [run["project"] for run in wandb.runs] == ["fedsel", "ours", "mine"]
    assert (wandb.runs[0]["name"], wandb.runs[0]["group"]) == ("bsfl-seed1", tmp_path.name)
    assert wandb.runs[0]["config"] == {"comparison": tmp_path.name, "seed": 1}
    assert wandb.runs[0]["settings"]["console"] == "off"
    assert wandb.runs[0]["dir"] == str(Path.cwd())
    tracking.end_service()
    Tracking.of(Own, "smoke", 10).end_service()
    assert wandb.torn_down == 1


def test_wandb_never_asks_at_the_terminal(wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    wandb.key = False
    said = r"W&B has no API key on this machine\. Log in with wandb login, or set WANDB_MODE"
    with pytest.raises(RunError, match=said):
        Tracking.of("wandb", "smoke", 10)
    wandb.mode = "offline"
    Tracking.of("wandb", "smoke", 10)
    assert caplog.messages == []
    wandb.mode, wandb.key = "online", TimeoutError("no answer")
    Tracking.of("wandb", "smoke", 10)
    assert "W&B does not answer. The runs continue" in caplog.messages[0]


def test_tensorboard_has_a_folder_for_each_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[str] = []

    def writer(folder: str) -> Any:
        Path(folder).mkdir(parents=True, exist_ok=True)
        written.append(str(Path(folder).relative_to(tmp_path)))
        return SimpleNamespace(add_scalar=lambda tag, value, step: written.append(f"{tag} {value} {step}"), flush=list)

    def events(folder: str, filename_suffix: str) -> Any:
        assert filename_suffix == ".hparams"
        return SimpleNamespace(add_event=lambda event: written.append(str(event["summary"])), close=list)

    put(monkeypatch, "tensorboard")
    put(monkeypatch, "tensorboard.summary", Writer=writer)
    put(monkeypatch, "tensorboard.compat.proto.event_pb2", Event=dict)
    put(monkeypatch, "tensorboard.plugins.hparams.summary_v2", hparams_pb=lambda params: params)
    put(monkeypatch, "tensorboard.summary.writer.event_file_writer", EventFileWriter=events)
    tracking = Tracking.of("tensorboard", "smoke", 10, folder=tmp_path / "study")
    run = tracking.open("bsfl-seed1", {"alpha": [1]})
    run.write(3, {"accuracy": 0.5, "client/1/latency_s": 2.0})
    tracking.open("bsfl-seed1", {})
    assert written[:5] == [
        "study/tensorboard/bsfl-seed1", "{'comparison': 'study', 'alpha': '[1]'}", "fedsel/accuracy 0.5 3",
        "client/1/latency_s 2.0 3", "study/tensorboard/bsfl-seed1-2",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shared = Tracking.of("tensorboard:logs", "smoke", 10, folder=tmp_path / "study")
    shared.open("bsfl-seed1", {})
    assert "logs/study/bsfl-seed1" in written
    shared.begin(tmp_path / "other").open("bsfl-seed1", {})
    assert "logs/other/bsfl-seed1" in written
    with pytest.raises(ParameterError, match="or an address as in 'tensorboard:logs'"):
        Tracking.of("tensorboard", "smoke", 10)
