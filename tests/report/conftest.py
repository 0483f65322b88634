"""Histories made by hand, for the tests of the reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from fedsel_flwr.rounds.history import ClientRecord, History, RoundRecord

MakeHistory = Callable[..., History]


@pytest.fixture
def make_history() -> MakeHistory:
    """Return a maker of histories: who was selected in each round, who failed, and what was measured."""

    def make(
        selected: Sequence[Sequence[int]],
        *,
        accuracy: Sequence[float],
        round_s: Sequence[float] | None = None,
        failed: Sequence[tuple[int, int]] = (),
        energy_j: float = 0.5,
    ) -> History:
        history = History()
        simulated = total = 0.0
        for number, clients in enumerate(selected, start=1):
            seconds = round_s[number - 1] if round_s else 1.0
            simulated += seconds
            total += energy_j * len(clients)
            for client in clients:
                done = (number, client) not in failed
                history.clients.append(
                    ClientRecord(
                        round=number,
                        client_id=f"client-{client}",
                        client=client,
                        completed=done,
                        problem="" if done else "exception: ValueError: broken, with a comma and an é",
                        latency_s=seconds,
                        energy_j=energy_j,
                        download_s=0.1,
                        compute_s=seconds - 0.2,
                        upload_s=0.1,
                        train_loss=0.25 if done else math.nan,
                        num_examples=12 if done else 0,
                    )
                )
            history.rounds.append(
                RoundRecord(
                    round=number,
                    num_available=10,
                    num_selected=len(clients),
                    num_completed=sum((number, client) not in failed for client in clients),
                    round_s=seconds,
                    simulated_s=simulated,
                    energy_j=energy_j * len(clients),
                    total_energy_j=total,
                    accuracy=accuracy[number - 1],
                    loss=1.5,
                )
            )
        return history

    return make
