"""The seam: a third adapter, on stacked arrays and without Flower, chooses and learns as the legacy API does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import create, names
from fedsel_flwr.strategies import SelectionStrategy
from tests.processes import ROOT, Command
from tests.strategies import numpy_world as world
from tests.strategies.flower_world import comparable, legacy_base, play_legacy
from tests.strategies.third_adapter import play_stacked

pytestmark = pytest.mark.timeout(60)
CASES = [
    *[(name, "loss", "fedpdp") for name in names()],
    *[(name, None, None) for name in names() if not name.startswith("fedcm")],
    ("gpfl", None, "mean"),
    ("fedcm-ts", "accuracy", "fedpdp-exact"),
    ("random", "accuracy", "fedavg-absent"),
    ("cs-ucb", None, "fedavg-absent"),
]


def _stacked(name: str, score: str | None, averaging: str | None) -> tuple[SelectionCore, list[world.Array]]:
    selector = create(name, **world.selector_params(name))
    settings = resolve_settings(
        selector, max_latency=world.MAX_LATENCY, averaging=averaging, validation=world.validation(),
        filter=None if score is None else Filter(score=score), learning_rate=world.ETA,
        availability=world.available,
    )  # fmt: skip
    core = SelectionCore(selector, settings)
    return core, play_stacked(core, world.ROUNDS)


def _legacy(name: str, score: str | None, averaging: str | None) -> tuple[Any, list[world.Array]]:
    strategy = SelectionStrategy(
        create(name, **world.selector_params(name)), legacy_base(), max_latency=world.MAX_LATENCY,
        availability=world.available, validation=world.validation(), averaging=averaging, learning_rate=world.ETA,
        filter=None if score is None else Filter(score=score),
    )  # fmt: skip
    return strategy, play_legacy(strategy, world.ROUNDS)


@pytest.mark.parametrize(("name", "score", "averaging"), CASES)
def test_the_same_choices_and_models_as_the_legacy_api(name: str, score: str | None, averaging: str | None) -> None:
    core, models = _stacked(name, score, averaging)
    strategy, legacy_models = _legacy(name, score, averaging)
    assert len(core.parts.history.rounds) == world.ROUNDS
    assert comparable(core.parts.history) == comparable(strategy.history)
    for ours, theirs in zip(models, legacy_models, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    own, other = core.parts.selector.state_dict(), strategy.selector.state_dict()
    assert own.keys() == other.keys()
    for key in own:
        np.testing.assert_allclose(own[key], other[key], rtol=1e-9, atol=1e-9, err_msg=key)


def _first_here(client: int) -> int:
    return min(t for t in range(1, world.ROUNDS + 1) if world.available(str(client), t, 0.0))


STRANGERS_COME = {_first_here(client) for client in range(world.FLEET)}


@pytest.mark.parametrize(
    ("name", "asking"),
    [
        ("power-of-choice", {1, 2, 3, 4, 5, 7, 8, 9, 10}),  # nobody is there in round 6
        ("active-fl", STRANGERS_COME),
        ("tifl", {1, 4, 7, 10}),
        ("oort", set()),
        ("fedcs", set()),
    ],
)
def test_what_the_baselines_ask_is_charged(name: str, asking: set[int]) -> None:
    """Probes take seconds and joules of the rounds that ask, and of no other."""
    history = _stacked(name, None, None)[0].parts.history
    assert {r.round for r in history.rounds if r.probe_s > 0} == asking
    assert {r.round for r in history.rounds if r.probe_j > 0} == asking


def test_the_world_asks_something_of_every_part() -> None:
    """Else the test above could pass on nothing: failures, an empty round, probes, dropped models, changing cohorts."""
    core, models = _stacked("fedcm-ucb", "loss", "fedpdp")
    history = core.parts.history
    assert [r.num_selected for r in history.rounds][5] == 0
    assert {r.problem.split(":")[0] for r in history.clients} >= {"", "no answer", "arrays", "late"}
    successes = core.parts.selector.state_dict()
    assert (successes["mean"] > 0).any()
    assert len({tuple(r.client_id for r in history.clients if r.round == t) for t in range(1, 11)}) > 4
    assert not np.allclose(models[-1], world.initial(), atol=0.1)
    probing, _ = _stacked("local-accuracy", None, None)
    assert [r.probe_s > 0 for r in probing.parts.history.rounds] == [t != 6 for t in range(1, 11)]
    zooming, _ = _stacked("pczfl", None, None)
    assert len(zooming.parts.selector.state_dict()["radius"]) > 2
    filtered, plain = _stacked("random", "loss", "fedpdp"), _stacked("random", None, "fedpdp")
    assert comparable(filtered[0].parts.history) == comparable(plain[0].parts.history)
    assert not np.allclose(filtered[1][-1], plain[1][-1], atol=1e-3)  # the filter dropped models
    inputs, labels = world.validation().inputs, world.validation().labels
    accuracy = [(world.predict([one], inputs).argmax(axis=1) == labels).mean() for one in (world.initial(), models[-1])]
    assert accuracy[1] > accuracy[0] + 0.2


def test_the_filter_keeps_the_initialization_of_gpfl_at_the_first_model() -> None:
    core, models = _stacked("gpfl", "loss", "mean")
    here = [k for k in range(world.FLEET) if world.available(str(k), 1, 0.0)]
    assert [r.client for r in core.parts.history.clients if r.round == 1] == here
    np.testing.assert_array_equal(models[0], world.initial())
    assert not np.array_equal(models[1], world.initial())


FRESH = """
import sys
import numpy as np
from fedsel_flwr.selectors import create
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.settings import resolve_settings
assert not {"flwr", "torch", "ray"} & sys.modules.keys(), sorted(sys.modules)
from tests.strategies import numpy_world as world
from tests.strategies.third_adapter import play_stacked
selector = create("gpfl", **world.selector_params("gpfl"))
settings = resolve_settings(
    selector, max_latency=world.MAX_LATENCY, validation=world.validation(), learning_rate=world.ETA,
    availability=world.available,
)
own = SelectionCore(selector, settings)
models = play_stacked(own, world.ROUNDS)
assert not {"flwr", "torch", "ray"} & sys.modules.keys(), sorted(sys.modules)
print(len(models), len(own.parts.history.rounds))
"""


def test_core_and_measuring_run_in_a_process_without_flower_and_torch(tmp_path: Path) -> None:
    command = Command(sys.executable, "-c", FRESH, folder=tmp_path, cwd=ROOT)
    try:
        assert command.wait(50) == 0, command.stderr[-3000:]
    finally:
        command.kill()
    assert command.stdout.split() == ["10", "10"]


def test_the_third_adapter_is_tiny_and_knows_no_flower() -> None:
    source = (ROOT / "tests" / "strategies" / "third_adapter.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    assert "flwr import" not in source.replace("fedsel_flwr", "")
