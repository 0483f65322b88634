"""Strategies of the Message API with a ``start`` of their own, as people outside write them.

Two forms: around ``super().start`` (best-model file, early stopping, logging), and a whole loop over
``self.configure_train``, ``grid.send_and_receive`` and ``self.aggregate_train``, as in Flower's advanced example.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, Result, Strategy

from tests.strategies.foreign.world import CLIENTS, LOG, ROUNDS, Case, StopTraining

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


def _write(file: Path, arrays: ArrayRecord) -> None:
    file.write_bytes(b"".join(array.tobytes() for array in arrays.to_numpy_ndarrays()))


class BestModel(FedAvg):
    """Wraps ``evaluate_fn``, and writes each model that is better than all before."""

    def set_save_path(self, save_path: Path) -> None:
        self.save_path = save_path
        self.best_accuracy = 0.0

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:  # fmt: skip
        def tracked(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays) if evaluate_fn else None
            if metrics is not None and metrics["accuracy"] > self.best_accuracy:
                self.best_accuracy = float(metrics["accuracy"])
                _write(self.save_path / f"best_round_{server_round}.bin", arrays)
                LOG.info("new best model in round %d: %f", server_round, self.best_accuracy)
            return metrics

        LOG.info("%s starts", self.__class__.__name__)
        return super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn=tracked
        )


class EarlyStopping(FedAdam):
    """Leaves ``super().start`` by an exception when the accuracy has not risen for ``patience`` rounds."""

    def __init__(self, save_path: Path, patience: int = 2, **kwargs: Any) -> None:
        super().__init__(eta=0.1, **kwargs)
        self.save_path, self.patience = save_path, patience
        self.best, self.waited, self.stopped_in = -1.0, 0, 0
        self.best_arrays: ArrayRecord | None = None

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **kwargs: Any) -> Result:
        evaluate_fn = kwargs.pop("evaluate_fn")
        tracked = Result()

        def watch(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            metrics: MetricRecord = evaluate_fn(server_round, arrays)
            tracked.arrays, tracked.evaluate_metrics_serverapp[server_round] = arrays, metrics
            if metrics["accuracy"] > self.best:
                self.best, self.waited, self.best_arrays = metrics["accuracy"], 0, arrays
                _write(self.save_path / "best.bin", arrays)
                return metrics
            self.waited += 1
            if self.waited >= self.patience:
                self.stopped_in = server_round
                raise StopTraining
            return metrics

        try:
            return super().start(grid, initial_arrays, *args, evaluate_fn=watch, **kwargs)
        except StopTraining:
            LOG.info("early stop in round %d", self.stopped_in)
            return tracked


class LoggingStart(FedAvg):
    """Passes on whatever it gets, and writes a summary at the end."""

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder = folder
        self.runs = 0

    def start(self, *args: Any, **kwargs: Any) -> Result:
        self.runs += 1
        result = super().start(*args, **kwargs)
        last = max(result.train_metrics_clientapp)
        LOG.info("finished after %d rounds", last)
        summary = {"rounds": last, "train_loss": result.train_metrics_clientapp[last]["train_loss"], "runs": self.runs}
        (self.folder / "summary.json").write_text(json.dumps(summary))
        self.result = result
        return result


class FinalEvaluation(FedAvg):
    """Evaluates the last model only, after Flower's loop."""

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, **kwargs: Any) -> Result:
        evaluate_fn = kwargs.pop("evaluate_fn", None)
        result = super().start(grid, initial_arrays, num_rounds, **kwargs)
        if evaluate_fn is not None:
            result.evaluate_metrics_serverapp[num_rounds] = evaluate_fn(num_rounds, result.arrays)
            LOG.info("final accuracy %s", result.evaluate_metrics_serverapp[num_rounds]["accuracy"])
        return result


class LastRoundEvaluation(FedAvg):
    """Learns in ``start`` how many rounds there are, evaluates on clients in the last one only, and counts messages."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_rounds: int | None = None
        self.dispatched: dict[int, list[int]] = {}

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **kwargs: Any) -> Result:
        self.num_rounds = num_rounds
        LOG.info("%d rounds", num_rounds)
        return super().start(grid, initial_arrays, num_rounds, *args, **kwargs)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.dispatched[server_round] = sorted(message.metadata.dst_node_id for message in messages)
        return messages

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        return super().configure_evaluate(server_round, arrays, config, grid) if server_round == self.num_rounds else []


class ExplicitStart(FedAvg):
    """Names Flower's class instead of ``super()``."""

    def start(self, *args: Any, **kwargs: Any) -> Result:
        LOG.info("starts")
        result = Strategy.start(self, *args, **kwargs)
        self.finished = True
        return result


class AdvancedLoop(FedAvg):
    """Flower's advanced example: results as JSON, best models as files; here with patience too."""

    patience = 2

    def set_save_path(self, path: Path) -> None:
        self.save_path = path

    def _is_worse(self, server_round: int, accuracy: float, arrays: ArrayRecord) -> bool:
        if accuracy > self.best_so_far:
            self.best_so_far, self.worse_rounds = accuracy, 0
            _write(self.save_path / f"model_{accuracy}_round_{server_round}.bin", arrays)
            LOG.info("new best model: %f", accuracy)
        else:
            self.worse_rounds += 1
        return self.worse_rounds >= self.patience

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        if server_round == 2:
            config["lr"] = config["lr"] * 0.5
            LOG.info("learning rate %s", config["lr"])
        return super().configure_train(server_round, arrays, config, grid)

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:  # fmt: skip
        LOG.info("Starting %s strategy", self.__class__.__name__)
        self.summary()
        self.best_so_far, self.worse_rounds = 0.0, 0
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        result, arrays = Result(), initial_arrays
        if evaluate_fn and (first := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = first
        for current in range(1, num_rounds + 1):
            LOG.info("[ROUND %s/%s]", current, num_rounds)
            messages = self.configure_train(current, arrays, train_config, grid)
            replies = grid.send_and_receive(messages=messages, timeout=timeout)
            new_arrays, metrics = self.aggregate_train(current, replies)
            if new_arrays is not None:
                result.arrays = arrays = new_arrays
            if metrics is not None:
                result.train_metrics_clientapp[current] = metrics
            messages = self.configure_evaluate(current, arrays, evaluate_config, grid)
            replies = grid.send_and_receive(messages=messages, timeout=timeout)
            if (tested := self.aggregate_evaluate(current, replies)) is not None:
                result.evaluate_metrics_clientapp[current] = tested
            worse = False
            if evaluate_fn and (evaluated := evaluate_fn(current, arrays)) is not None:
                result.evaluate_metrics_serverapp[current] = evaluated
                worse = self._is_worse(current, float(evaluated["accuracy"]), arrays)
            lines = {number: dict(one) for number, one in result.train_metrics_clientapp.items()}
            (self.save_path / "results.json").write_text(json.dumps(lines))
            if worse:
                LOG.info("stops in round %d", current)
                break
        return result


class TrainOnlyLoop(FedAvg):
    """Never evaluates, on clients or centrally."""

    __slots__ = ("norms", "rounds_done")

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, **kwargs: Any
    ) -> Result:
        self.rounds_done, self.norms = 0, []
        result = Result()
        result.arrays = initial_arrays
        for current in range(1, num_rounds + 1):
            messages = list(self.configure_train(current, result.arrays, ConfigRecord({"lr": 0.1}), grid))
            replies = list(grid.send_and_receive(messages, timeout=timeout))
            arrays, metrics = self.aggregate_train(current, replies)
            result.arrays, result.train_metrics_clientapp[current] = arrays, metrics
            self.norms.append(float(np.linalg.norm(arrays.to_numpy_ndarrays()[0])))
            self.rounds_done += 1
        return result


class ExtraArguments(FedAvg):
    """Takes more arguments than Flower's ``start``, and watches the clients' loss instead of a central one."""

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int, max_loss_rises: int, *, output: Path,
        evaluate_fn: Evaluate | None = None, note: str = "none",
    ) -> Result:  # fmt: skip
        arrays, result, last, rises = initial_arrays, Result(), float("inf"), 0
        train_config, evaluate_config = ConfigRecord({"note": note}), ConfigRecord()
        for current in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(current, arrays, train_config, grid))
            new_arrays, _ = self.aggregate_train(current, replies)
            arrays = new_arrays or arrays
            result.arrays = arrays
            replies = grid.send_and_receive(self.configure_evaluate(current, arrays, evaluate_config, grid))
            metrics = self.aggregate_evaluate(current, replies)
            assert metrics is not None
            result.evaluate_metrics_clientapp[current] = metrics
            rises += metrics["eval_loss"] > last
            last = float(metrics["eval_loss"])
            (output / f"round_{current}.json").write_text(json.dumps({"loss": last, "note": note}))
            if rises > max_loss_rises:
                break
        self.loss_rises = rises
        return result


class MovingAverage(FedAvg):
    """Evaluates two models in each round: the aggregated one, and a moving average of all."""

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, **kwargs: Any
    ) -> tuple[Result, dict[int, MetricRecord]]:
        evaluate_fn, averages = kwargs["evaluate_fn"], {}
        result, arrays, config = Result(), initial_arrays, ConfigRecord()
        self.average = initial_arrays
        for current in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(current, arrays, config, grid), timeout=timeout)
            new, _ = self.aggregate_train(current, replies)
            arrays = new or arrays
            result.evaluate_metrics_serverapp[current] = evaluate_fn(current, arrays)
            pairs = zip(self.average.items(), arrays.values(), strict=True)
            self.average = ArrayRecord({k: Array(0.5 * (a.numpy() + b.numpy())) for (k, a), b in pairs})
            averages[current] = evaluate_fn(current, self.average)
        result.arrays = arrays
        return result, averages


class Preflight(FedAvg):
    """Waits for nodes and asks them a question before round 1, and moves the messages by ``push`` and ``pull``."""

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, **kwargs: Any
    ) -> Result:
        nodes = list(grid.get_node_ids())
        assert len(nodes) >= self.min_available_nodes
        questions = [
            Message(RecordDict({"config": ConfigRecord({"what": "size"})}), dst_node_id=node, message_type="query")
            for node in nodes
        ]
        self.sizes = {
            one.metadata.src_node_id: one.content["facts"]["num_examples"]
            for one in grid.send_and_receive(questions, timeout=timeout)
        }
        result, arrays, config = Result(), initial_arrays, ConfigRecord()
        for current in range(1, num_rounds + 1):
            waiting = set(grid.push_messages(self.configure_train(current, arrays, config, grid)))
            replies: list[Message] = []
            while waiting:
                arrived = list(grid.pull_messages(waiting))
                waiting -= {one.metadata.reply_to_message_id for one in arrived}
                replies += arrived
            new, _ = self.aggregate_train(current, replies)
            result.arrays = arrays = new or arrays
        return result


class Measured:
    """A mixin, no strategy of Flower's, with a loop that counts the bytes in both directions."""

    down, up = 0, 0

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, **kwargs: Any
    ) -> Result:
        result, arrays, config = Result(), initial_arrays, ConfigRecord()
        for current in range(1, num_rounds + 1):
            messages = list(self.configure_train(current, arrays, config, grid))
            replies = list(grid.send_and_receive(messages=messages, timeout=timeout))
            self.down += sum(one.content["arrays"].count_bytes() for one in messages)
            self.up += sum(one.content["arrays"].count_bytes() for one in replies)
            new, metrics = self.aggregate_train(current, replies)
            arrays = new or arrays
            metrics["bytes"] = self.down + self.up
            result.arrays, result.train_metrics_clientapp[current] = arrays, metrics
            if evaluate_fn := kwargs.get("evaluate_fn"):
                result.evaluate_metrics_serverapp[current] = evaluate_fn(current, arrays)
        return result


class MeasuredAdam(Measured, FedAdam):
    """Its ``start`` comes from the mixin."""


class Days(FedAvg):
    """Its ``start`` takes a day in place of the number of rounds, which the constructor knows, and evaluates last."""

    def __init__(self, num_rounds: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_rounds = num_rounds

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        config["day"], config["round"] = self.day, self.current_round
        return super().configure_train(server_round, arrays, config, grid)

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, day: int, train_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:  # fmt: skip
        self.day, result, config = day, Result(), train_config or ConfigRecord()
        result.arrays = initial_arrays
        for current in range(1, self.num_rounds + 1):
            self.current_round = current
            LOG.info("day %d, round %d", day, self.current_round)
            replies = grid.send_and_receive(self.configure_train(self.current_round, result.arrays, config, grid))
            arrays, _ = self.aggregate_train(self.current_round, replies)
            result.arrays = arrays or result.arrays
        if evaluate_fn:
            result.evaluate_metrics_serverapp[self.num_rounds] = evaluate_fn(self.num_rounds, result.arrays)
        return result


class OneRoundAtATime(FedAvg):
    """Calls Flower's loop for one round again and again, which restarts the numbers of the rounds."""

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, **kwargs: Any) -> Result:
        self.losses, result = [], Result()
        for _ in range(num_rounds):
            result = super().start(grid, initial_arrays, 1, **kwargs)
            initial_arrays = result.arrays
            self.losses.append(result.train_metrics_clientapp[1]["train_loss"])
        return result


def _saved(cls: type[Any], folder: Path, **options: Any) -> Any:
    base = cls(**options)
    base.set_save_path(folder)
    return base


def _private(folder: Path) -> Any:
    """Flower's wrapper has Flower's ``start``, so the inner one's never runs, alone or wrapped."""
    return DifferentialPrivacyServerSideFixedClipping(_saved(BestModel, folder), 0.0, 1e6, CLIENTS)


AROUND: dict[str, Case] = {
    "best-model": Case(lambda folder: _saved(BestModel, folder)),
    "early-stopping": Case(EarlyStopping),
    "logging": Case(LoggingStart),
    "logging-without-evaluate-fn": Case(LoggingStart, evaluates_centrally=False),
    "final-evaluation": Case(lambda folder: FinalEvaluation()),
    "last-round-evaluation": Case(lambda folder: LastRoundEvaluation()),
    "inside-privacy": Case(_private),
}
LOOPS: dict[str, Case] = {
    "explicit-start": Case(lambda folder: ExplicitStart()),
    "advanced-example": Case(
        lambda folder: _saved(AdvancedLoop, folder), start=lambda folder: {"train_config": ConfigRecord({"lr": 0.1})}
    ),
    "train-only": Case(lambda folder: TrainOnlyLoop()),
    "extra-arguments": Case(
        lambda folder: ExtraArguments(), start=lambda folder: {"max_loss_rises": 1, "output": folder, "note": "mine"}
    ),
    "moving-average": Case(lambda folder: MovingAverage()),
    "start-in-a-mixin": Case(lambda folder: MeasuredAdam(eta=0.1)),
    "days": Case(lambda folder: Days(ROUNDS), positional=(17,)),
    "preflight": Case(lambda folder: Preflight(), evaluates_centrally=False),
}
