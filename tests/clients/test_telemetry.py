"""The mod that reports what training cost, in Flower's own client apps of both message formats, and its meter.

zeus and its monitor are replaced, as neither RAPL nor NVML can be counted on.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import FitIns, FitRes, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres

from fedsel_flwr.clients.telemetry import EnergyMeter, telemetry
from fedsel_flwr.errors import RunError
from tests.processes import run_python
from tests.strategies.message.helpers import FakeGrid

TRAINING_S = 0.02
CONTEXT = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={})


class Monitor:
    """Gives one window's energies."""

    def __init__(self, **energies: Any) -> None:
        self.energies, self.open = energies, False

    def begin_window(self, key: str, sync_execution: bool) -> None:
        self.open = True

    def end_window(self, key: str, sync_execution: bool) -> SimpleNamespace:
        assert self.open
        self.open = False
        return SimpleNamespace(**{"gpu_energy": {}, "cpu_energy": None, "dram_energy": None} | self.energies)


def with_zeus(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Replace zeus; None: it is not installed."""
    monkeypatch.setitem(sys.modules, "zeus", module)
    monkeypatch.setitem(sys.modules, "zeus.monitor", module)


@pytest.fixture(autouse=True)
def no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGrid()  # without a run Flower makes no messages
    with_zeus(monkeypatch, None)


def asked(kind: str = "train", content: RecordDict | None = None) -> Message:
    arrays = RecordDict({"arrays": ArrayRecord([np.ones(2)]), "config": ConfigRecord({"server-round": 1})})
    return Message(content=content or arrays, dst_node_id=5, message_type=kind)


def answering(content: Any, **kinds: Any) -> ClientApp:
    """An app with the mod, whose train function takes its time and answers this."""
    app = ClientApp(mods=[telemetry])

    @app.train()
    @app.train("twice")
    def train(message: Message, context: Context) -> Any:
        time.sleep(TRAINING_S)
        if isinstance(content, Exception):
            raise content
        return Message(content, reply_to=message) if isinstance(content, RecordDict | Error) else content

    for kind, answer in kinds.items():
        getattr(app, kind)()(lambda message, context, answer=answer: Message(answer, reply_to=message))
    return app


def told(metrics: dict[str, Any], kind: str = "train") -> MetricRecord:
    content = RecordDict({"arrays": ArrayRecord([np.ones(2)]), "mine": MetricRecord(metrics)})
    return answering(content)(asked(kind), CONTEXT).content["mine"]  # type: ignore[return-value]


class Client(NumPyClient):
    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def fit(self, arrays: Any, config: Any) -> Any:
        time.sleep(TRAINING_S)
        return arrays, 20, self.metrics


def fitted(metrics: dict[str, Any]) -> FitRes:
    app = ClientApp(client_fn=lambda context: Client(metrics).to_client(), mods=[telemetry])
    ins = FitIns(ndarrays_to_parameters([np.ones(2)]), {})
    reply = app(asked(content=fitins_to_recorddict(ins, keep_input=True)), CONTEXT)
    return recorddict_to_fitres(reply.content, keep_input=True)


in_both_formats = pytest.mark.parametrize(
    "ask", [told, lambda metrics: fitted(metrics).metrics], ids=["message", "legacy"]
)


# ---- what it reports -----------------------------------------------------------------------------------------------


@in_both_formats
def test_the_seconds_of_training_stand_in_the_replys_metrics(ask: Any) -> None:
    given = {"num-examples": 20, "acc": 0.5}
    metrics = dict(ask(given))
    assert TRAINING_S <= metrics["compute_s"] < TRAINING_S + 1.0
    assert metrics == {"num-examples": 20, "acc": 0.5, "compute_s": metrics["compute_s"]}
    assert given == {"num-examples": 20, "acc": 0.5}


def test_named_kinds_and_the_rest_of_a_legacy_reply() -> None:
    assert TRAINING_S <= told({"num-examples": 20}, "train.twice")["compute_s"] < TRAINING_S + 1.0
    result = fitted({"name": "a"})
    assert (result.num_examples, len(result.parameters.tensors), result.metrics["name"]) == (20, 1, "a")


@in_both_formats
def test_a_meters_joules_are_reported_and_what_the_app_reports_itself_stays(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_zeus(monkeypatch, SimpleNamespace(ZeusMonitor=lambda: Monitor(cpu_energy={0: 12.5})))
    assert ask({"num-examples": 20})["energy_j"] == 12.5
    own = {"num-examples": 20, "compute_s": 3.5, "energy_j": 1.0}
    assert dict(ask(own)) == own


def test_each_reply_has_its_own_seconds() -> None:
    """Even where an app answers with one and the same record."""
    metrics = MetricRecord({"num-examples": 20})
    app = answering(RecordDict({"arrays": ArrayRecord([np.ones(2)]), "metrics": metrics}))
    app(asked(), CONTEXT)
    assert dict(metrics) == {"num-examples": 20}


def test_only_training_is_measured() -> None:
    answer = RecordDict({"metrics": MetricRecord({"num-examples": 20, "loss": 0.5})})
    app = answering(answer, evaluate=answer, query=answer)
    for kind in ("evaluate", "query"):
        assert set(app(asked(kind), CONTEXT).content["metrics"]) == {"num-examples", "loss"}


# ---- it never costs an update --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"arrays": ArrayRecord([np.ones(2)])}),
        RecordDict({"a": MetricRecord({"loss": 1.0}), "b": MetricRecord({"acc": 1.0})}),
        RecordDict({"fitres.metrics": MetricRecord({"x": 1}), "other": MetricRecord({"x": 1})}),
        RecordDict({"stage": ConfigRecord({"pk1": b"123"}), "arrays": ArrayRecord({"0": Array(np.ones(1))})}),
    ],
    ids=["nothing", "arrays", "two-records", "named-as-legacy", "masked"],
)
def test_an_odd_reply_passes_unchanged(content: RecordDict) -> None:
    before = {name: dict(record) for name, record in content.items()}
    assert {name: dict(record) for name, record in answering(content)(asked(), CONTEXT).content.items()} == before


def test_an_error_passes_unchanged() -> None:
    reply = answering(Error(201, "no data"))(asked(), CONTEXT)
    assert (reply.has_error(), reply.error.code, reply.error.reason) == (True, 201, "no data")


@pytest.mark.parametrize("answer", [None, "nothing", SimpleNamespace(content=3)], ids=["none", "text", "odd-content"])
def test_what_is_no_message_is_left_to_flower(answer: object) -> None:
    assert answering(answer)(asked(), CONTEXT) is answer


def test_the_apps_exception_is_the_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(cpu_energy={0: 12.5})
    with_zeus(monkeypatch, SimpleNamespace(ZeusMonitor=lambda: monitor))
    with pytest.raises(ZeroDivisionError, match="no examples"):
        answering(ZeroDivisionError("no examples"))(asked(), CONTEXT)
    assert not monitor.open


@pytest.mark.parametrize("fault", ["begin_window", "end_window", "__init__", "import"])
def test_a_meter_that_fails_is_named_and_the_update_kept(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise OSError("powercap went away")

    if fault == "import":
        with_zeus(monkeypatch, type("Broken", (ModuleType,), {"__getattr__": broken})("zeus"))
    else:
        monkeypatch.setattr(Monitor, fault, broken)
        with_zeus(monkeypatch, SimpleNamespace(ZeusMonitor=Monitor))
    assert set(told({"num-examples": 20})) == {"num-examples", "compute_s"}
    assert "powercap went away" in caplog.text


@pytest.mark.parametrize(
    ("energies", "joules"),
    [({"gpu_energy": {0: 10.0, 1: 5.0}, "cpu_energy": {0: 2.0}, "dram_energy": {0: 0.5, 1: None}}, 17.5), ({}, None)],
    ids=["all", "none"],
)
def test_everything_with_a_meter_is_summed(
    energies: dict[str, Any], joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_zeus(monkeypatch, SimpleNamespace(ZeusMonitor=lambda: Monitor(**energies)))
    with EnergyMeter() as meter:
        assert meter.joules is None
    assert meter.joules == joules


def test_without_the_library_the_error_says_what_to_install() -> None:
    with pytest.raises(RunError, match=r"fedsel-flwr\[meter\]"):
        EnergyMeter()


def test_its_import_loads_neither_numpy_nor_flower() -> None:
    """Flower starts a process for each message: the app brings its own imports, the mod adds none."""
    code = "import sys; from fedsel_flwr.clients.telemetry import telemetry; print(*sys.modules)"
    loaded = {name.partition(".")[0] for name in run_python("-c", code).stdout.split()}
    assert loaded & {"numpy", "flwr", "torch", "ray", "zeus"} == set()
