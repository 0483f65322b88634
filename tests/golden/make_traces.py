"""Write the golden traces: ``python tests/golden/make_traces.py``.

Run it only when a change of choices is meant; the change of the traces then shows in the diff. NumPy keeps the stream
of PCG64 and of the generator's methods used here stable by policy (NEP 19 allows changes, which would show here too).
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fedsel_flwr.selectors import Selector, create, names
from fedsel_flwr.testing import play

FOLDER = Path(__file__).parent
PARAMETERS: dict[str, dict[str, float]] = {
    "bsfl": {"min_latency": 0.1, "alpha": 0.5},
    "cs-ucb": {"max_latency": 5.0},
    "cs-ucb-q": {"max_latency": 5.0, "queue_weight": 0.3},
    "fedcor": {"warmup_rounds": 5, "interval": 7},
    "gpfl": {"total_rounds": 60},
    "fedcs": {"deadline": 2.0},
    "power-of-choice": {"candidates": 4},
    "cpow-d": {"candidates": 4},
    "rpow-d": {"candidates": 4},
    "tifl": {"tiers": 2, "interval": 10},
}
ROUNDS = 60


def selector_under_trace(name: str) -> Selector:
    return create(name, clients_per_round=3, seed=2021, **PARAMETERS.get(name, {}))


def trace(name: str) -> dict[str, object]:
    """The choices of 60 rounds with failures and availability, and the state after them."""
    selector = selector_under_trace(name)
    choices = play(selector, range(ROUNDS), num_clients=7, availability=0.85, dead=(6,))
    state = {key: value.tolist() for key, value in selector.state_dict().items() if key in ("plays", "mean")}
    return {"selector": name, "choices": choices, **state}


if __name__ == "__main__":
    for name in names():
        rows = json.dumps(trace(name)).replace("]], ", "]],\n").replace('"choices"', '\n"choices"')
        (FOLDER / f"{name}.json").write_text(rows + "\n", encoding="utf-8")
