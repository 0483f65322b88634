"""Strategies of the legacy API, as people outside write them.

Files and early stopping in ``aggregate_fit`` and ``evaluate``, a config or a sub-model for each client, budgets, rounds
without training, and replies that are not shaped like the global model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import EvaluateIns, FitIns, Parameters, ndarrays_to_parameters
from flwr.server.client_manager import ClientManager
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, FedProx, Strategy
from flwr.server.strategy.aggregate import aggregate

from tests.strategies.foreign.world import ACCURACY, CLIENTS, LOG, Case, StopTraining, legacy_honest, legacy_metrics
from tests.strategies.helpers import Arrays, initial, parameters_to_ndarrays, update

Instructions = list[tuple[Any, FitIns]]
Aggregated = tuple[Parameters | None, dict[str, Any]]
KNOWN = [f"node-{k}" for k in range(2 * CLIENTS)]
"""The clients that the strategies' tables know. Any other is a KeyError."""


def accuracy_of(server_round: int, parameters: Arrays, config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """A central evaluation, as users give it to a strategy."""
    return float(sum(np.abs(array).sum() for array in parameters)), {"accuracy": ACCURACY[server_round]}


def mean_loss(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """A user's aggregation of metrics."""
    total = sum(examples for examples, _ in metrics)
    return {"train_loss": sum(examples * one["train_loss"] for examples, one in metrics) / total}


class Base(FedAvg):
    """What the strategies below have in common."""

    def __init__(self, **kwargs: Any) -> None:
        given = {"initial_parameters": initial(), "evaluate_fn": accuracy_of, "fit_metrics_aggregation_fn": mean_loss}
        super().__init__(**{**given, **kwargs})


def _models(results: list[Any]) -> list[Arrays]:
    return [parameters_to_ndarrays(res.parameters) for _, res in results]


def _mean(models: list[Arrays]) -> Arrays:
    return [np.mean(own, axis=0, dtype=np.float32) for own in zip(*models, strict=True)]


class SaveModel(Base):
    """Writes the model of each round, and the results as JSON: Flower's how-to on saving models."""

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder, self.results = folder, dict[int, Any]()

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if parameters is not None:
            (self.folder / f"round-{server_round}.bin").write_bytes(b"".join(parameters.tensors))
            self.results[server_round] = metrics
            (self.folder / "results.json").write_text(json.dumps(self.results))
            LOG.info("round %d: saved %d results", server_round, len(results))
        return parameters, metrics


class BestModel(Base):
    """Writes each model that is better than all before."""

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder, self.best = folder, 0.0

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Any]] | None:
        result = super().evaluate(server_round, parameters)
        if result is not None and result[1]["accuracy"] > self.best:
            self.best = result[1]["accuracy"]
            (self.folder / f"best-{server_round}.bin").write_bytes(b"".join(parameters.tensors))
        return result


class EarlyStopping(FedAdam):
    """Ends the server by an exception when the accuracy has not risen for two rounds."""

    def __init__(self) -> None:
        super().__init__(initial_parameters=initial(), evaluate_fn=accuracy_of, eta=0.1)
        self.best, self.waited = -1.0, 0

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Any]] | None:
        result = super().evaluate(server_round, parameters)
        assert result is not None
        accuracy = result[1]["accuracy"]
        self.best, self.waited = max(self.best, accuracy), 0 if accuracy > self.best else self.waited + 1
        if self.waited >= 2:
            raise StopTraining(f"no better model since round {server_round - 2}")
        return result


class Plateau(Base):
    """Configures nobody once the clients' loss has risen."""

    last, stopped_in = float("inf"), 0

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        return [] if self.stopped_in else super().configure_fit(server_round, parameters, client_manager)

    def aggregate_evaluate(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        loss, metrics = super().aggregate_evaluate(server_round, results, failures)
        if loss is not None and loss > self.last and server_round >= 3:
            self.stopped_in = self.stopped_in or server_round
            LOG.info("stops after round %d", server_round)
        self.last = loss if loss is not None else self.last
        return loss, metrics


class EveryOtherRound(Base):
    """Trains in odd rounds only."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trained_in, self.aggregated_in = list[int](), list[int]()

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        if server_round % 2 == 0:
            return []
        self.trained_in.append(server_round)
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        self.aggregated_in.append(server_round)
        return super().aggregate_fit(server_round, results, failures)


class Budget(Base):
    """Counts the bytes that it sends, and trains nobody when the budget is spent."""

    def __init__(self, budget: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.budget, self.spent, self.per_round = budget, 0, list[int]()

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        if self.spent >= self.budget:
            return []
        instructions = super().configure_fit(server_round, parameters, client_manager)
        self.per_round.append(len(instructions))
        arrays = [array for _, ins in instructions for array in parameters_to_ndarrays(ins.parameters)]
        self.spent += sum(array.nbytes for array in arrays)
        return instructions


class PerClientProximal(FedProx):
    """Sends each client the proximal term of its row in a table, and records what was intended."""

    def __init__(self) -> None:
        super().__init__(proximal_mu=0.0, initial_parameters=initial(), fit_metrics_aggregation_fn=mean_loss)
        self.table = {cid: round(0.1 * (i + 1), 1) for i, cid in enumerate(KNOWN)}
        self.intended: list[dict[str, float]] = []

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        pairs = super().configure_fit(server_round, parameters, client_manager)
        configs = {client.cid: {**ins.config, "proximal_mu": self.table[client.cid]} for client, ins in pairs}
        self.intended.append(dict(sorted((cid, config["proximal_mu"]) for cid, config in configs.items())))
        return [(client, FitIns(ins.parameters, configs[client.cid])) for client, ins in pairs]


def proximal(number: int, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
    new, share = update(number, arrays, server_round), np.float32(1 + config["proximal_mu"])
    return [a + (b - a) / share for a, b in zip(arrays, new, strict=True)], 10 + number, legacy_metrics(number)


class SubModels(Base):
    """HeteroFL: weak clients get the first rows of each array, and an entry is averaged over those that have it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = {cid: 1 + i % 2 for i, cid in enumerate(KNOWN)}

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        self.current = parameters_to_ndarrays(parameters)
        instructions = []
        for client, ins in super().configure_fit(server_round, parameters, client_manager):
            rows = self.rows[client.cid]
            own = ndarrays_to_parameters([array[:rows] for array in self.current])
            instructions.append((client, FitIns(own, {**ins.config, "rows": rows})))
        return instructions

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        merged = []
        for i, array in enumerate(self.current):
            total, counts = np.zeros(array.shape), np.zeros(array.shape)
            for own in _models(results):
                total[: len(own[i])] += own[i]
                counts[: len(own[i])] += 1
            merged.append(np.where(counts > 0, total / np.maximum(counts, 1), array).astype(np.float32))
        return ndarrays_to_parameters(merged), {}


class HalfAndHalf(Strategy):
    """From scratch, as in Flower's tutorial: the second half of the clients gets a higher learning rate."""

    def __init__(self) -> None:
        self.rates: list[dict[str, float]] = []

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        return initial()

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        wanted = max(int(client_manager.num_available() * 1.0), 2)
        clients = client_manager.sample(num_clients=wanted, min_num_clients=2)
        clients = sorted(clients, key=lambda client: client.cid)
        rates = {client.cid: 0.001 if i < len(clients) // 2 else 0.003 for i, client in enumerate(clients)}
        self.rates.append(rates)
        return [(client, FitIns(parameters, {"lr": rates[client.cid]})) for client in clients]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        weighted = [(parameters_to_ndarrays(res.parameters), res.num_examples) for _, res in results]
        return ndarrays_to_parameters(aggregate(weighted)), {}

    def configure_evaluate(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Any:
        clients = client_manager.sample(num_clients=client_manager.num_available(), min_num_clients=2)
        return [(client, EvaluateIns(parameters, {})) for client in clients]

    def aggregate_evaluate(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        return float(np.mean([res.loss for _, res in results])), {}

    def evaluate(self, server_round: int, parameters: Parameters) -> None:
        return None


class Scaffold(Base):
    """The changes of the control variates stand behind the weights."""

    variate: Arrays | None = None

    def _split(self, results: list[Any]) -> tuple[Arrays, Arrays]:
        arrays = _mean(_models(results))
        return arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        weights, change = self._split(results)
        before = self.variate or [np.float32(0) for _ in change]
        self.variate = [a + 0.5 * b for a, b in zip(before, change, strict=True)]
        return ndarrays_to_parameters(weights), {}


class ScaffoldInMetrics(Scaffold):
    """The changes of the control variates are bytes among the metrics."""

    def _split(self, results: list[Any]) -> tuple[Arrays, Arrays]:
        changes = [np.frombuffer(res.metrics["control"], np.float32) for _, res in results]
        return _mean(_models(results)), [np.mean(changes, axis=0, dtype=np.float32)]


def scaffold_client(layout: str) -> Any:
    own: dict[int, Arrays] = {}

    def train(number: int, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
        new = update(number, arrays, server_round)
        before = own.get(number, [np.zeros_like(array) for array in arrays])
        own[number] = [a - b for a, b in zip(new, arrays, strict=True)]
        changes = [a - b for a, b in zip(own[number], before, strict=True)]
        if layout == "behind":
            return [*new, *changes], 10 + number, legacy_metrics(number)
        control = np.concatenate([change.ravel() for change in changes]).tobytes()
        return new, 10 + number, {**legacy_metrics(number), "control": control}

    return train


class PersonalHead(Base):
    """The clients keep the last layer at home; the server's stays as it is."""

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        self.current = parameters
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if parameters is not None:
            parameters.tensors.append(self.current.tensors[-1])
        return parameters, metrics


def personal(number: int, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
    new, examples, metrics = legacy_honest(number, arrays, config, server_round)
    return new[:-1], examples, metrics


class PackedUpdates(Base):
    """The clients send their change as one vector of bytes, with its range among the metrics."""

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Instructions:
        self.current = parameters_to_ndarrays(parameters)
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        change: Any = 0.0
        for _, res in results:
            (packed,) = parameters_to_ndarrays(res.parameters)
            assert packed.dtype == np.uint8
            low, high = np.float32(res.metrics["low"]), np.float32(res.metrics["high"])
            change = change + (low + packed.astype(np.float32) * (high - low) / 255) / len(results)
        merged, at = [], 0
        for old in self.current:
            merged.append((old + change[at : at + old.size].reshape(old.shape)).astype(old.dtype))
            at += old.size
        return ndarrays_to_parameters(merged), {}


def packing(number: int, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
    pairs = zip(update(number, arrays, server_round), arrays, strict=True)
    change = np.concatenate([(new - old).ravel() for new, old in pairs])
    low, high = float(change.min()), float(change.max())
    packed = np.round((change - low) / (high - low) * 255).astype(np.uint8)
    return [packed], 10 + number, {**legacy_metrics(number), "low": low, "high": high}


class HashInMetrics(Base):
    """The clients send a hash of their model and their version among the metrics; Flower aggregates."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.versions: dict[str, str] = {}

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        for client, res in results:
            assert res.metrics["sha"] == _sha(parameters_to_ndarrays(res.parameters))
            assert res.metrics["salt"] == b"\x00\xff"
            self.versions[client.cid] = res.metrics["version"]
        return super().aggregate_fit(server_round, results, failures)


def _sha(arrays: Arrays) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def describing(number: int, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
    new, examples, metrics = legacy_honest(number, arrays, config, server_round)
    return new, examples, {**metrics, "sha": _sha(new), "version": f"1.{number}", "salt": b"\x00\xff", "spot": True}


class NoMetrics(Base):
    """Its clients report no metrics."""

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Aggregated:
        assert all("train_loss" not in res.metrics for _, res in results)
        return ndarrays_to_parameters(_mean(_models(results))), {}


def silent(number: int, arrays: Arrays, config: dict[str, Any], server_round: int) -> Any:
    return update(number, arrays, server_round), 1, {}


def _private(folder: Path) -> Any:
    return DifferentialPrivacyServerSideFixedClipping(SaveModel(folder), 0.0, 1e6, CLIENTS)


LEGACY: dict[str, Case] = {
    "flower's-own": Case(lambda folder: Base()),
    "save-model": Case(SaveModel),
    "inside-privacy": Case(_private),
    "best-model": Case(BestModel),
    "early-stopping": Case(lambda folder: EarlyStopping()),
    "plateau": Case(lambda folder: Plateau(), skips=True),
    "every-other-round": Case(lambda folder: EveryOtherRound(), skips=True),
    "byte-budget": Case(lambda folder: Budget(3 * CLIENTS * 32), skips=True),
    "per-client-proximal": Case(lambda folder: PerClientProximal(), lambda: proximal),
    "sub-models": Case(lambda folder: SubModels()),
    "half-and-half": Case(lambda folder: HalfAndHalf()),
    "scaffold-behind-the-weights": Case(lambda folder: Scaffold(), lambda: scaffold_client("behind")),
    "scaffold-in-metrics": Case(lambda folder: ScaffoldInMetrics(), lambda: scaffold_client("metrics")),
    "personal-head": Case(lambda folder: PersonalHead(), lambda: personal),
    "packed-updates": Case(lambda folder: PackedUpdates(), lambda: packing),
    "hash-in-metrics": Case(lambda folder: HashInMetrics(), lambda: describing),
    "no-metrics": Case(lambda folder: NoMetrics(), lambda: silent, problems=("latency",)),
}
