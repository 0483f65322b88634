"""A client: logistic regression on its share of scikit-learn's digits."""

import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

app = ClientApp()


def load(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Return this client's inputs, shape (n, 64) in [0, 1], and labels 0 to 9, shape (n,)."""
    if "data-path" in context.node_config:  # deployment: flower-supernode --node-config 'data-path="/data/mine.npz"'
        with np.load(str(context.node_config["data-path"])) as file:
            return file["inputs"], file["labels"]
    number, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    inputs, labels = load_digits(return_X_y=True)
    return inputs[number:1500:clients] / 16, labels[number:1500:clients]


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one epoch from the server's weights."""
    inputs, labels = load(context)
    if context.node_config.get("partition-id") == 0:  # in a simulation one client is a slow machine
        time.sleep(float(context.run_config["slow-client-s"]))

    weights, intercept = message.content["arrays"].to_numpy_ndarrays()
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05)
    model.partial_fit(inputs[:1], labels[:1], classes=np.arange(10))  # this client may lack some of the ten classes
    model.coef_, model.intercept_ = weights.copy(), intercept.copy()
    model.partial_fit(inputs, labels)

    metrics = {"num-examples": len(labels), "train_accuracy": float(np.mean(model.predict(inputs) == labels))}
    content = {"arrays": ArrayRecord([model.coef_, model.intercept_]), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
