"""Simulate a scenario: with Flower on Ray, on hundreds of virtual clients, or vectorized in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.common import Context
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr import flower
from fedsel_flwr.checks import one_of
from fedsel_flwr.clients.batched.backends import BACKENDS, Backend
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.resumption import Resume, decide_run, replay_or_refuse
from fedsel_flwr.rounds.run_length import ShouldStop, check_should_stop
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.existing_runs import (
    REPLAY_CURE,
    CheckpointPace,
    CheckpointPlan,
    discard_progress,
    read_fitting_run,
)
from fedsel_flwr.simulations.fingerprints import Fingerprints, code_fingerprints, fingerprints
from fedsel_flwr.simulations.logs import silent
from fedsel_flwr.simulations.on_flower.app import ScenarioApp
from fedsel_flwr.simulations.on_flower.building import make_strategy, resolve_strategy
from fedsel_flwr.simulations.on_flower.driving import run_rounds, wait_for_nodes
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, check_device
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.results import RunFolder, RunResult, client_accuracies, derived_tables, describe_runs
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.vectorized import check_vectorized, run_vectorized
from fedsel_flwr.simulations.worlds.ingredients import MakeModel, OwnParts, as_data
from fedsel_flwr.simulations.worlds.world import World, world_of

ENGINES = ("ray", "vectorized")
"""Names of the engines."""


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
    strategy: Any = None,
    selector: Selector | None = None,
    device: str = "cpu",
    backend: Backend | None = None,
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
    """Run a scenario to its end, or resume a run that was cut off; both give the same result.

    Args:
        scenario: The scenario; its ``selector`` chooses.
        engine: "ray": Flower on Ray, each client by itself; "vectorized": the same rounds in this process, a round's
            clients trained as one batched computation (:mod:`fedsel_flwr.simulations.vectorized`). None takes the
            scenario's.
        on_round: Called with each finished round, on Ray from the server's thread.
        should_stop: Called with each finished round's number and the history so far, after ``on_round``; True ends the
            run with this round, as a budget does. Such a run has finished.
        num_cpus: Cores that Ray gets; None: every core. As many clients train at one time if each takes one core. On a
            cluster it is refused: the cluster has the cores it was started with. The vectorized engine refuses this
            and the other arguments that only Ray uses.
        num_gpus: GPUs that Ray gets; None: those that ``client_gpus`` asks for. Refused on a cluster.
        client_cpus: Cores that a client takes on Ray, above 0.
        client_gpus: GPUs that a client takes on Ray: whole ones or a fraction; a client that has one trains on it.
            None: an equal share of ``num_gpus``.
        ray_address: HOST:PORT of the head of a Ray cluster, "auto", or "local" for Ray on this machine; None takes the
            environment variable RAY_ADDRESS.
        quiet: Keep Flower's log, this package's, and "Starting Ray" from standard error.
        strategy: A selection strategy of your own, of the scenario's API. Latencies, channels and availability are
            then those of the strategy, and its base sends ``round`` in the config (legacy API). None makes the
            scenario's (:func:`~fedsel_flwr.simulations.on_flower.building.make_strategy`).
        selector: A selector of your own, in place of the scenario's.
        device: Device on which the vectorized engine trains: "cpu", "cuda" and so on.
        backend: What trains in the vectorized engine: "numba", "manual", "vmap", "sequential", or "auto" for the first
            of them that can except "numba". None: by the kinds and sizes of model and run
            (:func:`~fedsel_flwr.clients.batched.backends.choose_backend`).
        model: Makes a torch module of your own, in place of ``model.name``
            (:class:`~fedsel_flwr.simulations.worlds.ingredients.OwnParts`).
        data: Examples of your own, in place of ``data.dataset``: ``OwnData``, or (train, test), each a pair of arrays
            or a torch ``Dataset`` (:class:`~fedsel_flwr.simulations.worlds.own_data.OwnData`); or a function of the
            seed that returns one of them.
        objective: Loss and quality of your own (:class:`~fedsel_flwr.clients.objectives.Objective`).
        folder: Folder to which the run is written (:class:`~fedsel_flwr.simulations.results.RunFolder`), each round as
            it ends. If an error ends the run, its last model is ``model-after-round-N.safetensors``. None: none.
        label: The selector's label in the folder; None: as in the scenario, or the name of a selector of your own.
        checkpoint_dir: Folder of the run's checkpoints, which stay when it has finished. None: the checkpoints of a run
            with a ``folder`` are there, in ``checkpoints``, until it has finished; any other run has none.
        checkpoint_every: Rounds between two checkpoints. None: every round, but on the vectorized engine with a
            ``folder`` as often as costs 2 % of the run's time. 0, without ``checkpoint_dir``: no checkpoints.
        keep_checkpoints: Number of checkpoints that stay.
        resume: False begins a new run, and refuses to overwrite checkpoints. True resumes from the newest checkpoint
            that can be used, and begins a new run if there is none, which "must" refuses. A finished run returns its
            result. Scenario, code and data must be the same, and your own selector, model or data given again;
            ``rounds`` and the budgets may be larger. The last trained round is evaluated again, and ``on_round``
            called with it again. A run in the ``folder`` is refused if the code of selector, model or objective, its
            data, partition or scenario has changed; the error names which.
        replay: With ``resume``: play a run again that does not fit or is damaged, in place of refusing it.
        code: Fingerprints of the code (:func:`~fedsel_flwr.simulations.fingerprints.code_fingerprints`), taken in
            another process that has its source; None: they are taken here.

    Returns:
        History and final model.

    Raises:
        ParameterError: The data or a parameter cannot be used, or the strategy is not of the scenario's API or is
            given together with ``on_round``, ``should_stop``, ``selector``, ``folder`` or checkpoints; or this backend
            cannot train the model.
        RunError: The simulation broke off, the folder cannot be written to, the address leads nowhere, no client ever
            completed a round of a strategy of your own, or no run can be resumed from the checkpoints: they are of
            another run, damaged, or of a newer version. If Ray dies, this process ends with status 2 and one line.

    >>> from fedsel_flwr.simulations.scenario_files import load_scenario
    >>> result = simulate(load_scenario("smoke"), selector=MySelector(clients_per_round=3))  # doctest: +SKIP
    """
    if not isinstance(scenario, Scenario):
        raise ParameterError(
            f"scenario must be a Scenario, got {type(scenario).__name__}. Make one from a name or file with "
            "fedsel_flwr.simulations.load_scenario"
        )
    if engine is not None:
        scenario = scenario.model_copy(update={"engine": one_of("engine", engine, ENGINES)})
    where = RayResources(num_cpus, num_gpus, client_cpus, client_gpus, ray_address)
    check_engine(scenario, where, device, backend=backend)
    _check_types(selector, objective, on_round)
    check_should_stop(should_stop)
    if strategy is not None:
        for name, value in (("folder", folder), ("checkpoint_dir", checkpoint_dir), ("resume", resume or None)):
            if value is not None:
                cure = "Save the result yourself" if name == "folder" else "Pass it to the strategy when you create it"
                raise ParameterError(f"{name} cannot be combined with strategy=. {cure}")
    checkpoints = CheckpointPlan.of(scenario, folder, checkpoint_dir, checkpoint_every, keep_checkpoints, resume)
    brought = OwnParts(model, None if data is None else as_data(data), objective)
    scenario = brought.named_in(scenario)
    label = label or (selector.name if selector else None)
    if replay and not (resume and folder is not None and checkpoint_dir is None):
        raise ParameterError(
            "replay = True repeats a run of a folder. Set resume = True and folder, and leave checkpoint_dir out"
        )
    code = code_fingerprints(scenario, selector, brought) if code is None else code
    # In this thread: faults in data and parameters then come before Ray starts.
    world = world_of(scenario, brought)
    prints = fingerprints(world, brought, code)
    finished, restart = None, False
    if resume and folder is not None:
        finished, restart = decide_run(
            partial(read_fitting_run, folder, scenario, label, prints, explain=replay), replay=replay
        )
    if finished is not None:
        # The earlier process may have been killed between the result and this.
        checkpoints.discard()
        return finished
    session = RaySession(where, quiet)
    run = partial(
        _run,
        world,
        device=device,
        session=session,
        quiet=quiet,
        backend=backend,
        checkpoints=checkpoints,
        folder=folder,
    )
    if folder is None:
        made = resolve_strategy(
            world, strategy, on_round, selector, checkpoints.options(scenario, selector), should_stop
        )
        checkpoints.attach(made, world, prints)
        result = _complete(run(made), world, prints)
        rows = made.history.clients
        if strategy is not None and rows and not any(row.completed for row in rows):
            raise RunError(
                f"no client completed in any of {scenario.rounds} rounds. The first failure was {rows[0].problem!r}. "
                "To use your own selector, pass selector= instead of strategy="
            )
        return result
    written = RunFolder(folder, scenario, label, prints)

    def begin(*, replay: bool) -> Any:
        if replay:
            discard_progress(Path(folder))
        plan = replace(checkpoints, resume=False) if replay else checkpoints
        made = make_strategy(world, on_round, selector, plan.options(scenario, selector), should_stop)
        # Before the strategy reads its checkpoint, which restores the history from this journal.
        written.record_rounds(made.history, elsewhere=checkpoint_dir is not None)
        plan.attach(made, world, prints)
        return made

    try:
        # Only now: the folder is locked, so that no other process resumes from what goes.
        made = begin(replay=restart)
    except RunError as error:
        replay_or_refuse(RunError(f"{error}. {REPLAY_CURE}") if checkpoints.temporary else error, replay=replay)
        made = begin(replay=True)
    try:
        written.begin()
        result = _complete(run(made), world, prints)
        written.finish(result, derived_tables(world, result))
        # Last: until the result is on the disk, the run can only be resumed.
        checkpoints.discard()
    except BaseException as error:
        # Ctrl-C too: the last model is worth writing whatever ended the run.
        written.save_last_model(made.last_model)
        if isinstance(error, RunError):
            # A full disk makes Flower's run break off; the disk's error says why.
            raise (written.failure or error) from None
        raise
    finally:
        written.close()
    return result


def _complete(result: RunResult, world: World, prints: Fingerprints) -> RunResult:
    """Add to a run's result what is known when it is over."""
    return replace(result, fingerprints=prints, client_accuracies=client_accuracies(world, result.arrays))


def _run(
    world: World,
    strategy: Any,
    *,
    device: str,
    session: RaySession,
    quiet: bool,
    backend: Backend | None,
    checkpoints: CheckpointPlan,
    folder: str | Path | None,
) -> RunResult:
    """Run a scenario's world with a strategy, on the scenario's engine."""
    scenario = world.scenario
    if scenario.engine == "vectorized":
        with silent(quiet):
            return run_vectorized(world, strategy, device, backend, CheckpointPace(checkpoints.share))
    # Flower's run_simulation returns nothing: the server app leaves its result here.
    results: list[RunResult] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        wait_for_nodes(grid, scenario)
        results.append(run_rounds(grid, world, strategy))

    def what_is_left() -> str:
        if folder is None:
            return f" after {len(strategy.history.rounds)} of {scenario.rounds} rounds"
        # What is on the disk: the last round of the history may not have been written yet.
        return f"; {folder} holds {describe_runs(Path(folder)) or 'no round yet'}"

    with silent(quiet):
        run_simulation(
            session=session,
            server_app=server_app,
            client_app=ScenarioApp(SameScenario(scenario)),
            num_supernodes=scenario.num_clients,
            what_is_left=what_is_left,
        )
    if not results:
        done = len(strategy.history.rounds)
        raise RunError(f"the simulation ended after {done} of {scenario.rounds} rounds. See the log for the reason")
    return results[0]


@dataclass(frozen=True)
class SameScenario:
    """Returns the same scenario on every node; unlike a closure it can be pickled for Ray's actors."""

    scenario: Scenario

    def __call__(self, context: Context) -> Scenario:
        """Return the scenario."""
        return self.scenario


def run_simulation(*, session: RaySession, what_is_left: Callable[[], str] = str, **simulation: Any) -> None:
    """Run Flower's simulation, on a cluster or on Ray started here.

    This process connects to Ray itself, before Flower's threads start: they would keep running after a failure.

    Args:
        session: Ray for this run.
        what_is_left: As in :meth:`RaySession.open`.
        **simulation: ``server_app``, ``client_app`` and ``num_supernodes`` of Flower's simulation.
    """
    with session.open(what_is_left):
        resources = session.resources.client_resources()
        flower.run_simulation(**simulation, backend_config={"client_resources": resources})


def check_engine(
    scenario: Scenario,
    where: RayResources,
    device: str = "cpu",
    rounds_on_flower: int = 0,
    backend: Backend | None = None,
) -> None:
    """Refuse a scenario that its engine cannot run, and resources that it cannot use.

    Args:
        scenario: The scenario, with its engine.
        where: Resources of Ray.
        device: Device on which the vectorized engine trains.
        rounds_on_flower: Rounds on Ray in addition to those of the vectorized engine.
        backend: What trains in the vectorized engine.

    Raises:
        FedSelError: Says what to change.
    """
    if backend is not None:
        one_of("backend", backend, BACKENDS)
        if scenario.engine != "vectorized":
            raise ParameterError(
                f"backend = {backend!r} is for the vectorized engine, but the engine is {scenario.engine!r}. Leave "
                "backend out, or set engine = 'vectorized'"
            )
    if scenario.engine == "vectorized":
        check_vectorized(scenario)
        check_device(device)
        if rounds_on_flower == 0:
            if where.non_default:
                raise ParameterError(
                    f"{where.non_default[0]} is for Ray, but the vectorized engine runs in one process. Choose the "
                    "engine 'ray', or leave it out"
                )
            return
    elif device != "cpu":
        raise ParameterError(
            f"device = {device!r} is for the vectorized engine, but the engine is 'ray'. Give each client a share of a "
            "GPU with client_gpus"
        )
    where.check()


def _check_types(selector: Any, objective: Any, on_round: Any) -> None:
    """Refuse arguments of :func:`simulate` whose type is wrong.

    Raises:
        ParameterError: Says what was expected.
    """
    if selector is not None and not isinstance(selector, Selector):
        got = selector.__name__ if isinstance(selector, type) else repr(selector)
        raise ParameterError(
            f"selector must be a fedsel_flwr.selectors.Selector, such as Random(clients_per_round=3), got {got}. To "
            "use a selector by name, set it in the scenario"
        )
    if objective is not None and not isinstance(objective, Objective):
        raise ParameterError(
            "objective must be a fedsel_flwr.clients.objectives.Objective(loss=..., quality=...), got "
            f"{type(objective).__name__}"
        )
    if on_round is not None and not callable(on_round):
        raise ParameterError(f"on_round must be a function of a RoundRecord, got {type(on_round).__name__}")
