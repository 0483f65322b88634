"""Plans that were written or changed by hand: each fault is one line, and nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.cli import main
from tests.simulations.plans import but, good, parent, with_value, without, written

pytestmark = pytest.mark.usefixtures("here", "no_pictures")
HUGE = 10**400
DEEP = "[" * 200_000
"""Brackets that Python's JSON does not follow."""


def deep(levels: int) -> Any:
    return reduce(lambda inner, _: [inner], range(levels), 1)


HAND_MADE: dict[str, tuple[str, str]] = {
    "nothing": ("", "cannot be read"),
    "a list": ("[]", "is not a plan"),
    "200,000 brackets": (f'{{"scenario": {{}}, "selectors": [], "seeds": {DEEP}', "cannot be read"),
    "nested": (but(left_out={"random": deep(300)}), "nested more than 20 levels"),
    "an unknown key": (but(run_this="rm"), "run_this = 'rm'"),
    "a key that acts": (but(**{"\x1b]0;owned\x07": 1}), "holds control characters"),
    "a long key": (but(where={"a" * 10**5: 1}), "where.aaa"),
    "a null": (but(seeds=None), "seeds = None"),
    "rubbish in the midst": (but().replace('"jobs": ', '"jobs": \n}\0'), "cannot be read"),
    "no seeds": (without("seeds"), "seeds = "),
    "selectors: texts": (but(selectors=["random", "bsfl"]), "selectors.0 = 'random'"),
    "selectors: an object": (but(selectors={"random": "random"}), "selectors = a dict of 1"),
    "selectors: without label": (without("selectors", 0, "label"), "selectors.0.label"),
    "selectors: without name": (without("selectors", 0, "name"), "passed in Python"),
    "selectors: a function": (with_value("os:abort", "selectors", 0, "make"), "selectors.0.make = 'os:abort'"),
    "selectors: one twice": (but(selectors=[good()["selectors"][0]] * 2), "'random'"),
    "selectors: a label that leads out": (but(selectors=[{"label": "../x", "name": "random"}]), "label '../x'"),
    "selectors: nobody's name": (but(selectors=[{"label": "x", "name": "nobody"}]), "unknown selector 'nobody'"),
    "where: a list": (but(where=[]), "where = []"),
    "where: an unknown key": (but(where={"gpu": 1}), "where.gpu = 1"),
    "where: an address of numbers": (but(where={"ray_address": 6379}), "ray_address"),
    "scenario: a text": (but(scenario="smoke"), "scenario = 'smoke'"),
    "scenario: NaN": (but(scenario=float("nan")), "scenario = nan"),
    "scenario: without name": (without("scenario", "name"), "scenario.name"),
    "scenario: endless clients": (with_value(HUGE, "scenario", "num_clients"), "num_clients = an integer of"),
    "a selector's null": (with_value({"a": {"b": None}}, "scenario", "selectors"), "not TOML serializable"),
    "seeds: 400 digits": (but(seeds=[HUGE]), "seeds.0 = an integer of 1329 bits"),
    "seeds: 5,000 digits": (but(seeds=["x"]).replace('"x"', "9" * 5000), "cannot be read"),
    "checkpoints: unknown options": (but(checkpoints={"every": 1}), "checkpoints.every = 1"),
    "checkpoints: a path of zeros": (but(checkpoints={"checkpoint_dir": "\0"}), "holds control characters"),
    "left_out: a text": (but(left_out="fedcs"), "left_out = 'fedcs'"),
    "half a character": (with_value("\ud800", "scenario", "description"), "holds control characters"),
}
"""What was written by hand, and words of the line that refuses it."""
BAD_VALUES: dict[str, list[Any]] = {
    "seeds": [[-1], [2**63], [1.5], [True], ["1"], [3, 3]],
    "jobs": [0, HUGE],
    "device": ["abacus", "", "cuda:99", "../cpu", "cpu:x:y"],
    "rounds_on_flower": [-1],
    "reference": ["nobody", "../random", "", "a" * 1000],
    "where": [{"num_cpus": number} for number in (0, -1, "all", HUGE, float("nan"))],
    "checkpoints": [{"checkpoint_dir": place} for place in ("", "/", "away", "../away", 7)],
    "selectors": [[{"label": "random", "name": name}] for name in ("", "a:b:c", "/no.py:X", ":", "os:abort")]
    + [[{"label": label, "name": "random"}] for label in (".", "..", "\\", " ")],
}


@pytest.fixture
def refused_plan(here: Path, refused: Any) -> Any:
    """The line with which a plan is refused; nothing is written for it."""

    def read(text: str) -> str:
        theirs = written(here / "theirs", text)
        before = sorted(os.listdir(here))
        said = refused("compare", "--resume", "theirs", "--trust", "--quiet")
        assert said.isprintable()
        assert len(said) < 2000
        assert (sorted(os.listdir(here)), os.listdir(theirs)) == (before, ["plan.json"])
        return said

    return read


@pytest.mark.parametrize(("text", "words"), HAND_MADE.values(), ids=HAND_MADE)
def test_a_hand_made_plan_is_refused(text: str, words: str, refused_plan: Any) -> None:
    assert words in refused_plan(text)


@pytest.mark.parametrize("key", BAD_VALUES)
def test_values_out_of_range_are_refused(key: str, refused_plan: Any) -> None:
    for value in BAD_VALUES[key]:
        refused_plan(but(**{key: value}))


def test_the_plan_itself_runs(here: Path) -> None:
    """Else the others might be refused for another reason."""
    written(here / "theirs", but())
    assert main(["compare", "--resume", "theirs", "--quiet"]) == 0


FREE = (("left_out",), ("scenario", "selectors"))
"""Objects of a plan in which any key may stand."""
KINDS = [None, 3, "text", [], [{}], {}, {"label": "random"}, float("nan"), HUGE, deep(12), "\x1b[31mred", "\ud800"]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a plan at which a value stands whose kind is fixed."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key)
        if (*path, key) not in FREE:
            yield from places(value, (*path, key))


def test_a_value_of_another_kind_and_a_file_that_is_cut_are_refused(refused_plan: Any) -> None:
    texts = [json.dumps(good())[:length] for length in range(0, 1000, 50)]
    for path in places(good()):
        before = parent(good(), path)[path[-1]]
        for value in KINDS:
            numbers = isinstance(before, int | float) and isinstance(value, int | float)
            if isinstance(value, type(before)) or numbers or None in (before, value):
                continue
            texts.append(with_value(value, *path))
    assert len(texts) > 500
    for text in texts[::7]:
        refused_plan(text)
