"""One round of selection in plain types, shared by every adapter: no Flower, no torch.

An adapter calls, in this order and once a round: :meth:`SelectionCore.enroll` for connections never seen,
:meth:`SelectionCore.choose`, :meth:`SelectionCore.collect` with what came back, and, after aggregating the usable
updates in the order given, :meth:`SelectionCore.finish`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import RoundReport, Selector
from fedsel_flwr.selectors._check import FloatArray, real, whole
from fedsel_flwr.strategies.history import ClientRecord, History, RoundRecord
from fedsel_flwr.strategies.replies import Arrays, ClientResult, MetricKeys, Reply, read_reply, usable_count
from fedsel_flwr.strategies.roster import Roster, RowValues, canonical_id
from fedsel_flwr.wireless import round_time

logger = logging.getLogger("fedsel_flwr")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a strategy treats its clients; see :class:`fedsel_flwr.strategies.SelectionStrategy`."""

    max_latency: float = 60.0
    min_completed: int = 1
    channels: int = 1
    clock: Literal["virtual", "server"] = "virtual"
    clock_slack: float = 5.0
    cooldown: bool = False
    keys: MetricKeys = field(default_factory=MetricKeys)

    def __post_init__(self) -> None:
        """Check every value."""
        real("max_latency", self.max_latency, above=0.0)
        whole("min_completed", self.min_completed, 1)
        whole("channels", self.channels, 1)
        real("clock_slack", self.clock_slack, at_least=0.0)
        if self.clock not in ("virtual", "server"):
            raise ParameterError(f"clock must be 'virtual' or 'server', got {self.clock!r}")


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a connection says of itself in the roll call; None where it says nothing."""

    client_id: object = None
    num_examples: object = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back in a round.

    Attributes:
        results: Connection -> its reply after reading, for every chosen client, by ascending row.
        usable: The connections whose updates may be aggregated, by ascending row.
        enough: Whether at least ``min_completed`` are usable; else the global model must stay.
    """

    results: Mapping[str, ClientResult]
    usable: list[str]
    enough: bool


class SelectionCore:
    """Keeps the roster, asks the selector, reads replies, keeps time and the history.

    Args:
        selector: The selector.
        settings: How clients are treated.
        roster: Who is who.
        client_values: Selector parameters given by client id; clients they do not cover are refused.
    """

    def __init__(
        self, selector: Selector, settings: Settings, roster: Roster, client_values: tuple[RowValues, ...] = ()
    ) -> None:
        self.selector, self.settings, self.roster = selector, settings, roster
        self.client_values = client_values
        self.history = History()
        self._chosen: dict[int, str] = {}
        self._num_available = 0
        self._failures: dict[int, int] = {}
        self._out_until: dict[int, int] = {}

    @property
    def round(self) -> int:
        """The round chosen last."""
        return self.selector.round

    def strangers(self, connected: Collection[str]) -> list[str]:
        """Connections that the roll call should ask who they are; those that are gone are released."""
        self.roster.release(connected, self.round + 1)
        return self.roster.strangers(connected)

    def enroll(self, introductions: Mapping[str, Introduction]) -> None:
        """Bind connections to rows and tell the selector about new clients.

        Args:
            introductions: Connection -> what it said. Without a usable id the connection's own name is the id.

        Raises:
            ParameterError: In the first roll call, parameters given by client do not cover a client.
        """
        named = set(self.roster.refused)
        self._refuse_uncovered(introductions, first_call=not self.roster.ids)
        claims = {
            node: canonical_id(said.client_id) or node
            for node, said in introductions.items()
            if node not in self.roster.refused
        }
        new, evicted = self.roster.enroll(claims, self.round + 1)
        for node in self.roster.refused.keys() - named:
            logger.warning("%s", self.roster.refused[node])
        for row in evicted:
            self._failures.pop(row, None)
            self._out_until.pop(row, None)
        if evicted:
            self.selector.forget(np.array(evicted))
        if not new:
            return
        rows = self.roster.present(claims, self.round)
        counts = {row: usable_count(introductions[node].num_examples) for row, node in rows.items() if row in new}
        if all(counts.values()):
            self.selector.inform(np.array(list(counts)), num_examples=np.array(list(counts.values()), dtype=float))
        else:
            self.selector.inform(np.array(new))

    def choose(self, connected: Collection[str]) -> list[str]:
        """Choose this round's clients among the connected ones.

        Args:
            connected: Every connection there is; those not enrolled are left out.

        Returns:
            The chosen connections, by ascending row.
        """
        upcoming = self.round + 1
        here = self.roster.present(connected, upcoming)
        available = [row for row in here if self._out_until.get(row, 0) < upcoming]
        chosen = self.selector.select(np.array(available, dtype=np.int64))
        self._num_available = len(available)
        self._chosen = {int(row): here[int(row)] for row in chosen}
        return list(self._chosen.values())

    def collect(self, replies: Mapping[str, Reply], reference: Arrays | None) -> Outcome:
        """Read what came back; every fault is logged with the client's id.

        Args:
            replies: Connection -> reply; a chosen connection without one did not answer.
            reference: The global model the clients received; None if it cannot be decoded.

        Returns:
            Which updates may be aggregated.
        """
        s, results = self.settings, {}
        for row, node in self._chosen.items():
            reply = replies.get(node, Reply(error="no answer"))
            results[node] = result = read_reply(
                reply, reference=reference, client_id=self.roster.ids[row], max_latency=s.max_latency,
                clock=s.clock, clock_slack=s.clock_slack, keys=s.keys,
            )  # fmt: skip
            for problem in result.problems:
                logger.warning("round %d, client %s: %s", self.round, self.roster.ids[row], problem)
        usable = [node for node, result in results.items() if result.completed]
        return Outcome(results=results, usable=usable, enough=len(usable) >= s.min_completed)

    def finish(self, outcome: Outcome) -> RoundRecord:
        """Let the selector observe the round and enter it into the history."""
        rows, results = list(self._chosen), [outcome.results[node] for node in self._chosen.values()]
        latency = np.array([result.latency_s for result in results])
        self.selector.observe(self._report(rows, results, latency))
        for row, result in zip(rows, results, strict=True):
            failures = 0 if result.completed else self._failures.get(row, 0) + 1
            self._failures[row] = failures
            if self.settings.cooldown and failures:
                self._out_until[row] = self.round + 2 ** min(failures, 30)
        return self.history.append(
            round=self.round,
            num_available=self._num_available,
            round_s=round_time(latency, self.settings.channels),
            clients=[self._record(row, result) for row, result in zip(rows, results, strict=True)],
        )

    def _refuse_uncovered(self, introductions: Mapping[str, Introduction], *, first_call: bool) -> None:
        """Refuse clients without an entry in a parameter given by client; at the start that is the user's mistake."""
        for node, said in introductions.items():
            claim = canonical_id(said.client_id)
            for values in self.client_values:
                if values.covers(claim or node):
                    continue
                if first_call and claim is not None:
                    raise ParameterError(
                        f"{values.name} has {len(values)} entries but none for client {claim!r}: give a mapping "
                        "{client_id: value} that covers every client (an array is for the ids 0..K-1)"
                    )
                self.roster.refused[node] = f"client {claim or node!r} refused: no entry in {values.name}"

    def _report(self, rows: list[int], results: list[ClientResult], latency: FloatArray) -> RoundReport:
        completed = np.array([result.completed for result in results], dtype=np.bool_)
        columns: dict[str, FloatArray] = {
            "energy": np.array([result.values["energy"] for result in results]),
            "num_examples": np.array([result.num_examples or np.nan for result in results]),
        }
        needed: dict[str, Any] = {name: value for name, value in columns.items() if name in self.selector.needs}
        for name, value in needed.items():
            lacking = completed & ~np.isfinite(value)
            if lacking.any():
                ids = [self.roster.ids[row] for row, lacks in zip(rows, lacking, strict=True) if lacks]
                logger.warning(
                    "round %d: clients %s lack %s and count as failed for the selector", self.round, ids, name
                )
                completed &= ~lacking
        latency = np.where(completed, latency, self.settings.max_latency)
        return RoundReport(clients=np.array(rows, dtype=np.int64), completed=completed, latency=latency, **needed)

    def _record(self, row: int, result: ClientResult) -> ClientRecord:
        values = result.values
        return ClientRecord(
            round=self.round,
            client_id=self.roster.ids[row],
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
