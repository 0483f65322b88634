"""What a round's results become: the selector's report and the history's records."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray
from fedsel_flwr.rounds.history import ClientRecord
from fedsel_flwr.rounds.replies import ClientResult
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.settings import Outcome
from fedsel_flwr.selectors import RoundReport, Selector

logger = logging.getLogger("fedsel_flwr")
MEASURED = frozenset({"accuracy", "projection", "update"})
"""Columns that the server measures on each usable model."""


class Reporter:
    """Writes reports and records.

    Args:
        selector: Its ``needs`` say which columns a report has.
        roster: Where rows find their ids.
        max_latency: Seconds reported for clients that failed.
    """

    def __init__(self, selector: Selector, roster: Roster, max_latency: float) -> None:
        self._selector, self._roster, self._max_latency = selector, roster, max_latency
        self._energy_max = 0.0

    def report(self, chosen: Mapping[int, str], outcome: Outcome, scalars: Mapping[str, float]) -> RoundReport:
        """The selector's report of a round.

        Args:
            chosen: Row -> connection, by ascending row.
            outcome: What came back.
            scalars: What was measured on the new global model.

        Returns:
            A row for each chosen client. One that lacks a needed column counts as failed, and is named in the log.
        """
        results, needs = [outcome.results[node] for node in chosen.values()], self._selector.needs
        completed = np.array([result.completed for result in results], dtype=np.bool_)
        columns: dict[str, FloatArray] = {
            "energy": np.array([result.values["energy"] for result in results]),
            "energy_score": self._energy_scores(results),
            "num_examples": np.array([result.num_examples or np.nan for result in results]),
        }
        columns |= self._measured(chosen, outcome)
        needed: dict[str, Any] = {name: value for name, value in columns.items() if name in needs}
        for name, value in needed.items():
            lacking = completed & ~np.isfinite(value).all(axis=tuple(range(1, value.ndim)))
            if lacking.any():
                ids = [self._roster.ids[row] for row, lacks in zip(chosen, lacking, strict=True) if lacks]
                number = self._selector.round
                remedy = "have them report it" + (", or their joules" if name == "energy_score" else "")
                logger.warning(
                    "round %d: clients %s lack %s and count as failed for the selector: %s", number, ids, name, remedy
                )
                completed &= ~lacking
        if "kept" in needs:
            kept: BoolArray = np.array([node in outcome.kept for node in chosen.values()], dtype=np.bool_)
            needed["kept"] = kept & completed
        latency = np.array([result.latency_s for result in results])
        return RoundReport(
            clients=np.array(list(chosen), dtype=np.int64),
            completed=completed,
            latency=np.where(completed, latency, self._max_latency),
            **needed,
            **dict[str, Any](scalars),
        )

    def record(self, row: int, result: ClientResult) -> ClientRecord:
        """The history's record of a client in the round chosen last."""
        values = result.values
        return ClientRecord(
            round=self._selector.round,
            client_id=self._roster.ids[row],
            client=row,
            completed=result.completed,
            problem="; ".join(problem.replace(";", ",") for problem in result.problems),
            latency_s=result.latency_s,
            energy_j=values["energy"],
            download_s=values["download"],
            compute_s=values["compute"],
            upload_s=values["upload"],
            train_loss=values["train_loss"],
            num_examples=result.num_examples,
        )

    def _measured(self, chosen: Mapping[int, str], outcome: Outcome) -> dict[str, FloatArray]:
        """Measured columns with a row for each chosen client, NaN where nothing was measured."""
        spread = {}
        position = {node: i for i, node in enumerate(chosen.values())}
        for name in self._selector.needs & MEASURED:
            measured = outcome.columns.get(name)
            row = np.shape(measured)[1:] if measured is not None else (0,) * (name == "update")
            spread[name] = np.full((len(chosen), *row), np.nan)
            if measured is not None:
                spread[name][[position[node] for node in outcome.usable]] = measured
        return spread

    def _energy_scores(self, results: list[ClientResult]) -> FloatArray:
        """The reported energy scores; where there is none, 1 - E / E_max of the reported joules.

        E_max is the largest energy seen up to the end of the selector's warm-up, at least until there was one.
        """
        joules = np.array([result.values["energy"] for result in results], dtype=np.float64)
        if not self._energy_max or self._selector.round <= getattr(self._selector, "warmup_rounds", 0):
            self._energy_max = max([self._energy_max, *joules[np.isfinite(joules)]])
        scores = np.array([result.values["energy_score"] for result in results], dtype=np.float64)
        derived = np.clip(1.0 - joules / (self._energy_max or 1.0), 0.0, 1.0)  # energy score, ours; NaN without joules
        return np.where(np.isfinite(scores), scores, derived)
