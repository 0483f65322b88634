"""The client app of the Flower worker, in a module of its own so that Ray's actors import it."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from turns import Task, batches

app = ClientApp()


@lru_cache(maxsize=1)
def _state() -> tuple[Task, Any, dict[int, Any]]:
    """What an actor keeps: the task, one model, and the tensors of the clients it has seen."""
    torch.set_num_threads(int(os.environ["ENGINES_THREADS"]))
    task = Task(os.environ["ENGINES_TASK"])
    return task, task.model().to(os.environ["ENGINES_DEVICE"]), {}


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the node's examples."""
    task, model, held = _state()
    settings, client = task.settings, int(context.node_config["partition-id"])
    if client not in held:
        held[client] = task.tensors(client, os.environ["ENGINES_DEVICE"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["learning_rate"])
    for _ in range(settings["local_epochs"]):
        for x, y in batches(*held[client], settings["batch_size"]):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(held[client][1])})}
    return Message(RecordDict(reply), reply_to=message)
