"""The drop-in example: both apps do what their README says."""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsel_flwr.clients.telemetry import telemetry
from fedsel_flwr.strategies.message import BSFL
from tests.flwr_command import ANSI, Flwr, LocalSuperLink
from tests.pages import ROOT, blocks
from tests.strategies.message.helpers import FakeGrid, arrays_of, fedavg

EXAMPLE = ROOT / "examples" / "drop-in"
README = EXAMPLE / "README.md"
PRINTS = next(block.text for block in blocks(README) if block.language == "python")
ROUNDS = 3


def module(path: Path, more: str = "") -> ModuleType:
    """A file of the example as a module, with further lines at the end of its main function."""
    spec = importlib.util.spec_from_loader(f"example_{path.parent.name}_{path.stem}", loader=None)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    text = path.read_text().replace("evaluate_fn=accuracy)\n", f"evaluate_fn=accuracy)\n{more}")
    assert more in text
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made


class AppNode:
    """A node that runs a client app, as a SuperNode does; its reply can be pulled after ``ready`` seconds."""

    def __init__(self, app: ClientApp, number: int, ready: float = 0.0) -> None:
        self.app, self.ready, self.received = app, ready, list[Message]()
        config: dict[str, Any] = {"partition-id": number, "num-partitions": 10}
        self.context = Context(7, number, config, RecordDict(), {"slow-client-s": 0.0})

    def handle(self, message: Message) -> RecordDict | Error:
        try:
            reply = self.app(message, self.context)
        except ValueError as error:
            return Error(202, str(error))
        return reply.content


def grid_of(app: ClientApp, slow: float = 0.0) -> FakeGrid:
    """Ten nodes; the replies of the first are late by ``slow`` seconds."""
    return FakeGrid({k + 1: AppNode(app, k, slow if k == 0 else 0.0) for k in range(10)})  # type: ignore[misc]


@pytest.mark.parametrize(("server", "client"), [("before", "before"), ("after", "after"), ("after", "before")])
def test_both_apps_learn(
    server: str, client: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = module(EXAMPLE / server / "server_app.py", PRINTS if server == "after" else "")
    accuracies, made = list[float](), list[BSFL]()
    measure = app.accuracy
    app.accuracy = lambda *given: accuracies.append((record := measure(*given))["accuracy"]) or record
    if server == "after":
        app.BSFL = lambda **options: made.append(BSFL(**options)) or made[-1]
    grid = grid_of(module(EXAMPLE / client / "client_app.py").app)
    app.app(grid, Context(7, 1, {}, RecordDict(), {"num-server-rounds": ROUNDS}))
    assert len(accuracies) == ROUNDS + 1
    assert accuracies[0] < 0.2
    assert accuracies[-1] > 0.6
    if not made:
        return
    rows = made[0].history.clients
    assert len(rows) == 2 * ROUNDS
    assert all(row.completed and row.latency_source in ("first", "observed") for row in rows)
    assert sum(row.latency_source == "first" for row in rows) == len({row.client_id for row in rows})
    took = [row.latency_s if row.latency_source == "observed" else row.first_s for row in rows]
    sums = [row.compute_s + row.transfer_s for row in rows]
    assert all((s == pytest.approx(t)) == (client == "after") for s, t in zip(sums, took, strict=True))
    printed = re.findall(r"client \d+: (\S+) s computing, (\S+) s transfer", capsys.readouterr().out)
    assert len(printed) == 4
    assert all(math.isnan(float(number)) == (client == "before") for pair in printed for number in pair)


@pytest.mark.parametrize("mods", [[], [telemetry]], ids=["without", "with"])
def test_the_selector_learns_with_and_without_the_mod(mods: list[Any]) -> None:
    """The server times the round trip either way."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(content), reply_to=message)

    strategy = BSFL(clients_per_round=1, min_latency=0.01, clock="server", seed=0, base=fedavg(min_available_nodes=10))
    strategy.start(grid=grid_of(app, slow=0.2), initial_arrays=arrays_of(), num_rounds=60, timeout=5.0)
    asked = Counter(row.client_id for row in strategy.history.clients)
    assert asked.total() == 60
    assert 2 <= asked["1"] <= 4, asked  # by chance it would be 6; once because nothing is learnt from its first time
    assert all(math.isnan(row.transfer_s) == (not mods) for row in strategy.history.clients)


@pytest.fixture(scope="module")
def flwr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flwr]:
    with LocalSuperLink(tmp_path_factory.mktemp("flwr")) as superlink:
        yield superlink.run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flwr_run_of_both(flwr: Flwr) -> None:
    """The app after asks the slow client less often than chance; before, Flower draws it in one round of five."""
    (commands,) = [block.commands() for block in blocks(README) if block.language == "sh"]
    runs = [tuple(words) for words in commands if words[0] == "flwr"]
    assert [words[2] for words in runs] == ["before", "after"]
    for _, verb, app, *options in runs:  # flwr run APP --stream ...
        command = flwr(*options, verb=(verb, str(EXAMPLE / app)))
        assert command.wait(400) == 0, command.stdout[-3000:] + command.stderr[-3000:]
        said = ANSI.sub("", command.stdout)
        assert "Strategy execution finished in" in said, said[-3000:]
        assert float(re.findall(r"MetricRecord: {'accuracy': ([\d.]+)}", said)[-1]) > 0.8
    computed = [float(seconds) for seconds in re.findall(r"Aggregated MetricRecord: {'compute_s': ([\d.]+)", said)]
    assert len(computed) >= 45  # on a busy machine Ray may start too late for the first
    assert 1 <= sum(seconds > 1.5 for seconds in computed) <= 7, computed  # half of its three seconds and more
