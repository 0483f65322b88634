"""What a caller sees: parameters, errors, and what an import loads."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.server.strategy import FedAvg

import fedsel_flwr.strategies as strategies
from fedsel_flwr import selectors
from fedsel_flwr.errors import FedSelError, ParameterError
from fedsel_flwr.strategies import BSFL, CSUCB, SelectionStrategy, message

ROOT = Path(__file__).resolve().parents[2]
EMPTY, ABSENT = inspect.Parameter.empty, object()
DEFAULTS = {
    "base": None,
    "min_completed": 1,
    "min_available": None,
    "wait_timeout": 600.0,
    "channels": None,
    "clock": "virtual",
}


def test_the_message_package_has_every_name_of_the_legacy_one() -> None:
    assert set(strategies.__all__) <= set(message.__all__)
    for name in ("Validation", "Filter", "MetricKeys", "History"):
        assert getattr(message, name) is getattr(strategies, name)


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (CSUCB, {"clients_per_round": EMPTY, "max_latency": None, "seed": None}),
        (BSFL, {"clients_per_round": EMPTY, "min_latency": None, "alpha": 1.0, "beta": 1, "data_weights": None}),
    ],
)
def test_the_signature_shows_the_selectors_parameters_and_the_strategys(cls: Any, own: dict[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert not {"self", "selector", "params"} & parameters.keys()
    assert {name: parameters[name].default for name in {**DEFAULTS, **own}} == {**DEFAULTS, **own}
    assert inspect.signature(SelectionStrategy).parameters["max_latency"].kind is inspect.Parameter.KEYWORD_ONLY
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert all(name in text for name in {**DEFAULTS, **own})


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
    with pytest.raises(ParameterError, match=rf"{cls.__name__} needs the parameter clients_per_round"):
        cls(**required)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -1), ("beta", 0), ("clients_per_round", 0), ("min_latency", 0), ("min_latency", ABSENT),
        ("max_latency", 0), ("clock", "sundial"), ("base", "FedAvg"), ("base", FedAvg),
    ],
)  # fmt: skip
def test_wrong_values_are_named(name: str, value: Any) -> None:
    params = {"clients_per_round": 2, "min_latency": 0.1, name: value}
    with pytest.raises(ParameterError, match=name):
        BSFL(**{key: one for key, one in params.items() if one is not ABSENT})


def test_a_selector_must_be_a_selector() -> None:
    for wrong in ("random", selectors.Random, None):
        with pytest.raises(ParameterError, match="selector"):
            SelectionStrategy(wrong)  # type: ignore[arg-type]


def test_one_max_latency_sets_both() -> None:
    selector = selectors.CSUCB(clients_per_round=2, max_latency=7.5)
    strategy = CSUCB(clients_per_round=2, max_latency=7.5)
    assert (strategy.selector.max_latency, strategy.core.settings.max_latency) == (7.5, 7.5)
    bsfl = {"clients_per_round": 2, "min_latency": 0.1}
    for made, seconds in (
        (SelectionStrategy(selector), 7.5),
        (BSFL(**bsfl, max_latency=3.0), 3.0),
        (BSFL(**bsfl), 60.0),
    ):
        assert made.core.settings.max_latency == seconds
    with pytest.raises(FedSelError, match=r"max_latency.*7.5"):
        SelectionStrategy(selector, max_latency=3.0)
    with pytest.raises(ParameterError, match="max_latency"):
        CSUCB(clients_per_round=2)


def _loads(modules: str) -> set[str]:
    code = f"import {modules}, sys\nprint(*[m for m in ('flwr', 'torch', 'ray', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.timeout(90)
def test_plain_parts_load_neither_flower_nor_torch_and_strategies_no_torch() -> None:
    """What Flower itself loads is its own: up to some version it took Ray along."""
    assert _loads("fedsel_flwr, fedsel_flwr.rounds.core, fedsel_flwr.rounds.history, fedsel_flwr.selectors") == set()
    flowers = _loads("flwr.client, flwr.server, flwr.serverapp")
    assert "torch" not in flowers
    mine = ("strategies", "strategies.message", "strategies.wrapping.paper", "strategies.bsfl")
    assert _loads(", ".join(f"fedsel_flwr.{name}" for name in mine)) <= {"flwr", *flowers}
