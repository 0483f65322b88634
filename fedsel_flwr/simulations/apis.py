"""Flower's two APIs as a scenario uses them: one module each, with the same functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from flwr.client import ClientApp
from flwr.common import Context
from flwr.serverapp import Grid

from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.simulations import legacy_api, message_api
from fedsel_flwr.simulations.world import World


class Api(Protocol):
    """What a module has to have: see :mod:`~fedsel_flwr.simulations.legacy_api`.

    Attributes:
        PACKAGE: Where the selection strategies are.
        STRATEGY: The class of every strategy.
    """

    PACKAGE: str
    STRATEGY: type

    def make_base(self, world: World) -> Any:
        """The scenario's base strategy."""
        ...

    def run(self, grid: Grid, world: World, strategy: Any) -> Arrays:
        """Run the scenario's rounds; returns the final model."""
        ...

    def make_client_app(self, client_of: Callable[[Context], TorchClient]) -> ClientApp:
        """The simulated clients as an app."""
        ...


APIS: Final[dict[str, Api]] = {"legacy": legacy_api, "message": message_api}
"""The scenario's name for an API -> its module."""
