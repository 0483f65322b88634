"""Plans of comparisons, and plans in which something was changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from tests.simulations.cut_off_runs import smoke

Plan = dict[str, Any]
SCENARIO = smoke(2).model_dump_json()


def good() -> Plan:
    """A plan that runs."""
    return {
        "scenario": json.loads(SCENARIO),
        "selectors": [{"label": "random", "name": "random"}, {"label": "bsfl", "name": "bsfl"}],
        "seeds": [1, 2],
        "reference": "random",
        "rounds_on_flower": 0,
        "left_out": {"fedcs": "needs a deadline"},
        "where": {},
        "device": "cpu",
        "jobs": 1,
        "checkpoints": {"checkpoint_every": 1},
    }


def parent(plan: Plan, path: Sequence[Any]) -> Any:
    """What holds the last key of a path."""
    return reduce(lambda inner, key: inner[key], path[:-1], plan)


def with_value(value: Any, *path: Any) -> str:
    plan = good()
    parent(plan, path)[path[-1]] = value
    return json.dumps(plan)


def without(*path: Any) -> str:
    plan = good()
    del parent(plan, path)[path[-1]]
    return json.dumps(plan)


def but(**changed: Any) -> str:
    return json.dumps(good() | changed)


def written(folder: Path, plan: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(plan, encoding="utf-8")
    return folder
