"""The pictures: the rows and specifications that are drawn, worked by hand, and what a decoder finds in the PNG."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report import plots
from fedsel_flwr.report.page.charts import COLOURS
from fedsel_flwr.report.page.comparison_tables import mean_curve
from fedsel_flwr.report.plots import PANELS, plot_comparison, plot_rounds, selection_fractions
from fedsel_flwr.report.verdict import Verdict, verdict
from tests.processes import run_python
from tests.report.made import make_history, make_run

NaN = math.nan


def test_fractions_of_rounds_by_hand() -> None:
    fractions = selection_fractions(make_history([[0, 1], [0], [2, 0]], accuracy=[0.1] * 3), 4)
    np.testing.assert_allclose(fractions, [[1, 1, 0, 0], [1, 1 / 2, 0, 0], [1, 1 / 3, 1 / 3, 0]])


def test_a_mean_curve_has_the_last_value_of_each_seed() -> None:
    """Two rounds of the first seed end at 2 s, and the later one counts."""
    first = (np.array([1.0, 2.0, 2.0, 5.0]), np.array([0.1, 0.2, 0.3, 0.4]))
    x, mean, deviation = mean_curve([first, (np.array([1.5, 4.0]), np.array([0.5, 0.7]))])
    assert x.tolist() == [1.5, 2, 4, 5]
    np.testing.assert_allclose(mean, [0.3, 0.4, 0.5, 0.55])
    np.testing.assert_allclose(deviation, np.array([0.4, 0.2, 0.4, 0.3]) / math.sqrt(2))
    assert [len(part) for part in mean_curve([first, (np.empty(0), np.empty(0))])] == [0, 0, 0]
    assert np.isnan(mean_curve([first])[2]).all()


def runs_of(names: list[str], seeds: int) -> dict[str, list]:
    generator = np.random.default_rng(3)
    rounds, clients = 12, 10

    def run(offset: float):
        chosen = [generator.choice(clients, 3, replace=False).tolist() for _ in range(rounds)]
        accuracy = offset + np.linspace(0.1, 0.6, rounds) + generator.normal(0, 0.02, rounds)
        return make_history(chosen, accuracy=accuracy.tolist(), round_s=generator.uniform(1, 2, rounds).tolist())

    return {name: [run(0.05 * i) for _ in range(seeds)] for i, name in enumerate(names)}


def found(image: Any, colour: str) -> Any:
    """Where an image has a colour."""
    return np.abs(image - np.array(ImageColor.getrgb(colour))).max(axis=-1) < 5


def drawn(runs: Any, path: Path, **options: Any) -> Any:
    """The pixels of a picture above its legend."""
    with Image.open(plot_comparison(runs, path, num_clients=10, target_accuracy=0.5, **options)) as image:
        return np.asarray(image.convert("RGB")).astype(int)[:-120]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The panels of the last picture, by a word of their titles, without drawing them."""
    seen: dict[str, Any] = {}

    def note(panels: Any, path: Any, **options: Any) -> Any:
        seen.update({" ".join(panel.title.split()[:2]): panel for panel in panels} | options)
        return path

    monkeypatch.setattr(plots, "save_picture", note)
    return seen


def judged(**times: tuple[float, ...]) -> Verdict:
    """The verdict of runs with these times; random needs 10 s on each seed."""
    runs = [make_run("random", seed, 10.0) for seed in range(max(map(len, times.values())))]
    runs += [make_run(name, seed, time) for name, own in times.items() for seed, time in enumerate(own)]
    profile = {0.5: {name: {0: own[0], 1: own[0]} for name, own in times.items()} | {"random": {0: 10.0, 1: 10.0}}}
    return verdict(runs, "random", 0.5, times=profile | {0.6: profile[0.5]})


def test_every_selector_has_its_colour_in_every_panel_and_a_label_is_text(tmp_path: Path) -> None:
    names = ["$^^$", "<b>", "constructor", "random"]
    path = tmp_path / "new folder" / "comparison.png"
    options: dict[str, Any] = {
        "verdict": judged(**dict(zip(names, ((8.0, 9.0), (5.0, 6.0), (12.0, 14.0)), strict=False))),
        "title": '"legend": null',
    }
    image = drawn(runs_of(names, 3), path, **options)
    for colour in COLOURS[:3]:
        places = np.flatnonzero(found(image, colour).any(axis=0))
        assert [one.size > 5 for one in np.split(places, np.searchsorted(places, [1100, 1950, 2750]))] == [True] * 4
    # The reference has no ratio to itself.
    assert not found(image, COLOURS[3])[:, 1200:2700].any()
    assert not found(image, COLOURS[4]).any()
    assert [p.name for p in path.parent.iterdir()] == ["comparison.png"]  # no temporary file is left


def test_two_that_select_everybody_as_often_are_both_seen_the_first_on_top(tmp_path: Path) -> None:
    (run,) = runs_of(["bsfl"], 1)["bsfl"]
    image = drawn({"bsfl": [run], "cs-ucb": [run]}, tmp_path / "1.png", panel="selections")
    first, second = (np.flatnonzero(found(image, colour).any(axis=1)) for colour in COLOURS[:2])
    assert second.min() < first.min() < first.max() < second.max()


def test_more_selectors_than_colours_and_a_selector_never_measured(tmp_path: Path) -> None:
    runs = runs_of([f"selector-{i}" for i in range(16)], 1)
    runs["unmeasured"] = [make_history([[0], [1]], accuracy=[NaN, NaN])] * 2
    runs["without runs"] = []
    image = drawn(runs, tmp_path / "many.png")
    assert min(found(image, colour).sum() for colour in (*COLOURS[:-1], plots.INK)) > 300


def test_the_panels_have_the_figures_of_the_verdict(rows: dict[str, Any], tmp_path: Path) -> None:
    names = ["bsfl", "cs", "never", "random"]
    options: dict[str, Any] = {"num_clients": 10, "target_accuracy": 0.5}
    options["verdict"] = judged(bsfl=(8.0,) * 8, cs=(20.0,) * 8, never=(*(9.0,) * 7, math.inf))
    plot_comparison(runs_of(names, 2), tmp_path / "x.png", **options)
    assert rows["labels"] == names
    time, targets = rows["Time to"].rows, rows["Time ratio"].rows
    ratios = [(row["series"], row["kind"], row["ratio"], row["note"]) for row in time if row["kind"] != "band"]
    assert [(s, k, round(r, 6) if math.isfinite(r) else None, n) for s, k, r, n in ratios] == [
        (0, "mean", 0.8, "*"), *[(0, "seed", 0.8, "")] * 8,
        (1, "mean", 2.0, "*"), *[(1, "seed", 2.0, "")] * 8,
        (2, "mean", None, "7 of 8 reach it"), *[(2, "seed", 0.9, "")] * 7, (2, "seed", None, ""),
    ]  # fmt: skip
    assert [(row["series"], row["target"], round(row["ratio"], 6)) for row in targets] == [
        (number, target, ratio) for target in (0.5, 0.6) for number, ratio in enumerate((0.8, 2.0, 0.9))
    ]


def test_the_curve_is_the_mean_of_the_window_with_one_standard_deviation(rows: dict[str, Any]) -> None:
    accuracy = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.3, 0.4, 0.3, 0.6, 0.9, 1.0]])
    histories = [make_history([[0]] * 6, accuracy=own.tolist()) for own in accuracy]
    plot_comparison({"bsfl": histories}, "x.png", num_clients=1, target_accuracy=0.5, target_rounds=5)
    means = np.array([own[1:].mean() for own in accuracy])  # of the last five, at the last round
    last = rows["Accuracy, mean"].rows[-1]
    assert (last["series"], last["accuracy"]) == (0, pytest.approx(means.mean()))
    assert (last["low"], last["high"]) == pytest.approx(
        (means.mean() - means.std(ddof=1), means.mean() + means.std(ddof=1))
    )


@pytest.mark.parametrize(
    ("accuracy", "low", "high", "form"),
    [
        # A band of fractions ends at 0 and 1. R² may be negative, and a quality of the user's may pass 1.
        ([[0.0, 1.0, 0.99], [0.2, 0.5, 0.99], [0.0, 1.0, 0.99]], 0.0, 1.0, ".0%"),
        ([[-0.5, 0.1], [0.5, 0.2]], -np.std([-0.5, 0.5], ddof=1), np.std([-0.5, 0.5], ddof=1), None),
        ([[1.0, 2.0], [1.5, 3.0]], 1.25 - np.std([1.0, 1.5], ddof=1), 2.5 + np.std([2.0, 3.0], ddof=1), None),
    ],
)
def test_a_band_of_fractions_ends_at_0_and_1(
    rows: dict[str, Any], accuracy: list[list[float]], low: float, high: float, form: str | None
) -> None:
    histories = [make_history([[0]] * len(own), accuracy=own) for own in accuracy]
    plot_comparison({"a": histories}, "x.png", num_clients=1, target_accuracy=0.5, target_rounds=1)
    panel = rows["Accuracy, mean"]
    assert min(row["low"] for row in panel.rows) == pytest.approx(low)
    assert max(row["high"] for row in panel.rows) == pytest.approx(high)
    assert panel.spec["layer"][1]["encoding"]["y"]["axis"].get("format") == form


def test_the_picture_by_rounds(rows: dict[str, Any]) -> None:
    options: dict[str, Any] = {"num_clients": 3, "target_accuracy": 0.8, "title": "three clients"}
    one = [make_history([[0], [1], [2]], accuracy=[0.1, 0.5, 0.9]), make_history([[0], [1]], accuracy=[0.1, 0.7])]
    runs = {"one": one, "other": [make_history([[0]] * 3, accuracy=[NaN] * 3)], "none": []}
    lost = {"one": [[0.5, 0.4, 0.3], [0.1, 0.2]], "other": [[0.0, 0.0, 0.0]]}
    plot_rounds(runs, "x.png", lost=lost, target_rounds=1, **options)
    curves = {
        title: [[row[name] for row in rows[title].rows if row["series"] == number] for number in (0, 1)]
        for title, name in (
            ("Accuracy, mean", "accuracy"),
            ("Clients selected", "clients"),
            ("Selection fractions:", "share"),
            ("Lost against", "theta"),
        )
    }
    assert curves["Clients selected"] == [[1, 2], [1, 1, 1]]
    assert curves["Accuracy, mean"][0] == pytest.approx([0.1, 0.6])
    assert curves["Lost against"][0] == pytest.approx([0.3, 0.3])
    assert curves["Selection fractions:"][0] == pytest.approx([0, 0.5, 1 / 3])
    ends = [(row["low"], row["high"]) for row in rows["Selection fractions:"].rows if row["series"] == 0]
    np.testing.assert_allclose(ends, [(0, 1), (0, 0.5), (1 / 3, 1 / 3)])
    assert (rows["labels"], rows["title"]) == (["one", "other"], "three clients")
    plot_rounds({f"s{i}": one for i in range(5)}, "x.png", **options)
    assert "low" not in rows["Selection fractions"].rows[0]


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<svg")])
def test_the_suffix_chooses_the_format(suffix: str, begins: bytes, tmp_path: Path) -> None:
    """The same runs give the same PNG and SVG. A PDF has the fonts that publishers want."""
    runs, paths = runs_of(["bsfl", "random"], 2), [tmp_path / f"{i}{suffix}" for i in range(2)]
    first, second = (plot_rounds(runs, path, num_clients=10, target_accuracy=0.5).read_bytes() for path in paths)
    assert first.startswith(begins)
    if suffix == ".pdf":
        assert b"/CIDFontType2" in first
        assert b"/Type3" not in first
    else:
        assert first == second


@pytest.mark.parametrize("plot", [plot_comparison, plot_rounds])
def test_another_suffix_and_no_run_are_refused(plot: Any, tmp_path: Path) -> None:
    for name in ("picture.tiff", "picture"):
        with pytest.raises(ParameterError, match=r"must end in \.png, \.pdf or \.svg, got '.*picture"):
            plot(runs_of(["bsfl"], 1), tmp_path / name, num_clients=10, target_accuracy=0.5)
    with pytest.raises(ParameterError, match=plot.__name__):
        plot({"bsfl": []}, tmp_path / "x.png", num_clients=3, target_accuracy=0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("panel", PANELS)
def test_a_single_panel_has_every_selector(panel: str, tmp_path: Path) -> None:
    runs = runs_of(["bsfl", "cs", "random"], 2)
    image = drawn(runs, tmp_path / "panel.png", verdict=judged(bsfl=(8.0, 9.0), cs=(12.0, 11.0)), panel=panel)
    assert all(found(image, colour).sum() > 100 for colour in COLOURS[:2])
    # The reference has no ratio to itself.
    assert found(image, COLOURS[2]).any() == (panel in ("accuracy", "selections"))


def test_a_panel_that_is_unknown_or_needs_a_verdict_is_refused(tmp_path: Path) -> None:
    runs = runs_of(["bsfl"], 1)
    with pytest.raises(ParameterError, match="one of accuracy, ratios, targets, selections, got 'accurate'"):
        drawn(runs, tmp_path / "x.png", panel="accurate")
    for panel in ("ratios", "targets"):
        with pytest.raises(ParameterError, match=f"panel {panel!r} needs a reference"):
            drawn(runs, tmp_path / "x.png", panel=panel)
    assert list(tmp_path.iterdir()) == []


FORKED = """
import json, os, sys
from fedsel_flwr.report.page.document import convert
spec = json.loads(sys.argv[1])
first = convert("vegalite_to_png", vl_spec=spec)
child = os.fork()
if not child:
    os._exit(convert("vegalite_to_png", vl_spec=spec) != first)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_draws_what_its_parent_drew_before() -> None:
    """vl-convert's thread is not in the child, and a call in the child itself would never return."""
    spec = {"data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {"x": {"field": "a", "type": "quantitative"}}}
    assert run_python("-W", "ignore", "-c", FORKED, json.dumps(spec)).stdout == "0\n"
