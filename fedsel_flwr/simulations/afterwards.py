"""What is worked out when a run is over, from what no selector and no server knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.clients.objectives import set_arrays
from fedsel_flwr.clients.training import outputs
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.history import ClientRecord, History
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.untrusted import shown
from fedsel_flwr.simulations.world import World
from fedsel_flwr.theory import fair_regret, xia_genie

MAX_CLIENTS = 10_000
"""In larger fleets regret is left out."""
Columns = Mapping[str, npt.NDArray[Any]]


def worked_out(world: World, history: History, arrays: Arrays) -> dict[str, Columns]:
    """Return the tables of a run that is over: name -> columns.

    Args:
        world: The scenario's world.
        history: What happened.
        arrays: The final global model.

    Returns:
        ``regret``, where the system model gives the latencies; ``classes``, where the scenario asks for it.
    """
    tables: dict[str, Columns] = {}
    if world.scenario.clients.latency_mode == "model" and world.scenario.num_clients <= MAX_CLIENTS:
        tables["regret"] = regret(world, history.clients, len(history.rounds))
    if world.scenario.per_class_accuracy:
        tables["classes"] = per_class_accuracy(world, arrays)
    return tables


def regret(world: World, clients: Sequence[ClientRecord], rounds: int) -> Columns:
    """What the choices lost in seconds a round, against the m clients of the least mean latency (Xia, (14)).

    Args:
        world: Its system model gives the mean latencies.
        clients: Who was chosen.
        rounds: How many rounds there were.

    Raises:
        RunError: A client or a round is none of the scenario's.

    Returns:
        ``round``; ``Theta``, the seconds lost since the start, tau_max times the regret; ``theta`` = Theta / round.
    """
    scenario, longest = world.scenario, world.system.max_latency_s
    answers = 1.0 - world.failing.share  # who does not answer has reward 0
    mean_reward = answers * (1.0 - mean_latencies(world.system) / longest)  # of Xia (5); capped, hence never below 0
    chosen = np.zeros((rounds, scenario.num_clients), dtype=np.bool_)
    known = {str(client): client for client in range(scenario.num_clients)}
    for row in clients:
        if row.client_id not in known or not 1 <= row.round <= rounds:
            raise RunError(
                f"the history holds client {shown(row.client_id)} in round {row.round}, but the scenario has clients 0 "
                f"to {scenario.num_clients - 1} and {rounds} rounds. The checkpoints that the run was resumed from are "
                "of another run: begin a new one"
            )
        chosen[row.round - 1, known[row.client_id]] = True
    _, best = xia_genie(mean_reward, scenario.clients_per_round)
    number = np.arange(1, rounds + 1)
    lost = longest * fair_regret(mean_reward, chosen, best)  # Theta, section V of Xia
    return {"round": number, "Theta": lost, "theta": lost / number}


def per_class_accuracy(world: World, arrays: Arrays) -> Columns:
    """How often the model is right on each client's examples of each class (Kim, Fig. 5).

    Args:
        world: The clients' training examples.
        arrays: The model.

    Returns:
        ``client``, ``label``, ``num_examples`` and ``accuracy``, a row for each class that a client has.
    """
    set_arrays(world.model, list(arrays))
    data = world.dataset.train
    labels = np.asarray(data.labels)
    right = (outputs(world.model, data.inputs).argmax(-1).numpy() == labels).astype(np.float64)
    rows: list[tuple[int, int, int, float]] = []
    for k in range(world.scenario.num_clients):
        own = world.train_rows(k)
        counts, hits = np.bincount(labels[own]), np.bincount(labels[own], weights=right[own])
        rows += [(k, int(c), int(counts[c]), float(hits[c] / counts[c])) for c in np.flatnonzero(counts)]
    client, label, examples, accuracy = zip(*rows, strict=True)
    return {
        "client": np.array(client),
        "label": np.array(label),
        "num_examples": np.array(examples),
        "accuracy": np.array(accuracy),
    }
