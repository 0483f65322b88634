"""What must be known of the base strategies that are wrapped (legacy API)."""

from __future__ import annotations

from collections.abc import Iterator

from flwr.server.strategy import Bulyan, FedAvg, Krum, Strategy

from fedsel_flwr.errors import ParameterError, RunError


def default_base() -> FedAvg:
    """The base strategy where none is given: FedAvg without federated evaluation."""
    return FedAvg(fraction_evaluate=0.0)


def layers(base: Strategy) -> Iterator[Strategy]:
    """``base`` and the strategies it wraps, outermost first."""
    current: object = base
    while isinstance(current, Strategy):
        yield current
        current = getattr(current, "strategy", None)


def min_available(base: Strategy) -> int:
    """The largest ``min_available_clients`` of ``base`` and what it wraps."""
    return max((int(getattr(layer, "min_available_clients", 0)) for layer in layers(base)), default=0)


def least_models(base: Strategy) -> tuple[int, str]:
    """How many models ``base`` needs to do what it promises, and why.

    Krum needs n >= 2f + 3 (Blanchard et al., NeurIPS 2017); Flower's returns the first model below. Bulyan needs
    n >= 4f + 3 (El Mhamdi et al., ICML 2018).
    """
    for layer in layers(base):
        if isinstance(layer, Krum):
            f = layer.num_malicious_clients
            return (2 * f + 3 if f else 1), f"Krum with num_malicious_clients = {f} needs 2f + 3 models"
        if isinstance(layer, Bulyan):
            f = layer.num_malicious_clients
            return 4 * f + 3, f"Bulyan with num_malicious_clients = {f} needs 4f + 3 models"
    return 1, ""


def check_cohort(base: Strategy, clients_per_round: int) -> None:
    """Refuse a cohort that ``base`` can never work with."""
    needed, why = least_models(base)
    if clients_per_round < needed:
        raise ParameterError(f"{why}: {needed}, but clients_per_round is {clients_per_round}; raise it or lower f")


def check_survivors(base: Strategy, survivors: int, round: int) -> None:
    """Refuse to aggregate fewer models than ``base`` needs."""
    needed, why = least_models(base)
    if survivors < needed:
        raise RunError(
            f"round {round}: {why}: {needed}, but {survivors} updates are usable; raise clients_per_round, or set "
            f"min_completed={needed} to keep the global model in such rounds"
        )
