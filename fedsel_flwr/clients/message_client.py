"""A torch client for Flower's Message API: the same work as :class:`TorchClient`, in records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedsel_flwr.clients.torch_client import TorchClient


def make_message_app(client_of: Callable[[Context], TorchClient]) -> ClientApp:
    """Build a ``ClientApp`` that answers TRAIN, EVALUATE and QUERY messages.

    Args:
        client_of: Returns the client of a node.

    Returns:
        The app. It reads the record ``arrays`` and the keys ``server-round`` or ``round``, ``needs``, and for a probe
        ``probe``, of the record ``config``. It answers with the records ``arrays`` and ``metrics``; Flower's weight is
        ``num-examples``. A vector that was asked for travels in an ``ArrayRecord`` of its own: record and array have
        the column's name, and the array is float32 of shape (n,).
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = _arrays(message)
        trained, num_examples, metrics = client_of(context).fit(arrays.to_numpy_ndarrays(), _config(message))
        renamed = ArrayRecord(trained)
        named = ArrayRecord(dict(zip(arrays.keys(), renamed.values(), strict=True)))
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
