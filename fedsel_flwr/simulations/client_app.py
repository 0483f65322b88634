"""The simulated clients of a scenario as a Flower app, in either API."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flwr.app import Message
from flwr.client import Client, ClientApp
from flwr.common import Context

from fedsel_flwr.clients.message_client import make_message_app
from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.world import world_of


class ScenarioApp(ClientApp):
    """The simulated clients, in the API that the scenario names.

    Args:
        scenario_of: Returns the scenario from a node's context; must be picklable. The node's ``partition-id`` says
            which client it is.
    """

    def __init__(self, scenario_of: Callable[[Context], Scenario]) -> None:
        super().__init__()
        self._scenario_of = scenario_of
        self._legacy = ClientApp(client_fn=make_client_fn(scenario_of))
        self._message = make_message_app(lambda context: _client(scenario_of(context), context))

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        app = self._message if self._scenario_of(context).api == "message" else self._legacy
        return app(message, context)


def make_client_fn(scenario_of: Callable[[Context], Scenario]) -> Callable[[Context], Client]:
    """Return the legacy API's ``client_fn``; the node's ``partition-id`` says which client it is."""

    def client_fn(context: Context) -> Client:
        return _client(scenario_of(context), context).to_client()

    return client_fn


def _client(scenario: Scenario, context: Context) -> TorchClient:
    torch.set_num_threads(1)  # an actor has one core; the same sums in the same order everywhere
    return world_of(scenario).client(int(context.node_config["partition-id"]))
