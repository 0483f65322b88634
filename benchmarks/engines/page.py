"""The page and the CSV file, from what the runs have left."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from cast import LEFT_OUT, OURS, PEERS, PLAYERS
from task import MODELS

HEAD = """# Engines side by side

Written by `python benchmarks/engines`. {clients} clients of {examples} images, {cohort} a round, {epochs} epoch,
batches of {batch}, SGD. A round is select, train, aggregate and observe; the evaluation is outside. All sides train the
same tensors, with the same shares, from the same first model. Each framework is a process of its own, and the driver
lets them take turns, in order and in the opposite order. Ratios are of the same turn. Each framework runs as was
fastest in the first turns; [engines.csv](engines.csv) has every turn. The first round holds what a framework does once.
"""


def write(results: dict[str, Any], page: Path, table: Path) -> None:
    """Write both files.

    Args:
        results: By model: ``runners``, ``floor``, ``machine``, ….
        page: Markdown.
        table: CSV, a line a turn.
    """
    known = [name for name in MODELS if name in results]
    shape = results[known[0]]["settings"]
    text = [HEAD.format(**shape)]
    for name in known:
        text += _section(name, results[name])
    text += ["## Left out", "", *(f"- {name}: {why}." for name, why in LEFT_OUT.items())]
    text += [
        "- On a GPU, only our engine was measured, without the other frameworks: [RESULTS.md](RESULTS.md#on-a-gpu).",
        "- pfl-research's CIFAR-10 protocol and VGG-11 are not options of the command yet.",
        "",
    ]
    page.write_text("\n".join(text))
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "engine", "variant", "kind", "number", "seconds"])
        for name in known:
            for runner in results[name]["runners"]:
                head = [name, runner["player"], runner["variant"]]
                writer.writerow([*head, "startup", 0, _short(runner["startup"])])
                writer.writerow([*head, "first", 0, _short(runner["first"])])
                for number, turn in enumerate(runner["turns"]):
                    writer.writerow([*head, "turn", number, _short(turn["seconds"])])


def _section(name: str, result: dict[str, Any]) -> list[str]:
    runners = {runner["player"]: runner for runner in result["runners"] if not runner["failure"]}
    ours = min((p for p in OURS if p in runners), key=lambda p: _median(runners[p]), default=None)
    lines = [
        f"## {MODELS[name]}",
        "",
        f"{result['when']}, {result['machine']}. Turns in each half: {result['turns']}. {result['data']}.",
        "",
        *_busy(result["load"], result.get("stolen", 0.0)),
        "| engine | version | at its best | start-up, s | round 1, s | round, s | quartiles | ours is faster by "
        "| quartiles | test accuracy |",
        "|" + " --- |" * 10,
    ]
    for player in PLAYERS:
        if player in runners:
            lines.append(_row(runners[player], runners.get(ours or "")))
        elif player in result["absent"]:
            lines.append(f"| {PLAYERS[player].title} | | {result['absent'][player]} |" + " |" * 7)
    lines += [
        "",
        *_compiling(result),
        *_floor(result, runners.get(ours or "")),
        *_verdict(runners, ours),
        *_warnings(runners),
    ]
    return lines


def _row(runner: dict[str, Any], ours: dict[str, Any] | None) -> str:
    own = _seconds(runner)
    ratio = ["", ""]
    if ours is not None and ours is not runner:
        paired = own / _seconds(ours)
        ratio = [f"**{np.median(paired):.1f}**", "{:.1f}-{:.1f}".format(*np.quantile(paired, [0.25, 0.75]))]
    cells = [
        PLAYERS[runner["player"]].title, runner["version"], runner["variant"], f"{runner['startup']:.1f}",
        _figure(runner["first"]), _figure(np.median(own)),
        "-".join(_figure(q) for q in np.quantile(own, [0.25, 0.75])), *ratio,
        f"{runner['accuracy']:.3f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _busy(load: float, stolen: float) -> list[str]:
    """A warning where others worked on the machine or on its host; rounds of two threads suffer most from that."""
    said = [f"load {load:.1f} before the start"] if load >= 0.5 else []
    said += [f"the host gave {stolen:.0%} of the time that was asked for to others"] if stolen >= 0.05 else []
    return [f"**The machine was busy with other work ({', '.join(said)}): figures are rough.**", ""] if said else []


def _compiling(result: dict[str, Any]) -> list[str]:
    """What the compiled loops cost before they run."""
    if not (seconds := result.get("compiling")):
        return []
    return [
        f"The loops of the backend numba take {seconds[0]:.1f} s to compile, once after the installation; every other "
        f"process loads them in {seconds[1]:.1f} s. Either is part of round 1.",
        "",
    ]


def _floor(result: dict[str, Any], ours: dict[str, Any] | None) -> list[str]:
    if ours is None:
        return []
    floor, round_s = result["floor"], _median(ours)
    best = max(floor["rates"].values())
    least = floor["operations"] / best
    rates = ", ".join(f"{value / 1e9:.0f} with {threads}" for threads, value in floor["rates"].items())
    training = np.median([turn["training"] for turn in ours["turns"]])
    backend = ours["turns"][-1]["backend"]
    return [
        f"Floor: {floor['operations'] / 1e9:.2f} GFLOP a round; large matrix products run at {rates} threads "
        f"(GFLOP/s), hence at least {_figure(least)} s. Our round takes {round_s / least:.1f} times that. Of its "
        f"{_figure(round_s)} s the training takes {_figure(training)} (backend: {backend}), everything else "
        f"{_figure(round_s - training)}.",
        "",
    ]


def _verdict(runners: dict[str, Any], ours: str | None) -> list[str]:
    """The two ratios that matter."""
    if ours is None:
        return []
    said = []
    peers = sorted((p for p in PEERS if p in runners), key=lambda p: _median(runners[p]))
    for what, player in (("Flower on Ray", "flower"), ("the fastest peer", peers[0] if peers else "")):
        if player in runners:
            ratio = np.median(_seconds(runners[player]) / _seconds(runners[ours]))
            named = f"{what} ({PLAYERS[player].title})" if player != "flower" else what
            said.append(f"{ratio:.1f} times as fast as {named}")
    return [f"The faster of our two ({PLAYERS[ours].title}) is {' and '.join(said)}.", ""] if said else []


def _warnings(runners: dict[str, Any]) -> list[str]:
    """Who trained less, or spent time while others ran."""
    accuracy = float(np.median([runner["accuracy"] for runner in runners.values()]))
    odd = [r for r in runners.values() if abs(r["accuracy"] - accuracy) > 0.05]
    busy = [r for r in runners.values() if r["idle"] > 0.1]
    said = [f"{PLAYERS[r['player']].title} ends {r['accuracy'] - accuracy:+.3f} from the median accuracy" for r in odd]
    said += [f"{PLAYERS[r['player']].title} takes {r['idle']:.2f} of a core while it waits" for r in busy]
    return [f"Note: {'; '.join(said)}.", ""] if said else []


def _seconds(runner: dict[str, Any]) -> Any:
    return np.array([turn["seconds"] for turn in runner["turns"]])


def _median(runner: dict[str, Any]) -> float:
    return float(np.median(_seconds(runner)))


def _figure(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _short(value: float) -> str:
    return f"{value:.6f}"
