"""Clients whose models and reports are written down, played through either API to a selector that keeps everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.common import GetPropertiesIns, GetPropertiesRes

from fedsel_flwr.selectors import RoundReport
from fedsel_flwr.selectors.base import Probe, Selector
from fedsel_flwr.strategies import Validation
from tests.strategies.either_api import Server, selection
from tests.strategies.helpers import OK, FakeProxy

MAX_LATENCY = 9.0
Script = Callable[[int, int, Any], Any]
"""From client, round and received model to the client's new model."""
# Three models over two examples, as rows (logits of example 0, logits of example 1):
#   A right on both, B wrong on both by 3, C right on 0 by 1, wrong on 1 by 0.2.
A, B, C = [[2.0, 0.0], [0.0, 2.0]], [[0.0, 3.0], [3.0, 0.0]], [[1.0, 0.0], [0.2, 0.0]]


class Spy(Selector):
    """Asks everybody, reads what it is told to read, and keeps everything it is told."""

    name = "spy"

    def __init__(self, *needs: str, requires: Any = (), warmup_rounds: int = 0, clients_per_round: int = 9) -> None:
        super().__init__(clients_per_round=clients_per_round)
        self.needs, self.requires = frozenset(needs), frozenset(requires)  # type: ignore[misc]
        self.warmup_rounds = warmup_rounds
        self.reports: list[RoundReport] = []
        self.informed: list[tuple[list[int], dict[str, list[float]]]] = []

    def _select(self, available: Any) -> Any:
        return available

    def _observe(self, report: RoundReport) -> None:
        self.reports.append(report)

    def _inform(self, clients: Any, columns: Mapping[str, Any]) -> None:
        self.informed.append((clients.tolist(), {k: v.tolist() for k, v in columns.items()}))


class Curious(Spy):
    """Asks clients, all or some of them, for columns before each choice; takes the lowest indices."""

    name = "curious"

    def __init__(self, *columns: str, clients_per_round: int = 9, asks: Any = None) -> None:
        super().__init__(clients_per_round=clients_per_round)
        self.columns, self.asks = columns or ("loss",), asks

    def _probe(self, available: Any) -> Probe:
        asked = available if self.asks is None else np.intersect1d(available, self.asks)
        return Probe(clients=asked, columns=self.columns)

    def _select(self, available: Any) -> Any:
        return available[: self.clients_per_round]


class Scripted(FakeProxy):
    """A client whose models, metrics and facts are written down."""

    def __init__(self, number: int, script: Script, report: Callable[[int, int], dict[str, Any]], facts: Any) -> None:
        super().__init__(f"node-{number}", number, number=number)
        self.script, self.report, self.facts = script, report, facts

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return GetPropertiesRes(OK, {"client_id": self.number, **self.facts(self.number)})

    def trained(self, arrays: list[np.ndarray], config: dict[str, Any], server_round: int) -> Any:
        model = np.array(self.script(self.number, server_round, *arrays), dtype=np.float64)
        return [model], 10, {"latency_s": 1.0, **self.report(self.number, server_round)}


class Counted:
    """Softmax regression, ``inputs @ w``; of a vector w, the logits of class 1 are 0. Keeps the models it saw."""

    def __init__(self) -> None:
        self.models: list[list[Any]] = []

    def __call__(self, arrays: Any, inputs: Any) -> Any:
        self.models.append(arrays[0].tolist())
        logits = inputs @ arrays[0]
        return logits if logits.ndim == 2 else np.column_stack([logits, np.zeros(len(logits))])


def two_examples(predict: Any = None) -> Validation:
    """Examples (1, 0) of class 0 and (0, 1) of class 1: the logits are the rows of w."""
    return Validation(predict or Counted(), np.eye(2), np.array([0, 1]))


def play_scripted(
    api: str, selector: Selector, script: Script, rounds: int, *, start: Any, clients: int = 2,
    base: Any = None, report: Any = lambda k, t: {}, facts: Any = lambda k: {}, **options: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """Play scripted clients through an API; returns the strategy and the model after each round."""
    first = np.array(start, dtype=np.float64)
    everyone = [Scripted(k, script, report, facts) for k in range(clients)]
    strategy = selection(api, selector, base, **{"max_latency": MAX_LATENCY, "min_available": 1, **options})
    server = Server(api, strategy, everyone, start=[first]).play(rounds)
    return strategy, [arrays[0].tolist() for arrays in server.models]


def play_still(api: str, selector: Selector, rounds: int = 1, **options: Any) -> tuple[Any, list[Any]]:
    """Play clients that return the model as they received it."""
    return play_scripted(api, selector, lambda k, t, w: w, rounds, start=[1.0], **options)
