"""One run of the comparison: played once, kept under a name made of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from references import references

from fedsel_flwr import __version__
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations import Scenario, simulate
from fedsel_flwr.simulations.on_flower.building import common_params, make_strategy
from fedsel_flwr.simulations.results import write_run
from fedsel_flwr.simulations.worlds.availability import find_trace
from fedsel_flwr.simulations.worlds.world import world_of

COST = "cost.json"


@dataclass(frozen=True)
class Cell:
    """A selector, or a reference, on one seed of a scenario.

    Args:
        scenario: With its seed, and the selector's name if it is one of the package's.
        label: What tables call it.
        runs: Where runs are kept.
    """

    scenario: Scenario
    label: str
    runs: Path

    @property
    def folder(self) -> Path:
        """Where it is kept; another scenario, package or trace is another folder."""
        s = self.scenario
        own = s.model_dump(exclude={"data": {"data_dir"}}, exclude_defaults=True)  # a new option changes nothing
        said = own | {"label": self.label, "package": __version__}
        if s.availability.kind == "trace":
            said["trace"] = find_trace(s.availability.trace, s.data.data_dir or None).stat().st_size
        digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
        return self.runs / f"{s.name}-{self.label}-seed{s.seed}-{digest[:12]}"

    @property
    def done(self) -> bool:
        """Whether it was played already."""
        return (self.folder / COST).exists()

    def play(self) -> float:
        """Run it and keep what comes out; returns the seconds of the processor that it took."""
        torch.set_num_threads(1)
        scenario, start = self.scenario, time.process_time()
        world = world_of(scenario)
        make = references(world).get(self.label)
        selector: Selector | None = make(**_accepted(scenario)) if make else None
        strategy = make_strategy(world, None, selector)
        watch = Watch(strategy.core)
        result = simulate(scenario, engine="vectorized", strategy=strategy, quiet=True)
        took = time.process_time() - start
        write_run(self.folder, scenario, result, self.label)
        rounds = max(1, len(result.history.rounds))
        cost = {"server_ms": 1000 * watch.seconds / rounds, "run_s": took}
        partial = self.folder / f"{COST}.part"
        partial.write_text(json.dumps(cost), encoding="utf-8")
        os.replace(partial, self.folder / COST)  # last: what has it is whole
        return took

    def read(self) -> tuple[History, Mapping[str, float]]:
        """What happened, and what it cost the server."""
        return read_history(self.folder), json.loads((self.folder / COST).read_text("utf-8"))


class Watch:
    """Seconds of the processor that a core takes to choose, to read replies and to learn; clients' work is outside."""

    def __init__(self, core: Any) -> None:
        self.seconds, self._core = 0.0, core
        choose, core.choose = core.choose, self._choose
        self._inner: Callable[..., Any] = choose
        for name in ("collect", "finish"):
            setattr(core, name, self._timed(getattr(core, name)))

    def _choose(self, connected: Any, reference: Any, transport: Any, server_round: int | None = None) -> Any:
        with self._running():
            return self._inner(connected, reference, _Paused(self, transport), server_round)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            with self._running():
                return call(*args, **keywords)

        return timed

    @contextmanager
    def _running(self, sign: int = 1) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds += sign * (time.process_time() - start)

    def paused(self) -> Any:
        """What happens within does not count."""
        return self._running(-1)


class _Paused:
    """A transport whose work is the clients', not the server's."""

    def __init__(self, watch: Watch, transport: Any) -> None:
        self._watch, self._transport = watch, transport

    def introduce(self, nodes: list[str]) -> Any:
        with self._watch.paused():
            return self._transport.introduce(nodes)

    def probe(self, nodes: list[str], config: Any) -> Any:
        with self._watch.paused():
            return self._transport.probe(nodes, config)


def _accepted(scenario: Scenario) -> dict[str, Any]:
    def everything(*, clients_per_round: int, seed: int) -> Any: ...

    return common_params(scenario, everything)
