"""Simulation of a scenario: with Flower on Ray and hundreds of virtual clients, or vectorized in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.common import Context
from flwr.server import ServerApp
from flwr.serverapp import Grid

from fedsel_flwr import flower
from fedsel_flwr.callbacks.trackers import TrackedRun, together
from fedsel_flwr.checks import one_of, whole
from fedsel_flwr.clients.batched.backends import BACKENDS, Backend
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.report.progress import silent
from fedsel_flwr.report.run_folder import run_name
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.rounds.run_length import ShouldStop, check_should_stop
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.diagnosis import client_accuracies, derived_tables
from fedsel_flwr.simulations.on_flower.app import ScenarioApp, run_rounds, wait_for_nodes
from fedsel_flwr.simulations.on_flower.building import check_strategy, make_strategy
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, check_device
from fedsel_flwr.simulations.on_flower.ray_session import RaySession
from fedsel_flwr.simulations.results import (
    REPLAY_CURE,
    RunFolder,
    RunResult,
    describe_runs,
    discard_progress,
    read_fitting_run,
)
from fedsel_flwr.simulations.run_identity import Identity, code_identity, identity, run_parameters
from fedsel_flwr.simulations.run_options import CheckpointPace, CheckpointPlan, RunOptions, takes
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.vectorized import check_vectorized, run_vectorized
from fedsel_flwr.simulations.worlds.world import World, world_of

ENGINES = ("ray", "vectorized")
"""Names of the engines."""


@dataclass(frozen=True)
class Arguments(RunOptions):
    """Arguments of :func:`simulate`.

    Args:
        scenario: The scenario, which also names the selector.
        engine: Either "ray" or "vectorized". The engine "ray" runs Flower on Ray and trains each client separately. The
            vectorized engine runs the same rounds in this process, and trains a round's clients as one batch
            (:mod:`fedsel_flwr.simulations.vectorized`). If None, the scenario's engine.
        on_round: Function called with each finished round; on Ray, the server's thread calls it.
        should_stop: Function called after ``on_round``, with the number of the finished round and the history so far.
            If the function returns True, the run ends after this round, as with a budget. Such a run counts as
            finished.
        strategy: Your selection strategy, of the scenario's API. The strategy then sets latencies, channels and
            availability. In the legacy API its base must send ``round`` in the config. If None,
            :func:`~fedsel_flwr.simulations.on_flower.building.make_strategy` makes the scenario's strategy.
        selector: Your selector, which replaces the scenario's.
        backend: Backend that trains in the vectorized engine: "numba", "manual", "vmap", "sequential" or "auto". The
            value "auto" means the first of "manual", "vmap" and "sequential" that can train the model. If None,
            :func:`~fedsel_flwr.clients.batched.backends.choose_backend` decides by the model and the size of the run.
        label: The selector's label in the folder. If None, the name of your selector or of the scenario's selector.
        checkpoint_dir: Folder of the checkpoints, which are not removed after the run. If None, a run with a ``folder``
            writes its checkpoints to the subfolder ``checkpoints``, and removes them when the run has finished. Other
            runs have no checkpoints.
        keep_checkpoints: Number of checkpoints that are kept.
        code: Identity of the code (:func:`~fedsel_flwr.simulations.run_identity.code_identity`). Pass it if only
            another process has the source of the code. If None, this process computes it.
    """

    scenario: Scenario
    engine: str | None = field(default=None, kw_only=True)
    on_round: Callable[[RoundRecord], None] | None = field(default=None, kw_only=True)
    should_stop: ShouldStop | None = field(default=None, kw_only=True)
    strategy: Any = field(default=None, kw_only=True)
    selector: Selector | None = field(default=None, kw_only=True)
    backend: Backend | None = field(default=None, kw_only=True)
    label: str | None = field(default=None, kw_only=True)
    checkpoint_dir: str | Path | None = field(default=None, kw_only=True)
    keep_checkpoints: int = field(default=3, kw_only=True)
    code: Identity | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse arguments of a wrong type, and arguments that contradict each other."""
        super().__post_init__()
        if not isinstance(self.scenario, Scenario):
            raise ParameterError(f"scenario must be a Scenario (load_scenario), got {type(self.scenario).__name__}")
        if self.selector is not None and not isinstance(self.selector, Selector):
            raise ParameterError(
                f"selector must be an object such as Random(clients_per_round=3), got {self.selector!r:.80}. Set names "
                "in the scenario"
            )
        if self.on_round is not None and not callable(self.on_round):
            raise ParameterError(f"on_round must be a function of a RoundRecord, got {type(self.on_round).__name__}")
        check_should_stop(self.should_stop)
        if self.strategy is not None:
            for name in ("folder", "checkpoint_dir", "resume", "track", "on_round", "selector", "should_stop"):
                if getattr(self, name) not in (None, False):
                    raise ParameterError(f"{name} cannot be combined with strategy=. Set it in the strategy")
        if self.replay and not (self.resume and self.folder is not None and self.checkpoint_dir is None):
            raise ParameterError("replay = True needs resume = True and folder, without checkpoint_dir")


@takes(Arguments)
def simulate(given: Arguments) -> RunResult:
    """Run a scenario to its end, or resume an interrupted run. A resumed run gives the same result.

    Args:
        given: See :class:`Arguments` and :class:`~fedsel_flwr.simulations.run_options.RunOptions`.

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
    scenario, selector = given.scenario, given.selector
    if given.engine is not None:
        scenario = scenario.model_copy(update={"engine": one_of("engine", given.engine, ENGINES)})
    check_engine(scenario, given.where, given.device, backend=given.backend)
    tracking = given.tracking(scenario.name, scenario.num_clients)
    checkpoints = CheckpointPlan.of(
        scenario, given.folder, given.checkpoint_dir, given.checkpoint_every, given.keep_checkpoints, given.resume
    )
    scenario = given.own.named_in(scenario)
    if given.strategy is not None:
        check_strategy(scenario, given.strategy)
    label = given.label or (selector.name if selector else scenario.selector)
    code = code_identity(scenario, selector, given.own) if given.code is None else given.code
    # Built in this thread, so that faults in data and parameters are reported before Ray starts.
    world = world_of(scenario, given.own)
    prints = identity(world, given.own, code)
    world = world.on(given.device)
    finished, anew = None, False
    if given.resume and given.folder is not None:
        try:
            finished = read_fitting_run(given.folder, scenario, label, prints, explain=given.replay)
        except FedSelError:
            if not given.replay:
                raise
            anew = True
    on_round, tracked = given.on_round, None
    if tracking is not None:
        tracked = tracking.run(run_name(label, scenario.seed), run_parameters(scenario, label, selector))
        on_round = tracked if on_round is None else together(tracked, on_round)
    if finished is not None:
        # An earlier process may have been killed after it wrote the result and before it removed the checkpoints.
        checkpoints.discard()
        return finished

    def begin(plan: CheckpointPlan) -> Any:
        options = plan.options(scenario, selector)
        made = given.strategy
        if made is None:
            made = make_strategy(world, on_round, selector, options, given.should_stop)
        if written is not None:
            # Called before the strategy reads its checkpoint, which restores the history from this journal.
            written.record_rounds(made.history, elsewhere=given.checkpoint_dir is not None)
        plan.attach(made, world, prints)
        return made

    written = None if given.folder is None else RunFolder(given.folder, scenario, label, prints)
    with contextlib.nullcontext() if written is None else contextlib.closing(written):
        # Done only after the folder is locked, so that no other process resumes from files that are removed here.
        try:
            made = None if anew else begin(checkpoints)
        except RunError as error:
            if not given.replay:
                raise RunError(f"{error}. {REPLAY_CURE}") if checkpoints.temporary else error from error
            made = None
        if made is None:
            discard_progress(Path(str(given.folder)))
            made = begin(replace(checkpoints, resume=False))
        if written is None:
            result = replace(_run(world, made, given, checkpoints.share, tracked), fingerprints=prints)
            _check_answered(scenario, given.strategy, result)
            return result
        try:
            written.begin()
            result = replace(_run(world, made, given, checkpoints.share, tracked), fingerprints=prints)
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
        return result


def _check_answered(scenario: Scenario, strategy: Any, result: RunResult) -> None:
    """Refuse the result of a caller's strategy with which no client completed a round."""
    rows = result.history.clients
    if strategy is not None and rows and not any(row.completed for row in rows):
        raise RunError(
            f"no client completed in any of {scenario.rounds} rounds. The first failure was {rows[0].problem!r}. "
            "To use your own selector, pass selector= instead of strategy="
        )


def _run(world: World, strategy: Any, given: Arguments, share: float, tracked: TrackedRun | None) -> RunResult:
    """Run the rounds of a world with a strategy; return the result with the clients' accuracies."""
    tracking = contextlib.nullcontext() if tracked is None else tracked.follow(strategy.history)
    with silent(given.quiet), tracking:
        if world.scenario.engine == "vectorized":
            result = run_vectorized(world, strategy, given.device, given.backend, CheckpointPace(share))
        else:
            result = _run_on_ray(world, strategy, given)
    return replace(result, client_accuracies=client_accuracies(world, result.arrays))


def _run_on_ray(world: World, strategy: Any, given: Arguments) -> RunResult:
    scenario = world.scenario
    # Flower's run_simulation returns nothing, so the server app stores its result here.
    results: list[RunResult] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        wait_for_nodes(grid, scenario)
        results.append(run_rounds(grid, world, strategy))

    def what_is_left() -> str:
        if given.folder is None:
            return f" after {len(strategy.history.rounds)} of {scenario.rounds} rounds"
        # Describe the files on the disk, because the last round of the history may not have been written yet.
        return f"; {given.folder} holds {describe_runs(Path(given.folder)) or 'no round yet'}"

    run_simulation(
        session=RaySession(given.where, given.quiet),
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
        flower.run_simulation(**simulation, backend_config={"client_resources": session.resources.client_resources()})


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
            raise ParameterError(f"backend = {backend!r} is for the vectorized engine. Set engine = 'vectorized'")
    if scenario.engine == "vectorized":
        check_vectorized(scenario)
        check_device(device)
        if rounds_on_flower == 0:
            if where.non_default:
                raise ParameterError(f"{where.non_default[0]} is for Ray. Choose the engine 'ray', or leave it out")
            return
    elif device != "cpu":
        raise ParameterError(f"device = {device!r} is for the vectorized engine. On Ray, set client_gpus")
    where.check()


def check_jobs(scenario: Scenario, jobs: int | None, device: str, *, on_cluster: bool = False) -> int | None:
    """Return the checked number of parallel runs.

    Args:
        scenario: Scenario of the runs.
        jobs: The number. If None, 1, or on a cluster as many as it has room for.
        device: Device on which the vectorized engine trains.
        on_cluster: Whether the runs are tasks on a Ray cluster, each with its own cores and GPUs.

    Returns:
        The number; None if the cluster decides.

    Raises:
        ParameterError: The number is below 1, or it is above 1 although the runs share Ray or a device.
    """
    number = None if jobs is None else whole("jobs", jobs, 1)
    if on_cluster:
        return number
    if (number or 1) > 1 and (scenario.engine != "vectorized" or device != "cpu"):
        shared = f"the device {device!r}" if scenario.engine == "vectorized" else "Ray"
        raise ParameterError(f"jobs = {number} runs at a time would share {shared}. Use 'vectorized' on the CPU")
    return number or 1
