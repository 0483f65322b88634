"""What a simulated client tells the server: answers about the received model, metrics of an update, and their costs.

A strategy asks in the train config (key ``needs``) or by a probe (key ``probe``), with names of columns separated by
commas. A client answers the columns that it knows, each under the column's name, and ignores the others:

==================  ================================================================================================
``loss``            mean loss (cross-entropy, nats) on the client's training examples
``batch_loss``      mean loss on one mini-batch of the training examples, as large as a training batch
``rms_loss``        root mean square of the losses of the single training examples (Oort)
``local_accuracy``  fraction of the client's test examples that are classified correctly
``gradient``        gradient of the mean loss on all training examples, flattened; floating-point parameters only
``sketch``          SimHash of the client's training data (LSH, NCCB), see :func:`sketch`
==================  ================================================================================================

In a regression the loss is the squared loss, and ``local_accuracy`` is R², or 0 if R² is negative.

Dropout layers and augmentation are off. Neither weight decay nor a proximal term is part of loss and gradient. The
mini-batch is drawn without replacement from the client's own stream of the round. A second question before the same
round therefore gets the same mini-batch, in all engines.

Costs (ours): time is counted in forward passes over the examples that a client trains on in a round. Training takes
three, because the backward pass costs about two. An answer is charged for the examples that it reads (:class:`Shares`).
``loss`` and ``rms_loss`` share one pass over the training examples. ``local_accuracy`` takes one over the test
examples, ``sketch`` one over the training examples. ``gradient`` takes three passes over the training examples, which
also yield the losses. ``batch_loss`` takes a pass over its mini-batch, or nothing if the losses of all examples are
computed anyway. Numbers travel with the update at no cost, and so does a sketch, which is as large as a number. A
gradient is as large as an update, and takes as long to send.

The system model is the only source of the energy. A meter would count all processes on the machine, and so all clients
together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import Scalar
from torch import nn

from fedsel_flwr.checks import FloatArray, IntArray
from fedsel_flwr.clients.device import PROBE_BITS, RoundDelays, System, probe_delays
from fedsel_flwr.clients.objectives import CLASSIFICATION, Objective
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.training import Targets, check_examples, device_of, evaluate, in_mode
from fedsel_flwr.clients.training_settings import TrainingSettings, examples_per_round
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.replies import SIMULATED_FAILURE

SKETCH_BITS = 64
"""Number of bits of a sketch."""
ANSWERABLE = frozenset({"loss", "batch_loss", "rms_loss", "local_accuracy", "gradient", "sketch"})
"""The columns that a simulated client can answer."""

Examples = tuple[npt.NDArray[np.float32], Targets]
"""Inputs of shape (n, ...) and labels of shape (n,)."""


def asked_columns(names: object) -> frozenset[str]:
    """Return the columns of a config that a simulated client can answer.

    Args:
        names: Names separated by commas; None if the config has none.

    Returns:
        Columns of :data:`ANSWERABLE`.

    Example:
        >>> sorted(asked_columns("rms_loss, energy,loss"))
        ['loss', 'rms_loss']
    """
    given = () if names is None else str(names).split(",")
    return ANSWERABLE & {name.strip() for name in given}


def answer(
    model: nn.Module,
    asked: Collection[str],
    train: Examples,
    test: Examples,
    objective: Objective = CLASSIFICATION,
    seed: int = 0,
    batch: IntArray | None = None,
) -> dict[str, float | bytes]:
    """Answer questions about a model without a change to it.

    Args:
        model: The received model.
        asked: Columns of :data:`ANSWERABLE`.
        train: The client's training examples, at least one.
        test: The client's test examples, at least one.
        objective: Loss and quality.
        seed: Seed of the run, for the sketch. All clients must use the same seed.
        batch: Rows of the training examples in the mini-batch (:func:`mini_batch`); None for all of them.

    Returns:
        Column -> number, or the bytes of a float32 array: a gradient of shape (number of parameters,), a sketch of
        shape (64,).

    Raises:
        ParameterError: There are no examples, or not one label for each.
    """
    answers: dict[str, float | bytes] = {}
    if {"loss", "rms_loss", "gradient"} & set(asked):
        losses, gradient = losses_and_gradient(model, *train, with_gradient="gradient" in asked, objective=objective)
        answers = {"loss": float(losses.mean()), "rms_loss": float(np.sqrt(np.mean(losses**2)))}
        answers["gradient"] = gradient.tobytes()
        answers["batch_loss"] = float(losses[... if batch is None else batch].mean())
    elif "batch_loss" in asked:
        rows = ... if batch is None else batch
        losses, _ = losses_and_gradient(model, train[0][rows], train[1][rows], with_gradient=False, objective=objective)
        answers["batch_loss"] = float(losses.mean())
    if "local_accuracy" in asked:
        answers["local_accuracy"] = local_accuracy(evaluate(model, *test, objective=objective)[1])
    if "sketch" in asked:
        answers["sketch"] = sketch(train[0], seed).tobytes()
    return {name: value for name, value in answers.items() if name in asked}


def mini_batch(seed: int, partition_id: int, round: int, count: int, batch_size: int) -> IntArray:
    """Draw the mini-batch of a round's probe from a client's training examples.

    Args:
        seed: Seed of the run.
        partition_id: The client's partition.
        round: The absolute round of the probe.
        count: Number of the client's training examples.
        batch_size: Number of examples in a training batch.

    Returns:
        Rows, shape (min(batch_size, count),), drawn without replacement.

    Example:
        >>> mini_batch(1, 0, 2, 10, 3).tolist(), len(mini_batch(1, 0, 2, 2, 3))
        ([0, 4, 8], 2)
    """
    drawn = stream(seed, "mini-batch", partition_id, round).permutation(count)[:batch_size]
    return np.asarray(drawn, dtype=np.int64)


def local_accuracy(quality: float) -> float:
    """Return the column's number for a quality: a negative R² becomes 0, because the column holds [0, 1]; NaN stays."""
    # Not max(), which would turn NaN into 0.
    return 0.0 if quality < 0 else quality


@dataclass(frozen=True)
class Shares:
    """Examples that a client reads for an answer, relative to the examples that it trains on in a round.

    Args:
        train: All its training examples. With local steps, a round may train on fewer; with several epochs, on more.
        test: All its test examples.
        batch: One mini-batch.
    """

    train: float = 1.0
    test: float = 1.0
    batch: float = 1.0

    @classmethod
    def of(cls, settings: TrainingSettings, train: IntArray, test: IntArray) -> list[Shares]:
        """Return the shares of several clients.

        Args:
            settings: The settings of training.
            train: Number of training examples of each client, at least 1, shape (n,).
            test: Number of test examples of each client, shape (n,).

        Example:
            >>> settings = TrainingSettings(learning_rate=0.1, batch_size=10, local_steps=4)
            >>> Shares.of(settings, np.array([80]), np.array([6]))
            [Shares(train=2.0, test=0.15, batch=0.25)]
        """
        counts = np.stack([train, test, np.minimum(train, settings.batch_size)], axis=1)
        return [cls(*row) for row in (counts / examples_per_round(settings, train)[:, np.newaxis]).tolist()]


def forward_passes(asked: Collection[str], shares: Shares) -> float:
    """Count the forward passes of an answer, over the examples of a round; training on them takes three.

    Args:
        asked: Columns of :data:`ANSWERABLE`.
        shares: The client's examples.

    Example:
        >>> shares = Shares(train=2.0, test=0.5, batch=0.1)
        >>> forward_passes(["loss", "rms_loss"], shares), forward_passes(["gradient", "loss", "local_accuracy"], shares)
        (2.0, 6.5)
        >>> forward_passes(["batch_loss"], shares), forward_passes(["batch_loss", "loss"], shares)
        (0.1, 2.0)
    """
    names = set(asked)
    on_training = shares.train * (3 if "gradient" in names else bool(names & {"loss", "rms_loss"}))
    if "batch_loss" in names and not on_training:
        on_training = shares.batch
    return on_training + shares.test * ("local_accuracy" in names) + shares.train * ("sketch" in names)


def with_answering(delays: RoundDelays, asked: Collection[str], shares: Shares) -> RoundDelays:
    """Return the delays of a round in which a client answers and trains.

    Args:
        delays: Delays of the round without an answer.
        asked: Columns of :data:`ANSWERABLE`. Without any, the delays do not change at all.
        shares: The client's examples.

    Returns:
        The delays with a longer computing time and, for a gradient, a longer upload.
    """
    return replace(
        delays,
        compute_s=delays.compute_s * (1 + forward_passes(asked, shares) / 3),
        upload_s=delays.upload_s * (2 if "gradient" in asked else 1),
    )


def sketch(inputs: npt.NDArray[np.float32], seed: int) -> npt.NDArray[np.float32]:
    """Return the SimHash of some examples; only the hash leaves the client.

    Each bit is the side of a random plane through the origin on which the mean of the examples lies. The planes are
    drawn from the seed of the run, so all clients use the same planes. In expectation, two clients differ in a share
    theta / pi of the bits, where theta is the angle between their means.

    Args:
        inputs: The examples, shape (n, ...), n at least 1.
        seed: Seed of the run.

    Returns:
        Bits of shape (64,), each 0 or 1.

    Raises:
        ParameterError: There are no examples.

    References:
        M. S. Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002.

    Example:
        >>> one, other = np.ones((3, 5), np.float32), -np.ones((2, 5), np.float32)
        >>> int((sketch(one, 7) == sketch(3 * one[:1], 7)).sum()), int((sketch(one, 7) == sketch(other, 7)).sum())
        (64, 0)
    """
    if not len(inputs):
        raise ParameterError("a sketch needs at least one training example, got none. Give the client examples.")
    mean = inputs.reshape(len(inputs), -1).mean(axis=0, dtype=np.float64)
    planes = stream(seed, "sketch", 0).standard_normal((SKETCH_BITS, mean.size))
    return np.asarray((planes * mean).sum(axis=1) > 0, dtype=np.float32)


def losses_and_gradient(
    model: nn.Module,
    inputs: npt.NDArray[np.float32],
    labels: Targets,
    *,
    with_gradient: bool = True,
    batch_size: int = 256,
    objective: Objective = CLASSIFICATION,
) -> tuple[FloatArray, npt.NDArray[np.float32]]:
    """Return the loss of each example, and the gradient of their mean, with dropout off.

    Args:
        model: The model, which is not changed.
        inputs: The examples, shape (n, ...), n at least 1.
        labels: Their classes, shape (n,).
        with_gradient: Whether the gradient is computed; without it the gradient is empty.
        batch_size: Number of examples at a time; changes the result only by rounding.
        objective: The objective of the loss; the default is cross-entropy, in nats.

    Returns:
        The losses, shape (n,); the gradient in the order of ``model.parameters()``, flattened. The gradient has the
        floating-point parameters only, and zeros for those that are frozen or not used.

    Raises:
        ParameterError: There are no examples, or not one label for each.
    """
    check_examples(inputs, labels)
    parameters = [one for one in model.parameters() if one.is_floating_point()] if with_gradient else []
    total = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
    moving = [(one, sums) for one, sums in zip(parameters, total, strict=True) if one.requires_grad]
    losses = []
    device = device_of(model)
    with torch.set_grad_enabled(with_gradient), in_mode(model, training=False):
        for start in range(0, len(labels), batch_size):
            rows = slice(start, start + batch_size)
            seen, wanted = (torch.tensor(part[rows], device=device) for part in (inputs, labels))
            each = objective.loss(model(seen), wanted, reduction="none")
            losses.append(each.detach().cpu().numpy().astype(np.float64))
            # Sums over the batches, divided once at the end, because batches may differ in size.
            if moving:
                parts = torch.autograd.grad(each.sum(), [one for one, _ in moving], allow_unused=True)
                for (_, sums), part in zip(moving, parts, strict=True):
                    sums += 0 if part is None else part
    flat = [(part / len(labels)).cpu().numpy().astype(np.float32).ravel() for part in total]
    return np.concatenate(losses), np.concatenate(flat) if flat else np.empty(0, dtype=np.float32)


def fit_metrics(
    system: System,
    partition_id: int,
    delays: RoundDelays,
    *,
    train_loss: float,
    compute_s: float | None = None,
    energy_score: float | None = None,
) -> dict[str, Scalar]:
    """Return the metrics of an update.

    Args:
        system: Delays and energy.
        partition_id: The client's partition.
        delays: The client's delays in the round.
        train_loss: Mean loss over the local steps.
        compute_s: Measured seconds of computing; None takes the system model's.
        energy_score: The client's energy score (PCZFL), reported if it is set.

    Returns:
        ``latency_s`` = ``download_s`` + ``compute_s`` + ``upload_s`` (Xia et al., equation (4), not yet capped),
        ``energy_j`` (always modelled, hence ``energy_modelled`` = 1), ``train_loss``, ``client_id``.
    """
    compute = delays.compute_s if compute_s is None else compute_s
    metrics: dict[str, Scalar] = {
        "latency_s": delays.download_s + compute + delays.upload_s,  # (4) before the cap
        "energy_j": system.energy_j(delays, compute),
        "energy_modelled": 1,
        "download_s": delays.download_s,
        "compute_s": compute,
        "upload_s": delays.upload_s,
        "train_loss": train_loss,
        "client_id": partition_id,
    }
    return metrics if energy_score is None else metrics | {"energy_score": energy_score}


def dropout_metrics(partition_id: int, outcome: int, spent: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
    """Return the metrics of a simulated client that drops out.

    Args:
        partition_id: The client's partition.
        outcome: :data:`~fedsel_flwr.rounds.replies.FAILED` or :data:`~fedsel_flwr.rounds.replies.CRASHED`.
        spent: The metrics that the reply would have had; None if the client has not trained.

    Returns:
        The client's costs, for the history, without the training loss, which a server could not know.
    """
    known = {key: value for key, value in (spent or {}).items() if key != "train_loss"}
    return known | {"client_id": partition_id, SIMULATED_FAILURE: outcome}


def probe_costs(
    system: System, delays: RoundDelays, asked: Collection[str], shares: Shares, compute_s: float | None = None
) -> dict[str, Scalar]:
    """Return the cost of answering a probe.

    Args:
        system: Delays and energy.
        delays: The client's delays in the round.
        asked: The columns that it answers. Without any, the client still makes one pass over its test examples.
        shares: The client's examples.
        compute_s: Measured seconds of computing; None takes the system model's.

    Returns:
        ``latency_s`` and ``energy_j``.
    """
    # All numbers together are one answer, and so is a reply without any number.
    vectors = {"gradient", "sketch"} & set(asked)
    bits = system.payload_up_bits if "gradient" in asked else PROBE_BITS * (vectors != set(asked))
    bits = max(bits + SKETCH_BITS * ("sketch" in asked), PROBE_BITS)
    passes = forward_passes(asked, shares) or shares.test
    answering = probe_delays(system, delays, forward_passes=passes, bits=bits)
    compute = answering.compute_s if compute_s is None else compute_s
    return {
        "latency_s": answering.download_s + compute + answering.upload_s,
        "energy_j": system.energy_j(answering, compute),
    }
