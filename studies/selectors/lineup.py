"""Entries of a world: every selector, the references, and the controls with more clients or a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from references import CHANCE, GENIE, GROUPS

from fedsel_flwr.selectors import names
from fedsel_flwr.selectors.columns import COLUMNS, FLAGS
from fedsel_flwr.selectors.registry import describe
from fedsel_flwr.simulations import Scenario, load_scenario

HERE = Path(__file__).resolve().parent
WORLDS = {"shards": 20, "cell": 20, "trace": 12}
"""World -> number of seeds of its tables, in the order of the page."""
REFERENCE = "random"
REFERENCES = (GENIE, GROUPS, CHANCE)
"""Labels of rows that are no contenders."""
ASKED = (10, 20, 40, 80)
"""Clients that the controls ask in a round."""
DEADLINES = (0, 40, 60, 90)
"""Deadlines of the controls in seconds; 0 for none."""
MATCHED = ("fedcs", "oort", "bsfl", "cs-ucb", "fedcm-ts")
"""Selectors that the frontier compares with random at equal numbers of clients.

FedCS, Oort, BSFL and CS-UCB prefer fast clients. FedCM-TS stands for the selectors that reduce the number of rounds.
"""
LARGEST = {"fedcm-ts": 10}
"""Selector -> its largest number of clients on the frontier. FedCA's filter searches all subsets of the clients."""
SINGLE = ("fedcor", "fedcm-ucb")
"""Selectors that the frontier shows only with the world's number of clients. The tables simulate these runs anyway."""
WITH_CONTROLS = "shards"
"""The world of the controls and the frontier."""
ABLATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "random-filtered": (REFERENCE, {"aggregation.filter": "loss", "aggregation.averaging": "fedpdp"}),
    "bsfl-auto": ("bsfl", {"selectors.bsfl.min_latency": "auto"}),
}
"""Label -> selector and scenario keys of a row that differs from a row of the tables in one point.

`random-filtered` filters the models and averages them as FedCM does. `bsfl-auto` computes `min_latency` from the
measured latencies, as in a deployment.
"""
CONTROL_SEEDS, FRONTIER_SEEDS, ABLATION_SEEDS = 5, 10, 10


@dataclass(frozen=True)
class Entry:
    """A row of a world's tables.

    Args:
        label: Its name in the tables.
        selector: Name of the selector; empty for a reference.
        seeds: Number of seeds.
        values: Scenario keys that differ from the world's file.
    """

    label: str
    selector: str
    seeds: int
    values: Mapping[str, Any] = field(default_factory=dict)


def reads(selector: str) -> str:
    """Return what a selector reads, in words: its columns, and those of its probes.

    Args:
        selector: Name of the selector.

    >>> reads("bsfl"), reads("fedcm-ucb"), reads("random"), reads("tifl")
    ('latency', 'server data', 'nothing', 'latency, probe: accuracy')
    """
    facts = describe(selector)
    own = dict.fromkeys(_kind(name) for name in facts["reads"] if name not in FLAGS or COLUMNS[name].validated)
    probes = dict.fromkeys(_kind(name) for name in facts["probes"])
    return ", ".join([*own, *(f"probe: {kind}" for kind in probes)]) or "nothing"


def _kind(name: str) -> str:
    """Return the kind of a column. A validated column is measured with the examples on the server."""
    if COLUMNS[name].validated:
        return "server data"
    known = {"num_examples": "sizes", "local_accuracy": "accuracy", "projection": "updates", "sketch": "data hash"}
    return "loss" if "loss" in name else known.get(name, name.replace("_", " "))


def world_file(world: str) -> Path:
    """Return the path of a world's scenario file."""
    return HERE / f"{world}.toml"


def table_entries(scenario: Scenario, seeds: int, chosen: Sequence[str] = ()) -> list[Entry]:
    """Return the entries of a world's tables: all selectors, FedCS with the others' cohort, references.

    Args:
        scenario: The world.
        seeds: Number of seeds of each entry.
        chosen: Names of selectors. If empty: all.
    """
    # Random selection comes first, because the others are compared with it. Asking everyone is no selection.
    own = set(chosen or names()) - {"everyone"}
    found = [Entry(name, name, seeds) for name in sorted(own, key=lambda name: (name != REFERENCE, name))]
    if any(entry.selector == "fedcs" for entry in found):
        found.append(cohort_entry("fedcs", scenario.clients_per_round, seeds))
    return found + [Entry(label, "", seeds) for label in REFERENCES]


def control_entries(seeds: int) -> list[Entry]:
    """Return random selection of more clients, without and with a deadline.

    Args:
        seeds: Number of seeds of each entry.
    """
    return [random_entry(asked, deadline, seeds) for asked in ASKED for deadline in DEADLINES]


def ablation_entries(seeds: int) -> list[Entry]:
    """Return the rows that separate two causes.

    Args:
        seeds: Number of seeds of each entry.
    """
    return [Entry(label, selector, seeds, values) for label, (selector, values) in ABLATIONS.items()]


def frontier_entries(scenario: Scenario, seeds: int) -> list[Entry]:
    """Return random selection and the matched selectors at each number of clients.

    Args:
        scenario: The world.
        seeds: Number of seeds of each entry.
    """
    few = scenario.clients_per_round
    found = [Entry(name, name, seeds) for name in (REFERENCE, *MATCHED, *SINGLE)]
    found += [cohort_entry("fedcs", few, seeds)]
    found += [random_entry(few, deadline, seeds) for deadline in DEADLINES if deadline]
    found += control_entries(seeds)
    return found + [cohort_entry(name, asked, seeds) for name in MATCHED for asked in matched_cohorts(name)]


def matched_cohorts(selector: str) -> list[int]:
    """Return the numbers of clients that a selector of the frontier asks in addition to the world's number."""
    return [asked for asked in ASKED[:-1] if asked <= LARGEST.get(selector, asked)]


def random_entry(asked: int, deadline: float, seeds: int) -> Entry:
    """Return random selection of a number of clients, with a deadline in seconds unless that is 0."""
    values: dict[str, Any] = {"clients_per_round": asked}
    label = f"{REFERENCE}-{asked}"
    if deadline:
        values["aggregation.round_deadline_s"] = float(deadline)
        label += f"-{deadline:g}s"
    return Entry(label, REFERENCE, seeds, values)


def cohort_entry(selector: str, asked: int, seeds: int) -> Entry:
    """Return a selector with a number of clients per round. For FedCS, the number is a limit."""
    own = {"selectors.fedcs.clients_per_round": asked} if selector == "fedcs" else {}
    return Entry(f"{selector}-{asked}", selector, seeds, {"clients_per_round": asked} | own)


def entry_scenario(world: str, entry: Entry, seed: int, common: Mapping[str, Any]) -> Scenario:
    """Return the scenario of one run.

    Args:
        world: Name of the world.
        entry: The entry.
        seed: Seed of the run.
        common: Scenario keys that differ from the world's file in every run, such as the data folder.
    """
    chosen = {"selector": entry.selector} if entry.selector else {}
    return load_scenario(world_file(world), {**common, **chosen, **entry.values, "seed": seed})
