"""Strategies over every selector and several bases, in both of Flower's APIs, for the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flwr.server.strategy as legacy_bases
import flwr.serverapp.strategy as message_bases
import numpy as np
from flwr.common import ndarrays_to_parameters

from fedsel_flwr import strategies as legacy
from fedsel_flwr.aggregation import Filter
from fedsel_flwr.selectors import create, names
from fedsel_flwr.selectors.registry import example
from fedsel_flwr.strategies import Validation
from fedsel_flwr.strategies import message as message

ARRAYS = [np.zeros((3, 2), dtype=np.float32), np.ones(2, dtype=np.float32)]
APIS: dict[str, Any] = {"legacy": legacy, "message": message}
MAX_LATENCY, COHORT, FEW = 5.0, 7, 4
VALIDATION = Validation(
    lambda arrays, inputs: inputs @ arrays[0] + arrays[1], np.eye(3, dtype=np.float32), np.array([0, 1, 1])
)
OPTIONS: dict[str, dict[str, Any]] = {
    "fedcor": {"warmup_rounds": 3, "interval": 4},
    "pczfl": {"clients_per_round": None, "warmup_rounds": 2},
    "power-of-choice": {"candidates": 8},
    "cpow-d": {"candidates": 8},
    "rpow-d": {"candidates": 8},
    "tifl": {"tiers": 3, "interval": 5},
}
SELECTORS: dict[str, dict[str, Any]] = {name: example(name) | OPTIONS.get(name, {}) for name in names()}
"""Every selector, with its parameters; :data:`OPTIONS` make openings short."""
PAPERS: dict[str, dict[str, Any]] = {
    "BSFL": {"min_latency": 0.1},
    "CSUCB": {},
    "CSUCBQ": {"fairness": dict.fromkeys(range(12), 0.05)},
    "FedCA": {"validation": VALIDATION},
    "FedCM": {"validation": VALIDATION},
    "GPFL": {"validation": VALIDATION, "learning_rate": 0.1, "total_rounds": 40},
    "PCZFL": {"validation": VALIDATION, "clients_per_round": None},
}
"""Every strategy named after a paper, with its parameters."""


def _legacy(name: str, **params: Any) -> Any:
    return getattr(legacy_bases, name)(
        initial_parameters=ndarrays_to_parameters(ARRAYS),
        fraction_evaluate=0.4,
        on_fit_config_fn=lambda number: {"rate": 0.5 / number},
        on_evaluate_config_fn=lambda number: {"number": number},
        **params,
    )


def _message(name: str, **params: Any) -> Any:
    return getattr(message_bases, name)(fraction_train=0.3, fraction_evaluate=0.4, **params)


BASES: dict[str, dict[str, Callable[[], Any]]] = {
    "legacy": {
        "FedAvg": partial(_legacy, "FedAvg"),
        "FedAdam": partial(_legacy, "FedAdam"),
        "Krum": partial(_legacy, "Krum", num_malicious_clients=1),
        "DP": lambda: legacy_bases.DifferentialPrivacyServerSideFixedClipping(_legacy("FedAvg"), 0.1, 1.0, COHORT),
    },
    "message": {
        "FedAvg": partial(_message, "FedAvg"),
        "FedAdam": partial(_message, "FedAdam"),
        "Krum": partial(_message, "Krum", num_malicious_nodes=1),
        "DP": lambda: message_bases.DifferentialPrivacyServerSideFixedClipping(_message("FedAvg"), 0.1, 1.0, COHORT),
    },
}
"""API -> the bases: an average, one with a state of its own, one that needs five models, one that adds noise."""
TRUSTING = {"legacy": partial(_legacy, "Krum"), "message": partial(_message, "Krum")}
"""Krum without malicious clients, for FedCA's filter, which may keep a single model."""


def paper(api: str, name: str, base: str | None = None) -> Any:
    """A paper's strategy over a base; what filters models gets a Krum that is content with one."""
    few = base is None or base.startswith("Fed")
    options: dict[str, Any] = {"clients_per_round": 3 if base is None else FEW if few else COHORT, "seed": 1}
    if base is not None:
        options["base"] = _made(api, base, filters=name in ("FedCA", "FedCM"))
    if base == "Krum":
        options["min_completed"] = 5
    return getattr(APIS[api], name)(**{**options, "max_latency": MAX_LATENCY, **PAPERS[name]})


def wrapped(api: str, selector: str, base: str, params: dict[str, Any] | None = None, **options: Any) -> Any:
    """Any selector over any base; Krum is asked for a model only where five are usable."""
    few = {"clients_per_round": FEW if base.startswith("Fed") else COHORT, "seed": 1}
    given = {"max_latency": MAX_LATENCY, "validation": VALIDATION, "learning_rate": 0.1, **options}
    if base == "Krum":
        given |= {"min_completed": 5}
    if filters := selector.startswith("fedcm"):
        given |= {"filter": Filter()}
    chosen = create(selector, **{**few, **SELECTORS[selector], **(params or {})})
    return APIS[api].SelectionStrategy(chosen, _made(api, base, filters), **given)


def _made(api: str, base: str, filters: bool) -> Any:
    return (TRUSTING[api] if filters and base == "Krum" else BASES[api][base])()
