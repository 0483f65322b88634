"""The pictures: carried-forward values and fractions by hand, and what a decoder finds in the PNG."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.panels import (
    COLOURS,
    carry_forward,
    draw_accuracy,
    draw_profile,
    draw_ratios,
    limit_to_percent,
    line_style,
)
from fedsel_flwr.report.plots import PANELS, _accuracy, plot_comparison, plot_rounds, selection_fractions
from fedsel_flwr.report.verdict import Verdict, verdict
from tests.report.made import make_history, make_run

NaN = math.nan


@pytest.mark.parametrize(
    ("times", "values", "grid", "expected"),
    [
        # two rounds end at 2 s: the later one counts
        ([1.0, 2.0, 2.0, 5.0], [0.1, 0.2, 0.3, 0.4], [0.5, 1.0, 1.999, 2.0, 4.9, 5.0, 9.0],
         [NaN, 0.1, 0.1, 0.3, 0.3, 0.4, 0.4]),
        ([1, 2, 3], [NaN, 0.2, NaN], [1, 2, 3], [NaN, 0.2, 0.2]),
        ([], [], [1, 2], [NaN, NaN]),
    ],
)  # fmt: skip
def test_carry_forward_by_hand(times: Any, values: Any, grid: Any, expected: Any) -> None:
    np.testing.assert_array_equal(carry_forward(times, values, grid), expected)


def test_fractions_and_accuracies_of_rounds_by_hand() -> None:
    """The accuracy of a round is the last mean of as many measured rounds as the window has."""
    fractions = selection_fractions(make_history([[0, 1], [0], [2, 0]], accuracy=[0.1] * 3), 4)
    np.testing.assert_allclose(fractions, [[1, 1, 0, 0], [1, 1 / 2, 0, 0], [1, 1 / 3, 1 / 3, 0]])
    history = make_history([[0]] * 5, accuracy=[NaN, 0.2, NaN, 0.4, 0.6])
    np.testing.assert_allclose(_accuracy(history, 2), [NaN, 0.2, 0.2, 0.3, 0.5])


def found(image: Any, colour: str) -> Any:
    """Where an image has a colour."""
    return np.abs(image[..., :3] - np.array(to_rgb(colour))).max(axis=-1) < 0.02


def runs_of(names: list[str], seeds: int) -> dict[str, list]:
    generator = np.random.default_rng(3)
    rounds, clients = 12, 10

    def run(offset: float):
        chosen = [generator.choice(clients, 3, replace=False).tolist() for _ in range(rounds)]
        accuracy = offset + np.linspace(0.1, 0.6, rounds) + generator.normal(0, 0.02, rounds)
        return make_history(chosen, accuracy=accuracy.tolist(), round_s=generator.uniform(1, 2, rounds).tolist())

    return {name: [run(0.05 * i) for _ in range(seeds)] for i, name in enumerate(names)}


def drawn(runs: Any, path: Path, **options: Any) -> Any:
    return matplotlib.image.imread(plot_comparison(runs, path, num_clients=10, target_accuracy=0.5, **options))


@pytest.mark.parametrize("seeds", [1, 3])
def test_every_selector_has_its_colour_in_both_panels(tmp_path: Path, seeds: int) -> None:
    runs = runs_of(["bsfl", "cs-ucb", "random", "round-robin"], seeds)
    path = tmp_path / "new folder" / "comparison.png"
    image = drawn(runs, path, title="Four selectors")
    assert image.shape[:2] == (920, 2000)
    for colour in COLOURS[:4]:
        exact = found(image, colour)
        assert exact.sum() > 2000
        assert all(part.any() for part in np.split(exact[:800], [1200], axis=1))  # above the legend
    assert not found(image, COLOURS[4]).any()
    assert [p.name for p in path.parent.iterdir()] == ["comparison.png"]  # no temporary file is left


def test_two_that_select_everybody_as_often_are_both_seen_and_drawn_alike_again(tmp_path: Path) -> None:
    """In the right panel, where the first lies on top."""
    (run,) = runs_of(["bsfl"], 1)["bsfl"]
    runs = {"bsfl": [run], "cs-ucb": [run]}
    image = drawn(runs, tmp_path / "1.png")
    assert all(found(image[:800, 1200:], colour).sum() > 500 for colour in COLOURS[:2])
    drawn(runs, tmp_path / "2.png")
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
    assert plt.get_fignums() == []


def test_more_selectors_than_colours_and_a_selector_never_measured(tmp_path: Path) -> None:
    runs = runs_of([f"selector-{i}" for i in range(16)], 1)
    runs["unmeasured"] = [make_history([[0], [1]], accuracy=[NaN, NaN])] * 2
    runs["without runs"] = []
    image = drawn(runs, tmp_path / "many.png")
    assert min(found(image, colour).sum() for colour in COLOURS) > 500


def judged(**times: tuple[float, ...]) -> Verdict:
    """The verdict of runs with these times; random needs 10 s on each seed."""
    runs = [make_run("random", seed, 10.0) for seed in range(2)]
    runs += [make_run(name, seed, time) for name, own in times.items() for seed, time in enumerate(own)]
    profile = {0.5: {name: {0: own[0], 1: own[0]} for name, own in times.items()} | {"random": {0: 10.0, 1: 10.0}}}
    return verdict(runs, "random", 0.5, times=profile | {0.6: profile[0.5]})


def test_the_ratio_panel_shows_each_ratio_left_or_right_of_the_reference() -> None:
    axes = Figure().subplots()
    looks = {name: line_style(i, 3) for i, name in enumerate(("bsfl", "cs", "never"))}
    found = judged(bsfl=(8.0, 8.0), cs=(20.0, 20.0), never=(9.0, math.inf))
    draw_ratios(axes, found, looks)
    blue, red, green = COLOURS[:3]
    shown = [(line.get_color(), np.round(line.get_xdata(), 6).tolist()) for line in axes.lines[1:]]
    assert shown == [
        (blue, [0.8, 0.8]), (blue, [0.8, 0.8]), (blue, [0.8]),
        (red, [2.0, 2.0]), (red, [2.0, 2.0]), (red, [2.0]),
        (green, [0.9]),
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["1 of 2 reach it"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bsfl", "cs", "never"]
    assert axes.get_xscale() == "log"


def test_the_profile_shows_each_target() -> None:
    axes = Figure().subplots()
    draw_profile(axes, judged(bsfl=(8.0, 8.0)), {"bsfl": line_style(0, 1)})
    assert axes.lines[1].get_xdata().tolist() == [50.0, 60.0]
    assert axes.lines[1].get_ydata() == pytest.approx([0.8, 0.8])


def test_with_a_verdict_the_picture_has_four_panels_and_a_label_is_no_formula(tmp_path: Path) -> None:
    """Matplotlib would read what stands between dollar signs, and refuse what it cannot read."""
    options: dict[str, Any] = {"verdict": judged(**{"$^^$": (8.0, 9.0)}), "title": "$^^$"}
    image = drawn(runs_of(["$^^$", "random"], 2), tmp_path / "3.png", **options)
    assert image.shape[:2] == (920, 3600)
    assert all(part.any() for part in np.split(found(image[:800], COLOURS[0]), [1150, 1950, 2750], axis=1))


def test_the_curve_is_the_mean_of_the_window_with_one_standard_deviation() -> None:
    accuracy = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.3, 0.4, 0.3, 0.6, 0.9, 1.0]])
    axes = Figure().subplots()
    histories = [make_history([[0]] * 6, accuracy=own.tolist()) for own in accuracy]
    draw_accuracy(axes, "bsfl", histories, line_style(0, 1), 5)
    means = 100 * np.array([own[1:].mean() for own in accuracy])  # of the last five, at the last round
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(means.mean())
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert np.isclose(band, means.mean() + means.std(ddof=1)).any()
    assert np.isclose(band, means.mean() - means.std(ddof=1)).any()


def test_the_picture_against_rounds(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_clients": 3, "target_accuracy": 0.8}
    one = [make_history([[0], [1], [2]], accuracy=[0.1, 0.5, 0.9]), make_history([[0], [1]], accuracy=[0.1, 0.5])]
    runs = {"one": one, "other": [make_history([[0]] * 3, accuracy=[NaN] * 3)], "none": []}
    path = plot_rounds(runs, tmp_path / "rounds.png", title="three clients", **options)
    assert matplotlib.image.imread(path).shape == (690, 2100, 4)
    lost = {"one": [[0.5, 0.4, 0.3], [0.1, 0.2]], "other": [[0.0, 0.0, 0.0]]}
    wide = plot_rounds(runs, tmp_path / "wide.png", lost=lost, **options)
    assert matplotlib.image.imread(wide).shape[1] == 2700


@pytest.mark.parametrize("plot", [plot_comparison, plot_rounds])
@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml")])
def test_the_suffix_chooses_the_format(plot: Any, suffix: str, begins: bytes, tmp_path: Path) -> None:
    """The same runs give the same file: no date, no random names."""
    runs, paths = runs_of(["bsfl", "random"], 2), [tmp_path / f"{i}{suffix}" for i in range(2)]
    first, second = (plot(runs, path, num_clients=10, target_accuracy=0.5).read_bytes() for path in paths)
    assert first.startswith(begins)
    assert first == second


@pytest.mark.parametrize("plot", [plot_comparison, plot_rounds])
@pytest.mark.parametrize("name", ["picture.tiff", "picture"])
def test_another_suffix_is_refused(plot: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"must end in \.png, \.pdf or \.svg, got '.*picture"):
        plot(runs_of(["bsfl"], 1), tmp_path / name, num_clients=10, target_accuracy=0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("panel", PANELS)
def test_a_single_panel_has_every_selector(panel: str, tmp_path: Path) -> None:
    found_by = judged(bsfl=(8.0, 9.0), cs=(12.0, 11.0))
    runs = runs_of(["bsfl", "cs", "random"], 2)
    image = drawn(runs, tmp_path / "panel.png", verdict=found_by, panel=panel)
    assert image.shape[:2] == (920, 1400)
    assert all(found(image, colour).sum() > 300 for colour in COLOURS[:2])
    # The reference has no ratio to itself.
    assert found(image, COLOURS[2]).any() == (panel in ("accuracy", "selections"))


def test_the_legend_of_a_single_panel_fits_its_width(tmp_path: Path) -> None:
    runs = runs_of([f"a-selector setting={i}" for i in range(6)], 1)
    image = drawn(runs, tmp_path / "panel.png", panel="accuracy")
    ink = (image[760:, :, :3] < 0.5).any(axis=-1)
    assert ink.any()
    assert not ink[:, :20].any()
    assert not ink[:, -20:].any()


def test_a_panel_that_is_unknown_or_needs_a_verdict_is_refused(tmp_path: Path) -> None:
    runs = runs_of(["bsfl"], 1)
    with pytest.raises(ParameterError, match="one of accuracy, ratios, targets, selections, got 'accurate'"):
        drawn(runs, tmp_path / "x.png", panel="accurate")
    for panel in ("ratios", "targets"):
        with pytest.raises(ParameterError, match=f"panel {panel!r} needs a reference"):
            drawn(runs, tmp_path / "x.png", panel=panel)
    assert list(tmp_path.iterdir()) == []


def band_of(accuracy: list[list[float]]) -> tuple[Any, Any]:
    """The axes and the edges of the band of runs with these accuracies, in percent."""
    axes = Figure().subplots()
    histories = [make_history([[0]] * len(own), accuracy=own) for own in accuracy]
    draw_accuracy(axes, "bsfl", histories, line_style(0, 1), 1)
    limit_to_percent(axes)
    return axes, axes.collections[0].get_paths()[0].vertices[:, 1]


def test_neither_band_nor_axis_leaves_0_to_100_percent() -> None:
    axes, band = band_of([[0.0, 1.0, 0.99], [0.2, 0.5, 0.99], [0.0, 1.0, 0.99]])
    assert (band.min(), band.max()) == (0.0, 100.0)
    assert axes.get_ylim() == (0.0, 100.0)


def test_a_quality_that_is_no_fraction_keeps_its_band() -> None:
    """R² may be negative, and a quality of the user's may pass 1."""
    _, band = band_of([[-0.5, 0.1], [0.5, 0.2]])
    assert band.min() == pytest.approx(100 * (0 - np.std([-0.5, 0.5], ddof=1)))
    axes, band = band_of([[1.0, 2.0], [1.5, 3.0]])
    assert band.max() == pytest.approx(100 * (2.5 + np.std([2.0, 3.0], ddof=1)))
    assert axes.get_ylim()[1] > 300


@pytest.mark.parametrize("plot", [plot_comparison, plot_rounds])
def test_a_picture_of_nothing_is_refused(plot: Any, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=plot.__name__):
        plot({"bsfl": []}, tmp_path / "x.png", num_clients=3, target_accuracy=0.5)
    assert list(tmp_path.iterdir()) == []
