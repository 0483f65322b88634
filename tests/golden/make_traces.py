"""Write the golden traces anew: ``python tests/golden/make_traces.py``. The test writes a missing one.

Run it only when a change of choices is meant; the change of the traces then shows in the diff. NumPy keeps the stream
of PCG64 and of the generator's methods used here stable by policy (NEP 19 allows changes, which would show here too).
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fedsel_flwr.selectors import Selector, create, names
from fedsel_flwr.selectors.registry import example
from fedsel_flwr.testing import play

FOLDER = Path(__file__).parent
OPTIONS: dict[str, dict[str, float]] = {
    "bsfl": {"alpha": 0.5},
    "cs-ucb-q": {"queue_weight": 0.3},
    "fedcor": {"warmup_rounds": 5, "interval": 7},
    "tifl": {"tiers": 2, "interval": 10},
    **{name: {"candidates": 4} for name in ("power-of-choice", "cpow-d", "rpow-d")},
}
"""Values other than the defaults, with which 60 rounds show more."""
ROUNDS = 60


def selector_under_trace(name: str) -> Selector:
    return create(name, clients_per_round=3, seed=2021, **example(name) | OPTIONS.get(name, {}))


def trace(name: str) -> dict[str, object]:
    """The choices of 60 rounds with failures and availability, and the state after them."""
    selector = selector_under_trace(name)
    choices = play(selector, range(ROUNDS), num_clients=7, availability=0.85, dead=(6,))
    state = {key: value.tolist() for key, value in selector.state_dict().items() if key in ("plays", "mean")}
    return {"selector": name, "choices": choices, **state}


def write(name: str) -> None:
    rows = json.dumps(trace(name)).replace("]], ", "]],\n").replace('"choices"', '\n"choices"')
    (FOLDER / f"{name}.json").write_text(rows + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in names():
        write(name)
