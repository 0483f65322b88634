"""Simulation of a scenario: with Flower on Ray and hundreds of virtual clients, or vectorized in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.common import Context
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr import flower
from fedsel_flwr.callbacks.trackers import TrackedRun, together
from fedsel_flwr.callbacks.tracking import TRACKED_CLIENTS, TrackerLike, Tracking
from fedsel_flwr.checks import one_of
from fedsel_flwr.clients.batched.backends import BACKENDS, Backend
from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.run_folder import run_name
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
from fedsel_flwr.simulations.logs import silent
from fedsel_flwr.simulations.on_flower.app import ScenarioApp
from fedsel_flwr.simulations.on_flower.building import make_strategy, resolve_strategy
from fedsel_flwr.simulations.on_flower.driving import run_rounds, wait_for_nodes
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, check_device
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.results import RunFolder, RunResult, client_accuracies, derived_tables, describe_runs
from fedsel_flwr.simulations.run_identity import Identity, code_identity, identity, run_parameters
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
    track: TrackerLike | Tracking | None = None,
    track_clients: int | Sequence[int] = TRACKED_CLIENTS,
    code: Identity | None = None,
) -> RunResult:
    """Run a scenario to its end, or resume an interrupted run. A resumed run gives the same result.

    Args:
        scenario: The scenario, which also names the selector.
        engine: Either "ray" or "vectorized". The engine "ray" runs Flower on Ray and trains each client separately. The
            vectorized engine runs the same rounds in this process, and trains a round's clients as one batch
            (:mod:`fedsel_flwr.simulations.vectorized`). If None, the scenario's engine.
        on_round: Function called with each finished round; on Ray, the server's thread calls it.
        should_stop: Function called after ``on_round``, with the number of the finished round and the history so far.
            If the function returns True, the run ends after this round, as with a budget. Such a run counts as
            finished.
        num_cpus: Cores for Ray. If None, all cores. If each client takes one core, then ``num_cpus`` clients train at a
            time. On a cluster the argument is refused, because the cluster already has its cores. The vectorized engine
            refuses all arguments that only Ray uses.
        num_gpus: GPUs for Ray. If None, all GPUs if ``client_gpus`` is above 0, otherwise none. On a cluster the
            argument is refused.
        client_cpus: Cores per client on Ray, above 0.
        client_gpus: GPUs per client on Ray, a whole number or a fraction. A client with a GPU trains on it. If None, an
            equal share of ``num_gpus``.
        ray_address: HOST:PORT of the head of a Ray cluster, "auto", or "local" for Ray on this machine. If None, the
            environment variable RAY_ADDRESS.
        quiet: Whether to hide the logs of Flower and of this package, and the line "Starting Ray", from standard error.
        strategy: Your selection strategy, of the scenario's API. The strategy then sets latencies, channels and
            availability. In the legacy API its base must send ``round`` in the config. If None,
            :func:`~fedsel_flwr.simulations.on_flower.building.make_strategy` makes the scenario's strategy.
        selector: Your selector, which replaces the scenario's.
        device: Device on which the vectorized engine trains and evaluates: "cpu", "cuda" and so on. On a GPU, a run
            with convolutions does not repeat itself exactly.
        backend: Backend that trains in the vectorized engine: "numba", "manual", "vmap", "sequential" or "auto". The
            value "auto" means the first of "manual", "vmap" and "sequential" that can train the model. If None,
            :func:`~fedsel_flwr.clients.batched.backends.choose_backend` decides by the model and the size of the run.
        model: Function that makes your torch module. The module replaces ``model.name``
            (:class:`~fedsel_flwr.simulations.worlds.ingredients.OwnParts`).
        data: Your examples, which replace ``data.dataset``: an ``OwnData`` or a pair (train, test). Train and test are
            pairs of arrays or torch ``Dataset`` objects (:class:`~fedsel_flwr.simulations.worlds.own_data.OwnData`).
            You may also pass a function that takes the seed and returns an ``OwnData`` or such a pair.
        objective: Your loss and quality (:class:`~fedsel_flwr.clients.objectives.Objective`).
        folder: Folder of the run (:class:`~fedsel_flwr.simulations.results.RunFolder`). Each round is written as soon
            as it ends. After an error, the last model is in ``model-after-round-N.safetensors``. If None, nothing is
            written.
        label: The selector's label in the folder. If None, the name of your selector or of the scenario's selector.
        checkpoint_dir: Folder of the checkpoints, which are not removed after the run. If None, a run with a ``folder``
            writes its checkpoints to the subfolder ``checkpoints``, and removes them when the run has finished. Other
            runs have no checkpoints.
        checkpoint_every: Rounds between two checkpoints. With None, a checkpoint follows each round. With None and a
            ``folder``, the vectorized engine writes checkpoints less often: they take at most 2 % of the run's time.
            With 0, which is allowed only without ``checkpoint_dir``, there are no checkpoints.
        keep_checkpoints: Number of checkpoints that are kept.
        resume: False begins a new run, and refuses to overwrite checkpoints. True resumes from the newest usable
            checkpoint, or begins a new run if there is no checkpoint. "must" raises an error if there is none. If the
            run has already finished, its result is returned. Scenario, code and data must be unchanged, and you must
            pass your selector, model or data again. ``rounds`` and the budgets may be larger. The last trained round is
            evaluated again, and ``on_round`` is called again with it. A run in the ``folder`` is refused if the code of
            selector, model or objective, or its data, partition or scenario has changed. The error names what has
            changed.
        replay: Whether ``resume`` repeats, from the start, a run that is damaged or whose code or data changed. If
            False, such a run is refused.
        track: The tracker that receives parameters and metrics: "tensorboard", "mlflow" or "wandb". An address may
            follow, as in "mlflow:http://host:5000". For your own tracker, pass a class derived from
            :class:`~fedsel_flwr.callbacks.Recorder`, or its path ``./file.py:Class``. If the tracker fails, the run
            continues without it. A resumed run is a new run of the tracker. If None, there is no tracker.
        track_clients: Clients whose own metrics are tracked: a list of ids, or a number. With a number, the clients are
            picked evenly from all ids.
        code: Identity of the code (:func:`~fedsel_flwr.simulations.run_identity.code_identity`). Pass them if
            only another process has the source of the code. If None, this process computes them.

    Returns:
        History and final model.

    Raises:
        ParameterError: The data or a parameter cannot be used, or the backend cannot train the model. Also raised if
            ``strategy`` has another API than the scenario, or is combined with ``on_round``, ``should_stop``,
            ``selector``, ``folder``, ``track`` or checkpoints.
        RunError: The simulation ended early, the folder cannot be written to, or no cluster replies at the address.
            Also raised if no client completed any round of your strategy. Also raised if no run can be resumed, because
            the checkpoints are damaged, or belong to another run or a newer version. If Ray dies, this process ends
            with status 2 and a message of one line.

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
        cures = {"folder": "Save the result yourself", "track": "Pass a tracker's callback to the strategy as on_round"}
        given = {"folder": folder, "checkpoint_dir": checkpoint_dir, "resume": resume or None, "track": track}
        for name, value in given.items():
            if value is not None:
                cure = cures.get(name, f"Pass {name} to the strategy when you create the strategy")
                raise ParameterError(f"{name} cannot be combined with strategy=. {cure}")
    if track is not None and not isinstance(track, Tracking):
        track = Tracking.of(track, scenario.name, scenario.num_clients, folder=folder, track_clients=track_clients)
    checkpoints = CheckpointPlan.of(scenario, folder, checkpoint_dir, checkpoint_every, keep_checkpoints, resume)
    brought = OwnParts(model, None if data is None else as_data(data), objective)
    scenario = brought.named_in(scenario)
    label = label or (selector.name if selector else None)
    if replay and not (resume and folder is not None and checkpoint_dir is None):
        raise ParameterError(
            "replay = True repeats a run of a folder. Set resume = True and folder, and leave checkpoint_dir out"
        )
    code = code_identity(scenario, selector, brought) if code is None else code
    # Built in this thread, so that faults in data and parameters are reported before Ray starts.
    world = world_of(scenario, brought)
    prints = identity(world, brought, code)
    world = world.on(device)
    finished, restart = None, False
    if resume and folder is not None:
        finished, restart = decide_run(
            partial(read_fitting_run, folder, scenario, label, prints, explain=replay), replay=replay
        )
    tracked: TrackedRun | None = None
    if track is not None:
        shown = label or scenario.selector
        tracked = track.run(run_name(shown, scenario.seed), run_parameters(scenario, shown, selector))
        on_round = tracked if on_round is None else together(tracked, on_round)
    if finished is not None:
        # An earlier process may have been killed after it wrote the result and before it removed the checkpoints.
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
        tracked=tracked,
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
        # Called before the strategy reads its checkpoint, which restores the history from this journal.
        written.record_rounds(made.history, elsewhere=checkpoint_dir is not None)
        plan.attach(made, world, prints)
        return made

    try:
        # Done only after the folder is locked, so that no other process resumes from files that are removed here.
        made = begin(replay=restart)
    except RunError as error:
        replay_or_refuse(RunError(f"{error}. {REPLAY_CURE}") if checkpoints.temporary else error, replay=replay)
        made = begin(replay=True)
    try:
        written.begin()
        result = _complete(run(made), world, prints)
        written.finish(result, derived_tables(world, result))
        # Done last, because an unfinished run needs its checkpoints until the result is on the disk.
        checkpoints.discard()
    except BaseException as error:
        # The last model is saved after any end of the run, including Ctrl-C.
        written.save_last_model(made.last_model)
        if isinstance(error, RunError):
            # A full disk ends Flower's run. The error of the disk names this cause.
            raise (written.failure or error) from None
        raise
    finally:
        written.close()
    return result


def _complete(result: RunResult, world: World, prints: Identity) -> RunResult:
    """Add the fingerprints and the clients' accuracies to a run's result."""
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
    tracked: TrackedRun | None,
) -> RunResult:
    """Run the rounds of a world (a scenario's data, partition and model) with a strategy on the scenario's engine."""
    scenario = world.scenario
    tracking = contextlib.nullcontext() if tracked is None else tracked.follow(strategy.history)
    if scenario.engine == "vectorized":
        with silent(quiet), tracking:
            return run_vectorized(world, strategy, device, backend, CheckpointPace(checkpoints.share))
    # Flower's run_simulation returns nothing, so the server app stores its result here.
    results: list[RunResult] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        wait_for_nodes(grid, scenario)
        results.append(run_rounds(grid, world, strategy))

    def what_is_left() -> str:
        if folder is None:
            return f" after {len(strategy.history.rounds)} of {scenario.rounds} rounds"
        # Describe the files on the disk, because the last round of the history may not have been written yet.
        return f"; {folder} holds {describe_runs(Path(folder)) or 'no round yet'}"

    with silent(quiet), tracking:
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
    """Function that returns the same scenario on every node. Unlike a closure, it can be pickled for Ray's actors."""

    scenario: Scenario

    def __call__(self, context: Context) -> Scenario:
        """Return the scenario."""
        return self.scenario


def run_simulation(*, session: RaySession, what_is_left: Callable[[], str] = str, **simulation: Any) -> None:
    """Run Flower's simulation, on a cluster or on Ray on this machine.

    This process connects to Ray itself, before Flower's threads start. Otherwise these threads would continue to run
    after a failure.

    Args:
        session: The Ray session of this run.
        what_is_left: See :meth:`RaySession.open`.
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
    """Refuse a scenario that its engine cannot run, and resources that the engine cannot use.

    Args:
        scenario: The scenario, with its engine.
        where: Resources of Ray.
        device: Device on which the vectorized engine trains.
        rounds_on_flower: Number of rounds that also run on Ray, to check the vectorized engine.
        backend: Backend that trains in the vectorized engine.

    Raises:
        FedSelError: The engine cannot run the scenario. The message says what to change.
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
    """Refuse arguments of :func:`simulate` that have the wrong type.

    Raises:
        ParameterError: An argument has the wrong type. The message says what was expected.
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
