"""The simulated clients of a scenario as a Flower app, in either API."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Message
from flwr.client import ClientApp
from flwr.common import Context

from fedsel_flwr.clients.torch_client import TorchClient
from fedsel_flwr.simulations.apis import APIS
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.sharing import Offer, accept, offered
from fedsel_flwr.simulations.world import world_of


class ScenarioApp(ClientApp):
    """The simulated clients, in the API that the scenario names.

    Flower pickles it with each message. It then takes along where the actor finds the world that this process has
    built (:mod:`fedsel_flwr.simulations.sharing`).

    Args:
        scenario_of: Returns the scenario from a node's context; must be picklable. The node's ``partition-id`` says
            which client it is.
        offer: Where the world is that another process has built; None if nowhere.
    """

    def __init__(self, scenario_of: Callable[[Context], Scenario], offer: Offer | None = None) -> None:
        super().__init__()
        self._scenario_of, self._offer = scenario_of, offer

        def client(context: Context) -> TorchClient:
            return client_of(scenario_of(context), context)

        self._apps = {name: api.make_client_app(client) for name, api in APIS.items()}

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        if self._offer is not None:
            accept(self._offer)
        return self._apps[self._scenario_of(context).api](message, context)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """The scenario, and where its world is; the rest is made anew."""
        return type(self), (self._scenario_of, self._offer or offered())


def client_of(scenario: Scenario, context: Context) -> TorchClient:
    """The client that a node is.

    Args:
        scenario: The scenario.
        context: The node's; its ``partition-id`` says which client it is.

    Returns:
        The client.

    Raises:
        ParameterError: There is no such client; the data or a parameter cannot be used.
    """
    torch.set_num_threads(1)  # an actor has one core; the same sums in the same order everywhere
    world = world_of(scenario)
    world.model.to(own_device())
    return world.client(int(context.node_config["partition-id"]))


def own_device() -> str:
    """Where this process's clients train: on the GPU that Ray has given it, else on the CPU.

    >>> own_device()
    'cpu'
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return "cpu"
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU")
    return "cuda" if given and torch.cuda.is_available() else "cpu"
