"""Running a scenario: with Flower on Ray, on hundreds of virtual clients, or vectorized in this process.

What is refused before a scenario runs: what its engine cannot do, and arguments of another kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.client import ClientApp
from flwr.common import Context
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr import flower
from fedsel_flwr.checks import one_of
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.progress import Waiting
from fedsel_flwr.rounds.checkpoints import Resume
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.run_length import ShouldStop, check_signal
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.existing_runs import (
    AGAIN,
    Keeping,
    Pace,
    check_fingerprints,
    finished_run,
    forget,
    has_begun,
)
from fedsel_flwr.simulations.fingerprints import Fingerprints, code_of, fingerprints
from fedsel_flwr.simulations.logs import silent
from fedsel_flwr.simulations.on_flower.app import ScenarioApp
from fedsel_flwr.simulations.on_flower.building import given_or_made, make_strategy
from fedsel_flwr.simulations.on_flower.driving import count_nodes, run_rounds
from fedsel_flwr.simulations.on_flower.ray_resources import Where, check_device
from fedsel_flwr.simulations.on_flower.ray_session import Session
from fedsel_flwr.simulations.parallelism import Staff, check_processes
from fedsel_flwr.simulations.results import RunFolder, RunResult, worked_out
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.vectorized import check_vectorized, run_vectorized
from fedsel_flwr.simulations.worlds.ingredients import MakeModel, Own, as_data
from fedsel_flwr.simulations.worlds.world import World, world_of

ENGINES = ("ray", "vectorized")
"""What can run a scenario."""


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


def check_kinds(selector: Any, objective: Any, on_round: Any) -> None:
    """Refuse what is of another kind than :func:`~fedsel_flwr.simulations.engine.simulate` takes.

    Args:
        selector: Of one's own, or None.
        objective: Likewise.
        on_round: Told each round, or None.

    Raises:
        ParameterError: Says what was expected.
    """
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


def simulate(
    scenario: Scenario,
    *,
    engine: str | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    should_stop: ShouldStop | None = None,
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
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep_checkpoints: int = 3,
    resume: Resume = False,
    replay: bool = False,
    code: Fingerprints | None = None,
) -> RunResult:
    """Run a scenario and wait for its end; or go on with a run that was cut off, as if it had never been.

    Args:
        scenario: The scenario; its ``selector`` chooses.
        engine: "ray": Flower on Ray, each client by itself; "vectorized": the same rounds in this process, a round's
            clients trained as one batched computation (:mod:`fedsel_flwr.simulations.vectorized`). None takes the
            scenario's.
        on_round: Called with each finished round; on Ray from the server's thread.
        should_stop: Called with each finished round's number and the history so far, after ``on_round``; True ends the
            run with this round, as a budget does. Such a run has finished.
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
            the scenario's (:func:`~fedsel_flwr.simulations.on_flower.building.make_strategy`).
        selector: A selector of your own, in place of the scenario's; everything else is the scenario's.
        device: Where the vectorized engine trains: "cpu", "cuda" and so on.
        processes: How many processes train in the vectorized engine, this one included, on the CPU; None: by the sizes
            of model and round (:func:`~fedsel_flwr.clients.batched.backends.choose_backend`). A
            :class:`~fedsel_flwr.simulations.parallelism.Staff` keeps them over several runs.
        model: Makes a torch module of your own, in place of ``model.name``
            (:class:`~fedsel_flwr.simulations.worlds.ingredients.Own`).
        data: Examples of your own, in place of ``data.dataset``: ``OwnData``, or (train, test), each a pair of arrays
            or a torch ``Dataset`` (:class:`~fedsel_flwr.simulations.worlds.own_data.OwnData`); or a function of the
            seed that returns one of them.
        objective: Loss and quality of your own (:class:`~fedsel_flwr.clients.objectives.Objective`).
        folder: Where the run is written (:class:`~fedsel_flwr.simulations.results.RunFolder`), each round as it ends;
            of a run that an error ends also the last model, ``model-after-round-N.safetensors``. None: nowhere.
        label: What the selector is called there; None: as in the scenario, or by the name of a selector of your own.
        checkpoint_dir: Folder of the run's checkpoints, which stay when it has finished. None: those of a run with a
            ``folder`` are there, in ``checkpoints``, until it has finished; any other run has none.
        checkpoint_every: A checkpoint after every so many rounds. None: after every round; but in the ``folder`` of a
            run of the vectorized engine as often as costs it 2 % of its time. 0, without ``checkpoint_dir``: none.
        keep_checkpoints: So many stay.
        resume: False begins a new run, and refuses to overwrite checkpoints; True goes on from the newest one that can
            be used, and begins anew where there is none; "must" refuses to begin anew. Of a run that had finished the
            result is returned. What the run was made of must be the same, a selector, model or data of your own given
            again; ``rounds`` and the budgets may be larger. The last round that was trained is evaluated, and
            ``on_round`` told of it, again. A run in the ``folder`` is refused by name if the code of selector, model or
            objective, its data, partition or scenario is not the same as now.
        replay: With ``resume``: play a run again that does not fit or is damaged, in place of refusing it.
        code: Fingerprints of the code (:func:`~fedsel_flwr.simulations.fingerprints.code_of`), taken in another process
            that has its source; None: they are taken here.

    Returns:
        History and final model.

    Raises:
        ParameterError: The data or a parameter cannot be used, or the strategy is not of the scenario's API or is
            given together with ``on_round``, ``should_stop``, ``selector``, ``folder`` or checkpoints; or so many
            processes cannot train.
        RunError: The simulation broke off, Ray died, the folder cannot be written to, the address leads nowhere, no
            client ever completed a round of a strategy of your own, or there are checkpoints that cannot be gone on
            from: of another run, damaged, or of a newer version.

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
    check_kinds(selector, objective, on_round)
    check_signal(should_stop)
    if strategy is not None:
        for name, value in (("folder", folder), ("checkpoint_dir", checkpoint_dir), ("resume", resume or None)):
            if value is not None:
                instead = (
                    "write the result yourself" if name == "folder" else "give it to the strategy when you make it"
                )
                raise ParameterError(f"{name} cannot be given together with a strategy of your own: {instead}")
    keeping = Keeping.of(scenario, folder, checkpoint_dir, checkpoint_every, keep_checkpoints, resume)
    brought = Own(model, None if data is None else as_data(data), objective)
    scenario = brought.named_in(scenario)
    label = label or (selector.name if selector else None)
    if replay and not (resume and folder is not None and checkpoint_dir is None):
        raise ParameterError("replay = True needs resume = True and the folder of the run, and takes no checkpoint_dir")
    code = code_of(scenario, selector, brought) if code is None else code
    finished, again = None, False
    try:
        if resume and folder is not None:
            finished = finished_run(folder, scenario, label)
    except (RunError, ParameterError):  # damaged, of an older version, or another scenario
        if not replay:
            raise
        again = True
    world = world_of(scenario, brought)  # in this thread, so that faults in data and parameters come before Ray starts
    prints = fingerprints(world, brought, code)
    # what was cut off is compared with its checkpoint, which says more
    if resume and folder is not None and not again and has_begun(Path(folder)) and (finished is not None or replay):
        try:
            check_fingerprints(Path(folder), label or scenario.selector, prints)
        except RunError:
            if not replay:
                raise
            again = True
    if finished is not None and not again:
        keeping.finished()  # it may have been cut off before they were removed
        return finished
    session = Session(where, Waiting("Starting Ray", "Ray started", tell=on_wait, quiet=quiet))
    run = partial(_run, world, device=device, session=session, quiet=quiet, processes=processes, keeping=keeping)
    if folder is None:
        made = given_or_made(world, strategy, on_round, selector, keeping.options(scenario, selector), should_stop)
        keeping.begin(made, world, prints)
        result = replace(run(made), fingerprints=prints)
        rows = made.history.clients
        if strategy is not None and rows and not any(row.completed for row in rows):
            raise RunError(
                f"no client completed in any of {scenario.rounds} rounds, the first because of {rows[0].problem!r}; "
                "to try a selector of your own, give simulate selector= in place of strategy="
            )
        return result
    kept = RunFolder(folder, scenario, label, prints)
    if again:
        forget(Path(folder))
        keeping = replace(keeping, resume=False)
    made = make_strategy(world, on_round, selector, keeping.options(scenario, selector), should_stop)
    kept.follow(made.history, elsewhere=checkpoint_dir is not None)
    try:
        keeping.begin(made, world, prints)
    except RunError as error:
        raise RunError(f"{error}. {AGAIN}") if keeping.own else error from None
    try:
        kept.begin()
        result = replace(run(made), fingerprints=prints)
        kept.finish(result, worked_out(world, result.history, result.arrays))
        keeping.finished()
    except BaseException as error:
        kept.rescue(made.last_model)
        if isinstance(error, RunError):
            raise (kept.failure or error) from None  # what the disk said, in place of a run that broke off
        raise
    finally:
        kept.close()
    return result


def _run(
    world: World,
    strategy: Any,
    *,
    device: str,
    session: Session,
    quiet: bool,
    processes: int | Staff | None,
    keeping: Keeping,
) -> RunResult:
    """Run a scenario's world with a strategy."""
    scenario = world.scenario
    if scenario.engine == "vectorized":
        staffed = contextlib.nullcontext(processes) if isinstance(processes, Staff) else Staff(processes)
        with silent(quiet), staffed as staff:
            return run_vectorized(world, strategy, device, staff, Pace(keeping.share))
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
    """Flower's ``run_simulation`` within a session of Ray."""
    with session.open():
        flower.run_simulation(**kwargs)
