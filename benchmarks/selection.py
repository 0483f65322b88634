"""What selection costs as the fleet grows: every selector, K = 10^3 ... 10^6 clients, m = 10 ... 1,000 a round.

    python benchmarks/selection.py                     everything; writes selection.csv and selection.md beside itself
    python benchmarks/selection.py --clients 1000 --selectors bsfl,random --folder DIR

Two figures a round. The selector's: seconds in its probe, select, observe and inform. The round's: choose, collect and
finish of ``fedsel_flwr.rounds``, selector included, without training, averaging and the clients' answers to probes. The
models have 650 numbers, the server's validation set two examples, and FedCA's filter keeps every other model: what is
measured on models grows with them, not with the fleet. Everybody is connected and answers, as in the vectorized engine.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.models import ModelStack, Validation
from fedsel_flwr.rounds.replies import Reply
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import RoundReport, Selector, create, names

FLEETS = (1_000, 10_000, 100_000, 1_000_000)
COHORTS = (10, 100, 1_000)
PARAMETERS: dict[str, dict[str, Any]] = {
    "cs-ucb": {"max_latency": 5.0}, "cs-ucb-q": {"max_latency": 5.0}, "bsfl": {"min_latency": 0.1},
    "gpfl": {"total_rounds": 10_000}, "fedcs": {"deadline": 0.5}, "power-of-choice": {"candidates": 2_000},
    "cpow-d": {"candidates": 2_000}, "rpow-d": {"candidates": 2_000},
}  # fmt: skip
BALLS = 500
VECTORS = {"gradient": 650, "sketch": 64}
CLOCK: list[Callable[[], float]] = [time.perf_counter]
MODEL = [np.zeros((10, 64), dtype=np.float32), np.zeros(10, dtype=np.float32)]
FIELDS = ("selector", "clients", "cohort", "fleet", "rounds", "chosen", "state_bytes", "selector_s", "selector_low",
          "selector_high", "round_s", "round_low", "round_high")  # fmt: skip


class EveryOther(Filter):
    """Keeps every other model, so that the filter costs nothing."""

    def kept(self, logits: Any, labels: Any) -> Any:
        """Which models are kept."""
        return np.arange(len(logits)) % 2 == 0


class Timed:
    """Seconds in some methods of an object."""

    def __init__(self, owner: Any, *methods: str) -> None:
        self.seconds, self._depth = 0.0, 0
        for name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            self._depth += 1
            start = CLOCK[0]()
            try:
                return call(*args, **keywords)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += CLOCK[0]() - start

        return timed


class Clients:
    """Everybody answers at once."""

    def introduce(self, nodes: list[str]) -> tuple[Mapping[str, Any], list[str]]:
        """Who they are."""
        return {node: {"client_id": int(node), "num_examples": 120} for node in nodes}, []

    def probe(self, nodes: list[str], config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Their accuracy and losses, and where they are asked a gradient and a hash of their data."""
        losses = {node: int(node) % 89 / 89 for node in nodes}
        answers: dict[str, dict[str, Any]] = {
            node: {"local_accuracy": int(node) % 97 / 97, "loss": loss, "batch_loss": loss, "rms_loss": loss}
            for node, loss in losses.items()
        }
        asked = set(str(config["probe"]).split(","))
        for node, answer in answers.items() if asked & VECTORS.keys() else ():
            rng = np.random.default_rng(int(node))
            answer |= {name: np.sign(rng.normal(size=VECTORS[name])) for name in sorted(asked & VECTORS.keys())}
        return answers


def seen(selector: Selector, num_clients: int) -> None:
    """Let every client have been chosen before, as after thousands of rounds."""
    rng, state = np.random.default_rng(0), selector.state_dict()
    drawn: dict[str, Callable[[], Any]] = {
        "plays": lambda: rng.integers(1, 20, num_clients), "successes": lambda: rng.integers(1, 20, num_clients),
        "failures": lambda: rng.integers(1, 20, num_clients), "mean": lambda: rng.random(num_clients),
        "queue": lambda: 3 * rng.random(num_clients), "reward_sum": lambda: rng.random(num_clients),
        "accuracy": lambda: rng.random(num_clients), "energy_score": lambda: rng.random(num_clients),
        "loss": lambda: rng.random(num_clients), "asked": lambda: np.ones(num_clients, dtype=np.bool_),
        "rms_loss": lambda: rng.random(num_clients), "duration": lambda: rng.random(num_clients),
        "last_round": lambda: rng.integers(1, 5000, num_clients), "latency": lambda: rng.random(num_clients),
        "measured_in": lambda: rng.integers(4950, 5000, num_clients), "profile": lambda: rng.random(num_clients),
        "tried": lambda: np.ones(num_clients, dtype=np.bool_), "before": lambda: rng.random(num_clients),
        "measurements": lambda: rng.integers(1, 20, num_clients),
    }  # fmt: skip
    state |= {key: draw() for key, draw in drawn.items() if np.shape(state.get(key)) == (num_clients,)} | {
        "round": 5000
    }
    if "radius" in state:
        state["centre"] = np.vstack([[0.5, 0.5], rng.random((BALLS - 1, 2))])
        state["radius"] = np.append(1.0, 0.5 ** rng.integers(1, 6, BALLS - 1))
        state |= {"ball_plays": rng.integers(1, 30, BALLS), "ball_mean": rng.random((BALLS, 2))}
    if "gains" in state:
        state["gains"] = rng.random(40)  # of Oort's last two pacer steps
    selector.load_state_dict(state)


def made(name: str, roster: Roster, cohort: int, fleet: str) -> tuple[SelectionCore, Selector]:
    """A core whose clients are enrolled, and its selector."""
    num_clients = len(roster.ids)
    selector = create(name, clients_per_round=cohort, seed=1, **PARAMETERS.get(name, {}))
    everybody, rng = np.arange(num_clients), np.random.default_rng(1)
    selector.inform(everybody, num_examples=rng.integers(50, 200, num_clients).astype(np.float64))
    selector.inform(everybody, energy_score=rng.random(num_clients))
    if name == "gpfl":  # its first round asks everybody: played beside the core
        chosen, ones = selector.select(everybody), np.ones(num_clients)
        report = RoundReport(clients=chosen, completed=ones > 0, latency=ones, projection=rng.random(num_clients),
                             global_accuracy=0.1, global_loss=2.3)  # fmt: skip
        selector.observe(report)
    if fleet == "seen":
        seen(selector, num_clients)
    validation = Validation(lambda arrays, inputs: np.eye(2), None, np.array([0, 1]))
    options = {"filter": EveryOther()} if "kept" in selector.needs else {}
    settings = resolve_settings(selector, max_latency=5.0, validation=validation, learning_rate=0.1, **options)
    core = SelectionCore(selector, settings, roster=roster)
    core.parts.registrar.note_sizes(everybody, np.full(num_clients, 120))
    return core, selector


def measure(name: str, roster: Roster, nodes: frozenset[str], cohort: int, fleet: str, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    core, selector = made(name, roster, cohort, fleet)
    clients, rng = Clients(), np.random.default_rng(2)
    own, theirs = Timed(selector, "probe", "select", "observe", "inform"), Timed(clients, "probe", "introduce")
    times, chosen = [], [0]
    for _ in range(rounds + 2):
        own.seconds = theirs.seconds = 0.0
        start = CLOCK[0]()
        asked = core.choose(nodes, MODEL, clients)
        middle = CLOCK[0]()
        replies = dict(zip(asked, _replies(len(asked), rng), strict=True))
        stack = ModelStack([np.broadcast_to(layer, (len(asked), *layer.shape)) for layer in MODEL])
        again = CLOCK[0]()
        core.collect(replies, stack)
        core.finish(MODEL)
        whole = CLOCK[0]() - again + middle - start - theirs.seconds
        times.append((own.seconds, whole))
        chosen.append(len(asked))
    state = sum(value.nbytes for value in selector.state_dict().values() if isinstance(value, np.ndarray))
    low, median, high = np.quantile(times[2:], [0.0, 0.5, 1.0], axis=0)
    return dict(zip(FIELDS, (
        name, len(nodes), cohort, fleet, rounds, max(chosen), round(state / len(nodes), 1),
        *(f"{value:.6f}" for i in range(2) for value in (median[i], low[i], high[i])),
    ), strict=True))  # fmt: skip


def _replies(count: int, rng: np.random.Generator) -> list[Reply]:
    gradient = rng.normal(size=650)  # for DivFL; the others do not read it
    return [
        Reply(num_examples=120, metrics={
            "gradient": gradient,
            "latency_s": latency, "energy_j": 0.5, "energy_modelled": 1, "energy_score": score, "download_s": 0.1,
            "compute_s": 0.1, "upload_s": 0.1, "train_loss": 1.0, "loss": 1.0 + score, "rms_loss": 1.0 + score,
        })
        for latency, score in zip(rng.uniform(0.1, 4.0, count).tolist(), rng.random(count).tolist(), strict=True)
    ]  # fmt: skip


def enrolled(num_clients: int) -> tuple[Roster, frozenset[str], float]:
    """A roster in which everybody is bound, the connections, and the seconds a first roll call takes."""
    nodes, roster = frozenset(str(k) for k in range(num_clients)), Roster()
    selector = create("random", clients_per_round=1, seed=1)
    core = SelectionCore(selector, resolve_settings(selector, max_latency=5.0), roster=roster)
    start = CLOCK[0]()
    core.choose(nodes, MODEL, Clients())
    return roster, nodes, CLOCK[0]() - start


def main() -> None:
    """Measure, print, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=",".join(map(str, FLEETS)), help="fleets, comma-separated")
    parser.add_argument("--cohorts", default=",".join(map(str, COHORTS)), help="clients a round, comma-separated")
    parser.add_argument("--selectors", default=",".join(names()), help="names, comma-separated")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent, help="where the files go")
    parser.add_argument("--cpu", action="store_true", help="count the processor's seconds: of use on a busy machine")
    parser.add_argument("--note", default="", help="what the page is to say of the measurement")
    args = parser.parse_args()
    if args.cpu:
        CLOCK[0] = time.process_time
    rows, roll_calls = [], {}
    for num_clients in map(int, args.clients.split(",")):
        roster, nodes, roll_calls[num_clients] = enrolled(num_clients)
        print(f"{num_clients} clients: first roll call {roll_calls[num_clients]:.2f} s", flush=True)
        for name in args.selectors.split(","):
            most = create(name, clients_per_round=1, **PARAMETERS.get(name, {})).max_clients or num_clients
            cohorts = [m for m in map(int, args.cohorts.split(",")) if m < num_clients <= most]
            for cohort in cohorts:  # none where the fleet is larger than the selector takes
                for fleet in ("new", "seen"):
                    gc.collect()
                    slow = name in ("fedcor", "local-accuracy") and num_clients >= 100_000  # seconds a round
                    rows.append(measure(name, roster, nodes, cohort, fleet, 3 if slow else 9))
                    row = rows[-1]
                    print(*(row[key] for key in ("selector", "clients", "cohort", "fleet", "selector_s", "round_s")),
                          flush=True)  # fmt: skip
    with (args.folder / "selection.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    import selection_page

    versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
    clock = "seconds of the processor (--cpu)" if args.cpu else "seconds of the wall clock"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {versions}; {clock}{args.note and '; '}{args.note}"
    page = args.folder / "selection.md"
    section = selection_page.kept_section(page)
    page.write_text(selection_page.page(rows, roll_calls, machine) + section, encoding="utf-8")


if __name__ == "__main__":
    main()
