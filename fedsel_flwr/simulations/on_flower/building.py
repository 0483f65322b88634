"""Construction of what a scenario needs in Flower's two APIs: strategy, selector and base; rounds; the clients' app."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Final

from flwr.app import ArrayRecord, MetricRecord
from flwr.client import Client, ClientApp
from flwr.common import Context, NDArrays, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, ServerConfig, SimpleClientManager
from flwr.server import strategy as legacy_strategies
from flwr.serverapp import Grid
from flwr.serverapp import strategy as message_strategies

from fedsel_flwr import strategies
from fedsel_flwr.checks import AUTO
from fedsel_flwr.clients.torch_client import TorchClient, make_message_app
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.flower import start_grid
from fedsel_flwr.rounds.eligibility import Availability
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.roster import ClientValues, Roster
from fedsel_flwr.rounds.run_length import Budget, ShouldStop
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.selectors.base import over_selected
from fedsel_flwr.selectors.registry import label_of, selector_class
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import chooses_cohort_size
from fedsel_flwr.simulations.scenario_tables import Availability as AvailabilityTable
from fedsel_flwr.simulations.worlds.availability import BernoulliAvailability, TraceAvailability
from fedsel_flwr.simulations.worlds.image_files import find_file
from fedsel_flwr.simulations.worlds.world import World
from fedsel_flwr.strategies import message

BASE_CLASSES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedavgm": "FedAvgM",
}
"""Base in a scenario -> name of its class in ``flwr.server.strategy`` and in ``flwr.serverapp.strategy``."""


class LegacyApi:
    """Legacy API: the base holds the initial model and evaluates on the test set.

    Attributes:
        package: Package with the selection strategies of this API.
    """

    package: ClassVar[ModuleType] = strategies

    def make_base(self, world: World) -> Any:
        """Make the scenario's base strategy.

        Args:
            world: The scenario's world.

        Returns:
            The base.
        """

        # Measures the model on the test set, which no selector sees. FedAvg calls this after each round and before the
        # first.
        def evaluate_fn(round: int, arrays: NDArrays, config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
            loss, accuracy = world.test(arrays)
            return loss, {"accuracy": accuracy}

        return getattr(legacy_strategies, BASE_CLASSES[world.scenario.aggregation.base])(
            fraction_evaluate=0.0,
            min_available_clients=world.scenario.num_clients,
            initial_parameters=ndarrays_to_parameters(list(world.initial_arrays())),
            evaluate_fn=evaluate_fn,
            on_fit_config_fn=lambda round: {"round": round},
            # Without a function, Flower warns in every run that metrics are not aggregated.
            fit_metrics_aggregation_fn=lambda metrics: {},
            **base_parameters(world.scenario),
        )

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """Run the scenario's rounds, or only the rounds after the strategy's checkpoint.

        Args:
            grid: Flower's connection to the nodes.
            world: The scenario's world.
            strategy: The selection strategy.

        Returns:
            The final global model.
        """
        scenario = world.scenario
        server = make_server(strategy, scenario.num_clients)
        # Flower's legacy server counts from 1 in every process, so a resumed run asks it only for the remaining rounds.
        done = 0 if strategy.resumed is None else strategy.resumed.round
        config = ServerConfig(num_rounds=scenario.rounds - done, round_timeout=scenario.aggregation.round_timeout_s)
        start_grid(grid=grid, server=server, config=config)
        return server_arrays(server)

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """Make the ClientApp of the simulated clients.

        Args:
            client_of: Function that returns the client of a node.

        Returns:
            The app.
        """

        def client_fn(context: Context) -> Client:
            return client_of(context).to_client()

        return ClientApp(client_fn=client_fn)


class MessageApi:
    """Message API: its bases do not evaluate on the server, so :meth:`run` passes the evaluation to Flower.

    This class has the same attributes and methods as :class:`LegacyApi`.
    """

    package: ClassVar[ModuleType] = message

    def make_base(self, world: World) -> Any:
        """Make the scenario's base strategy, see :meth:`LegacyApi.make_base`."""
        return getattr(message_strategies, BASE_CLASSES[world.scenario.aggregation.base])(
            fraction_evaluate=0.0, min_available_nodes=world.scenario.num_clients, **base_parameters(world.scenario)
        )

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """Run the scenario's rounds, see :meth:`LegacyApi.run`."""
        scenario, initial = world.scenario, ArrayRecord(list(world.initial_arrays()))

        def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            loss, accuracy = world.test(arrays.to_numpy_ndarrays())
            return MetricRecord({"loss": loss, "accuracy": accuracy})

        result = strategy.start(
            grid=grid,
            initial_arrays=initial,
            num_rounds=scenario.rounds,
            timeout=scenario.aggregation.round_timeout_s,
            evaluate_fn=evaluate_fn,
        )
        # Flower returns no arrays if no round delivered a model.
        final: ArrayRecord = result.arrays if result.arrays else initial
        return final.to_numpy_ndarrays()

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """Make the ClientApp of the simulated clients, see :meth:`LegacyApi.make_client_app`."""
        return make_message_app(client_of)


def base_parameters(scenario: Scenario) -> dict[str, Any]:
    """Return the parameters that are special to the scenario's base.

    Args:
        scenario: The scenario, whose table ``aggregation`` names the base.

    Returns:
        Keyword arguments, the same in both APIs.
    """
    rate = scenario.aggregation.server_learning_rate
    return {
        "fedprox": {"proximal_mu": scenario.training.proximal_mu},
        "fedadam": {"eta": rate},
        "fedyogi": {"eta": rate},
        "fedavgm": {"server_learning_rate": rate},
    }.get(scenario.aggregation.base, {})


def make_server(strategy: legacy_strategies.Strategy, max_workers: int) -> Server:
    """Make Flower's server for the legacy API.

    Args:
        strategy: The strategy.
        max_workers: Number of clients that may be asked at the same time. Each uses a thread, so that no client waits
            for another. Threads are started when they are needed.

    Returns:
        The server.
    """
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    server.set_max_workers(max_workers)
    return server


def server_arrays(server: Server) -> Arrays:
    """Return the global model of a server of the legacy API."""
    return parameters_to_ndarrays(server.parameters)


APIS: Final[dict[str, LegacyApi | MessageApi]] = {"legacy": LegacyApi(), "message": MessageApi()}
"""Name of an API in a scenario -> the API."""


def make_strategy(
    world: World,
    on_round: Callable[[RoundRecord], None] | None = None,
    selector: Selector | None = None,
    checkpointing: Mapping[str, Any] | None = None,
    should_stop: ShouldStop | None = None,
) -> Any:
    """Build the scenario's selection strategy around its base strategy, in the API that the scenario names.

    Args:
        world: The scenario's world.
        on_round: Function called with each finished round.
        selector: Selector of the strategy. If None, the scenario's selector is created.
        checkpointing: Options of the strategy's checkpoints.
        should_stop: Function that ends the run after the round for which it returns True.

    Returns:
        The strategy, a ``SelectionStrategy`` of the scenario's API.

    Raises:
        ParameterError: A selector parameter is missing or out of range, or the availability trace cannot be used.
    """
    scenario = world.scenario
    asks = selector_class(scenario.selector) if selector is None else selector
    world.check_validation_set(asks.needs, label_of(scenario.selector) if selector is None else selector.name)
    api, chosen = APIS[scenario.api], scenario.aggregation.options()
    options: dict[str, Any] = chosen | {
        "base": api.make_base(world),
        "max_latency": scenario.wireless.max_latency_s,
        "min_available": scenario.num_clients,
        # The same limit as for a round. On a busy machine a shorter wait would miss clients, and the run would not be
        # reproducible.
        "roll_call_timeout": scenario.aggregation.round_timeout_s,
        "channels": scenario.wireless.channels
        or chosen["concurrency"]
        or (over_selected(scenario.clients_per_round, chosen["over_selection"]) if asks.waves else None),
        "validation": world.validation(),
        "learning_rate": scenario.training.learning_rate,
        "availability": make_availability(scenario),
        "budget": Budget(simulated_s=scenario.simulated_s or math.inf, joules=scenario.joules or math.inf),
        "evaluate_in": lambda number: number % scenario.evaluation_every == 0 or number >= scenario.rounds,
        "on_round": on_round,
        "should_stop": should_stop,
        **(checkpointing or {}),
    }
    package = api.package
    if selector is not None:
        return package.SelectionStrategy(selector, **options)
    params = selector_params(scenario, world.num_examples())
    # A paper's selector gets the paper's strategy, which sets averaging, filter and validation as in the paper.
    for name in package.__all__:
        paper = getattr(package, name)
        if getattr(getattr(paper, "selector_class", None), "name", None) == scenario.selector:
            # "auto" affects only the selector's rewards. The strategy still needs the scenario's maximum as a number.
            if params.get("max_latency") == AUTO:
                options["longest_wait"] = options.pop("max_latency")
            # PCZFL has a parameter with the same name and meaning. The longer warm-up applies.
            own = params.get("warmup_rounds", 0)
            return paper(**params | options | {"warmup_rounds": max(own, chosen["warmup_rounds"])})
    selector = create(scenario.selector, **params)
    # A parameter may let the selector read more columns than its class.
    world.check_validation_set(selector.needs, label_of(scenario.selector))
    return package.SelectionStrategy(selector, **options)


def check_strategy(scenario: Scenario, strategy: Any) -> None:
    """Refuse a caller's strategy that is not a selection strategy of the scenario's API.

    Raises:
        ParameterError: The strategy has another API or another type.
    """
    package = APIS[scenario.api].package
    fits = isinstance(strategy, package.SelectionStrategy.strategy_type)
    if not fits or not isinstance(getattr(strategy, "history", None), History):
        raise ParameterError(
            f"strategy must be of the API {scenario.api!r}, such as {package.__name__}.SelectionStrategy(...), got "
            f"{strategy!r:.80}."
        )


def make_availability(scenario: Scenario) -> Availability | None:
    """Build the availability of the clients.

    Args:
        scenario: The scenario, whose table ``availability`` is used.

    Returns:
        A function of client id, round and simulated seconds; None if all clients are always available.

    Raises:
        ParameterError: The trace cannot be read, or one of its rows is wrong. Or it names clients that the scenario
            does not have, or covers none of the run's time.
    """
    table = scenario.availability
    if table.kind == "bernoulli":
        return BernoulliAvailability(table.probability, scenario.seed)
    if table.kind == "always":
        return None
    if not table.trace:
        raise ParameterError(
            "availability.kind = 'trace' needs availability.trace, the path of a CSV file 'second,client,state' or "
            "'round,client,state'"
        )
    path = find_file(table.trace, key="availability.trace", data_dir=scenario.data.data_dir or None)
    trace = TraceAvailability(path, seconds_per_round=table.seconds_per_round or None)
    # At most, all clients answer a probe and train, in waves over the channels.
    waves = math.ceil(scenario.num_clients / (scenario.wireless.channels or scenario.clients_per_round))
    trace.check(scenario.num_clients, scenario.rounds, 2 * waves * scenario.wireless.max_latency_s)
    return trace


def first_rounds(scenario: Scenario, rounds: int) -> Scenario:
    """Return a scenario of a run's first rounds; a trace that begins after them has no effect, and is left out."""
    make_availability(scenario)
    short = scenario.model_copy(update={"rounds": min(rounds, scenario.rounds)})
    try:
        make_availability(short)
    except ParameterError:
        return short.model_copy(update={"availability": AvailabilityTable()})
    return short


def check_selector(scenario: Scenario) -> None:
    """Check the parameters of the scenario's selector before any run starts.

    Raises:
        ParameterError: The selector is unknown, or one of its parameters is missing, out of range, or does not have a
            value for every client.
    """
    # The data are not read yet, but any sizes are sufficient to check the other parameters.
    params = selector_params(scenario, dict.fromkeys(range(scenario.num_clients), 1))
    name = scenario.selector
    create(name, **params)
    for key in selector_class(name).by_client & {key for key, value in params.items() if value is not None}:
        values = ClientValues(key, params[key], Roster())
        lacking = [k for k in range(scenario.num_clients) if not values.covers(str(k))]
        if lacking:
            raise ParameterError(
                f"selectors.{name}.{key} has {len(values.given)} entries but none for client {lacking[0]}. "
                f"Give one for each of the {scenario.num_clients} clients."
            )


def selector_params(scenario: Scenario, num_examples: Mapping[int, int]) -> dict[str, Any]:
    """Return the parameters of the scenario's selector.

    Args:
        scenario: The scenario.
        num_examples: Client -> its number of training examples. Replaces the value "sizes" of a per-client parameter.

    Returns:
        Keyword arguments of the selector's class, which checks their ranges.

    Raises:
        ParameterError: The selector is unknown.
    """
    cls = selector_class(scenario.selector)
    params = common_params(scenario, cls) | scenario.selectors.get(label_of(scenario.selector), {})
    for key in cls.by_client:
        if params.get(key) == "sizes":
            params[key] = dict(num_examples)
    return params


def common_params(scenario: Scenario, make: Callable[..., Selector]) -> dict[str, Any]:
    """Return the parameters of a selector that the scenario determines.

    These are ``seed``, ``clients_per_round``, ``max_latency``, ``total_rounds``, ``channels`` and ``trained_examples``.
    The last one is local steps times batch size, or None for whole passes.

    Args:
        scenario: The scenario.
        make: A selector's class, or a callable that creates a selector.

    Returns:
        The parameters that ``make`` accepts and that ``functools.partial`` has not fixed. ``clients_per_round`` is left
        out if its default is None, because then the algorithm decides.
    """
    steps = scenario.training.local_steps
    own = {
        "clients_per_round": scenario.clients_per_round,
        "seed": scenario.seed,
        "max_latency": scenario.wireless.max_latency_s,
        "total_rounds": scenario.rounds,
        "channels": scenario.wireless.channels or scenario.clients_per_round,
        "trained_examples": steps * scenario.training.batch_size if steps else None,
    }
    accepted = inspect.signature(make).parameters
    taken = {key: value for key, value in own.items() if key in accepted and key not in getattr(make, "keywords", {})}
    if chooses_cohort_size(accepted):
        taken.pop("clients_per_round", None)
    return taken
