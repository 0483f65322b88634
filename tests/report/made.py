"""Rows of clients, histories and summaries of runs made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedsel_flwr.report import RunSummary
from fedsel_flwr.rounds.history import ClientRecord, History


def client(name: str, seconds: float, **own: Any) -> ClientRecord:
    """A client with a usable update after some seconds."""
    nothing = dict.fromkeys(("energy_j", "download_s", "compute_s", "upload_s", "train_loss"), math.nan)
    values: dict[str, Any] = {"round": 0, "client": ord(name[-1]), "completed": True, "problem": "", "num_examples": 5,
                              "client_id": name, "latency_s": seconds, "latency_source": "observed"}  # fmt: skip
    return ClientRecord(**{**nothing, **values, **own})


def make_history(
    selected: Sequence[Sequence[int]],
    *,
    accuracy: Sequence[float],
    loss: Sequence[float] | None = None,
    round_s: Sequence[float] | None = None,
    failed: Sequence[tuple[int, int]] = (),
    energy_j: float = 0.5,
) -> History:
    """A history from who was selected in each round, who failed (round, client), and what was measured."""
    history = History()
    for number, clients in enumerate(selected, start=1):
        seconds = round_s[number - 1] if round_s else 1.0
        rows = []
        for k in clients:
            done = (number, k) not in failed
            row = client(
                f"client-{k}", seconds, round=number, client=k, completed=done, latency_source="reported",
                problem="" if done else "exception: ValueError: broken, with a comma and an é", energy_j=energy_j,
                download_s=0.1, compute_s=seconds - 0.2, upload_s=0.1, train_loss=0.25 if done else math.nan,
                num_examples=12 if done else 0,
            )  # fmt: skip
            rows.append(row)
        history.append(
            round=number, round_s=seconds, clients=rows, num_available=10, accuracy=accuracy[number - 1],
            loss=loss[number - 1] if loss else 1.5,
        )  # fmt: skip
    return history


def make_run(
    selector: str = "bsfl", seed: int = 0, time: float = 10.0, energy: float = 100.0, **own: Any
) -> RunSummary:
    figures = {"accuracy": 0.9, "energy_j": 200.0, "jain": 0.5, "failed_clients": 3, "simulated_s": 20.0, **own}
    return RunSummary(selector=selector, seed=seed, time_to_target_s=time, energy_to_target_j=energy, **figures)
