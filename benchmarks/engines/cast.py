"""Who takes part: frameworks, the settings in which each is tried, and where each runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Player:
    """A column of the table.

    Args:
        title: As the table has it.
        worker: The file that is run.
        variants: What is tried, by what the page says of it; the fastest stays. ``only``: the models that it can train.
        package: Its distribution, whose version is printed; "" for none.
        environment: The requirements file of its environment; "" for ours.
        without: Models that it does not train, and why.
    """

    title: str
    worker: Path
    variants: Mapping[str, Settings]
    package: str = ""
    environment: str = ""
    without: Mapping[str, str] = field(default_factory=dict)


def _in_workers(name: str) -> Path:
    return HERE / "workers" / name


VECTORIZED = {"engine": "vectorized", "backend": "auto"}
COMPILED = {"engine": "vectorized", "backend": "numba", "only": ["mlp"]}
ONE = {"1 thread": {"threads": 1}}
ALONE = ONE | {"2 threads": {"threads": 2}}
PROCESSES = ONE | {"2 processes": {"threads": 1, "processes": 2}}  # two threads share out products of ten rows badly
SHORT = {"resnet": "left out to keep the run short"}
ACTORS = {"2 actors": {"threads": 1, "processes": 2}}

PLAYERS: dict[str, Player] = {
    "vectorized-1": Player(
        "ours, vectorized, 1 thread",
        _in_workers("fedsel.py"),
        {"1 thread": VECTORIZED | {"threads": 1}, "1 thread, compiled": COMPILED | {"threads": 1}},
        "fedsel-flwr",
    ),
    "vectorized-2": Player(
        "ours, vectorized, 2 cores",
        _in_workers("fedsel.py"),
        {"2 threads": VECTORIZED | {"threads": 2}, "2 threads, compiled": COMPILED | {"threads": 2}},
        "fedsel-flwr",
    ),
    "ray": Player(
        "ours, on Ray",
        _in_workers("fedsel.py"),
        {"2 actors": {"threads": 1, "processes": 2, "engine": "ray"}},
        package="fedsel-flwr",
        without={"resnet": "the Ray engine builds a scenario's models only"},
    ),
    "flower": Player("Flower on Ray", _in_workers("flower.py"), ACTORS, package="flwr"),
    "pfl": Player("pfl-research", _in_workers("with_pfl.py"), PROCESSES, package="pfl", environment="pfl"),
    "fedlab": Player(
        "FedLab", _in_workers("with_fedlab.py"), PROCESSES, package="fedlab", environment="fedlab", without=SHORT
    ),
    "flgo": Player(
        "FLGo",
        _in_workers("with_flgo.py"),
        ALONE | {"2 parallel threads": {"threads": 1, "parallel": 2}},
        package="flgo",
        environment="flgo",
        without=SHORT,
    ),
    "loop": Player("plain PyTorch loop", _in_workers("loop.py"), PROCESSES, package="torch"),
}
"""In the order of the table."""

OURS = ("vectorized-1", "vectorized-2")
PEERS = ("pfl", "fedlab", "flgo")
LEFT_OUT = {
    "BlazeFL": "version 3.0.0 needs Python 3.14 and the versions before it Python 3.12, the others here run on 3.11"
}
