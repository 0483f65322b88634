"""A small world that any adapter can be played on: softmax regression, latencies, faults and probes in plain NumPy.

Eight clients with two kinds of data each; the labels of clients 2 and 6 are wrong, so that FedCA's filter has something
to drop. Client 3 never answers, 7 sends NaN, 5 is late in every third round, 1 does not tell its latency in round 4,
6 does not answer probes, and 4 does not tell its losses with its update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.models import ModelStack, Validation
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.selectors.registry import example

Array = npt.NDArray[Any]
FLEET, COHORT, ROUNDS, MAX_LATENCY, ETA, STEPS = 8, 3, 10, 4.0, 0.5, 3
FEATURES, CLASSES, EXAMPLES = 4, 3, 12
PARAMETERS = FEATURES * CLASSES
OPTIONS: dict[str, dict[str, Any]] = {
    "cs-ucb": {"max_latency": MAX_LATENCY},
    "cs-ucb-q": {"max_latency": MAX_LATENCY, "queue_weight": 0.1},
    "bsfl": {"min_latency": 0.1, "alpha": 2.0},
    "gpfl": {"total_rounds": ROUNDS},
    "fedcs": {"deadline": 1.5, "clients_per_round": None, "channels": 3},
    "power-of-choice": {"candidates": 4},
    "cpow-d": {"candidates": 4},
    "rpow-d": {"candidates": 4},
    "tifl": {"tiers": 2, "interval": 3, "credits": 2},
    "pczfl": {"warmup_rounds": 2, "uncertainty": 0.01, "clients_per_round": None},
    "fedcor": {"warmup_rounds": 3, "interval": 4},
    "nccb": {"clusters": 3},
}
"""Selector -> values that show more in ten rounds than its example and its defaults do."""


def selector_params(name: str) -> dict[str, Any]:
    return {"clients_per_round": COHORT, "seed": 3, **example(name), **OPTIONS.get(name, {})}


def _examples(stream: int, labels: Array) -> Array:
    generator = np.random.default_rng([41, stream])
    return np.eye(CLASSES, FEATURES)[labels] + generator.normal(0.0, 0.6, (len(labels), FEATURES))


def _data() -> tuple[Array, Array]:
    """Inputs (clients, examples, features) and labels (clients, examples)."""
    own = np.array([[(k + (i % 2)) % CLASSES for i in range(EXAMPLES)] for k in range(FLEET)])
    inputs = np.stack([_examples(k, labels) for k, labels in enumerate(own)])
    own[[2, 6]] = (own[[2, 6]] + 1) % CLASSES
    return inputs, own


INPUTS, LABELS = _data()


def initial() -> Array:
    """The initial model, shape (parameters,)."""
    return np.random.default_rng(5).normal(0.0, 0.1, PARAMETERS)


def predict(arrays: Any, inputs: Array) -> Array:
    return np.asarray(inputs @ arrays[0].reshape(FEATURES, CLASSES))


def validation() -> Validation:
    labels = np.arange(60) % CLASSES
    return Validation(predict, _examples(99, labels), labels)


def train(model: Array, clients: Array) -> Array:
    """Train all ``clients`` at once: three steps of gradient descent; shape (clients, parameters)."""
    inputs, targets = INPUTS[clients], np.eye(CLASSES)[LABELS[clients]]
    stack = np.broadcast_to(model.reshape(FEATURES, CLASSES), (len(clients), FEATURES, CLASSES)).copy()
    for _ in range(STEPS):
        logits = inputs @ stack
        powers = np.exp(logits - logits.max(axis=2, keepdims=True))
        wrong = powers / powers.sum(axis=2, keepdims=True) - targets
        stack -= ETA * inputs.transpose(0, 2, 1) @ wrong / EXAMPLES
    stack[np.asarray(clients) == 7] = np.nan
    return stack.reshape(len(clients), PARAMETERS)


def num_examples(k: int) -> int:
    return 10 + 3 * k


def facts(k: int) -> dict[str, Any]:
    """What client k says of itself; only the even ones know an energy score."""
    return {"client_id": k, "num_examples": num_examples(k)} | ({"energy_score": 0.3 + 0.05 * k} if k % 2 == 0 else {})


def answers(k: int) -> bool:
    return k != 3


def metrics(k: int, server_round: int) -> dict[str, Any]:
    """What client k reports with its update."""
    draw = np.random.default_rng([7, k, server_round]).random(2)
    latency = 2 * MAX_LATENCY if k == 5 and server_round % 3 == 0 else 0.2 + 0.2 * k + float(draw[0])
    reported = {"energy_j": 0.5 + 0.25 * k + float(draw[1]), "latency_s": latency}
    reported |= {"energy_score": 0.3 + 0.05 * k} if k % 2 == 0 else {}
    losses = np.random.default_rng([8, k, server_round]).exponential(size=2)
    reported |= {"loss": float(losses[0]), "rms_loss": float(losses[1])} if k != 4 else {}
    reported |= {"train_loss": float(np.random.default_rng([10, k, server_round]).exponential())} if k != 4 else {}
    if k == 1 and server_round == 4:
        del reported["latency_s"]
    return reported


def probed(k: int, model: Array) -> dict[str, Any]:
    """What client k answers to a probe of ``model``."""
    right = predict([model], INPUTS[k]).argmax(axis=1) == LABELS[k]
    own = {} if k == 6 else {"local_accuracy": float(right.mean()), "loss": loss(k, model)}
    own |= {} if k == 6 else {"batch_loss": loss(k, model, 5)}
    own |= {} if k == 6 else {"gradient": gradient(k, model), "sketch": sketch(k)}
    return {"latency_s": 0.1 + 0.05 * k, "energy_j": 0.125, **own}


def loss(k: int, model: Array, count: int = EXAMPLES) -> float:
    """Mean cross-entropy of ``model`` on the first of client k's examples."""
    return float(-np.log(_chances(k, model)[np.arange(EXAMPLES), LABELS[k]])[:count].mean())


def gradient(k: int, model: Array) -> bytes:
    """Its gradient, as the legacy API carries it."""
    wrong = _chances(k, model) - np.eye(CLASSES)[LABELS[k]]
    return np.asarray(INPUTS[k].T @ wrong / EXAMPLES, dtype=np.float32).tobytes()


def sketch(k: int) -> bytes:
    """A hash of client k's examples: the signs of their mean."""
    return np.asarray(INPUTS[k].mean(axis=0) > 0.3, dtype=np.float32).tobytes()


def asked(k: int, model: Array, names: str) -> dict[str, Any]:
    """What client k reports with its update because it was asked."""
    return {"gradient": gradient(k, model)} if "gradient" in names.split(",") else {}


def _chances(k: int, model: Array) -> Array:
    """Softmax, shape (examples, classes)."""
    powers = np.exp(predict([model], INPUTS[k]))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def available(client_id: str, server_round: int, seconds: float) -> bool:
    """Most clients in most rounds, and nobody in round 6."""
    return server_round != 6 and np.random.default_rng([9, int(client_id), server_round]).random() < 0.85


# ---- a third adapter beside Flower's two APIs ------------------------------------------------------------------------

NODES = {f"node-{k}": k for k in range(FLEET)}
"""Connection -> client."""


class InProcess:
    """The transport of the third adapter: everybody answers at once."""

    def __init__(self, model: Array) -> None:
        self.model = model

    def introduce(self, nodes: list[str]) -> tuple[dict[str, Any], list[str]]:
        return {node: facts(NODES[node]) for node in nodes}, []

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> dict[str, Any]:
        return {node: probed(NODES[node], self.model) for node in nodes}


def play_stacked(core: SelectionCore, rounds: int, model: Array | None = None) -> list[Array]:
    """Play rounds through the core alone, on stacked arrays (clients x parameters), as a vectorized engine does.

    Returns the global model after each round.
    """
    model, models = initial() if model is None else model, []
    for _ in range(rounds):
        chosen = core.choose(NODES, [model], InProcess(model))
        if chosen:
            trained = ModelStack([train(model, np.array([NODES[node] for node in chosen], dtype=int))])
            replies = {}
            for node in filter(lambda node: answers(NODES[node]), chosen):
                told = metrics(k := NODES[node], core.round) | asked(k, model, core.asks)
                replies[node] = Reply(num_examples=num_examples(k), metrics=told)
            outcome = core.collect(replies, trained)
            kept = outcome.models.take(outcome.positions).flat()
            mean = np.average(kept, axis=0, weights=outcome.weights) if outcome.enough else None
            after = core.finish(None if mean is None else [mean])
            model = model if after is None else after[0]
        models.append(model)
    return models
