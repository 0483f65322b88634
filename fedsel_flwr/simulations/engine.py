"""Running a scenario: with Flower on Ray, on hundreds of virtual clients, or vectorized in this process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.client import ClientApp
from flwr.common import Context
from flwr.server import ServerApp
from flwr.serverapp import Grid
from flwr.simulation import run_simulation

from fedsel_flwr.checks import one_of
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.building import given_or_made, make_strategy
from fedsel_flwr.simulations.client_app import ScenarioApp
from fedsel_flwr.simulations.cluster import check_cluster, cluster_address, joined
from fedsel_flwr.simulations.driving import count_nodes, run_rounds
from fedsel_flwr.simulations.ingredients import MakeModel, Own, as_own_data
from fedsel_flwr.simulations.results import RunFolder, RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.vectorized import check_vectorized, run_vectorized
from fedsel_flwr.simulations.world import World, world_of

ENGINES = ("ray", "vectorized")
"""What can run a scenario."""


def simulate(
    scenario: Scenario,
    *,
    engine: str | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    num_cpus: int | None = None,
    strategy: Any = None,
    selector: Selector | None = None,
    device: str = "cpu",
    model: MakeModel | None = None,
    data: Any = None,
    objective: Objective | None = None,
    folder: str | Path | None = None,
    label: str | None = None,
) -> RunResult:
    """Run a scenario and wait for its end.

    Args:
        scenario: The scenario; its ``selector`` chooses.
        engine: "ray": Flower on Ray, each client by itself; "vectorized": the same rounds in this process, a round's
            clients trained as one batched computation (:mod:`fedsel_flwr.simulations.vectorized`). None takes the
            scenario's.
        on_round: Called with each finished round; on Ray from the server's thread.
        num_cpus: On Ray, actors, one core each; None takes every core. On a cluster (RAY_ADDRESS is set) they are as
            many as the cluster has cores, and a number is refused.
        strategy: A selection strategy of your own, of the scenario's API; the scenario's latencies, channels and
            availability are then what you give it, and its base sends ``round`` in the config (legacy API). None makes
            the scenario's (:func:`~fedsel_flwr.simulations.building.make_strategy`).
        selector: A selector of your own, in place of the scenario's; everything else is the scenario's.
        device: Where the vectorized engine trains: "cpu", "cuda" and so on.
        model: Makes a torch module of your own, in place of ``model.name``
            (:class:`~fedsel_flwr.simulations.ingredients.Own`).
        data: Examples of your own, in place of ``data.dataset``: ``OwnData``, or (train, test), each a pair of arrays
            or a torch ``Dataset`` (:class:`~fedsel_flwr.simulations.own_data.OwnData`).
        objective: Loss and quality of your own (:class:`~fedsel_flwr.clients.objectives.Objective`).
        folder: Where the run is written (:class:`~fedsel_flwr.simulations.results.RunFolder`), each round as it ends;
            None: nowhere.
        label: What the selector is called there; None: as in the scenario, or by the name of a selector of your own.

    Returns:
        History and final model.

    Raises:
        ParameterError: The data or a parameter cannot be used, or the strategy is not of the scenario's API or is
            given together with ``on_round``, ``selector`` or ``folder``.
        RunError: The simulation broke off, the folder cannot be written to, RAY_ADDRESS leads nowhere, or no client
            ever completed a round of a strategy of your own.

    >>> from fedsel_flwr.simulations.scenario_files import load_scenario
    >>> result = simulate(load_scenario("smoke"), selector=MySelector(clients_per_round=3))  # doctest: +SKIP
    """
    if not isinstance(scenario, Scenario):
        raise ParameterError(
            f"scenario must be a Scenario, got {type(scenario).__name__}; "
            "fedsel_flwr.simulations.scenario_files.load_scenario makes one of a name or file"
        )
    if engine is not None:
        scenario = scenario.model_copy(update={"engine": one_of("engine", engine, ENGINES)})
    check_engine(scenario, num_cpus)
    _check_kinds(selector, objective, on_round)
    brought = Own(model, None if data is None else as_own_data(data), objective)
    scenario = brought.named_in(scenario)
    world = world_of(scenario, brought)  # in this thread, so that faults in data and parameters come before Ray starts
    if folder is None:
        made = given_or_made(world, strategy, on_round, selector)
        result = _run(world, made, device, num_cpus)
        rows = made.history.clients
        if strategy is not None and rows and not any(row.completed for row in rows):
            raise RunError(
                f"no client completed in any of {scenario.rounds} rounds, the first because of {rows[0].problem!r}; "
                "to try a selector of your own, give simulate selector= in place of strategy="
            )
        return result
    if strategy is not None:
        raise ParameterError("folder cannot be given together with a strategy of your own: write the result yourself")

    def keep(record: RoundRecord) -> None:
        kept.round_ended(record, made.history)
        if on_round:
            on_round(record)

    made = make_strategy(world, keep, selector)
    kept = RunFolder(folder, scenario, label or (selector.name if selector else None))
    try:
        result = _run(world, made, device, num_cpus)
        kept.finish(result)
    except RunError as error:
        raise (kept.failure or error) from None  # what the disk said, in place of a run that broke off
    finally:
        kept.close()
    return result


def _run(world: World, strategy: Any, device: str, num_cpus: int | None) -> RunResult:
    """Run a scenario's world with a strategy."""
    scenario = world.scenario
    if scenario.engine == "vectorized":
        return run_vectorized(world, strategy, device)
    results: list[RunResult] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        count_nodes(grid, scenario)
        results.append(run_rounds(grid, world, strategy))

    _run_quietly(server_app, ScenarioApp(_Constant(scenario)), scenario.num_clients, num_cpus)
    if not results:
        done = len(strategy.history.rounds)
        raise RunError(f"the simulation ended after {done} of {scenario.rounds} rounds; see the log for the reason")
    return results[0]


def _check_kinds(selector: Any, objective: Any, on_round: Any) -> None:
    """Refuse what is of another kind than :func:`simulate` takes."""
    if selector is not None and not isinstance(selector, Selector):
        got = selector.__name__ if isinstance(selector, type) else repr(selector)
        raise ParameterError(
            f"selector must be a fedsel_flwr.selectors.Selector, such as Random(clients_per_round=3), got {got}; a "
            "name belongs into the scenario"
        )
    if objective is not None and not isinstance(objective, Objective):
        raise ParameterError(
            "objective must be a fedsel_flwr.clients.objectives.Objective(loss=..., quality=...), got "
            f"{type(objective).__name__}"
        )
    if on_round is not None and not callable(on_round):
        raise ParameterError(f"on_round must be a function of a RoundRecord, got {type(on_round).__name__}")


def check_engine(scenario: Scenario, num_cpus: int | None = None) -> None:
    """Refuse a scenario that its engine cannot run, or where; raises a :class:`FedSelError`."""
    if scenario.engine == "vectorized":
        check_vectorized(scenario)
    else:
        check_cluster(num_cpus)


@dataclass(frozen=True)
class _Constant:
    """A scenario that does not depend on the node; can be pickled."""

    scenario: Scenario

    def __call__(self, context: Context) -> Scenario:
        return self.scenario


def _run_quietly(
    server_app: ServerApp, client_app: ClientApp, num_supernodes: int, num_cpus: int | None = None
) -> None:
    """Flower's simulation, on a cluster or on Ray of its own; the notice that ``flwr run`` is preferred is not shown.

    On a cluster this process connects itself, before Flower's threads start: they would go on after a failure.
    """
    backend: dict[str, Any] = {
        "init_args": {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False},
        # Actors that die are started again; without this the pool keeps handing out the dead one.
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": -1},
    }
    address = cluster_address()
    if address is None:
        # "local": else Ray joins whatever was started on this machine, and refuses the number of cores.
        backend["init_args"] |= {"address": "local", "num_cpus": num_cpus or os.cpu_count() or 1}
    with contextlib.nullcontext() if address is None else joined(address):
        run_simulation(
            server_app=server_app, client_app=client_app, num_supernodes=num_supernodes, backend_config=backend
        )
