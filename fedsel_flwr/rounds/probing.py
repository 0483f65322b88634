"""Probes: the selector's questions to clients before the choice, and the cost of the answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.missing_columns import ColumnWatch
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import column_of, length_faults
from fedsel_flwr.rounds.roster import ConnectedClients, Roster
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import column_value, finite_number, log_faults, max_vector_length, one_line
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import COLUMNS, LARGEST, PROBED, check_columns
from fedsel_flwr.wireless import round_time

logger = logging.getLogger("fedsel_flwr")
Answers = Mapping[str, Mapping[str, object] | str]
"""Connection -> its metrics, or the reason of its error. A connection that did not answer has no entry."""
RAISED = "exception: "
"""Start of the reason of an error of the client's app itself."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A selector's probe, for the adapter to send.

    Attributes:
        asked: Row -> connection.
        columns: The requested columns.
        config: The config to send with the current model. ``probe`` holds the columns, comma-separated, and ``round``
            the absolute round about to be chosen.
    """

    asked: Mapping[int, str]
    columns: tuple[str, ...]
    config: Mapping[str, str | int]

    @property
    def nodes(self) -> list[str]:
        """Return the connections to ask."""
        return list(self.asked.values())


@dataclass(frozen=True, kw_only=True)
class ProbeFaults:
    """The faults of a probe's answers, for the history.

    Attributes:
        problems: Row -> its problems.
        lacking: The columns that all answers lacked.
    """

    problems: Mapping[int, list[str]] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()


class Probing(state_dicts.NotByClient):
    """Turns a selector's probe into a question to connections, and the answers into side information.

    Args:
        selector: The selector.
        roster: The client ids by row, for messages.
        settings: The names of the metrics, the longest wait and the channels.
        watch: Ends the run if no client answers what is asked.
    """

    def __init__(self, selector: Selector, roster: Roster, settings: Settings, watch: ColumnWatch) -> None:
        self._selector, self._roster, self._settings, self._watch = selector, roster, settings, watch
        self._logged_empty = False
        # Costs of probes since the last finished round.
        self._seconds = self._joules = 0.0
        self._asked = 0

    def question(self, here: ConnectedClients, model: Arrays | None = None) -> Question | None:
        """Return the selector's question to the eligible clients in ``here``; None if it asks nothing.

        A model without numbers, as before the first round of boosted trees, cannot be evaluated, so nothing is asked.
        """
        if model is not None and not any(array.size for array in model):
            if type(self._selector)._probe is not Selector._probe and not self._logged_empty:
                logger.info("the global model has no numbers yet, so no client is probed")
                self._logged_empty = True
            return None
        probe = self._selector.probe(here.rows)
        if probe is None or not len(probe.clients):
            return None
        check_columns(type(self._selector).__name__, "probe", probe.columns, PROBED)
        config: dict[str, str | int] = {"probe": ",".join(probe.columns), "round": self._selector.round + 1}
        return Question(asked=here.nodes_of(np.asarray(probe.clients)), columns=tuple(probe.columns), config=config)

    def answer(self, question: Question, answers: Answers, model: Arrays | None = None) -> ProbeFaults:
        """Inform the selector of the answers, and charge their simulated time and energy.

        A client without a usable answer counts as NaN and costs ``max_latency``.

        Args:
            question: The question, and the clients that got it.
            answers: Connection -> its metrics, or the reason of its error. ``local_accuracy`` may have the name
                ``accuracy``, as in Flower's own apps.
            model: The global model; None if it cannot be decoded.

        Returns:
            The faults of the answers, which are also in the log.

        Raises:
            RunError: No client has ever reported a column that the probe asked for.
        """
        keys, limit, upcoming = self._settings.keys, self._settings.max_latency, self._selector.round + 1
        told = [one for one in answers.values() if not isinstance(one, str)]
        # Only an error of the app shows how it answers; an unavailable node does not.
        errors = [one for one in answers.values() if isinstance(one, str) and one.startswith(RAISED)]
        raised = [one_line(one.removeprefix(RAISED)) for one in errors]
        lacking = self._watch.check_answers(upcoming, question.columns, told, raised)
        columns: dict[str, list[float | FloatArray | None]] = {name: [] for name in question.columns}
        latency, joules, measured = [], 0.0, False
        problems: dict[int, list[str]] = {row: [] for row in question.asked}
        for row, node in question.asked.items():
            metrics = answers.get(node, "no answer")
            if isinstance(metrics, str):
                problems[row].append(f"probe: {one_line(metrics.removeprefix(RAISED)) or 'error'}")
            said: Mapping[str, object] = {} if isinstance(metrics, str) else metrics
            answered = said is metrics
            for name, column in columns.items():
                reported = said.get(keys.of(name), said.get("accuracy") if name == "local_accuracy" else None)
                column.append(value := column_value(COLUMNS[name], reported, max_vector_length(name, model)))
                # Otherwise a client could skip the work and still be credited with its short time.
                if value is None:
                    answered = False
                    if said is metrics:
                        problems[row].append(f"probe: no {name}")
            seconds = finite_number(said.get(keys.latency)) if answered else None
            latency.append(limit if seconds is None or not 0 <= seconds <= limit else seconds)
            energy = finite_number(said.get(keys.energy))
            if energy is not None and 0 <= energy <= LARGEST:
                joules, measured = joules + energy, True
        # Probes go in waves through the channels, like the round itself.
        self._asked += len(latency)
        self._seconds += round_time(np.array(latency), self._settings.channels or len(latency))
        # NaN, not 0, if no client reports energy: the history must not count an unmeasured probe as free.
        self._joules += joules if measured else np.nan
        rows = np.array(list(question.asked), dtype=np.int64)
        for name, column in columns.items():
            for i, fault in length_faults(column).items():
                problems[int(rows[i])].append(f"probe: {name}: {fault}")
        # One line has named the columns that all answers lack.
        quiet = {f"probe: no {name}" for name in lacking}
        log_faults(
            f"round {upcoming}",
            [(self._roster.ids[row], one) for row, some in problems.items() for one in some if one not in quiet],
        )
        informed = {name: column_of(name, column) for name, column in columns.items()}
        self._selector.inform(rows, **{name: column for name, column in informed.items() if column is not None})
        return ProbeFaults(problems=problems, lacking=lacking)

    def take_costs(self) -> tuple[float, float, int]:
        """Return seconds, joules and clients of the probes since the last call; joules are NaN if not measured."""
        spent = (self._seconds, self._joules, self._asked)
        self._seconds, self._joules, self._asked = 0.0, 0.0, 0
        return spent

    def state_dict(self) -> state_dicts.State:
        """Return the costs of probes since the last finished round."""
        return {"seconds": self._seconds, "joules": self._joules, "asked": self._asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        seconds, joules = (state_dicts.plain_number(key, state[key]) or 0.0 for key in ("seconds", "joules"))
        asked = state_dicts.whole_number("asked", state["asked"])
        self._seconds, self._joules, self._asked = seconds, joules, asked
