"""What a selector asks before it chooses, and what the answers cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.settings import Question, Settings
from fedsel_flwr.rounds.untrusted import finite_number, fraction
from fedsel_flwr.selectors import Selector
from fedsel_flwr.wireless import round_time

logger = logging.getLogger("fedsel_flwr")
FRACTIONS = frozenset({"local_accuracy", "accuracy", "energy_score"})
"""Columns that lie in [0, 1]."""


class Probing:
    """Turns a selector's probe into a question to connections, and their answers into side information.

    Args:
        selector: The selector that asks.
        roster: Where rows find their ids.
        settings: Names of the metrics, longest wait, channels.
    """

    def __init__(self, selector: Selector, roster: Roster, settings: Settings) -> None:
        self._selector, self._roster, self._settings = selector, roster, settings
        self._asked: dict[int, str] = {}
        self._columns: tuple[str, ...] = ()
        self._seconds = self._joules = 0.0

    def question(self, here: Mapping[int, str]) -> Question | None:
        """Ask the selector what must be asked of the available clients.

        Args:
            here: Row -> connection, by ascending row.

        Returns:
            None, or whom to ask.
        """
        probe = self._selector.probe(np.array(list(here), dtype=np.int64))
        if probe is None or not len(probe.clients):
            return None
        self._asked = {int(row): here[int(row)] for row in probe.clients}
        self._columns = probe.columns
        config: dict[str, str | int] = {"probe": ",".join(probe.columns), "round": self._selector.round + 1}
        return Question(nodes=list(self._asked.values()), config=config)

    def answer(self, answers: Mapping[str, Mapping[str, object]]) -> None:
        """Pass the answers on to the selector, and charge their simulated time and energy.

        A client that did not answer, or not with a finite number, informs with NaN and costs ``max_latency``.

        Args:
            answers: Connection -> the metrics it returned; ``local_accuracy`` may be called ``accuracy``, as Flower's
                clients call it.
        """
        keys, limit = self._settings.keys, self._settings.max_latency
        columns: dict[str, list[float]] = {name: [] for name in self._columns}
        latency = []
        for row, node in self._asked.items():
            metrics = answers.get(node, {})
            for name in self._columns:
                said = metrics.get(name, metrics.get("accuracy") if name == "local_accuracy" else None)
                value = (fraction if name in FRACTIONS else finite_number)(said)
                columns[name].append(np.nan if value is None else value)
                if value is None:
                    number, client_id = self._selector.round + 1, self._roster.ids[row]
                    logger.warning("round %d, client %s: probe: no %s", number, client_id, name)
            answered = all(np.isfinite(columns[name][-1]) for name in self._columns)
            seconds = finite_number(metrics.get(keys.latency)) if answered else None
            latency.append(limit if seconds is None or not 0 <= seconds <= limit else seconds)
            energy = finite_number(metrics.get(keys.energy))
            self._joules += energy if energy is not None and energy > 0 else 0.0
        self._seconds += round_time(np.array(latency), self._settings.channels or len(latency))
        self._selector.inform(np.array(list(self._asked)), **{k: np.array(v) for k, v in columns.items()})

    def settle(self) -> tuple[float, float]:
        """Seconds and joules of the questions since the last call."""
        spent = (self._seconds, self._joules)
        self._seconds = self._joules = 0.0
        return spent
