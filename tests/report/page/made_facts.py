"""Facts of a made-up comparison: any number of selectors, seeds and rounds, with names of one's choice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedsel_flwr.report.page.comparison_page import ComparisonFacts
from fedsel_flwr.report.page.comparison_tables import PageRun
from fedsel_flwr.report.summary import find_target_rounds, summarize
from fedsel_flwr.report.verdict import verdict
from fedsel_flwr.rounds.history import History
from tests.report.made import client

TARGET = 0.8
LIMIT = 60.0


def made_facts(
    selectors: Sequence[str], seeds: int, rounds: int, *, clients: int = 20, cohort: int = 5, text: str = "made up"
) -> ComparisonFacts:
    """Return facts of runs whose accuracy rises at the same rate, with latencies that differ by client."""
    generator = np.random.default_rng(1)
    runs, summaries = [], []
    times: dict[float, dict[str, dict[int, float]]] = {target: {} for target in (0.7, 0.75, TARGET)}
    for place, selector in enumerate(selectors):
        for seed in range(1, seeds + 1):
            history = _history(np.random.default_rng(seed).lognormal(2, 0.7, clients), place, rounds, cohort, generator)
            runs.append(PageRun(selector, seed, history, (1e5, 1e5), generator.random(rounds)))
            summaries.append(
                summarize(
                    history, selector=selector, seed=seed, num_clients=clients, target_accuracy=TARGET,
                    model_bytes=(1e5, 1e5), client_accuracies=generator.random(clients),
                )
            )  # fmt: skip
            for own, record in zip(times.values(), find_target_rounds(history.rounds, list(times)), strict=True):
                own.setdefault(selector, {})[seed] = record.simulated_s if record else math.inf
    return ComparisonFacts(
        title=text, description=text, runs=runs, summaries=summaries, num_clients=clients, target_accuracy=TARGET,
        verdict=verdict(summaries, selectors[0], TARGET, times=times), target_rounds=15, remarks=[text], scenario=text,
        commands=[text], latex=text, environment=[(text, text)], differences=[(text, text)],
    )  # fmt: skip


def _history(means: np.ndarray, place: int, rounds: int, cohort: int, generator: np.random.Generator) -> History:
    weights = means ** (-place / 10)
    history = History()
    for number in range(1, rounds + 1):
        chosen = generator.choice(len(means), cohort, replace=False, p=weights / weights.sum())
        latency, rows = means[chosen] * generator.lognormal(0, 0.3, cohort), []
        for k, own in zip(chosen.tolist(), latency.tolist(), strict=True):
            problem = "" if own < LIMIT else "late: <b>60 s</b>"
            parts = {"download_s": 0.1 * own, "compute_s": 0.7 * own, "upload_s": 0.2 * own, "energy_j": own}
            more = {"round": number, "client": k, "completed": not problem, "problem": problem, "train_loss": 1.0}
            rows.append(client(str(k), min(own, LIMIT), **parts, **more))
        accuracy = float(np.clip(0.9 - 0.8 * math.exp(-number / 60) + generator.normal() * 0.01, 0, 1))
        history.append(
            round=number, round_s=float(min(latency.max(), LIMIT)), clients=rows, num_available=len(means),
            accuracy=accuracy, loss=1.0,
        )  # fmt: skip
    return history
