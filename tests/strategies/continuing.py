"""Runs that are cut off and go on in another process, through each adapter.

``python -m tests.strategies.continuing FILE``: loads the states in FILE, plays on, and writes what came back into it.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.server import strategy as legacy_bases

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies import numpy_world as world
from tests.strategies.flower_world import encoded, message_base, proxies
from tests.strategies.helpers import Federation
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id, play
from tests.strategies.third_adapter import play_stacked

ADAPTERS = ("legacy", "message", "third")


@dataclass
class Run:
    """A selector in an adapter, up to a round.

    Attributes:
        model: The global model.
        state: Of the strategy, or of the core.
    """

    adapter: str
    name: str
    model: world.Array = field(default_factory=world.initial)
    state: dict[str, Any] | None = None

    def go_on(self, rounds: int) -> Run:
        """The run after so many further rounds, played by objects that are made anew."""
        options: dict[str, Any] = {
            "max_latency": world.MAX_LATENCY, "learning_rate": world.ETA, "validation": world.validation(),
            "filter": Filter() if self.name in ("random", "gpfl") else None, "cooldown": self.name == "cs-ucb",
            "availability": world.available,
        }  # fmt: skip
        selector = create(self.name, **world.selector_params(self.name))
        if self.adapter == "third":
            core = SelectionCore(selector, resolve_settings(selector, **options))
            self._load(core)
            model = play_stacked(core, rounds, self.model)[-1]
            return Run(self.adapter, self.name, model, core.state_dict())
        if self.adapter == "legacy":  # the server counts on
            base = legacy_bases.FedAvg(fraction_evaluate=0.0, initial_parameters=encoded([self.model]))
            legacy = LegacyStrategy(selector, base, **options)
            self._load(legacy)
            federation = Federation(legacy, proxies())
            federation.server.parameters, federation.round = encoded([self.model]), legacy.selector.round
            return Run(self.adapter, self.name, federation.play(rounds).arrays()[0], legacy.state_dict())
        message = MessageStrategy(selector, message_base(), **options)
        self._load(message)  # the server counts from 1
        grid = FakeGrid({node_id(k): FakeNode(proxy, extra={}) for k, proxy in enumerate(proxies())})
        _, models = play(message, grid, rounds, initial_arrays=ArrayRecord({"model": Array(self.model)}))
        return Run(self.adapter, self.name, np.frombuffer(models[-1][0]), message.state_dict())

    def said(self) -> dict[str, Any]:
        """What the run left behind: the model, and everything that outlives a round."""
        return {"model": self.model, **dict(_flat("", self.state or {}))}

    def _load(self, owner: Any) -> None:
        if self.state is not None:
            owner.load_state_dict(self.state)


def _flat(prefix: str, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield f"{prefix}{key}", sorted(value)
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def main(path: Path) -> None:
    """Play every run of a file to the end."""
    cut = pickle.loads(path.read_bytes())
    done = {key: astuple(Run(*fields).go_on(rounds)) for key, (fields, rounds) in cut.items()}
    path.write_bytes(pickle.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
