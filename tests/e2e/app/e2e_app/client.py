"""Clients in NumPy that behave as a file orders: the node config's ``orders``, JSON.

The orders: ``claim`` (a client id), ``sleep`` (seconds), ``raise`` (a text); with ``in_round`` the last two concern
that round alone. The file beside it with the suffix ``.seen`` gets a line for each training that begins: round, process
id.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp

Arrays = list[np.ndarray]
EXAMPLES = 10


def orders_of(context: Context) -> dict[str, Any]:
    return dict(json.loads(Path(str(context.node_config["orders"])).read_text(encoding="utf-8")))


def trained(arrays: Arrays, context: Context, round: int) -> Arrays:
    """A new model, unless the orders say otherwise."""
    orders = orders_of(context)
    with Path(str(context.node_config["orders"])).with_suffix(".seen").open("a", encoding="utf-8") as seen:
        seen.write(f"{round} {os.getpid()}\n")
    if orders.get("in_round", round) == round:
        time.sleep(orders.get("sleep", 0.0))
        if "raise" in orders:
            raise RuntimeError(orders["raise"])
    return [array + 1.0 for array in arrays]


def identity(context: Context) -> dict[str, str | int]:
    orders = orders_of(context)
    return {"client_id": orders["claim"]} if "claim" in orders else {}


class NumPyTrainer(NumPyClient):
    """A client of the legacy API."""

    def __init__(self, context: Context) -> None:
        self._node = context

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return dict(identity(self._node))

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        return trained(parameters, self._node, int(config["round"])), EXAMPLES, dict(identity(self._node))


def client_fn(context: Context) -> Client:
    return NumPyTrainer(context).to_client()


message_app = ClientApp()


@message_app.train()
def train(message: Message, context: Context) -> Message:
    (config,) = message.content.config_records.values()
    arrays = trained(message.content["arrays"].to_numpy_ndarrays(), context, int(config["server-round"]))
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": EXAMPLES})})
    if said := identity(context):
        content["who"] = ConfigRecord(said)
    return Message(content, reply_to=message)


@message_app.query()
def who(message: Message, context: Context) -> Message:
    return Message(RecordDict({"who": ConfigRecord(identity(context))}), reply_to=message)


class BothApis(ClientApp):
    """Answers in the API that the run config names."""

    def __init__(self) -> None:
        super().__init__()
        self._apps = {"legacy": ClientApp(client_fn=client_fn), "message": message_app}

    def __call__(self, message: Message, context: Context) -> Message:
        return self._apps[str(context.run_config["api"])](message, context)


app = BothApis()
