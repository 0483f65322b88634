"""Measuring the models of a round on the server: validation, and projection on the global model's direction.

A column is measured only if the selector or FedCA's filter reads it. This happens before the base strategy may
overwrite the replies. All computations use plain NumPy. Updates and gradients consist of the floating-point arrays of
the model only (:meth:`Measurer.measured`). GPFL projects each client's gradient on the direction in which the global
model moves:

===========  ==========================  =================================================================
paper        here                        meaning
===========  ==========================  =================================================================
d_k          row of ``gradients``        (w^{t-1} - w_k) / eta, the sum of the terms (1) of client k's local steps
G^t          ``_direction``              gamma G^{t-1} + (w^{t-1} - w^t) / eta, G^0 = 0
eta          ``learning_rate``           the clients' nominal initial learning rate
gamma        ``momentum``                momentum of the direction
===========  ==========================  =================================================================

References:
    S. Na, Y. Liang, S.-M. Yiu, GPFL, equation (3) and the text around it.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, cast

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.models import Arrays, Models, Validation, flat, floating
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ON_VALIDATION, PER_UPDATE


class Measurer(state_dicts.SavedFields):
    """Measures the columns that the selector and FedCA's filter read.

    Args:
        selector: The selector. Its ``needs`` name the columns to measure.
        settings: The server's examples, FedCA's filter, and learning rate and momentum of :class:`Direction`.

    Raises:
        ParameterError: A required setting is missing.
    """

    saved: ClassVar = {"_integers": lambda name, value: state_dicts.array(name, value, np.int64).tolist()}

    def __init__(self, selector: Selector, settings: Settings) -> None:
        needs, name, validation = selector.needs, selector.name, settings.validation
        if validation is not None and not isinstance(validation, Validation):
            raise ParameterError(f"validation must be a Validation, got {type(validation).__name__}")
        if validation is None and (settings.filter is not None or needs & ON_VALIDATION):
            columns = ", ".join(sorted(needs & ON_VALIDATION))
            reader = "FedCA's filter" if settings.filter is not None else f"{name} ({columns})"
            raise ParameterError(f"{reader} needs a validation set on the server. Pass validation=Validation(...).")
        if "kept" in needs and settings.filter is None:
            raise ParameterError(f"{name} needs FedCA's filter, but has none. Pass filter=Filter(), or use FedCM.")
        if "projection" in needs and settings.learning_rate is None:
            raise ParameterError(f"{name} reads gradients, but has no learning_rate. Pass the clients' initial one.")
        self.selector, self.filter = selector, settings.filter
        # Read only if the selector or the filter needs them, and then they are set.
        self._examples = cast(Validation, validation)
        # Without a learning rate no part reads the direction, but the checkpoint has a place for it.
        self.direction = Direction(settings.learning_rate or 1.0, settings.momentum)
        # Positions at which a global model had integers.
        self._integers: list[int] = []

    def measured(self, reference: Arrays) -> list[int]:
        """Return the positions of the arrays that count as the model: those that were never integers in the run.

        Flower's average turns integers, such as the step counter of a batch normalization, into floats. Therefore the
        type in one round is not enough.

        Raises:
            RunError: The selector reads updates, but the model has no floating-point array.
        """
        integers = {*range(len(reference))}.difference(floating(reference))
        self._integers = sorted(integers.union(self._integers))
        found = [i for i in range(len(reference)) if i not in self._integers]
        if not found and self.selector.needs & {"projection", "update"}:
            raise RunError(
                f"{self.selector.name} reads updates, but the global model has no floating-point array. Choose another "
                "selector, or train floating-point parameters"
            )
        return found

    @property
    def reads_global(self) -> bool:
        """Return whether :meth:`global_model` needs the arrays of the global model."""
        return bool(self.selector.needs & {"projection", "global_accuracy", "global_loss"})

    @property
    def reader(self) -> str:
        """Name the reader of individual updates, for messages; empty if neither the selector nor the filter is one."""
        own = self.selector.name if self.selector.needs & PER_UPDATE else ""
        return own or ("" if self.filter is None else "FedCA's filter")

    def models(
        self, models: Models, reference: Arrays, draws: IntArray | None = None
    ) -> dict[str, FloatArray | BoolArray | IntArray]:
        """Measure the usable models of a round.

        Args:
            models: The clients' models, in row order.
            reference: The global model that the clients received.
            draws: Number of draws of each model's client, shape (n_models,); None for once each.

        Returns:
            The needed columns. kept (bool), accuracy and projection have the shape (n_models,), update has the shape
            (n_models, floating-point numbers). If clients were drawn repeatedly, draws is the number of copies of each
            model that the filter keeps.
        """
        needs, columns = self.selector.needs, dict[str, FloatArray | BoolArray | IntArray]()
        if not len(models):
            return columns
        if self.filter is not None or "accuracy" in needs:
            logits = self._examples.logits_of(models)
            if "accuracy" in needs:
                columns["accuracy"] = np.array([self._examples.accuracy(one) for one in logits])  # PCZFL's A_k of (3)
            if self.filter is not None:
                if draws is not None and (draws > 1).any():
                    columns["draws"] = self.filter.copies(logits, self._examples.labels, draws)
                    columns["kept"] = columns["draws"] > 0
                else:
                    columns["kept"] = self.filter.kept(logits, self._examples.labels)
        if needs & {"projection", "update"}:
            # In place, here and for the gradients, because this is the round's largest array: all clients' parameters.
            read = self.measured(reference)
            updates = models.flat(read)
            updates -= flat(reference, read)
            if "update" in needs:
                columns["update"] = updates
            if "projection" in needs:
                gradients = self.direction.gradients(updates, in_place="update" not in needs)
                # Before projecting, because the first direction is the mean of these same gradients.
                if self._starts_direction:
                    self.direction.start(gradients)
                columns["projection"] = self.direction.project(gradients)
        return columns

    def global_model(self, before: Arrays, after: Arrays) -> dict[str, float]:
        """Measure the global model after the round, and update the direction.

        Args:
            before: The global model at the start of the round.
            after: The new global model; ``before`` itself if the round did not change it.

        Returns:
            global_accuracy and global_loss, if needed.
        """
        needs = self.selector.needs
        if "projection" in needs and not self._starts_direction:
            read = self.measured(before)
            self.direction.move(flat(before, read), flat(after, read))
        if not needs & {"global_accuracy", "global_loss"}:
            return {}
        loss, accuracy = self._examples.loss_and_accuracy(after)
        values = {"global_accuracy": accuracy, "global_loss": loss}
        return {name: value for name, value in values.items() if name in needs}

    def initial_accuracy(self, arrays: Arrays) -> float:
        """Return the accuracy of a model on the validation set."""
        return self._examples.accuracy(self._examples.logits(arrays))  # PCZFL's A_k of (3)

    @property
    def _starts_direction(self) -> bool:
        """Return whether the direction starts with this round's gradients, so that its step does not move it again."""
        return self.selector.keeps_model or (self.selector.warming_up and self.selector.round == 1)


class Direction(state_dicts.SavedFields):
    """The direction in which the global model moves (GPFL).

    Args:
        learning_rate: eta, above 0.
        momentum: gamma, at least 0 and below 1.

    >>> import numpy as np
    >>> direction = Direction(learning_rate=0.5, momentum=0.1)
    >>> direction.move(np.array([1.0, 2.0]), np.array([1.0, 0.0]))  # G = (0, 2) / .5
    >>> direction.project(direction.gradients(np.array([[1.5, -1.0]])))  # d = (-3, 2); <d, G> / |G|
    array([2.])
    """

    saved: ClassVar = {"_direction": state_dicts.optional(partial(state_dicts.array, dtype=np.float64))}

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self._direction: FloatArray | None = None

    def gradients(self, updates: FloatArray, *, in_place: bool = False) -> FloatArray:
        """Return d_k of updates w_k - w^{t-1}, both (n_models, parameters); ``in_place`` overwrites the updates."""
        return np.divide(updates, -self.learning_rate, out=updates if in_place else None)  # d_k

    def start(self, gradients: FloatArray) -> None:
        """Set the direction to the mean of these gradients, shape (n_models, parameters)."""
        self._direction = gradients.mean(axis=0)  # G of round 1, ours

    def move(self, before: FloatArray, after: FloatArray) -> None:
        """Update the direction with the step of the global model from ``before`` to ``after``, shape (parameters,)."""
        old = np.zeros_like(before) if self._direction is None else self._direction
        self._direction = self.momentum * old + (before - after) / self.learning_rate  # G^t

    def project(self, gradients: FloatArray) -> FloatArray:
        """Return c_k of gradients, shape (n_models, parameters); 0 while there is no direction."""
        # If the global model did not move, the length is 0, and the division would fail.
        if self._direction is None or not (length := float(np.linalg.norm(self._direction))):
            return np.zeros(len(gradients))
        return np.asarray(gradients @ self._direction / length)  # (3) of GPFL
