"""Verdicts on effects that are smaller than the margin of equality, 5 %."""

from __future__ import annotations

import math

import pytest

from fedsel_flwr.simulations.reproductions.claims import judge
from fedsel_flwr.simulations.reproductions.paper_figure import read_figure

FIGURE = """
paper = "kim"
figure = "Table 3"
claim = "FedCA is above FedPdp."
scenario = "digits"
[arms.fedca]
selector = "random"
[arms.fedpdp]
selector = "random"
[[checks]]
says = "accuracy"
outcome = "accuracy"
left = "fedca"
right = "fedpdp"
relation = "above"
"""
OTHERS = """
[[checks]]
says = "another check"
outcome = "other"
left = "fedca"
right = "fedpdp"
relation = "above"
"""


def _word(logs: list[float], others: int = 0, paper: str = "") -> str:
    """Return the word of the first check for these log ratios, among other checks without any effect."""
    figure = read_figure(FIGURE + paper + others * OTHERS, "kim-table-3")

    def values(outcome: str, arm: str, cell: str) -> dict[int, float]:
        own = logs if outcome == "accuracy" else [-0.1, 0.1, 0.0, 0.02, -0.02]
        return {seed: math.exp(log) if arm == "fedca" else 1.0 for seed, log in enumerate(own)}

    return judge(figure, values).findings[0].word


# Mean 0.02, standard error 0.0045, Student's 2.776: the interval of the logs is 0.0076 to 0.0324, and p is 0.011.
ABOVE = [0.01, 0.01, 0.02, 0.03, 0.03]
# Mean 0, standard error 0.0071: the interval of the logs is -0.0196 to 0.0196.
NONE = [-0.02, -0.01, 0.0, 0.01, 0.02]


@pytest.mark.parametrize(
    ("logs", "others", "paper", "expected"),
    [
        (ABOVE, 0, "", "reproduced"),
        # Holm's factor is 6, and 6 x 0.011 is above 0.05. But the interval does not exclude the claim.
        (ABOVE, 5, "", "not settled"),
        # The interval holds the claim, however narrow it is. The paper's ratio does not matter for this.
        (NONE, 0, "", "not settled"),
        (NONE, 0, "paper = 1.01", "not settled"),
        (NONE, 0, "paper = 1.1", "not settled"),
        ([-log for log in ABOVE], 0, "paper = 1.01", "not seen"),
    ],
)
def test_an_interval_that_holds_the_claim_is_not_settled(
    logs: list[float], others: int, paper: str, expected: str
) -> None:
    assert _word(logs, others, paper) == expected
