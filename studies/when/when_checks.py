"""Two checks of the grid of ``when.py``: runs with training, and the worlds of the comparison page.

The first check runs three fleets of the grid with training, in the vectorized engine. The handwritten digits are
divided evenly, and each client takes 30 steps on one example each, so that latencies equal those of the grid.

The second check computes selections without training in worlds whose ceiling is known from runs with training: (a) and
(b) of ``docs/results/selectors.md``, and the scenario ``fashion-500``. World (c) has absent clients, so only the
measured values are copied. The copies in ``docs/results/when-known.csv`` come from the commit :data:`SOURCE`.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from when_fleet import Fleet, Times, draw_times, run
from when_grid import GROUPS, RANDOM, variants

from fedsel_flwr.clients.answering import forward_passes
from fedsel_flwr.clients.device import mean_latencies, probe_delays
from fedsel_flwr.report import jain_index
from fedsel_flwr.rounds.fingerprints import fingerprint
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.simulations import Scenario, compare, load_scenario
from fedsel_flwr.simulations.reproductions.rows import Rows
from fedsel_flwr.simulations.worlds.world import World

STUDIES = Path(__file__).resolve().parents[1]
MEASURED_RUNS = STUDIES.parent / "docs" / "results" / "selectors-runs.csv"
SOURCE = "a1efc2e"
"""Commit whose ``docs/results/selectors-runs.csv`` has the runs with training of the known worlds."""
TRAINING_REVISION, KNOWN_REVISION = 1, 2
"""Raise a number when the rows of a check change."""
TRAINED = ("random", "bsfl", "oort", "tifl")
POINTS = (Fleet(100, 5, 0.78, 0.4), Fleet(100, 5, 0.4, 1.0), Fleet(500, 25, 0.78, 0.4))
PLAYS, SEEDS = 15, 5
TRAINING_COLUMNS = (
    "clients", "per_round", "spread", "noise", "selector", "seed", "fingerprint", "rounds", "training_s", "choices_s",
    "training_jain", "choices_jain", "accuracy", "cpu_s",
)  # fmt: skip
TRAINING_KEY = TRAINING_COLUMNS[:6]
WORLDS: Mapping[str, tuple[str, str, Mapping[str, float]]] = {
    "a": (str(STUDIES / "selectors" / "shards.toml"), "shards", {"bsfl": 10.0, "cs-ucb": 180.0}),
    "b": (str(STUDIES / "selectors" / "cell.toml"), "cell", {"bsfl": 0.05, "cs-ucb": 5.0}),
    "c": ("", "trace", {}),
    "fashion-500": ("fashion-500", "", {"bsfl": 0.05, "cs-ucb": 5.0}),
}
"""World -> scenario, its label in the runs of the comparison page, tau_min of BSFL and tau_max of CS-UCB."""
ROUNDS, WORLD_SEEDS = {"fashion-500": 120}, {"fashion-500": 20}
"""Rounds and seeds that differ from the scenario and from SEEDS."""
KNOWN_COLUMNS = (
    "world", "selector", "seed", "fingerprint", "clients", "per_round", "rounds", "latency_spread", "latency_noise",
    "choices_s", "trained_s", "cpu_s",
)  # fmt: skip
KNOWN_KEY = KNOWN_COLUMNS[:3]
CLOCKS = {"bsfl": "min_latency", "cs-ucb": "max_latency"}


# ---- with training -------------------------------------------------------------------------------------------------


def trained_scenario(fleet: Fleet, rounds: int) -> Scenario:
    """Return the scenario ``phones`` with the latencies of a fleet."""
    phones = fleet.phones(0)
    keys = ("compute_log_sd", "download_log_sd", "upload_log_sd", "network_round_cv")
    return load_scenario("phones", {
        "num_clients": fleet.clients, "clients_per_round": fleet.per_round, "rounds": rounds,
        "wireless.channels": fleet.clients, "partition.kind": "iid", "training.local_steps": 30,
        "training.batch_size": 1, "training.learning_rate": 0.01, "evaluation_every": 10,
        **{f"system.{key}": getattr(phones, key) for key in keys},
    })  # fmt: skip


def train(rows: Rows, points: Sequence[Fleet], plays: int, seeds: int) -> None:
    """Run fleets with training, and append a row for each run."""
    params = {variant.label: variant.params for variant in variants() if variant.label in TRAINED}
    for fleet in points:
        rounds = plays * fleet.cycle
        for seed in range(1, seeds + 1):
            for name in TRAINED:
                said = fingerprint(
                    fleet=asdict(fleet), rounds=rounds, name=name, params=params[name], seed=seed,
                    revision=TRAINING_REVISION,
                )  # fmt: skip
                if not rows.done(said):
                    key = (*asdict(fleet).values(), name, seed)
                    row = dict(zip(TRAINING_KEY, key, strict=True)) | {"fingerprint": said, "rounds": rounds}
                    rows.add(row | _trained(fleet, rounds, name, params[name], seed))


def _trained(fleet: Fleet, rounds: int, name: str, params: Mapping[str, Any], seed: int) -> dict[str, str]:
    start = time.process_time()

    def make(*, clients_per_round: int, seed: int) -> Selector:
        return create(name, clients_per_round=clients_per_round, seed=seed, **params)

    # Another label than the selector's name, so that the scenario's own parameters are not added.
    scenario = trained_scenario(fleet, rounds)
    found = compare(scenario, {f"{name} here": make}, seeds=[seed], rounds_on_flower=0, quiet=True)
    (summary,) = found.summaries
    shares = World(scenario.model_copy(update={"seed": seed})).shares(range(fleet.clients))
    passes = np.array([forward_passes(["local_accuracy"], share) for share in shares])
    course = run(draw_times(fleet, seed, rounds, passes), name, params, seed)
    jain = jain_index(np.bincount(course.cohorts.ravel(), minlength=fleet.clients))
    figures = {
        "training_s": summary.simulated_s / rounds, "choices_s": float(course.seconds.mean()),
        "training_jain": summary.jain, "choices_jain": jain, "accuracy": summary.accuracy,
    }  # fmt: skip
    return _text(figures) | {"cpu_s": f"{time.process_time() - start:.2f}"}


# ---- known worlds --------------------------------------------------------------------------------------------------


def known(rows: Rows) -> None:
    """Run selections without training in the known worlds, and append a row for each run."""
    for world, (path, label, clocks) in WORLDS.items():
        for seed in range(1, WORLD_SEEDS.get(world, SEEDS) + 1):
            times = cache(lambda path=path, world=world, seed=seed: _times(path, seed, ROUNDS.get(world)))
            for selector in (RANDOM, GROUPS, "bsfl", "cs-ucb"):
                trained = _measured(label, selector, seed)
                said = fingerprint(world=world, selector=selector, seed=seed, revision=KNOWN_REVISION)
                if rows.done(said) or not (path or trained):
                    continue
                start = time.process_time()
                row: dict[str, object] = {"world": world, "selector": selector, "seed": seed, "fingerprint": said}
                row |= dict.fromkeys(KNOWN_COLUMNS[4:], "") | {"trained_s": trained}
                if path:
                    row |= _chosen(times(), selector, seed, clocks)
                rows.add(row | {"cpu_s": f"{time.process_time() - start:.2f}"})


def _chosen(times: Times, selector: str, seed: int, clocks: Mapping[str, float]) -> dict[str, object]:
    fleet = times.fleet
    references: Mapping[str, Callable[[], float]] = {RANDOM: times.random_s, GROUPS: times.groups_s}
    if selector in references:
        seconds = references[selector]()
    else:
        seconds = float(run(times, selector, {CLOCKS[selector]: clocks[selector]}, seed).seconds.mean())
    spread, noise = times.components()
    figures = {"choices_s": seconds, "latency_spread": spread, "latency_noise": noise}
    return {"clients": fleet.clients, "per_round": fleet.per_round, "rounds": len(times.latency), **_text(figures)}


def _times(path: str, seed: int, rounds: int | None) -> Times:
    """Return the latencies of a scenario, in which all clients train on equally many examples."""
    scenario = load_scenario(path, {"seed": seed})
    fleet = Fleet(scenario.num_clients, scenario.clients_per_round, np.nan, np.nan)
    system, ids = scenario.system_model(np.full(fleet.clients, 600)), range(fleet.clients)
    drawn = [system.draws(ids, number) for number in range(1, (rounds or scenario.rounds) + 1)]
    latency = np.array([[d.download_s + d.compute_s + d.upload_s for d in row] for row in drawn])
    asked = [[probe_delays(system, d) for d in row] for row in drawn]
    probe = np.array([[d.download_s + d.compute_s + d.upload_s for d in row] for row in asked]).max(axis=1)
    return Times(fleet, latency, np.minimum(probe, system.max_latency_s), mean_latencies(system), system.max_latency_s)


def _measured(label: str, selector: str, seed: int) -> str:
    """Return the seconds a round of a run of the comparison page; empty if there is none."""
    for row in _runs() if label else ():
        known = row.get("simulated_s") and row.get("rounds")
        if known and (row.get("world"), row.get("selector"), row.get("seed")) == (label, selector, str(seed)):
            return f"{float(row['simulated_s']) / float(row['rounds']):.5g}"
    return ""


@cache
def _runs() -> list[dict[str, str]]:
    if not MEASURED_RUNS.exists():
        return []
    with MEASURED_RUNS.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _text(figures: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.5g}" for name, value in figures.items()}
