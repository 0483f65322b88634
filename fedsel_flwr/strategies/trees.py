"""Boosted trees as Flower's bagging reads them, XGBoost's models in JSON; one that does not fit would end the run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fedsel_flwr.rounds.untrusted import one_line

KEPT = ("iteration_indptr", "tree_info", "trees")
"""Lists of a model that bagging appends to."""


def fault_in_trees(models: Iterable[bytes]) -> str:
    """What keeps models from being bagged; empty if nothing does.

    >>> fault_in_trees([b'{"learner": {}}'])
    "trees: KeyError: 'gradient_booster'"
    """
    try:
        for one in models:
            _read(json.loads(one))
    except Exception as error:  # whatever a client sent
        return one_line(f"trees: {type(error).__name__}: {error}")
    return ""


def _read(document: Any) -> None:
    """Read whatever bagging reads, as it does.

    Raises:
        Exception: Of any kind, where it would stumble.
    """
    model = document["learner"]["gradient_booster"]["model"]
    sizes = model["gbtree_model_param"]
    _, added = int(sizes["num_trees"]), int(sizes["num_parallel_tree"])
    for name in KEPT:
        if not isinstance(model[name], list):
            raise TypeError(f"{name} is no list")
    if added > len(model["trees"]):
        raise ValueError(f"{len(model['trees'])} trees, but num_parallel_tree is {added}")
    if not all(isinstance(tree, dict) for tree in model["trees"]):
        raise TypeError("a tree is no object")
    model["iteration_indptr"].append(model["iteration_indptr"][-1] + added)
