"""The page and the CSV file, from what the runs have left."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from cast import LEFT_OUT, OURS, PEERS, PLAYERS
from task import MODELS

HEAD = """# Engines side by side

Written by `python benchmarks/engines`; every number here is of the run that is named at its table. {clients} clients of
{examples} images, {cohort} a round, {epochs} epoch, batches of {batch}, SGD. A round is select, train, aggregate and
observe on every side; the evaluation of the global model is outside. All sides train the same tensors, with the same
shares, from the same first model, and draw cohorts and batches themselves. Each framework is a process (or several) of
its own that waits in a blocking read; the driver lets them take turns, through all of them in order in the first half
and in the opposite order in the second, so that whatever else the machine does hits all. Ratios are of the same turn.
Where a framework can use the machine in several ways, each was tried for the first turns ("tried"), and the fastest
went on. The first round holds what a framework does once; every later one finds cold caches, as others were at work.
Where a framework lets us choose how a client's batches are cut, they are slices of tensors; FLGo's own data loader
reads FLGo's, through a method that torch 2.12 asks of its data sets and that the worker adds.
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
        "| engine | version | at its best | start-up, s | round 1, s | round, s | quartiles | halves "
        "| ours is faster by | quartiles | idle, cores | test accuracy |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for player in PLAYERS:
        if player in runners:
            lines.append(_row(runners[player], runners.get(ours or "")))
        elif player in result["absent"]:
            lines.append(f"| {PLAYERS[player].title} | | {result['absent'][player]} |" + " |" * 9)
    lines += [
        "",
        *_tried(result),
        *_compiling(result),
        *_floor(result, runners.get(ours or "")),
        *_verdict(runners, ours),
        *_warnings(runners),
    ]
    return lines


def _row(runner: dict[str, Any], ours: dict[str, Any] | None) -> str:
    own = _seconds(runner)
    half = len(own) // 2
    ratio = ["", ""]
    if ours is not None and ours is not runner:
        paired = own / _seconds(ours)
        ratio = [f"**{np.median(paired):.1f}**", "{:.1f}-{:.1f}".format(*np.quantile(paired, [0.25, 0.75]))]
    halves = f"{_figure(np.median(own[:half]))} / {_figure(np.median(own[half:]))}"
    cells = [
        PLAYERS[runner["player"]].title, runner["version"], runner["variant"], f"{runner['startup']:.1f}",
        _figure(runner["first"]), _figure(np.median(own)),
        "-".join(_figure(q) for q in np.quantile(own, [0.25, 0.75])), halves, *ratio,
        f"{runner['idle']:.2f}", f"{runner['accuracy']:.3f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _busy(load: float, stolen: float) -> list[str]:
    """A warning where others worked on the machine or on its host; rounds of two threads suffer most from that."""
    said = [f"load {load:.1f} before the start"] if load >= 0.5 else []
    said += [f"the host gave {stolen:.0%} of the time that was asked for to others"] if stolen >= 0.05 else []
    return [f"**The machine was busy with other work ({', '.join(said)}): figures are rough.**", ""] if said else []


def _tried(result: dict[str, Any]) -> list[str]:
    """Medians of the variants over the first turns, which all of them took."""
    by_player: dict[str, list[dict[str, Any]]] = {}
    for runner in result["runners"]:
        by_player.setdefault(runner["player"], []).append(runner)
    said = []
    for player, own in by_player.items():
        if len(own) > 1:
            each = [
                f"{r['variant']} {_figure(np.median(_seconds(r)[: result['trial']]))}" if r["turns"]
                else f"{r['variant']}: {r['failure']}"
                for r in own
            ]  # fmt: skip
            said.append(f"{PLAYERS[player].title}: {', '.join(each)}")
    return [f"Tried, median s of the first {result['trial']} turns: {'; '.join(said)}.", ""] if said else []


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
        LIMITS.get(f"{result['model']}, {backend}", LIMITS[result["model"]]),
        "",
    ]


LIMITS = {
    "mlp, numba": "What limits it: three fifths of a client's step are the two products of its first layer, at half "
    "the rate of large ones, a quarter is the fetching of ten images from main memory, the rest the smaller layers. "
    "Outside the training most goes into random streams, each named by client, purpose and round.",
    "mlp": "What limits it: a batch of ten reads each client's first layer once for its outputs and once for its "
    "step, at the speed of the cache rather than of the arithmetic; with one thread that is about two fifths "
    "of the training. Some sixty small operations a step cost another fifth, whatever they compute. A second "
    "thread would have to be woken for each of them, which takes longer than they do; a second process is "
    "woken once a round and trains half of the clients, but does the small operations once more. Outside the "
    "training most goes into random streams, each named by client, purpose and round, and nothing of it is "
    "shared.",
    "cnn5": "What limits it: the second convolution, whose grouped products run at the rate of large ones, takes most "
    "of the training; the first, with a single input channel, runs at half that rate, and pooling takes about a "
    "seventh.",
    "resnet": "What limits it: manual backprop does not know these layers, so torch.func batches them: grouped "
    "convolutions of few channels in a layout that is not theirs, and normalisation and additions that read and write "
    "memory as often as in a loop. This is the kind of model for which the engine pays least.",
}


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
