"""Settings of a client's training; this room loads no torch, so that scenario files can be read without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from fedsel_flwr.checks import FloatArray, IntArray, one_of, real, whole
from fedsel_flwr.errors import ParameterError

Augmentation = Literal["none", "crop-flip"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of a client's local training.

    Args:
        learning_rate: Learning rate of the local steps, above 0.
        batch_size: Number of examples per step, at least 1. The last batch of a pass may be smaller.
        local_epochs: Number of passes over the client's data, at least 1.
        local_steps: Number of steps instead of passes, at least 1, with as many passes over the data as needed. None
            takes whole passes.
        momentum: Momentum of the gradient, in [0, 1).
        weight_decay: Factor of the weights in the term that is added to the gradient, at least 0.
        proximal_mu: FedProx's mu, at least 0: the steps minimise ``loss + mu/2 |w - w0|²`` with the received model w0.
        augmentation: Random change of the training images, "none" or "crop-flip". The value "crop-flip" changes an
            image each time that it is used. The image is padded by four pixels on each side, cropped to its size at a
            random place and mirrored with probability 1/2. For images only.
        halved_at: Absolute rounds, ascending, at whose start the learning rate is halved.

    Raises:
        ParameterError: If a value is out of its range.

    References:
        Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020 (FedProx).

    Example:
        >>> TrainingSettings(learning_rate=0.1, batch_size=16).local_epochs
        1
    """

    learning_rate: float
    batch_size: int
    local_epochs: int = 1
    local_steps: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    augmentation: Augmentation = "none"
    halved_at: tuple[int, ...] = ()

    def at(self, round: int) -> TrainingSettings:
        """Return the settings of a round, with its step length.

        >>> TrainingSettings(learning_rate=0.2, batch_size=1, halved_at=(150, 300)).at(150).learning_rate
        0.1
        """
        times = sum(first <= round for first in self.halved_at)
        return replace(self, learning_rate=self.learning_rate / 2**times, halved_at=()) if self.halved_at else self

    def steps(self, size: int) -> int:
        """Count the steps of a client with ``size`` examples in a round.

        >>> TrainingSettings(learning_rate=0.1, batch_size=4, local_epochs=2).steps(9)
        6
        """
        return self.local_steps or self.local_epochs * math.ceil(size / self.batch_size)

    def __post_init__(self) -> None:
        """Check every value."""
        for name in ("batch_size", "local_epochs", "local_steps"):
            if (count := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, count, 1))
        real("learning_rate", self.learning_rate, above=0.0)
        rounds = tuple(whole("each value of halved_at", first, 1) for first in self.halved_at)
        if list(rounds) != sorted(set(rounds)):
            raise ParameterError(
                f"halved_at must be rounds in ascending order, got {list(rounds)}. Sort them, and name each only once."
            )
        object.__setattr__(self, "halved_at", rounds)
        real("momentum", self.momentum, at_least=0.0, below=1.0)
        for name in ("weight_decay", "proximal_mu"):
            real(name, getattr(self, name), at_least=0.0)
        one_of("augmentation", self.augmentation, get_args(Augmentation))


def examples_per_round(settings: TrainingSettings, sizes: IntArray) -> FloatArray:
    """Count the examples that clients process in a round, with repeated passes.

    Args:
        settings: The settings of a client's training.
        sizes: Number of examples of each client, at least 1, shape (n,).

    Returns:
        Numbers of shape (n,). With `local_steps`, the last batch of each pass is as small as in training.

    Example:
        >>> steps = TrainingSettings(learning_rate=0.1, batch_size=4, local_steps=5)
        >>> examples_per_round(steps, np.array([3, 10, 40])).tolist()  # 5 x 3; 4 + 4 + 2 + 4 + 4; 5 x 4
        [15.0, 18.0, 20.0]
    """
    if settings.local_steps is None:
        return np.asarray(sizes * settings.local_epochs, dtype=np.float64)
    # Negated twice, so that the quotient is rounded up.
    passes, rest = np.divmod(settings.local_steps, -(-sizes // settings.batch_size))
    return np.asarray(passes * sizes + rest * settings.batch_size, dtype=np.float64)
