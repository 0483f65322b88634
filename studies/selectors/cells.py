"""One run of the comparison: its fingerprint, and its simulation."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from references import CHANCE, GENIE, GROUPS, references
from runs import RunRow, run_row

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.fingerprints import fingerprint
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations import Scenario, simulate
from fedsel_flwr.simulations.on_flower.building import common_params, make_strategy
from fedsel_flwr.simulations.worlds.world import world_of

_PROBING = (
    "active-fl", "cpow-d", "divfl", "fedcor", "local-accuracy", "lsh", "nccb", "oort", "power-of-choice", "tifl",
)  # fmt: skip
REVISIONS: dict[str, int] = dict.fromkeys(_PROBING, 2)  # 2: answers are charged for the examples that they read
"""Selector or reference -> revision, 1 if it has no entry. Raise it when a change of the code changes the results."""
SIMULATION = 1
"""Revision of everything else. Raise it when a change of data, devices, training or rounds changes the results."""
IMAGES = "71f30403b19a558acc1ed561522a427eb8214d5f61bb11f897a94b04de4da7a3"
TRACE = "00bd257b0a659fba9a8a3df6970b4da90cbfe22bdb53758287ff67c32ca79f27"
"""SHA-256 of Fashion-MNIST's four files, one after the other by name, and of the trace of FLASH."""


@dataclass(frozen=True)
class Cell:
    """A selector or a reference on one seed of a scenario.

    Args:
        scenario: The scenario with its seed, and with the selector's name if there is a selector.
        label: The name in the tables.
    """

    scenario: Scenario
    label: str

    @property
    def fingerprint(self) -> str:
        """Digest of everything that the run depends on, the same on every machine and without the data.

        A new option of the package changes nothing, because values that equal the defaults do not count.
        """
        s = self.scenario
        own = s.model_dump(exclude={"data": {"data_dir"}}, exclude_defaults=True)
        for key in ("description", "engine"):
            own.pop(key, None)
        subject = self.label if self.label in (GENIE, GROUPS, CHANCE) else s.selector
        own["selectors"] = {name: table for name, table in s.selectors.items() if name == subject}
        data = {"images": IMAGES} if s.data.dataset == "fashion-mnist" else {}
        data |= {"trace": TRACE} if s.availability.kind == "trace" else {}
        revisions = [SIMULATION, REVISIONS.get(subject, 1)]
        return fingerprint(scenario=own, label=self.label, data=data, revisions=revisions)

    def check_data(self) -> None:
        """Refuse other data than those of the stored rows.

        Raises:
            ParameterError: The data are missing, or they are not those of the other rows.
        """
        scenario = self.scenario
        _check_data(scenario.data.data_dir, scenario.data.dataset, scenario.availability.trace)

    def simulate(self) -> RunRow:
        """Simulate the run; call :meth:`check_data` first."""
        torch.set_num_threads(1)
        scenario, start = self.scenario, time.process_time()
        world = world_of(scenario)
        make = references(world).get(self.label)
        selector: Selector | None = make(**_accepted(scenario)) if make else None
        strategy = make_strategy(world, None, selector)
        watch = Watch(strategy.core)
        result = simulate(scenario, engine="vectorized", strategy=strategy, quiet=True)
        return run_row(
            scenario,
            result.history,
            label=self.label,
            fingerprint=self.fingerprint,
            model_bytes=sum(array.nbytes for array in result.arrays),
            client_accuracies=result.client_accuracies,
            server_s=watch.seconds,
            run_s=time.process_time() - start,
        )


class Watch:
    """Processor time of the server's part of a run: selection, reading replies and learning, without the clients."""

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
        """Return a context whose time does not count."""
        return self._running(-1)


class _Paused:
    """A transport whose time counts for the clients, not for the server."""

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


@lru_cache
def _check_data(data_dir: str, dataset: str, trace: str) -> None:
    """Refuse other data than those of the stored rows."""
    folder = Path(data_dir or os.environ.get("FEDSEL_DATA", ""))
    wanted = [(sorted((folder / "FashionMNIST" / "raw").glob("*ubyte")), IMAGES)] if dataset == "fashion-mnist" else []
    wanted += [([folder / trace], TRACE)] if trace else []
    for paths, digest in wanted:
        found = hashlib.sha256()
        for path in paths:
            found.update(path.read_bytes() if path.exists() else b"")
        if found.hexdigest() != digest:
            raise ParameterError(
                f"the data in {str(folder)!r} are not those of the stored rows: the SHA-256 of "
                f"{', '.join(path.name for path in paths) or 'FashionMNIST/raw'} differs. Give their folder to "
                "--data-dir"
            )
