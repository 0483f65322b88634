"""Aggregation of a round, and of its federated evaluation: the same steps in both APIs.

:class:`Aggregation` reads the replies, checks and measures them, lets the base aggregate the usable ones, reports the
round to the selector, and keeps the new model. Each API translates between these steps and its own types
(:class:`Translation`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import Reply, requires_weight
from fedsel_flwr.rounds.roster import Roster, id_order
from fedsel_flwr.rounds.round import Outcome
from fedsel_flwr.rounds.untrusted import MAX_METRICS, is_finite, shown, usable_count
from fedsel_flwr.strategies.wrapping import bases
from fedsel_flwr.strategies.wrapping.failure_reasons import DeadActors
from fedsel_flwr.strategies.wrapping.round_end import RoundEnd

logger = logging.getLogger("fedsel_flwr")


class Evaluation(NamedTuple):
    """A client's reply to an evaluation, in plain types.

    Attributes:
        weight: The number of examples, or what stands for it.
        metrics: Key and value of each metric; the loss is one of them.
        fault: The reason why it cannot be used; empty if none is known.
    """

    weight: object
    metrics: Collection[tuple[str, object]]
    fault: str = ""

    def problem(self, weight_key: str, requires_weight: bool = True) -> str:
        """Return the reason why the base cannot average this reply; empty if it can.

        >>> Evaluation(10, [("loss", float("nan"))]).problem("num_examples")
        'loss: expected finite numbers, got nan'
        """
        if self.fault:
            return self.fault
        if len(self.metrics) > MAX_METRICS:
            return f"metrics: {len(self.metrics)} reported, more than {MAX_METRICS}"
        if requires_weight and not usable_count(self.weight):
            return f"{weight_key}: expected a number above 0, got {shown(self.weight)}"
        bad = [(key, value) for key, value in self.metrics if not is_finite(value)]
        return f"{bad[0][0]}: expected finite numbers, got {shown(bad[0][1])}" if bad else ""


class Translation(Protocol):
    """Translation between the steps of an aggregation and the types of one API.

    ``arrived`` are the replies that have arrived, in a form of the API's choice.
    """

    def _errors(self, arrived: Any) -> Iterable[str]:
        """Return the texts of the errors among the replies."""

    def _models(self, arrived: Any) -> list[object]:
        """Return the undecoded models of the replies."""

    def _read(self, arrived: Any) -> dict[str, Reply]:
        """Read the replies into plain types: connection -> reply, for each chosen client."""

    def _base_result(self, arrived: Any, outcome: Outcome, faults: Mapping[str, str]) -> tuple[Any, Any]:
        """Let the base aggregate the kept replies; return its model and metrics.

        Args:
            arrived: The replies.
            outcome: The outcome of the round.
            faults: Connection -> reason, of the clients that failed. A reply among them that is no error of the client
                is replaced by a failure with this reason.
        """

    def _decode(self, model: Any, /) -> Arrays | None:
        """Return the arrays of a model of this API; None if they cannot be decoded."""

    def _encode(self, arrays: Arrays) -> Any:
        """Return arrays as a model of this API."""

    def _weight_key(self) -> str:
        """Return the name of the number by which the base weights replies to an evaluation."""

    def _read_evaluations(self, arrived: Any) -> Mapping[str, Evaluation]:
        """Read the replies to an evaluation of clients that succeeded into plain types: connection -> reply."""

    def _base_evaluation(self, arrived: Any, number: int, usable: list[str], faults: Mapping[str, str]) -> Any:
        """Let the base aggregate the usable replies to an evaluation.

        Args:
            arrived: The replies.
            number: The absolute round.
            usable: The connections of the usable replies, in the order of the clients' ids.
            faults: Connection -> reason, for the failures in place of unusable replies.
        """


class Aggregation(RoundEnd, Translation):
    """Aggregates the rounds of an adapter.

    Attributes:
        base: The wrapped strategy.
        roster: Connections, client ids and rows.
    """

    base: Any
    roster: Roster
    _dead_actors: DeadActors
    # The global model of this API: that which the clients got, and after their replies the new one.
    _model: Any = None

    def _aggregate(self, arrived: Any) -> tuple[Any, Any]:
        """End a round with its replies.

        Returns:
            The new global model and the base's metrics, as Flower expects them; None if there are none.

        Raises:
            RunError: The base needs more models, the selector needs updates that secure aggregation hides, or Flower's
                simulation has lost its actors.
        """
        core = self.core
        # Converting the replies belongs to reading them, which ``collect`` does.
        core.stopwatch.switch("collect")
        self._dead_actors.check(self._errors(arrived), core.round, self._resuming.resume_hint)
        # Before replies are read: under secure aggregation every result holds the sum, which looks like an update.
        if reader := core.update_reader:
            bases.check_not_aggregated(self._models(arrived), reader)
        # The models are measured here, before the base, because a base may aggregate in place.
        outcome = core.collect(self._read(arrived))
        model, metrics = None, None
        if outcome.enough:
            if bases.clips(self.base) and core.reference is not None:
                outcome = outcome.with_norms(core.reference)
            bases.check_survivors(self.base, len(outcome.kept), core.round)
            # A base counts failures, for accept_failures or to calibrate noise, and these include unusable updates.
            faults = {
                node: self._fault(node, result.problems)
                for node, result in outcome.results.items()
                if not result.completed and not result.spare
            }
            model, metrics = self._base_result(arrived, outcome, faults)
        # Decoding a model takes time and memory, so it is skipped if no part reads the arrays.
        after = self._decode(model) if model is not None and core.reads_global(outcome) else None
        mixed = core.finish(after)
        if mixed is not None and mixed is not after:
            # The averaging scheme has mixed in the old model.
            model = self._encode(mixed)
        self._model = self._model if model is None else model
        self._keep(core.round, self._model)
        return model, metrics

    def _aggregate_evaluation(self, server_round: int, arrived: Any) -> Any:
        """Let the base aggregate the replies to an evaluation that can be averaged, in id order."""
        number = self.core.numbering.absolute(server_round)
        read = self._read_evaluations(arrived)
        # Replies arrive in any order, and a sum of floats depends on the order.
        nodes = sorted(read, key=lambda node: id_order(self.roster.name(node)))
        own = bases.brings_own(self.base, "aggregate_evaluate")
        weighted = requires_weight(not own, [one.weight for one in read.values()])
        problems = {node: read[node].problem(self._weight_key(), weighted) for node in nodes}
        faults = {node: self._fault(node, (problem,)) for node, problem in problems.items() if problem}
        for node in faults:
            logger.warning("round %d, client %s: evaluation: %s", number, self.roster.name(node), problems[node])
        return self._base_evaluation(arrived, number, [node for node in nodes if node not in faults], faults)

    def _fault(self, node: str, problems: Collection[str]) -> str:
        """Return the fault of a client's reply, for the base strategy and Flower's log."""
        return f"client {self.roster.name(node)}: {'; '.join(problems)}"
