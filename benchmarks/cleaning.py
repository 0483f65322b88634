"""What cleaning a reply costs beside averaging it, in microseconds a reply: both APIs' ways, and the stack.

25 MLPs 784-64-30-10 (52,500 numbers, float32), all of them sound; CS-UCB. Cleaning is everything between Flower's
types and the base strategy: decoding, checks of arrays and metrics, and the copies that the base sees; averaging is
Flower's FedAvg on the same replies, decoding included, and for the stack the vectorized engine's mean. Each is the
median of rounds.

    python benchmarks/cleaning.py [--clients 25] [--rounds 60]
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp.strategy import FedAvg as MessageFedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.models import ModelStack
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations.vectorized import stack_mean
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.legacy_transport import TimedProxy, cleaned
from fedsel_flwr.strategies.wrapping.legacy_transport import reply_of as legacy_reply
from fedsel_flwr.strategies.wrapping.message_records import Cleaner
from fedsel_flwr.strategies.wrapping.message_records import reply_of as message_reply

SHAPES = ((64, 784), (64,), (30, 64), (30,), (10, 30), (10,))
NAMES = tuple(f"layer{i}" for i in range(len(SHAPES)))
METRICS = {"latency_s": 1.0, "energy_j": 2.0, "download_s": 0.2, "compute_s": 0.6, "upload_s": 0.2, "train_loss": 0.5}


class Everybody:
    """A core whose rounds choose the same clients, and that is told their replies again and again.

    Args:
        clients: How many.
        limit: ``max_update_norm``; None for none.
    """

    def __init__(self, clients: int, limit: float | None) -> None:
        selector = create("cs-ucb", clients_per_round=clients, max_latency=60.0, seed=1)
        self.core = SelectionCore(selector, resolve_settings(selector, max_update_norm=limit))
        self.nodes = [str(k) for k in range(1000, 1000 + clients)]
        self.reference = [np.zeros(shape, dtype=np.float32) for shape in SHAPES]

    def introduce(self, nodes: list[str]) -> Any:
        """Each is its own name."""
        return {node: {"client_id": node, "num_examples": 10} for node in nodes}, []

    def probe(self, nodes: list[str], config: Any) -> Any:
        """Nobody is asked."""
        return {}

    def round(self, clean: Callable[[], Any]) -> float:
        """Seconds of ``clean`` in a round of its own."""
        self.core.choose(self.nodes, self.reference, self)
        start = time.perf_counter()
        clean()
        seconds = time.perf_counter() - start
        self.core.finish()
        return seconds


def timed(action: Callable[[], Any]) -> float:
    """Seconds of an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def legacy(everybody: Everybody, models: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Cleaning and averaging in the legacy API."""
    base, ok = LegacyFedAvg(fit_metrics_aggregation_fn=lambda metrics: {}), Status(Code.OK, "")
    proxies = {node: TimedProxy(bases.NamedClient(node)) for node in everybody.nodes}
    results = {
        node: (proxies[node], FitRes(ok, ndarrays_to_parameters(own), 10, {**METRICS, "client_id": node}))
        for node, own in zip(everybody.nodes, models, strict=True)
    }
    ours = everybody.core.settings.keys.own_keys()

    def clean() -> Any:
        outcome = everybody.core.collect(
            {node: legacy_reply(base, proxies[node], results[node], None) for node in results}
        )
        return [cleaned(results[node], outcome.results[node], ours, ()) for node in outcome.kept]

    return clean, lambda: base.aggregate_fit(2, list(results.values()), [])


def messages(everybody: Everybody, models: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Cleaning and averaging in the Message API."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 7, 1, 1
    base = MessageFedAvg()
    replies = {}
    for node, own in zip(everybody.nodes, models, strict=True):
        asked = Message(content=RecordDict(), dst_node_id=int(node), message_type="train")
        record = ArrayRecord({name: Array(array) for name, array in zip(NAMES, own, strict=True)})
        content = RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 10, **METRICS})})
        replies[node] = Message(content, reply_to=asked)

    keys, model = everybody.core.settings.keys, replies[everybody.nodes[0]].content.array_records["arrays"]

    def clean() -> Any:
        outcome = everybody.core.collect(
            {node: message_reply(base, message, model, None, keys) for node, message in replies.items()}
        )
        return Cleaner(base, keys).cleaned({node: replies[node] for node in outcome.usable}, outcome, model, {})

    return clean, lambda: base.aggregate_train(2, list(replies.values()))


def stack(everybody: Everybody, models: list[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Cleaning and averaging in the vectorized engine."""
    layers = ModelStack([np.stack([own[i] for own in models]) for i in range(len(SHAPES))])
    replies = {node: Reply(num_examples=10, metrics={**METRICS, "client_id": node}) for node in everybody.nodes}
    weights = np.full(len(models), 10.0)
    return lambda: everybody.core.collect(replies, layers), lambda: stack_mean(layers, weights)


def main() -> None:
    """Print a line for each way, with and without a limit of the norm."""
    parser = argparse.ArgumentParser(description="What cleaning a reply costs.")
    parser.add_argument("--clients", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    for name in ("flwr", "fedsel_flwr"):
        logging.getLogger(name).setLevel(logging.ERROR)
    draws = np.random.default_rng(1)
    models = [[draws.normal(0.0, 0.1, shape).astype(np.float32) for shape in SHAPES] for _ in range(args.clients)]
    print(f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{args.clients} replies a round, {sum(a.size for a in models[0])} numbers each; microseconds a reply")
    for way in (legacy, messages, stack):
        for limit in (None, 1e6):
            everybody = Everybody(args.clients, limit)
            clean, average = way(everybody, models)
            cleaning = [everybody.round(clean) for _ in range(args.rounds)]
            averaging = [timed(average) for _ in range(args.rounds)]
            one, other = (statistics.median(part) / args.clients * 1e6 for part in (cleaning, averaging))
            words = "with max_update_norm" if limit else "without a limit"
            print(f"{way.__name__:9} {words:21}: cleaning {one:7.1f}, averaging {other:7.1f}, ratio {one / other:5.2f}")


if __name__ == "__main__":
    main()
