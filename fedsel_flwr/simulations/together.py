"""What clients answer about the same model, from one pass over the examples of all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.clients.answering import asked_columns, local_accuracy, mini_batch, sketch
from fedsel_flwr.clients.metrics import probe_costs
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.clients.training import held, outputs
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations.world import World

TOGETHER = frozenset({"loss", "batch_loss", "rms_loss", "local_accuracy", "sketch"})
"""The columns that follow from the model's outputs, or from the examples alone."""
LOSSES = frozenset({"loss", "rms_loss"})
"""Those of the outputs on the training examples."""


class Answers:
    """The answers of several clients for a model: what each would say alone, but for rounding.

    Args:
        world: The examples, and who holds them.
        arrays: The model.
        partition_ids: Who is asked.
        asked: The columns that will be asked for: the model sees no other examples.
        tested: Whether :meth:`tested` will be asked too.
        round: The absolute round, on which the mini-batches depend.
    """

    def __init__(
        self,
        world: World,
        arrays: Arrays,
        partition_ids: Sequence[int],
        asked: Collection[str],
        *,
        tested: bool = False,
        round: int = 0,
    ) -> None:
        self._objective, data = world.objective, world.dataset.train
        self._inputs, self._seed = data.inputs, world.system.seed
        self._split = dict(zip(partition_ids, world.split_of(partition_ids), strict=True))
        self._batches: dict[int, npt.NDArray[np.int64]] = {}
        if "batch_loss" in asked:
            size = world.scenario.training.settings().batch_size
            self._batches = {
                k: train[mini_batch(self._seed, k, round, len(train), size)] for k, (train, _) in self._split.items()
            }
        seen = [not LOSSES.isdisjoint(asked), tested or "local_accuracy" in asked]  # of training, of test examples
        parts = [part for split in self._split.values() for part, needed in zip(split, seen, strict=True) if needed]
        parts.extend(self._batches.values())
        rows = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
        everything = 2 * len(rows) > len(data)  # then nothing is copied
        self._place = np.arange(len(data)) if everything else np.searchsorted(rows, np.arange(len(data)))
        self._labels = held(data.labels)
        if parts:
            set_arrays(world.model, list(arrays))
            self._outputs = outputs(world.model, data.inputs if everything else data.inputs[rows])

    def tested(self, partition_id: int) -> tuple[float, float]:
        """Loss and quality on the client's test examples."""
        rows = self._split[partition_id][1]
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return self._objective.loss(own, labels, reduction="sum").item() / len(rows), self._objective.quality(
            own, labels
        )

    def answer(self, partition_id: int, asked: Collection[str]) -> dict[str, float | bytes]:
        """The client's answers to columns of :data:`TOGETHER`."""
        said: dict[str, float | bytes] = {}
        if not LOSSES.isdisjoint(asked):
            losses = self._losses(self._split[partition_id][0])
            said = {"loss": float(losses.mean()), "rms_loss": float(np.sqrt(np.mean(losses**2)))}
        if "batch_loss" in asked:
            said["batch_loss"] = float(self._losses(self._batches[partition_id]).mean())
        if "local_accuracy" in asked:
            said["local_accuracy"] = local_accuracy(self.tested(partition_id)[1])
        if "sketch" in asked:
            said["sketch"] = sketch(self._inputs[self._split[partition_id][0]], self._seed).tobytes()
        return {name: value for name, value in said.items() if name in asked}

    def _losses(self, rows: npt.NDArray[np.int64]) -> FloatArray:
        """The model's loss on each of some examples."""
        own, labels = self._outputs[self._place[rows]], self._labels[rows]
        return np.asarray(self._objective.loss(own, labels, reduction="none").numpy(), dtype=np.float64)


def probed(
    world: World, arrays: Arrays, partition_ids: Sequence[int], config: Mapping[str, str | int]
) -> list[dict[str, object]]:
    """What clients say to a probe, and what it costs them: what each would say alone, but for rounding.

    Args:
        world: The scenario's world.
        arrays: The current global model.
        partition_ids: Who is asked.
        config: The probe's: ``probe``, the columns, and ``round``.

    Returns:
        The metrics of each.
    """
    asked = asked_columns(config["probe"])
    said: list[dict[str, object]] = []
    if not asked <= TOGETHER:
        for k in partition_ids:
            loss, _, metrics = world.client(k).evaluate(list(arrays), dict(config))
            said.append({"loss": loss, **metrics})
        return said
    round = int(config["round"])
    answers = Answers(world, arrays, partition_ids, asked, tested=True, round=round)
    size = world.scenario.training.settings().batch_size
    for k, delays in zip(partition_ids, world.system.draws(partition_ids, round), strict=True):
        loss, quality = answers.tested(k)
        own: dict[str, float | bytes] = {}
        if "local_accuracy" in asked:
            own["local_accuracy"] = local_accuracy(quality)
        own |= answers.answer(k, asked - {"local_accuracy"})
        costs = probe_costs(world.system, delays, asked, batch_share=min(1.0, size / int(world.sizes[k])))
        said.append({"loss": loss, "accuracy": quality, "client_id": k, **own, **costs})
    return said
