"""The roll call of new connections, and the selector's probes: all questions to clients before the choice.

An adapter sends both through its transport.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.rounds import state_dicts, untrusted
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import column_of, length_faults
from fedsel_flwr.rounds.reply_checks import ColumnWatch
from fedsel_flwr.rounds.roster import ConnectedClients, Roster
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import COLUMNS, LARGEST, PROBED, check_columns
from fedsel_flwr.wireless import round_time

logger = logging.getLogger("fedsel_flwr")
MAX_REMEMBERED = 10_000
"""Number of connections whose missing answers are stored; beyond that, the earliest due are dropped first."""
MAX_ASKED_ALONE = 2
"""Largest number of connections to ask one by one before all others are asked at once."""
Properties = Mapping[str, object]
"""The client's own properties: its id, number of examples, energy score."""
NO_PROPERTIES: Final[Properties] = MappingProxyType({})
"""The properties of a client that was not asked, or whose app has no function for the roll call."""
Answers = Mapping[str, Mapping[str, object] | str]
"""Connection -> its metrics, or the reason of its error. A connection that did not answer has no entry."""
RAISED = "exception: "
"""Start of the reason of an error of the client's app itself."""
Introduce = Callable[[list[str]], tuple[Mapping[str, Properties | None], list[str]]]
"""The signature of :meth:`Transport.introduce`."""


class Transport(Protocol):
    """The adapter's access to connections before a round."""

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Properties | None], list[str]]:
        """Ask connections for their properties.

        Returns:
            Connection -> its properties; None for an error, :data:`NO_PROPERTIES` (the object itself) if the client's
            app has no function for this question. And the connections that did not answer in time.
        """

    def probe(self, nodes: list[str], config: Mapping[str, str | int]) -> Answers:
        """Let connections measure the current global model: connection -> metrics, for those that answered."""


@dataclass(frozen=True)
class Registration:
    """The server's own data on a connection, independent of the client's claims.

    Args:
        name: The name under which an operator registered it; empty without one.
        public_key: The key with which it signs; empty if unknown.
    """

    name: str = ""
    public_key: bytes = b""


@runtime_checkable
class Registry(Protocol):
    """A transport whose server knows more about connections than their ids."""

    @property
    def simulated(self) -> bool:
        """Return whether the connections are clients of a simulation, which the server itself started."""

    @property
    def one_first(self) -> bool:
        """Return whether one client should be asked before the others, because an app without an answer is slow."""

    def registrations(self) -> Mapping[str, Registration] | None:
        """Return the registration of every connection, in one call; None if the server knows only ids."""


class RollCall(state_dicts.SavedFields):
    """Asks new connections for their identity.

    Connections that did not answer are asked last, and each time after twice as many rounds. So one silent connection
    cannot delay every round.

    Args:
        timeout: Seconds that the transport waits for an answer, for messages.
    """

    saved: ClassVar = {"_in_vain": state_dicts.whole_numbers, "_not_before": state_dicts.whole_numbers}

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        # Connection -> how often it did not answer.
        self._in_vain: dict[str, int] = {}
        # Connection -> round in which it is asked again.
        self._not_before: dict[str, int] = {}
        # None until known. Not saved, because the next run may have another app.
        self._app_answers: bool | None = None

    def call(
        self, strangers: Iterable[str], round: int, introduce: Introduce, *, one_first: bool = False
    ) -> dict[str, Properties]:
        """Ask the due connections for their identity; repeat the question once after an error.

        Args:
            strangers: Connections that are not in the roster.
            round: The round about to be chosen.
            introduce: Asks the connections.
            one_first: Ask one connection before the others, and a second one if the first was inconclusive. All of them
                run the same app. If the app cannot state its identity, the others are not asked.

        Returns:
            Connection -> its properties, empty after two errors or without a question. Without the connections that did
            not answer.
        """
        due = [name for name in strangers if self._not_before.get(name, 0) <= round]
        if not due:
            return {}
        if self._in_vain:
            # Those that missed most calls come last.
            due.sort(key=lambda name: self._in_vain.get(name, 0))
        said, missed, asked = dict[str, Properties | None](), list[str](), 0
        while asked < len(due) and self._app_answers is not False:
            alone = one_first and self._app_answers is None and asked < MAX_ASKED_ALONE
            batch = due[asked : asked + 1] if alone else due[asked:]
            asked += len(batch)
            answers, hanging = introduce(batch)
            said |= answers
            missed += hanging
            self._learn(answers.values(), one_first)
        said |= dict.fromkeys(due[asked:], NO_PROPERTIES)
        if failed := [node for node, properties in said.items() if properties is None]:
            again, hanging = introduce(failed)
            said |= again
            missed += hanging
        # A connection that first failed and then hung is in both.
        for node in missed:
            said.pop(node, None)
        failed = [node for node, properties in said.items() if properties is None]
        words = "answered with an error, so its connection serves as its client id"
        untrusted.warn_of("roll call: ", [f"client {node} {words}" for node in failed])
        self._note_missed(missed, round)
        return {node: properties or {} for node, properties in said.items()}

    def _learn(self, answers: Collection[Properties | None], one_first: bool) -> None:
        """Learn from answers whether the app can state its identity."""
        # By identity, because a client with an empty answer did answer.
        if any(properties is not None and properties is not NO_PROPERTIES for properties in answers):
            self._app_answers = True
        elif self._app_answers is None and any(properties is NO_PROPERTIES for properties in answers):
            message = "the ClientApp has no query function. Flower reports this as an error, but it is harmless"
            if one_first:
                self._app_answers, message = False, f"{message}. The other clients are not asked"
            logger.warning("roll call: %s", message)

    def _note_missed(self, connections: list[str], round: int) -> None:
        """Record the connections that were asked before ``round`` and did not answer."""
        for name in connections:
            self._in_vain[name] = self._in_vain.get(name, 0) + 1
            # 2^30 rounds never end, and the number stays small in a checkpoint.
            self._not_before[name] = round + 2 ** min(self._in_vain[name] - 1, 30)
        words = f"did not answer within {self.timeout:g} s and takes no part in this round"
        untrusted.warn_of("roll call: ", [f"client {name} {words}" for name in connections])
        # A client can invent any number of node ids, and each would be saved permanently.
        if (surplus := len(self._not_before) - MAX_REMEMBERED) > 0:
            for name in sorted(self._not_before, key=self._not_before.__getitem__)[:surplus]:
                del self._not_before[name], self._in_vain[name]


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


@dataclass(frozen=True, kw_only=True)
class ProbeFaults:
    """The faults of a probe's answers, for the history.

    Attributes:
        problems: Row -> its problems.
        lacking: The columns that all answers lacked.
    """

    problems: Mapping[int, list[str]] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()


class Probing(state_dicts.SavedFields):
    """Turns a selector's probe into a question to connections, and the answers into side information.

    Args:
        selector: The selector.
        roster: The client ids by row, for messages.
        settings: The names of the metrics, the longest wait and the channels.
        watch: Ends the run if no client answers what is asked.

    Attributes:
        seconds: The seconds of the probes since the last finished round.
    """

    saved: ClassVar = {
        "seconds": state_dicts.plain_number,
        "_joules": state_dicts.plain_number,
        "_asked": state_dicts.whole_number,
    }

    def __init__(self, selector: Selector, roster: Roster, settings: Settings, watch: ColumnWatch) -> None:
        self._selector, self._roster, self._settings, self._watch = selector, roster, settings, watch
        self._logged_empty = False
        # Costs of probes since the last finished round.
        self.seconds = self._joules = 0.0
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
        raised = [untrusted.one_line(one.removeprefix(RAISED)) for one in errors]
        lacking = self._watch.check(upcoming, told, question.columns, raised)
        columns: dict[str, list[float | FloatArray | None]] = {name: [] for name in question.columns}
        latency, joules, measured = [], 0.0, False
        problems: dict[int, list[str]] = {row: [] for row in question.asked}
        for row, node in question.asked.items():
            metrics = answers.get(node, "no answer")
            if isinstance(metrics, str):
                problems[row].append(f"probe: {untrusted.one_line(metrics.removeprefix(RAISED)) or 'error'}")
            said: Mapping[str, object] = {} if isinstance(metrics, str) else metrics
            answered = said is metrics
            for name, column in columns.items():
                reported = said.get(keys.of(name), said.get("accuracy") if name == "local_accuracy" else None)
                column.append(
                    value := untrusted.column_value(COLUMNS[name], reported, untrusted.max_vector_length(name, model))
                )
                # Otherwise a client could skip the work and still be credited with its short time.
                if value is None:
                    answered = False
                    if said is metrics:
                        problems[row].append(f"probe: no {name}")
            seconds = untrusted.finite_number(said.get(keys.latency)) if answered else None
            latency.append(limit if seconds is None or not 0 <= seconds <= limit else seconds)
            energy = untrusted.finite_number(said.get(keys.energy))
            if energy is not None and 0 <= energy <= LARGEST:
                joules, measured = joules + energy, True
        # Probes go in waves through the channels, like the round itself.
        self._asked += len(latency)
        self.seconds += round_time(np.array(latency), self._settings.channels or len(latency))
        # NaN, not 0, if no client reports energy: the history must not count an unmeasured probe as free.
        self._joules += joules if measured else np.nan
        rows = np.array(list(question.asked), dtype=np.int64)
        for name, column in columns.items():
            for i, fault in length_faults(column).items():
                problems[int(rows[i])].append(f"probe: {name}: {fault}")
        # One line has named the columns that all answers lack.
        quiet = {f"probe: no {name}" for name in lacking}
        untrusted.log_faults(
            f"round {upcoming}",
            [(self._roster.ids[row], one) for row, some in problems.items() for one in some if one not in quiet],
        )
        informed = {name: column_of(name, column) for name, column in columns.items()}
        self._selector.inform(rows, **{name: column for name, column in informed.items() if column is not None})
        return ProbeFaults(problems=problems, lacking=lacking)

    def take_costs(self) -> dict[str, Any]:
        """Return the probes' costs since the last call, as in the history; joules are NaN if not measured."""
        spent = {"probe_s": self.seconds, "probe_j": self._joules, "num_probed": self._asked}
        self.seconds, self._joules, self._asked = 0.0, 0.0, 0
        return spent
