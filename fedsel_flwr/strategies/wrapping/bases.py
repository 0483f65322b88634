"""Facts about base strategies: what each requires, what it reads of a reply, and what it cannot be combined with.

A base consists of the user's strategy and the strategies that it wraps, one layer each. Flower does not publish these
facts, so they are derived from class names and attributes, in both APIs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.flower import ClientProxy
from fedsel_flwr.rounds.late import LateUpdate
from fedsel_flwr.rounds.settings import Payload
from fedsel_flwr.rounds.untrusted import finite_number, one_line, shown

logger = logging.getLogger("fedsel_flwr")
NEEDED_CLIENTS = ("min_available_clients", "min_available_nodes", "min_train_nodes")
"""Attributes of bases with the number of clients that must be connected."""
TREES = ("FedXgbBagging", "FedXgbCyclic", "FedXgbNnAvg")
"""Bases whose models grow from round to round."""
TREE_LISTS = ("iteration_indptr", "tree_info", "trees")
"""Lists of an XGBoost model in JSON that bagging extends."""
BUFFERED = ("FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi")
"""Bases that may be used in buffered rounds, and with late updates."""
NORM_BITS = {"DifferentialPrivacyClientSideAdaptiveClipping": "norm_bit", "DPFedAvgAdaptive": "dpfedavg_norm_bit"}
"""Class of a base -> the one-bit metric that it counts over the replies."""


def layers(base: object) -> Iterator[object]:
    """Yield ``base`` and the strategies it wraps, outermost first, whatever the name of the attribute."""
    current, seen = base, list[int]()
    while current is not None and id(current) not in seen:
        yield current
        seen.append(id(current))
        inner = (getattr(current, "strategy", None), *getattr(current, "__dict__", {}).values())
        # The instances of a strategy's class; a text or a class may have the same name.
        current = next((one for one in inner if hasattr(type(one), "aggregate_evaluate")), None)


def outermost(base: object, name: str) -> Any:
    """Return an attribute of the outermost layer that has it; None if no layer does."""
    return next((one for layer in layers(base) if (one := getattr(layer, name, None)) is not None), None)


# Classes are matched by name: the two APIs have different classes of the same name, and a run loads only one API.
def is_a(base: object, *names: str) -> bool:
    """Return whether the class of ``base``, or one of its base classes, has one of these names."""
    return any(cls.__name__ in names for cls in type(base).__mro__)


def has_layer(base: object, *names: str) -> bool:
    """Return whether ``base``, or a strategy it wraps, has one of these class names."""
    return any(is_a(layer, *names) for layer in layers(base))


def min_available(base: object, *names: str) -> int:
    """Return the largest number of connected clients that a layer of ``base`` requires.

    Args:
        base: The base strategy.
        names: The attributes with such numbers; by default those for training.
    """
    numbers = (int(getattr(layer, name, 0)) for layer in layers(base) for name in names or NEEDED_CLIENTS)
    return max(numbers, default=0)


def evaluates(base: object) -> bool:
    """Return whether clients evaluate the global model for ``base``."""
    for layer in layers(base):
        if not _flowers(layer, "configure_evaluate"):
            return True
        if getattr(layer, "fraction_evaluate", None) == 0.0:
            return False
    return True


def _flowers(layer: object, *methods: str) -> bool:
    """Return whether a layer has a method, which has these names in both APIs, from a class of Flower."""
    owner = next((cls for cls in type(layer).__mro__ if not vars(cls).keys().isdisjoint(methods)), object)
    # A method that is set on the object itself is the user's own.
    return owner.__module__.split(".")[0] == "flwr" and vars(layer).keys().isdisjoint(methods)


def min_models(base: object) -> tuple[int, str]:
    """Return the number of models that ``base`` needs to keep its guarantee, and the reason.

    Krum needs n >= 2f + 3 (Blanchard et al., NeurIPS 2017). With fewer models, Flower's Krum returns the first model.
    Bulyan needs n >= 4f + 3 (El Mhamdi et al., ICML 2018).
    """
    for layer in layers(base):
        f = int(getattr(layer, "num_malicious_clients", getattr(layer, "num_malicious_nodes", 0)))
        if is_a(layer, "Bulyan"):
            return 4 * f + 3, f"Bulyan with f = {f} malicious clients needs 4f + 3 models"
        if is_a(layer, "Krum", "MultiKrum"):
            # With f = 0 no client is malicious, and Krum over a single model is that model.
            return (2 * f + 3 if f else 1), f"Krum with f = {f} malicious clients needs 2f + 3 models"
    return 1, ""


def payload(base: object) -> Payload:
    """Return the content of the replies that ``base`` aggregates."""
    if has_layer(base, *TREES):
        return "trees"
    if private(base):
        return "private"
    return "own" if brings_own(base, "aggregate_fit", "aggregate_train") else "model"


def brings_own(base: object, *methods: str) -> bool:
    """Return whether no layer of ``base`` has the method from a class of Flower.

    Args:
        base: The base strategy.
        methods: The names of the method in both APIs.
    """
    return not any(_flowers(layer, *methods) for layer in layers(base))


def private(base: object, *prefixes: str) -> list[object]:
    """Return the layers of ``base`` that add differential privacy, by the first letters of their classes' names."""
    names = prefixes or ("DifferentialPrivacy", "DPFedAvg")
    return [one for one in layers(base) if any(cls.__name__.startswith(names) for cls in type(one).__mro__)]


def weight_key(base: object) -> str:
    """Return the metric with which ``base`` weights the replies of the Message API."""
    key = outermost(base, "weighted_by_key")
    return "num-examples" if key is None else str(key)


def record_names(base: object) -> tuple[str, str]:
    """Return the names of the records in which ``base`` sends the model and the config in the Message API."""
    return outermost(base, "arrayrecord_key") or "arrays", outermost(base, "configrecord_key") or "config"


def evaluate_config(base: object, round: int) -> dict[str, Any]:
    """Return the config of an evaluation in the legacy API, from the function that FedAvg calls for it."""
    own = outermost(base, "on_evaluate_config_fn")
    return {} if own is None else dict(own(round))


def averages_lists(base: object, function: str) -> bool:
    """Return whether ``base`` averages list-valued metrics element by element; a user's own function may not.

    Args:
        base: A strategy of the Message API.
        function: "train_metrics_aggr_fn" or "evaluate_metrics_aggr_fn".
    """
    own = [getattr(getattr(layer, function, None), "__name__", "") for layer in layers(base)]
    return "aggregate_metricrecords" in own


def read_metrics(base: object) -> dict[str, str]:
    """Return the metrics of a reply that ``base`` reads by name, except the weight: key -> the class that reads it.

    An invalid loss makes QFedAvg of the Message API return a model of NaN. Adaptive clipping on the client counts norm
    bits, and Flower ends the run if one is missing.
    """
    read: dict[str, str] = {}
    for layer in layers(base):
        if (key := getattr(layer, "train_loss_key", None)) is not None:
            read[str(key)] = type(layer).__name__
        read |= {bit: type(layer).__name__ for name, bit in NORM_BITS.items() if is_a(layer, name)}
    return read


def fault_in_metrics(base: object, metrics: Mapping[str, object]) -> str:
    """Return the reason why ``base`` cannot use a reply with these metrics; empty if it can."""
    for key, reader in read_metrics(base).items():
        if key not in metrics:
            return f"metrics: expected {key}, which {reader} reads of every reply, got none"
        value = metrics[key]
        # ``finite_number`` does not accept a bool, but a client may send a norm bit as a bool.
        flag = key in NORM_BITS.values()
        as_float = float(value) if flag and isinstance(value, bool) else finite_number(value)
        if as_float is None or as_float < 0.0:
            wanted = "0 or 1" if flag else "a finite number of at least 0"
            return f"metrics: {key}: expected {wanted}, got {shown(value)}"
    return ""


def fault_in_model(base: object, model: Iterable[bytes]) -> str:
    """Return the reason why ``base`` cannot use a model of bytes, in one or several pieces; empty if none is known."""
    return fault_in_trees(model) if has_layer(base, "FedXgbBagging") else ""


def fault_in_trees(models: Iterable[bytes]) -> str:
    """Return the fault of XGBoost models in JSON that prevents bagging, because one such model ends the run.

    >>> fault_in_trees([b'{"learner": {}}'])
    "trees: KeyError: 'gradient_booster'"
    """
    try:
        for one in models:
            _check_trees(json.loads(one))
    # A client may send any content, so any error may be raised.
    except Exception as error:
        return one_line(f"trees: {type(error).__name__}: {error}")
    return ""


def _check_trees(document: Any) -> None:
    """Read the same parts of a model as Flower's bagging.

    Raises:
        Exception: Any error with which bagging would fail.
    """
    model = document["learner"]["gradient_booster"]["model"]
    sizes = model["gbtree_model_param"]
    # ``num_trees`` is converted only for its exception, because bagging converts it too.
    _, added = int(sizes["num_trees"]), int(sizes["num_parallel_tree"])
    for name in TREE_LISTS:
        if not isinstance(model[name], list):
            raise TypeError(f"{name} is not a list")
    if added > len(model["trees"]):
        raise ValueError(f"{len(model['trees'])} trees, but num_parallel_tree is {added}")
    if not all(isinstance(tree, dict) for tree in model["trees"]):
        raise TypeError("a tree is not an object")
    model["iteration_indptr"].append(model["iteration_indptr"][-1] + added)


def check_accepts_selector(base: object) -> None:
    """Refuse a base that takes the clients in turn and ignores the selector's choice."""
    if has_layer(base, "FedXgbCyclic"):
        raise ParameterError(f"{type(base).__name__} takes the clients in turn, without a selector. Use another base")


def check_trains(base: object) -> None:
    """Refuse a base of the Message API whose fraction_train of 0 configures no client in any round."""
    for layer in layers(base):
        if getattr(layer, "fraction_train", None) == 0 and _flowers(layer, "configure_train"):
            raise RunError(f"{type(layer).__name__} configures no messages: its fraction_train is 0. Set it above 0")


def check_cohort(base: object, models: int) -> None:
    """Refuse a number of models, ``wait_for`` or ``clients_per_round``, that ``base`` can never work with."""
    needed, why = min_models(base)
    if models < needed:
        raise ParameterError(f"{why}: {needed}, but a round has {models}. Raise clients_per_round, or lower f")


def check_filter(base: object) -> None:
    """Refuse a base that needs several models, because FedCA's filter may keep a single one."""
    needed, why = min_models(base)
    if needed > 1:
        raise ParameterError(f"{why}: {needed}, but filter may keep a single one. Use f = 0, or no filter")


def check_moved(base: object, option: str) -> None:
    """Refuse a base that may do other things with a result than add up the clients' updates, for an option's sake."""
    flowers = [cls.__name__ for cls in type(base).__mro__ if cls.__module__.split(".")[0] == "flwr"]
    # A user's subclass may send and record what it likes, as long as it leaves the aggregation to Flower's class.
    if len(list(layers(base))) > 1 or payload(base) != "model" or flowers[0] not in BUFFERED:
        raise ParameterError(
            f"{option} moves models to the current one, which {type(base).__name__} may not expect. Use Flower's "
            f"{', '.join(BUFFERED)}, a subclass with their aggregation, or leave {option} out"
        )


def check_survivors(base: object, survivors: int, round: int) -> None:
    """Refuse to aggregate fewer models than ``base`` needs."""
    needed, why = min_models(base)
    if survivors < needed:
        raise RunError(
            f"round {round}: {why}: {needed}, but {survivors} updates are usable. Raise clients_per_round, or set "
            f"min_completed={needed} to keep the global model in such rounds"
        )


def check_is_average(base: object, averaging: str) -> None:
    """Refuse a scheme that needs each client's share of all examples if ``base`` does not weight by examples."""
    if type(base).__name__ not in ("FedAvg", "FedProx"):
        raise ParameterError(
            f"averaging {averaging!r} is for FedAvg and FedProx only, got {type(base).__name__}. Use averaging='fedpdp'"
        )
    if (key := getattr(base, "weighted_by_key", "num-examples")) != "num-examples":
        raise ParameterError(
            f"averaging {averaging!r} needs shares of examples, but the base weighs by {key!r}. Use averaging='fedpdp'"
        )


def check_not_aggregated(updates: list[object], reader: str) -> None:
    """Refuse secure aggregation for a selector that reads updates, because all replies then share one object."""
    if len(updates) > 1 and all(update is updates[0] for update in updates):
        raise RunError(
            f"{reader} reads each client's update, but all replies share one, as under secure aggregation (SecAgg). "
            "Use a selector of latencies, such as cs-ucb or bsfl, and have the clients report their latency"
        )


def clips(base: object) -> bool:
    """Return whether a layer of ``base`` clips the updates on the server, and divides by their norms."""
    return bool(private(base, "DifferentialPrivacyServerSide"))


def warn_of_privacy(base: object, reader: str) -> None:
    """Warn that differential privacy does not cover the updates that a selector reads."""
    # With server_side_noising=False, the clients add the noise of the older wrappers, before anybody reads the updates.
    if any(getattr(one, "server_side_noising", True) for one in private(base)):
        logger.warning(
            "%s reads the clients' updates before noise is added, so its choices are not covered by the "
            "differential-privacy guarantee of %s", reader, type(base).__name__,
        )  # fmt: skip


def aggregation_round(base: object, round: int) -> int:
    """Return the number of the round under which ``base`` aggregates.

    FedAvgM of the legacy API creates its momentum in round 1, and later ends the run if it has none. If the first
    rounds had no usable update, the first round that FedAvgM sees counts as round 1.
    """
    with_momentum = [one for one in layers(base) if is_a(one, "FedAvgM") and getattr(one, "server_momentum", 0.0) > 0.0]
    return 1 if any(getattr(one, "momentum_vector", None) is None for one in with_momentum) else round


class NamedClient(ClientProxy):
    """Client that a base strategy knows only by its name, and that Flower cannot call.

    Args:
        cid: Name of the client.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(
            f"a base strategy cannot call client {self.cid}, simulated or late. Use engine 'ray', or leave late out"
        )

    fit = evaluate = get_properties = get_parameters = reconnect = _refuse


def late_result(update: LateUpdate) -> tuple[ClientProxy, FitRes]:
    """Return a late update as a client's result; the moved model replaces its arrays when it is cleaned."""
    parameters = ndarrays_to_parameters(list(update.change))
    return NamedClient(update.node), FitRes(Status(Code.OK, ""), parameters, max(1, int(update.weight)), update.metrics)


def as_counts(weights: Iterable[float]) -> list[int]:
    """Return weights as Flower's numbers of examples, which are whole; fractions keep six digits.

    >>> as_counts([10.0, 2.5]), as_counts([10.0, 2.0])
    ([10485760, 2621440], [10, 2])
    """
    given = [float(weight) for weight in weights]
    scale = 1 if all(weight.is_integer() for weight in given) else 2**20
    return [round(scale * weight) for weight in given]
