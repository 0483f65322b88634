"""The picture: carried-forward values by hand, and what a decoder finds in the PNG."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.plots import (
    COLOURS,
    carry_forward,
    draw_accuracy,
    draw_differences,
    line_style,
    plot_comparison,
)
from fedsel_flwr.report.run_folder import load_optional
from fedsel_flwr.report.verdict import PairedDifference


def test_carry_forward_by_hand() -> None:
    times, values = [1.0, 2.0, 2.0, 5.0], [0.1, 0.2, 0.3, 0.4]  # two rounds end at 2 s: the later one counts
    grid = [0.5, 1.0, 1.999, 2.0, 4.9, 5.0, 100.0]
    np.testing.assert_array_equal(carry_forward(times, values, grid), [np.nan, 0.1, 0.1, 0.3, 0.3, 0.4, 0.4])


def test_carry_forward_passes_over_missing_values() -> None:
    nan = math.nan
    np.testing.assert_array_equal(carry_forward([1, 2, 3], [nan, 0.2, nan], [1, 2, 3]), [nan, 0.2, 0.2])
    np.testing.assert_array_equal(carry_forward([], [], [1, 2]), [nan, nan])


def pixels_of(path: Path, colour: str) -> int:
    image = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(image - np.array(to_rgb(colour))).max(axis=-1) < 0.02).sum())


def runs_of(make_history, names: list[str], seeds: int) -> dict[str, list]:
    generator = np.random.default_rng(3)
    rounds, clients = 12, 10

    def run(offset: float):
        chosen = [generator.choice(clients, 3, replace=False).tolist() for _ in range(rounds)]
        accuracy = offset + np.linspace(0.1, 0.6, rounds) + generator.normal(0, 0.02, rounds)
        return make_history(chosen, accuracy=accuracy.tolist(), round_s=generator.uniform(1, 2, rounds).tolist())

    return {name: [run(0.05 * i) for _ in range(seeds)] for i, name in enumerate(names)}


@pytest.mark.parametrize("seeds", [1, 3])
def test_every_selector_has_its_colour_in_both_panels(make_history, tmp_path: Path, seeds: int) -> None:
    names = ["bsfl", "cs-ucb", "random", "round-robin"]
    path = plot_comparison(
        runs_of(make_history, names, seeds),
        tmp_path / "new folder" / "comparison.png",
        num_clients=10,
        target_accuracy=0.5,
        title="Four selectors",
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (920, 2000)
    for colour in COLOURS[:4]:
        assert pixels_of(path, colour) > 2000
        exact = np.abs(image[..., :3] - np.array(to_rgb(colour))).max(axis=-1) < 0.02
        plots = exact[:800]  # above the legend
        assert plots[:, :1200].any()
        assert plots[:, 1200:].any()
    assert pixels_of(path, COLOURS[4]) == 0
    assert [p.name for p in path.parent.iterdir()] == ["comparison.png"]  # no temporary file is left


def test_two_that_select_everybody_as_often_are_both_seen(make_history, tmp_path: Path) -> None:
    """In the right panel, where the first lies on top."""
    (run,) = runs_of(make_history, ["bsfl"], 1)["bsfl"]
    path = plot_comparison({"bsfl": [run], "cs-ucb": [run]}, tmp_path / "two.png", num_clients=10, target_accuracy=0.5)
    right = matplotlib.image.imread(path)[:800, 1200:, :3]
    for colour in COLOURS[:2]:
        assert (np.abs(right - np.array(to_rgb(colour))).max(axis=-1) < 0.02).sum() > 500


def test_more_selectors_than_colours_and_a_selector_never_measured(make_history, tmp_path: Path) -> None:
    runs = runs_of(make_history, [f"selector-{i}" for i in range(16)], 1)
    runs["unmeasured"] = [make_history([[0], [1]], accuracy=[math.nan, math.nan])] * 2
    runs["without runs"] = []
    path = plot_comparison(runs, tmp_path / "many.png", num_clients=10, target_accuracy=0.5)
    assert min(pixels_of(path, colour) for colour in COLOURS) > 500


def test_the_same_histories_draw_the_same_picture_whatever_the_state_of_pyplot(make_history, tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    runs = runs_of(make_history, ["bsfl", "random"], 2)
    first = plot_comparison(runs, tmp_path / "1.png", num_clients=10, target_accuracy=0.5).read_bytes()
    second = plot_comparison(runs, tmp_path / "2.png", num_clients=10, target_accuracy=0.5).read_bytes()
    assert first == second
    assert plt.get_fignums() == []


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="plot_comparison"):
        plot_comparison({"bsfl": []}, tmp_path / "x.png", num_clients=3, target_accuracy=0.5)
    assert list(tmp_path.iterdir()) == []


def difference(selector: str, *values: float) -> PairedDifference:
    mean = float(np.mean(values))
    low, high = (mean - 4.0, mean + 4.0) if math.isfinite(mean) else (math.nan, math.nan)
    return PairedDifference(
        selector=selector, reference="random", figure="time_to_target_s", mean=mean, low=low, high=high,
        confidence=0.95, p=0.01, pairs=len(values), reached=int(np.isfinite(values).sum()),
        reference_reached=len(values), reference_mean=20.0, differences=values,
    )  # fmt: skip


def test_the_middle_panel_shows_each_difference_left_or_right_of_the_reference() -> None:
    axes = load_optional("matplotlib.figure").Figure().subplots()
    looks = {name: line_style(i, 3) for i, name in enumerate(("bsfl", "cs-ucb", "never"))}
    shown = [difference("bsfl", -8.0, -6.0), difference("cs-ucb", 3.0, 1.0), difference("never", math.nan, 2.0)]
    draw_differences(axes, shown, looks)
    drawn = [(line.get_color(), line.get_xdata().tolist()) for line in axes.lines[1:]]
    blue, red, green = COLOURS[:3]
    assert drawn == [
        (blue, [-8.0, -6.0]), (blue, [-11.0, -3.0]), (blue, [-7.0]),
        (red, [3.0, 1.0]), (red, [-2.0, 6.0]), (red, [2.0]),
        (green, [2.0]),
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["1 of 2 arrived"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bsfl", "cs-ucb", "never"]


def test_with_differences_the_picture_has_three_panels(make_history, tmp_path: Path) -> None:
    runs = runs_of(make_history, ["bsfl", "random"], 2)
    shown = [difference("bsfl", -8.0, -6.0)]
    path = plot_comparison(runs, tmp_path / "3.png", num_clients=10, target_accuracy=0.5, differences=shown)
    image = matplotlib.image.imread(path)
    assert image.shape[:2] == (920, 2800)
    blue = np.abs(image[:800, :, :3] - np.array(to_rgb(COLOURS[0]))).max(axis=-1) < 0.02
    assert all(part.any() for part in np.split(blue, [1200, 2000], axis=1))


def test_the_curve_is_the_mean_of_five_rounds_with_one_standard_deviation(make_history) -> None:
    accuracy = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.3, 0.4, 0.3, 0.6, 0.9, 1.0]])
    axes = load_optional("matplotlib.figure").Figure().subplots()
    histories = [make_history([[0]] * 6, accuracy=own.tolist()) for own in accuracy]
    draw_accuracy(axes, "bsfl", histories, line_style(0, 1))
    means = 100 * np.array([own[1:].mean() for own in accuracy])  # of the last five, at the last round
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(means.mean())
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert np.isclose(band, means.mean() + means.std(ddof=1)).any()
    assert np.isclose(band, means.mean() - means.std(ddof=1)).any()


def test_a_label_is_no_formula(make_history, tmp_path: Path) -> None:
    """Matplotlib would read what stands between dollar signs, and refuse what it cannot read."""
    names = ["$^^$", "$}$"]
    path = plot_comparison(
        runs_of(make_history, names, 3), tmp_path / "c.png", num_clients=10, target_accuracy=0.5, title="$^^$",
        differences=[difference("$}$", -8.0, -6.0)],
    )  # fmt: skip
    assert path.read_bytes().startswith(b"\x89PNG")
