"""What a caller sees: parameters, errors, and what an import loads."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.server.strategy import FedAvg, Strategy

import fedsel_flwr.strategies as strategies
from fedsel_flwr import selectors
from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.strategies import BSFL, CSUCB, History, SelectionStrategy, message

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"base", "max_latency", "min_completed", "min_available", "wait_timeout", "channels", "clock"}
DEFAULTS = {"min_completed": 1, "min_available": None, "wait_timeout": 600.0, "channels": None, "clock": "virtual"}


def test_the_message_package_has_every_name_of_the_legacy_one() -> None:
    assert set(strategies.__all__) <= set(message.__all__)
    for name in ("Validation", "Filter", "MetricKeys", "History"):
        assert getattr(message, name) is getattr(strategies, name)


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (CSUCB, {"clients_per_round", "max_latency", "seed"}),
        (BSFL, {"clients_per_round", "min_latency", "alpha", "beta", "data_weights", "seed"}),
    ],
)
def test_the_signature_shows_the_selectors_parameters_and_the_strategys(cls: Any, own: set[str]) -> None:
    parameters = inspect.signature(cls).parameters
    assert own | COMMON <= parameters.keys()
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert not {"self", "selector", "params"} & parameters.keys()
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    assert parameters["base"].default is None
    assert parameters["clients_per_round"].default is inspect.Parameter.empty
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert all(name in text for name in own | COMMON)


def test_selection_strategy_signature() -> None:
    parameters = inspect.signature(SelectionStrategy).parameters
    assert list(parameters)[:2] == ["selector", "base"]
    assert parameters["max_latency"].kind is inspect.Parameter.KEYWORD_ONLY
    assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS
    strategy = SelectionStrategy(selectors.create("random", clients_per_round=2))
    assert strategy.core.settings.max_latency == 60.0


def test_bsfl_defaults() -> None:
    parameters = inspect.signature(BSFL).parameters
    defaults = {name: parameters[name].default for name in ("alpha", "beta", "data_weights", "seed")}
    assert defaults == {"alpha": 1.0, "beta": 1, "data_weights": None, "seed": None}


@pytest.mark.parametrize("name", [name for name in strategies.__all__ if name.isupper() or name.startswith("Fed")])
def test_a_papers_twin_asks_for_what_the_legacy_class_asks_for(name: str) -> None:
    legacy, twin = getattr(strategies, name), getattr(message, name)
    assert issubclass(legacy, SelectionStrategy)
    assert issubclass(twin, message.SelectionStrategy)
    assert not issubclass(twin, SelectionStrategy)
    assert inspect.signature(twin) == inspect.signature(legacy)
    asked = [key for key in vars(legacy) if not key.startswith("_")]
    assert {key: getattr(twin, key) for key in asked} == {key: getattr(legacy, key) for key in asked}


@pytest.mark.parametrize("cls", [CSUCB, BSFL])
def test_unknown_and_missing_parameters_are_named_with_those_that_exist(cls: Any) -> None:
    required = {"clients_per_round": 2, "max_latency": 5.0, "min_latency": 0.1}
    required = {k: v for k, v in required.items() if k in inspect.signature(cls).parameters}
    with pytest.raises(ParameterError, match=rf"{cls.__name__}.*max_latancy.*max_latency"):
        cls(**required, max_latancy=3.0)
    del required["clients_per_round"]
    with pytest.raises(ParameterError, match=rf"{cls.__name__} needs clients_per_round"):
        cls(**required)


def test_missing_parameters_of_each_paper() -> None:
    with pytest.raises(ParameterError, match="max_latency"):
        CSUCB(clients_per_round=2)
    with pytest.raises(ParameterError, match="min_latency"):
        BSFL(clients_per_round=2)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"alpha": -1}, "alpha"), ({"beta": 0}, "beta"), ({"clients_per_round": 0}, "clients_per_round"),
        ({"min_latency": 0}, "min_latency"), ({"clock": "sundial"}, "clock"), ({"wait_timeout": -1}, "wait_timeout"),
        ({"min_available": 0}, "min_available"), ({"clock_slack": -1}, "clock_slack"), ({"base": "FedAvg"}, "base"),
        ({"base": FedAvg}, "base"), ({"roll_call_timeout": 0}, "roll_call_timeout"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(params: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        BSFL(**{"clients_per_round": 2, "min_latency": 0.1, **params})


def test_a_selector_must_be_a_selector() -> None:
    for wrong in ("random", selectors.Random, None):
        with pytest.raises(ParameterError, match="selector"):
            SelectionStrategy(wrong)  # type: ignore[arg-type]


def test_one_max_latency_sets_both() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=7.5)
    assert strategy.selector.max_latency == 7.5
    assert strategy.core.settings.max_latency == 7.5
    selector = selectors.CSUCB(clients_per_round=2, max_latency=7.5)
    assert SelectionStrategy(selector).core.settings.max_latency == 7.5
    assert BSFL(clients_per_round=2, min_latency=0.1, max_latency=3.0).core.settings.max_latency == 3.0
    assert BSFL(clients_per_round=2, min_latency=0.1).core.settings.max_latency == 60.0
    with pytest.raises(FedSelError, match=r"max_latency.*7.5"):
        SelectionStrategy(selector, max_latency=3.0)


def test_attributes_and_default_base() -> None:
    for strategy in (CSUCB(clients_per_round=2, max_latency=5.0), BSFL(clients_per_round=2, min_latency=0.1)):
        assert isinstance(strategy, SelectionStrategy)
        assert isinstance(strategy, Strategy)
        assert isinstance(strategy.history, History)
        assert strategy.selector.name in ("cs-ucb", "bsfl")
        assert type(strategy.base) is FedAvg
        assert strategy.base.fraction_evaluate == 0.0
    assert BSFL(clients_per_round=2, min_latency=0.1).base is not BSFL(clients_per_round=2, min_latency=0.1).base


def test_two_strategies_share_nothing() -> None:
    one, two = (CSUCB(clients_per_round=2, max_latency=5.0) for _ in range(2))
    assert one.history is not two.history
    assert one.roster is not two.roster
    assert one.selector is not two.selector


def test_names_of_the_package() -> None:
    assert set(strategies.__all__) <= set(dir(strategies))
    for name in strategies.__all__:
        assert getattr(strategies, name).__name__ == name
    with pytest.raises(AttributeError, match="NoSuch"):
        strategies.NoSuch  # noqa: B018


def _loads(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*[m for m in ('flwr', 'torch', 'ray', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "statement",
    [
        "import fedsel_flwr",
        "import fedsel_flwr.rounds.core",
        "from fedsel_flwr.rounds.history import History",
        "import fedsel_flwr.selectors",
    ],
)
def test_plain_parts_load_neither_flower_nor_torch(statement: str) -> None:
    assert _loads(statement) == set()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "statement",
    [
        "import fedsel_flwr.strategies",
        "from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy",
        "import fedsel_flwr.strategies.message",
        "import fedsel_flwr.strategies.wrapping.paper",
        "import fedsel_flwr.strategies.wrapping.adapter",
        "import fedsel_flwr.strategies.bsfl",
    ],
)
def test_the_strategies_load_flower_but_not_torch(statement: str) -> None:
    """What Flower itself loads is its own: up to some version it took Ray along."""
    flowers = _loads("import flwr.client, flwr.server, flwr.serverapp")
    assert "torch" not in flowers
    assert _loads(statement) <= {"flwr", *flowers}
