"""A client: a step of linear regression on data of its own."""

import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

TRUTH = np.array([[1.0], [-2.0], [3.0]])
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Go a few steps from the weights that the server sent."""
    number = int(context.node_config["partition-id"])
    inputs = np.random.default_rng(number).normal(size=(100, 3))
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    for _ in range(10):
        weights = weights - 0.1 * inputs.T @ inputs @ (weights - TRUTH) / len(inputs)
    if number == 0:
        time.sleep(6.0)  # an old machine
    content = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord({"num-examples": len(inputs)})}
    return Message(RecordDict(content), reply_to=message)
