"""Flower client that trains a torch model and reports the cost of the round, for both of Flower's APIs.

:class:`TorchClient` is the client of the legacy API. :func:`make_message_app` lets it answer the records of the Message
API.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Config, NDArrays, Scalar
from torch import nn

from fedsel_flwr.checks import one_of
from fedsel_flwr.clients.answering import (
    Shares,
    answer,
    asked_columns,
    dropout_metrics,
    fit_metrics,
    local_accuracy,
    mini_batch,
    probe_costs,
    with_answering,
)
from fedsel_flwr.clients.device import REPLIED, ClientDropout, System
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective, fresh_copy, get_arrays
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.training import Targets, TrainingSettings, evaluate, train
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.replies import CRASHED

LatencyMode = Literal["measured", "model"]
Delay = Literal["virtual", "sleep"]


@dataclass(kw_only=True, eq=False, repr=False)
class TorchClient(NumPyClient):
    """Simulated client that trains on its examples; the system model simulates its channel and its processor.

    The config of ``fit`` must carry ``round``, the absolute round, on which every random draw depends. Its key
    ``needs`` names columns that the client reports with its update, see :mod:`fedsel_flwr.clients.answering`.

    Args:
        partition_id: The client's partition, which it reports as its identity.
        model: The model. Each call works on a copy (:func:`~fedsel_flwr.clients.objectives.fresh_copy`).
        inputs: The client's examples, shape (n, ...).
        labels: Their classes, or numbers to predict, shape (n,).
        test_inputs: The client's own test examples, shape (k, ...); None takes ``inputs``.
        test_labels: Their classes or numbers, shape (k,).
        energy_score: The client's energy score (PCZFL) in [0, 1], reported if it is set.
        settings: The settings of training.
        system: Delays and energy.
        latency_mode: "measured" takes the training time of this machine. With "model" the time is that of the system
            model, which makes runs reproducible.
        delay: "virtual" only reports the delays. With "sleep" the call really takes as long as it reports.
        objective: Loss and quality.
        dropout: Draws the rounds in which the client crashes or its reply is lost. None means that it never drops out.

    References:
        Metrics: ``latency_s`` = ``download_s`` + ``compute_s`` + ``upload_s`` (Xia et al., equation (4), not yet
        capped), ``energy_j`` (always modelled, hence ``energy_modelled`` = 1), ``train_loss``, ``client_id``.
    """

    partition_id: int
    model: nn.Module
    inputs: npt.NDArray[np.float32]
    labels: Targets
    settings: TrainingSettings
    system: System
    test_inputs: npt.NDArray[np.float32] | None = None
    test_labels: Targets | None = None
    energy_score: float | None = None
    latency_mode: LatencyMode = "measured"
    delay: Delay = "virtual"
    objective: Objective = CLASSIFICATION
    dropout: ClientDropout | None = None

    def __post_init__(self) -> None:
        """Check the modes."""
        one_of("latency_mode", self.latency_mode, get_args(LatencyMode))
        one_of("delay", self.delay, get_args(Delay))
        self._train = self.inputs, self.labels
        self._test = (
            self.inputs if self.test_inputs is None else self.test_inputs,
            self.labels if self.test_labels is None else self.test_labels,
        )

    def get_properties(self, config: Config) -> dict[str, Scalar]:
        """Return the client's identity and the number of its training examples."""
        facts: dict[str, Scalar] = {"client_id": self.partition_id, "num_examples": len(self._train[1])}
        return facts if self.energy_score is None else facts | {"energy_score": self.energy_score}

    def get_parameters(self, config: dict[str, Scalar]) -> NDArrays:
        """Return the model's arrays."""
        return get_arrays(self.model)

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train from the received model; return the arrays, the number of examples and the metrics.

        The columns in ``needs`` are answered before training, and their time and energy are part of the round's. A
        client that drops out returns the received model, with metrics that declare that this reply never arrives.
        """
        round, asked = _round(config), asked_columns(config.get("needs"))
        outcome = REPLIED if self.dropout is None else self.dropout.outcomes([self.partition_id], round)[0]
        if outcome == CRASHED:
            return parameters, len(self._train[1]), dropout_metrics(self.partition_id, outcome)
        delays = with_answering(self.system.draw(self.partition_id, round), asked, self._shares)
        model = fresh_copy(self.model, parameters)
        order = stream(self.system.seed, "data-order", self.partition_id, round)
        start = time.perf_counter()
        answers, loss = {}, math.nan
        # The model of a lost reply is not used, so it is trained only if its time is measured.
        if outcome == REPLIED or self.latency_mode == "measured":
            answers = self._answers(model, asked, round)
            loss = train(model, *self._train, self.settings.at(round), order, self.objective)
        measured = time.perf_counter() - start
        metrics = fit_metrics(
            self.system, self.partition_id, delays, train_loss=loss, energy_score=self.energy_score,
            compute_s=None if self.latency_mode == "model" else measured,
        )  # fmt: skip
        if self.delay == "sleep":
            time.sleep(max(0.0, min(float(metrics["latency_s"]), self.system.max_latency_s) - measured))
        if outcome != REPLIED:
            return parameters, len(self._train[1]), dropout_metrics(self.partition_id, outcome, metrics)
        return get_arrays(model), len(self._train[1]), metrics | answers

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[float, int, dict[str, Scalar]]:
        """Measure the received model on the client's own test examples.

        For a probe (``probe`` in the config, with ``round``), the metrics hold the requested columns, see
        :mod:`fedsel_flwr.clients.answering`, and the cost of the answer. A probe is charged for the examples that it
        asks about. A measured time of a probe for only a mini-batch's loss does not contain the test examples.
        """
        model = fresh_copy(self.model, parameters)
        start = time.perf_counter()
        loss, accuracy = evaluate(model, *self._test, objective=self.objective)
        metrics: dict[str, Scalar] = {"accuracy": accuracy, "client_id": self.partition_id}
        if "probe" in config:
            asked, round = asked_columns(config["probe"]), _round(config)
            # Flower asked for the evaluation of the test examples above, and the probe did not.
            if asked == {"batch_loss"}:
                start = time.perf_counter()
            # The accuracy is already known from above, and the time of a second evaluation would be measured too.
            metrics |= self._answers(model, asked - {"local_accuracy"}, round)
            if "local_accuracy" in asked:
                metrics["local_accuracy"] = local_accuracy(accuracy)
            delays = self.system.draw(self.partition_id, round)
            measured = None if self.latency_mode == "model" else time.perf_counter() - start
            metrics |= probe_costs(self.system, delays, asked, self._shares, measured)
        return loss, len(self._test[1]), metrics

    def _answers(self, model: nn.Module, asked: frozenset[str], round: int) -> dict[str, float | bytes]:
        """Answer questions about a model."""
        seed, batch = self.system.seed, None
        if "batch_loss" in asked:
            batch = mini_batch(seed, self.partition_id, round, len(self._train[1]), self.settings.batch_size)
        return answer(model, asked, self._train, self._test, self.objective, seed, batch)

    @property
    def _shares(self) -> Shares:
        """The client's examples, relative to those that it trains on in a round."""
        train, test = (np.array([len(part[1])]) for part in (self._train, self._test))
        return Shares.of(self.settings, train, test)[0]


def _round(config: dict[str, Scalar]) -> int:
    round = config.get("round")
    # True is an int in Python.
    if isinstance(round, bool) or not isinstance(round, int):
        raise ParameterError(
            f"the config must carry the absolute round as an integer (key round), got {round!r}. Send it with "
            "on_fit_config_fn, or let a SelectionStrategy send it."
        )
    return round


def make_message_app(client_of: Callable[[Context], TorchClient]) -> ClientApp:
    """Build a ``ClientApp`` that answers TRAIN, EVALUATE and QUERY messages.

    Args:
        client_of: Returns the client of a node.

    Returns:
        The app. It reads the record ``arrays`` and these keys of the record ``config``: ``server-round`` or ``round``,
        ``needs``, and for a probe ``probe``. It answers with the records ``arrays`` and ``metrics``. Flower's weight is
        ``num-examples``. Each requested vector is in a separate ``ArrayRecord``. Record and array have the column's
        name, and the array is float32 of shape (n,).
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = _arrays(message)
        trained, num_examples, metrics = client_of(context).fit(arrays.to_numpy_ndarrays(), _config(message))
        # Under the names of the received record, because the strategy's averaging compares the names.
        named = ArrayRecord(dict(zip(arrays.keys(), ArrayRecord(trained).values(), strict=True)))
        return _answer(message, {"num-examples": num_examples, **metrics}, named)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        loss, num_examples, metrics = client_of(context).evaluate(
            _arrays(message).to_numpy_ndarrays(), _config(message)
        )
        return _answer(message, {"num-examples": num_examples, "loss": loss, **metrics})

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _answer(message, dict(client_of(context).get_properties({})))

    return app


def _arrays(message: Message) -> ArrayRecord:
    record: ArrayRecord = message.content["arrays"]  # type: ignore[assignment]
    return record


def _config(message: Message) -> dict[str, Any]:
    record: ConfigRecord = message.content["config"]  # type: ignore[assignment]
    config: dict[str, Any] = dict(record)
    if "round" not in config and "server-round" in config:
        config["round"] = config["server-round"]
    return config


def _answer(message: Message, metrics: dict[str, Any], arrays: ArrayRecord | None = None) -> Message:
    vectors = {name: value for name, value in metrics.items() if isinstance(value, bytes)}
    numbers = {name: value for name, value in metrics.items() if name not in vectors}
    content = RecordDict({"metrics": MetricRecord(numbers)})
    if arrays is not None:
        content["arrays"] = arrays
    for name, value in vectors.items():
        content[name] = ArrayRecord({name: Array(np.frombuffer(value, dtype=np.float32))})
    return Message(content=content, reply_to=message)
