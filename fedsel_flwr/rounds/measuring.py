"""What the server measures on the models of a round, each only when a selector or the filter reads it.

Everything happens before the base strategy may overwrite the replies, in plain NumPy; the model comes in through one
function, ``predict(arrays, inputs) -> logits``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.checks import BoolArray, FloatArray, IntArray
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds import saving
from fedsel_flwr.rounds.direction import Direction
from fedsel_flwr.rounds.models import Arrays, Models, flat
from fedsel_flwr.rounds.validation import Validation
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ON_VALIDATION, PER_UPDATE


class Measurer:
    """Measures what a selector needs.

    Args:
        selector: Its ``needs`` say what is measured.
        validation: The server's examples; None if there are none.
        filter: FedCA's filter; None keeps every usable model.
        learning_rate: The clients' nominal initial learning rate, for :class:`Direction`.
        momentum: The direction's momentum.

    Raises:
        ParameterError: Something needed is missing, or a value is out of range.
    """

    def __init__(
        self,
        selector: Selector,
        validation: Validation | None = None,
        filter: Filter | None = None,
        learning_rate: float | None = None,
        momentum: float = 0.1,
    ) -> None:
        needs, name = selector.needs, selector.name
        if validation is not None and not isinstance(validation, Validation):
            raise ParameterError(f"validation must be a Validation, got {type(validation).__name__}")
        if validation is None and (filter is not None or needs & ON_VALIDATION):
            what = "FedCA's filter" if filter is not None else f"{name} ({', '.join(sorted(needs & ON_VALIDATION))})"
            raise ParameterError(f"{what} needs a validation set on the server: pass validation=Validation(...)")
        if "kept" in needs and filter is None:
            raise ParameterError(f"{name} learns from FedCA's filter: pass filter=Filter(), or use the strategy FedCM")
        if "projection" in needs and learning_rate is None:
            raise ParameterError(f"{name} needs learning_rate, the clients' nominal initial learning rate")
        self.selector, self.validation, self.filter = selector, validation, filter
        self.direction = Direction(1.0 if learning_rate is None else learning_rate, momentum)

    @property
    def reads_global(self) -> bool:
        """Whether :meth:`global_model` has something to do."""
        return bool(self.selector.needs & {"projection", "global_accuracy", "global_loss"})

    @property
    def reads_updates(self) -> bool:
        """Whether anything is read off individual updates."""
        return self.filter is not None or bool(self.selector.needs & PER_UPDATE)

    @property
    def reader(self) -> str:
        """What reads individual updates, for messages."""
        return self.selector.name if self.selector.needs & PER_UPDATE else "FedCA's filter"

    def models(
        self, models: Models, reference: Arrays, draws: IntArray | None = None
    ) -> dict[str, FloatArray | BoolArray | IntArray]:
        """Measure the usable models of a round.

        Args:
            models: The clients' models, in row order.
            reference: The global model they started from.
            draws: How often the client behind each model was drawn, shape (n_models,); None for once each.

        Returns:
            As needed: kept (bool) and, of a multiset, draws, how many of the model's the filter keeps; accuracy and
            projection of shape (n_models,); update of shape (n_models, parameters).
        """
        needs, columns = self.selector.needs, dict[str, FloatArray | BoolArray | IntArray]()
        if not len(models):
            return columns
        if self.filter is not None or "accuracy" in needs:
            logits = self._server.logits_of(models)
            if "accuracy" in needs:
                columns["accuracy"] = np.array([self._server.accuracy(one) for one in logits])  # PCZFL's A_k of (3)
            if self.filter is not None:
                if draws is not None and (draws > 1).any():
                    columns["draws"] = self.filter.copies(logits, self._server.labels, draws)
                    columns["kept"] = columns["draws"] > 0
                else:
                    columns["kept"] = self.filter.kept(logits, self._server.labels)
        if needs & {"projection", "update"}:
            updates = models.flat()
            updates -= flat(reference)
            if "update" in needs:
                columns["update"] = updates
            if "projection" in needs:
                gradients = self.direction.gradients(updates, in_place="update" not in needs)
                if self._begins:
                    self.direction.start(gradients)
                columns["projection"] = self.direction.project(gradients)
        return columns

    def global_model(self, before: Arrays, after: Arrays) -> dict[str, float]:
        """Measure the new global model (the old one where the round kept it), and follow it with the direction.

        Args:
            before: The global model of the round.
            after: The new one.

        Returns:
            global_accuracy and global_loss, as needed.
        """
        needs = self.selector.needs
        if "projection" in needs and not self._begins:
            self.direction.move(flat(before), flat(after))
        if not needs & {"global_accuracy", "global_loss"}:
            return {}
        loss, accuracy = self._server.loss_and_accuracy(after)
        values = {"global_accuracy": accuracy, "global_loss": loss}
        return {name: value for name, value in values.items() if name in needs}

    def initial_accuracy(self, arrays: Arrays) -> float:
        """Accuracy of a model on the validation set."""
        return self._server.accuracy(self._server.logits(arrays))  # PCZFL's A_k of (3)

    def state_dict(self) -> saving.State:
        """The direction's."""
        return self.direction.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; nothing changes if it does not fit."""
        self.direction.load_state_dict(state)

    def forget(self, rows: IntArray) -> None:
        """Nothing is known by row."""

    @property
    def _begins(self) -> bool:
        """Whether the direction begins with this round's gradients, so that its step does not move it once more."""
        return self.selector.keeps_model or (self.selector.warming_up and self.selector.round == 1)

    @property
    def _server(self) -> Validation:
        if self.validation is None:  # refused at construction
            raise ParameterError("there is no validation set")
        return self.validation
