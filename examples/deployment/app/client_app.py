"""A client: a step of linear regression on its own examples, the same code in simulation and deployment."""

import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def load(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return this client's inputs, shape (n, 3), and targets, shape (n, 1)."""
    if "data-path" in context.node_config:  # deployment: each SuperNode names its file
        with np.load(str(context.node_config["data-path"])) as file:
            return file["inputs"], file["targets"]
    inputs = np.random.default_rng(int(context.node_config["partition-id"])).normal(size=(100, 3))
    return inputs, inputs @ np.array([[1.0], [-2.0], [3.0]])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Go a few steps from the weights that the server sent."""
    inputs, targets = load(context)
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    for _ in range(10):
        weights = weights - 0.1 * inputs.T @ (inputs @ weights - targets) / len(inputs)
    time.sleep(float(context.node_config.get("slow-s", 0.0)))
    content = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord({"num-examples": len(inputs)})}
    return Message(RecordDict(content), reply_to=message)
