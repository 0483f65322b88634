"""Plans that somebody wrote or changed by hand: each is refused in one line, and nothing is written for it."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.simulations import load_scenario

Plan = dict[str, Any]
MUTATED = 300
HUGE = 10**400
DEEP = "[" * 200_000
"""Brackets that Python's JSON does not follow."""


def good() -> Plan:
    """A plan that runs."""
    return {
        "scenario": json.loads(load_scenario("smoke", {"engine": "vectorized", "rounds": 2}).model_dump_json()),
        "selectors": [{"label": "random", "name": "random"}, {"label": "bsfl", "name": "bsfl"}],
        "seeds": [1, 2],
        "reference": "random",
        "rounds_on_flower": 0,
        "left_out": {"fedcs": "needs a deadline"},
        "where": {},
        "device": "cpu",
        "jobs": 1,
        "checkpoints": {"checkpoint_every": 1},
        "fingerprints": {"random": "SHA-256 0123"},
    }


def but(**changed: Any) -> str:
    """That plan with other values."""
    return json.dumps(good() | changed)


def scenario(**changed: Any) -> str:
    """That plan with other keys of the scenario."""
    return but(scenario=good()["scenario"] | changed)


def without(*path: Any) -> str:
    """That plan without a key."""
    plan: Any = good()
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return json.dumps(plan)


def deep(levels: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


HAND_MADE: dict[str, tuple[str, str]] = {
    "nothing": ("", "cannot be read"),
    "a list": ("[]", "lacks scenario, seeds, selectors"),
    "null": ("null", "lacks scenario, seeds, selectors"),
    "200,000 brackets": (DEEP, "cannot be read"),
    "200,000 brackets in a seed": (f'{{"scenario": {{}}, "selectors": [], "seeds": {DEEP}', "cannot be read"),
    "nested": (but(fingerprints={"random": deep(300)}), "nested more than 20 levels"),
    "an unknown key": (but(run_this="rm"), "run_this = 'rm'"),
    "no seeds": (without("seeds"), "lacks seeds"),
    "selectors: texts": (but(selectors=["random", "bsfl"]), "selectors.0 = 'random'"),
    "selectors: an object": (but(selectors={"random": "random"}), "selectors = a dict of 1"),
    "selectors: a number": (but(selectors=3), "selectors = 3"),
    "selectors: without label": (without("selectors", 0, "label"), "selectors.0.label"),
    "selectors: without name": (without("selectors", 0, "name"), "selectors.0.name"),
    "selectors: one twice": (but(selectors=[good()["selectors"][0]] * 2), "'random'"),
    "selectors: a label that leads out": (but(selectors=[{"label": "../x", "name": "random"}]), "label '../x'"),
    "selectors: nobody's name": (but(selectors=[{"label": "x", "name": "nobody"}]), "unknown selector 'nobody'"),
    "where: a list": (but(where=[]), "where = []"),
    "where: null": (but(where=None), "where = None"),
    "where: an unknown key": (but(where={"gpu": 1}), "unknown key 'gpu'"),
    "where: an address of numbers": (but(where={"ray_address": 6379}), "ray_address must be HOST:PORT"),
    "scenario: a list": (but(scenario=[]), "scenario = []"),
    "scenario: a text": (but(scenario="smoke"), "scenario = 'smoke'"),
    "scenario: null": (but(scenario=None), "scenario = None"),
    "scenario: NaN": (but(scenario=float("nan")), "scenario = nan"),
    "scenario: without name": (without("scenario", "name"), "scenario.name"),
    "scenario: clients without number": (scenario(num_clients=HUGE), "scenario.num_clients = an integer of"),
    "seeds: 400 digits": (but(seeds=[HUGE]), "seeds.0 = an integer of 1329 bits"),
    "seeds: 5,000 digits": (but(seeds=["x"]).replace('"x"', "9" * 5000), "cannot be read"),
    "seeds: a text": (but(seeds="1"), "seeds = '1'"),
    "checkpoints: unknown options": (but(checkpoints={"every": 1}), "checkpoints.every = 1"),
    "checkpoints: a path of zeros": (but(checkpoints={"checkpoint_dir": "\0"}), "holds control characters"),
    "scenario: a selector's null": (scenario(selectors={"fedcs": {"deadline": None}}), "not TOML serializable"),
    "left_out: a text": (but(left_out="fedcs"), "left_out = 'fedcs'"),
    "half a character": (scenario(description="\ud800"), "holds control characters"),
}
"""What was written by hand, and words of the line that refuses it."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the folder of a comparison in it."""
    (tmp_path / "theirs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    return tmp_path


def refused(text: str, here: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a plan is refused; nothing is written."""
    (here / "theirs" / "plan.json").write_text(text, encoding="utf-8")
    status = main(["compare", "--resume", "theirs", "--trust", "--quiet"])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("fedsel: error: ")
    assert err.strip().isprintable()
    assert len(err) < 2000
    assert sorted(os.listdir(here)) == ["theirs"]
    assert os.listdir(here / "theirs") == ["plan.json"]
    return err


@pytest.mark.parametrize(("text", "words"), HAND_MADE.values(), ids=HAND_MADE)
def test_a_hand_made_plan_is_refused_in_one_line(
    text: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(text, here, capsys)


def test_there_are_34() -> None:
    assert len(HAND_MADE) == 34


@pytest.mark.parametrize("plan", [but(), but(processes=2)], ids=["as written", "with the key of older plans"])
def test_the_plan_itself_runs(plan: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the others are made of; else they might be refused for another reason."""
    (here / "theirs" / "plan.json").write_text(plan)
    assert main(["compare", "--resume", "theirs", "--quiet"]) == 0


# ---- mutations -----------------------------------------------------------------------------------------------------

FREE = (("left_out",), ("fingerprints",), ("scenario", "selectors"))
"""Objects of a plan in which any key may stand."""
OF_ANOTHER_KIND = {
    "object": [None, 3, "text", [], [{}], True, float("nan")],
    "list": [None, 3, "text", {}, {"label": "random"}, False],
    "number": ["1", [], {}, HUGE, -HUGE, float("nan"), float("inf"), deep(12), None],
    "text": [3, [], {}, False, float("nan"), deep(12), HUGE, None, "\x1b[31mred", "\ud800", "a\x00b"],
}


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return {dict: "object", list: "list", int: "number", float: "number", str: "text"}.get(type(value), "nothing")


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a plan at which a value stands whose kind is fixed."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if kind(value) in OF_ANOTHER_KIND:
            yield (*path, key)
        if (*path, key) not in FREE:
            yield from places(value, (*path, key))


def parent(plan: Plan, path: tuple[Any, ...]) -> Any:
    inner: Any = plan
    for key in path[:-1]:
        inner = inner[key]
    return inner


def another_kind(plan: Plan, draw: random.Random) -> str:
    path = draw.choice(list(places(plan)))
    inner = parent(plan, path)
    allowed = {None} if path[-1] in NULL else {False} if path[-1] == "cooldown" else set()
    inner[path[-1]] = draw.choice(
        [value for value in OF_ANOTHER_KIND[kind(inner[path[-1]])] if not any(value is one for one in allowed)]
    )
    return json.dumps(plan)


NULL = ("reference", "name", "fingerprints", "checkpoint_every")
"""Keys that may be null."""


def unknown_key(plan: Plan, draw: random.Random) -> str:
    objects = [path for path in places(plan) if kind(parent(plan, path)[path[-1]]) == "object" and path not in FREE]
    inside = draw.choice(objects)
    parent(plan, inside)[inside[-1]][draw.choice(["x", "__class__", "", "\x1b]0;owned\x07", "$ref", "a" * 10**5])] = 1
    return json.dumps(plan)


def lacking(plan: Plan, draw: random.Random) -> str:
    path = draw.choice([("scenario",), ("selectors",), ("seeds",), ("scenario", "name"), ("selectors", 1, "label")])
    del parent(plan, path)[path[-1]]
    return json.dumps(plan)


def cut(plan: Plan, draw: random.Random) -> str:
    text = json.dumps(plan)
    return text[: draw.randrange(len(text))]


def garbled(plan: Plan, draw: random.Random) -> str:
    text = json.dumps(plan)
    at = draw.choice([found.end() for found in re.finditer('": ', text)])  # not within a text, where all may stand
    return text[:at] + draw.choice([DEEP, "\x00", "\n}", "}" * 10**5, '"\n"', "9" * 5000 + "x{"]) + text[at:]


def out_of_range(plan: Plan, draw: random.Random) -> str:
    changed: dict[str, Any] = draw.choice([
        {"seeds": [draw.choice([-1, 2**63, 1.5, True, "1", HUGE])]}, {"seeds": [3, 3]}, {"jobs": 0}, {"jobs": HUGE},
        {"device": draw.choice(["abacus", "", "cuda:99", "../cpu", "cpu:x:y"])},
        {"rounds_on_flower": -1}, {"reference": draw.choice(["nobody", "../random", "", "a" * 1000])},
        {"where": {"num_cpus": draw.choice([0, -1, "all", HUGE, float("nan")])}},
        {"checkpoints": {"checkpoint_dir": draw.choice(["", "/", "away", "../away", 7])}},
        {"selectors": [{"label": draw.choice(["", ".", "..", "a/b", "\\", "a\x07", "\u202ea", "a" * 101, " "]),
                        "name": "random"}]},
        {"selectors": [{"label": "x", "name": draw.choice(["nobody", "", "a:b:c", "/no.py:X", ":", "os:abort"])}],
         "reference": None},
    ])  # fmt: skip
    return json.dumps(plan | changed)


MUTATIONS: list[Callable[[Plan, random.Random], str]] = [
    another_kind, another_kind, another_kind, unknown_key, lacking, cut, garbled, out_of_range, out_of_range,
]  # fmt: skip


def test_300_mutated_plans_are_refused_in_one_line_each(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(25)
    texts: dict[str, None] = {}
    while len(texts) < MUTATED:
        texts[draw.choice(MUTATIONS)(good(), draw)] = None
    for text in texts:
        refused(text, here, capsys)
