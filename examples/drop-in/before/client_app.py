"""A client: logistic regression on its share of scikit-learn's digits."""

import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch from the weights that the server sent."""
    number, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    inputs, labels = load_digits(return_X_y=True)
    inputs, labels = inputs[number:1500:clients] / 16, labels[number:1500:clients]
    if number == 0:
        time.sleep(float(context.run_config["slow-client-s"]))  # an old machine

    weights, intercept = message.content["arrays"].to_numpy_ndarrays()
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.05, max_iter=1, tol=None)
    model.fit(inputs, labels, coef_init=weights, intercept_init=intercept)

    metrics = {"num-examples": len(labels), "train_accuracy": float(np.mean(model.predict(inputs) == labels))}
    content = {"arrays": ArrayRecord([model.coef_, model.intercept_]), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
