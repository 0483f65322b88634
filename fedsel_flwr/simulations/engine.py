"""Running a scenario: with Flower on Ray, on hundreds of virtual clients, or vectorized in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.client import ClientApp
from flwr.common import Context
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr.checks import one_of
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.waiting import Waiting
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.afterwards import worked_out
from fedsel_flwr.simulations.building import given_or_made, make_strategy
from fedsel_flwr.simulations.client_app import ScenarioApp
from fedsel_flwr.simulations.driving import count_nodes, run_rounds
from fedsel_flwr.simulations.ingredients import MakeModel, Own, as_own_data
from fedsel_flwr.simulations.logs import silent
from fedsel_flwr.simulations.ray_session import Session
from fedsel_flwr.simulations.results import RunFolder, RunResult
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.staffing import Staff, check_processes
from fedsel_flwr.simulations.vectorized import check_vectorized, run_vectorized
from fedsel_flwr.simulations.where import Where, check_device
from fedsel_flwr.simulations.world import World, world_of

ENGINES = ("ray", "vectorized")
"""What can run a scenario."""


def simulate(
    scenario: Scenario,
    *,
    engine: str | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    client_cpus: float = 1,
    client_gpus: float | None = None,
    ray_address: str | None = None,
    quiet: bool = False,
    on_wait: Callable[[str], None] | None = None,
    strategy: Any = None,
    selector: Selector | None = None,
    device: str = "cpu",
    processes: int | Staff | None = None,
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
        num_cpus: Cores that Ray gets; None: every core. So many clients train at one time, if each takes one. On a
            cluster it is refused: the cluster has what it was started with. The vectorized engine refuses this and
            the other arguments that only Ray can follow.
        num_gpus: GPUs that Ray gets; None: those that ``client_gpus`` asks for. Refused on a cluster.
        client_cpus: Cores that a client takes on Ray, above 0.
        client_gpus: GPUs that a client takes on Ray: whole ones or a fraction; a client that has one trains on it.
            None: an equal share of ``num_gpus``.
        ray_address: HOST:PORT of the head of a Ray cluster, "auto", or "local" for Ray on this machine; None takes the
            environment variable RAY_ADDRESS.
        quiet: Keep Flower's log, this package's, and "Starting Ray ..." from standard error.
        on_wait: Told once a second what is waited for ("Starting Ray, 3 s"), in place of standard error.
        strategy: A selection strategy of your own, of the scenario's API; the scenario's latencies, channels and
            availability are then what you give it, and its base sends ``round`` in the config (legacy API). None makes
            the scenario's (:func:`~fedsel_flwr.simulations.building.make_strategy`).
        selector: A selector of your own, in place of the scenario's; everything else is the scenario's.
        device: Where the vectorized engine trains: "cpu", "cuda" and so on.
        processes: How many processes train in the vectorized engine, this one included, on the CPU; None: by the sizes
            of model and round (:func:`~fedsel_flwr.simulations.staffing.processes_for`). A
            :class:`~fedsel_flwr.simulations.staffing.Staff` keeps them over several runs.
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
            given together with ``on_round``, ``selector`` or ``folder``; or so many processes cannot train.
        RunError: The simulation broke off, Ray died, the folder cannot be written to, the address leads nowhere, or no
            client ever completed a round of a strategy of your own.

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
    where = Where(num_cpus, num_gpus, client_cpus, client_gpus, ray_address)
    if not isinstance(processes, Staff):
        check_processes(scenario, processes, device)
    check_engine(scenario, where, device)
    _check_kinds(selector, objective, on_round)
    brought = Own(model, None if data is None else as_own_data(data), objective)
    scenario = brought.named_in(scenario)
    world = world_of(scenario, brought)  # in this thread, so that faults in data and parameters come before Ray starts
    session = Session(where, Waiting("Starting Ray", "Ray started", tell=on_wait, quiet=quiet))
    if folder is None:
        made = given_or_made(world, strategy, on_round, selector)
        result = _run(world, made, device, session, quiet, processes)
        rows = made.history.clients
        if strategy is not None and rows and not any(row.completed for row in rows):
            raise RunError(
                f"no client completed in any of {scenario.rounds} rounds, the first because of {rows[0].problem!r}; "
                "to try a selector of your own, give simulate selector= in place of strategy="
            )
        return result
    if strategy is not None:
        raise ParameterError("folder cannot be given together with a strategy of your own: write the result yourself")
    made = make_strategy(world, on_round, selector)
    kept = RunFolder(folder, scenario, label or (selector.name if selector else None))
    kept.follow(made.history)
    try:
        result = _run(world, made, device, session, quiet, processes)
        kept.finish(result, worked_out(world, result.history, result.arrays))
    except RunError as error:
        raise (kept.failure or error) from None  # what the disk said, in place of a run that broke off
    finally:
        kept.close()
    return result


def _run(
    world: World, strategy: Any, device: str, session: Session, quiet: bool, processes: int | Staff | None
) -> RunResult:
    """Run a scenario's world with a strategy."""
    scenario = world.scenario
    if scenario.engine == "vectorized":
        staffed = contextlib.nullcontext(processes) if isinstance(processes, Staff) else Staff(processes)
        with silent(quiet), staffed as staff:
            return run_vectorized(world, strategy, device, staff)
    results: list[RunResult] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        session.attend(grid)
        try:
            with session.stopping(strategy):
                count_nodes(grid, scenario)
                results.append(run_rounds(grid, world, strategy))
        finally:
            session.ending()

    try:
        with silent(quiet):
            _run_on_flower(server_app, ScenarioApp(_Constant(scenario)), scenario.num_clients, session)
    except RunError as error:
        if not session.died:
            raise
        raise RunError(f"{error} after {len(strategy.history.rounds)} of {scenario.rounds} rounds") from None
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


def check_engine(scenario: Scenario, where: Where, device: str = "cpu", rounds_on_flower: int = 0) -> None:
    """Refuse a scenario that its engine cannot run, or where.

    Args:
        scenario: The scenario, with its engine.
        where: What Ray is given.
        device: Where the vectorized engine trains.
        rounds_on_flower: Rounds on Ray beside the vectorized engine's.

    Raises:
        FedSelError: Says what to change.
    """
    if scenario.engine == "vectorized":
        check_vectorized(scenario)
        check_device(device)
        if rounds_on_flower == 0:
            if where.asked:
                raise ParameterError(
                    f"{where.asked[0]} is for Ray, but the vectorized engine runs in one process: choose the engine "
                    "'ray', or leave it out"
                )
            return
    elif device != "cpu":
        raise ParameterError(
            f"device = {device!r} is where the vectorized engine trains; on Ray give each client a share of a GPU: "
            "client_gpus"
        )
    where.check()


@dataclass(frozen=True)
class _Constant:
    """A scenario that does not depend on the node; can be pickled."""

    scenario: Scenario

    def __call__(self, context: Context) -> Scenario:
        return self.scenario


def _run_on_flower(server_app: ServerApp, client_app: ClientApp, num_supernodes: int, session: Session) -> None:
    """Flower's simulation, on a cluster or on Ray of its own.

    This process connects to Ray itself, before Flower's threads start: they would go on after a failure.
    """
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=num_supernodes,
        backend_config={"client_resources": session.client_resources},
        session=session,
    )


def run_simulation(*, session: Session, **kwargs: Any) -> None:
    """Flower's ``run_simulation`` within a session of Ray; Flower's is imported where it is needed."""
    from flwr.simulation import run_simulation as flowers

    with session.open():
        flowers(**kwargs)
