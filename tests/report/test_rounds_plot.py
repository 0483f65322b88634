"""The picture against rounds: selection fractions by hand, and what a decoder finds in the PNG."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.plots import _accuracy, plot_rounds, selection_fractions


def test_selection_fractions_by_hand(make_history) -> None:
    fractions = selection_fractions(make_history([[0, 1], [0], [2, 0]], accuracy=[0.1] * 3), 4)
    expected = [[1, 1, 0, 0], [1, 1 / 2, 0, 0], [1, 1 / 3, 1 / 3, 0]]
    np.testing.assert_allclose(fractions, expected)


def test_the_accuracy_of_a_round_is_the_last_mean_of_five(make_history) -> None:
    history = make_history([[0]] * 5, accuracy=[math.nan, 0.2, math.nan, 0.4, 0.6])
    np.testing.assert_allclose(_accuracy(history), [math.nan, 0.2, 0.2, 0.3, 0.4])


def test_the_picture(make_history, tmp_path: Path) -> None:
    runs = {
        "one": [make_history([[0], [1], [2]], accuracy=[0.1, 0.5, 0.9]), make_history([[0], [1]], accuracy=[0.1, 0.5])],
        "other": [make_history([[0]] * 3, accuracy=[math.nan] * 3)],
        "none": [],
    }
    path = plot_rounds(runs, tmp_path / "rounds.png", num_clients=3, target_accuracy=0.8, title="three clients")
    assert matplotlib.image.imread(path).shape == (690, 2100, 4)
    lost = {"one": [[0.5, 0.4, 0.3], [0.1, 0.2]], "other": [[0.0, 0.0, 0.0]]}
    wide = plot_rounds(runs, tmp_path / "wide.png", num_clients=3, target_accuracy=0.8, lost=lost)
    assert matplotlib.image.imread(wide).shape[1] == 2700
    with pytest.raises(ParameterError, match="plot_rounds"):
        plot_rounds({"none": []}, path, num_clients=3, target_accuracy=0.8)
