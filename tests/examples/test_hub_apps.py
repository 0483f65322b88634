"""The apps for Flower Hub: Flower's own checks, the client's data in both runtimes, and what the apps print."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_app_name, _validate_files
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from tests.examples.test_drop_in import EXAMPLE as DROP_IN
from tests.examples.test_drop_in import AppNode
from tests.flwr_command import ANSI, LocalSuperLink
from tests.pages import ROOT, blocks
from tests.strategies.message.helpers import FakeGrid

APPS = ("selection-quickstart", "selection-compare")
CLIENTS = [
    *(ROOT / "examples" / app / app.replace("-", "_") / "client_app.py" for app in APPS),
    *(DROP_IN / app / "client_app.py" for app in ("before", "after")),
]
CONFIG: dict[str, dict[str, Any]] = {
    "selection-quickstart": {"num-server-rounds": 3, "clients-per-round": 2, "min-clients": 4, "slow-client-s": 0.0},
    "selection-compare": {
        "selectors": "random, cs-ucb", "repeats": 2, "num-server-rounds": 3, "clients-per-round": 2, "min-clients": 4,
        "slow-client-s": 0.0, "test-data": "",
    },
}  # fmt: skip


@pytest.fixture
def module_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    def found(app: str, name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(ROOT / "examples" / app))
        return importlib.import_module(f"{app.replace('-', '_')}.{name}")

    return found


@pytest.mark.parametrize("app", APPS)
def test_flowers_own_checks_pass(app: str) -> None:
    folder = ROOT / "examples" / app
    config, warnings = load_and_validate(folder / "pyproject.toml", check_module=True)
    assert warnings == []
    assert 0 < len(config["project"]["description"]) <= 200
    assert config["project"]["name"] == app
    _validate_app_name(folder.name, "directory")
    files = _collect_file_paths(folder)
    _validate_files(files)
    assert len(files) <= 10
    assert len(build_fab_from_disk(folder)) > 1000
    assert set(config["tool"]["flwr"]["app"]["config"]) == set(CONFIG[app])


def test_the_apps_have_the_same_client() -> None:
    assert CLIENTS[0].read_text() == CLIENTS[1].read_text()


@pytest.mark.parametrize("path", CLIENTS, ids=lambda path: path.parent.name)
def test_a_client_reads_its_file_in_a_deployment(path: Path, tmp_path: Path) -> None:
    """Its two classes of ten are enough."""
    inputs, labels = np.random.default_rng(0).uniform(size=(12, 64)), np.array([3, 7] * 6)
    np.savez(tmp_path / "mine.npz", inputs=inputs, labels=labels)
    loaded: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), loaded)
    node = AppNode(loaded["app"], 0)
    node.context.node_config = {"data-path": str(tmp_path / "mine.npz")}
    assert [array.tolist() for array in loaded["load"](node.context)] == [inputs.tolist(), labels.tolist()]
    FakeGrid({})  # sets the identity without which Flower makes no message
    content = {"arrays": ArrayRecord([np.zeros((10, 64)), np.zeros(10)]), "config": ConfigRecord()}
    reply = node.handle(Message(RecordDict(content), dst_node_id=1, message_type="train"))  # type: ignore[arg-type]
    assert isinstance(reply, RecordDict)
    assert reply["metrics"]["num-examples"] == 12
    weights, _ = reply["arrays"].to_numpy_ndarrays()
    assert weights[[3, 7]].any(axis=1).all()


@pytest.mark.parametrize("app", APPS)
def test_an_app_prints_what_its_page_shows(
    app: str, module_of: Callable[[str, str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    client, server = module_of(app, "client_app"), module_of(app, "server_app")
    nodes = {k + 1: AppNode(client.app, k) for k in range(10)}
    server.app(FakeGrid(nodes), Context(7, 1, {}, RecordDict(), CONFIG[app]))  # type: ignore[arg-type]
    said = capsys.readouterr().out
    if app == "selection-quickstart":
        times = re.findall(r"^client \d+: selected (\d+) times, [\d.]+ s on average$", said, re.MULTILINE)
        assert sum(map(int, times)) == 6
    else:
        accuracies = re.findall(
            r"^(random|cs-ucb): [\d.]+ s, accuracy (0\.\d+), [\d.]+ times the seconds \(", said, re.MULTILINE
        )
        assert [name for name, _ in accuracies] == ["random", "cs-ucb"]
        assert all(float(accuracy) > 0.6 for _, accuracy in accuracies)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("app", APPS)
def test_flwr_run_from_the_apps_folder(app: str, tmp_path: Path) -> None:
    page = blocks(ROOT / "examples" / app / "README.md")
    commands = [words for block in page if block.language == "sh" for words in block.commands()]
    ((_, run, here, *options),) = [words for words in commands if words[0] == "flwr"]
    assert (run, here) == ("run", ".")
    with LocalSuperLink(tmp_path / "home") as superlink:
        command = superlink.run(*options, verb=("run", str(ROOT / "examples" / app)))
        assert command.wait(600) == 0, command.stdout[-3000:] + command.stderr[-3000:]
    said = ANSI.sub("", command.stdout)
    if app == "selection-quickstart":
        times = re.findall(r"^client \d+: selected (\d+) times, ([\d.]+) s", said, re.MULTILINE)
        assert sum(int(number) for number, _ in times) == 40, said[-3000:]
    else:
        (ratio,) = re.findall(r"^bsfl: .* ([\d.]+) times the seconds", said, re.MULTILINE)
        assert float(ratio) < 1.0, said[-1000:]
