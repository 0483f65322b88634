"""Words of checks and figures, on values whose words follow by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from fedsel_flwr.simulations.reproductions.claims import FigureVerdict, describe_words, judge
from fedsel_flwr.simulations.reproductions.paper_figure import PaperFigure, read_figure

HEAD = 'paper = "xia"\nfigure = "Fig. 9"\nclaim = "A claim."\nscenario = "smoke"\n'
ARMS = "[arms.new]\n[arms.old]\n[arms.third]\n"


def figure(checks: str, head: str = "", cells: str = "") -> PaperFigure:
    return read_figure(HEAD + head + ARMS + cells + checks, "xia-fig-9")


def check(**keys: object) -> str:
    """A check; the texts of its values are TOML."""
    given = {"says": '"it"', "outcome": '"regret"', "left": '"new"', "right": '"old"', "relation": '"below"'} | keys
    return "[[checks]]\n" + "".join(f"{key} = {value}\n" for key, value in given.items())


def verdict(figure: PaperFigure, **arms: list[float]) -> FigureVerdict:
    """The verdict for the values of each arm, seed by seed, the same in all cells and outcomes."""

    def values(outcome: str, arm: str, cell: str) -> Mapping[int, float]:
        return dict(enumerate(arms[f"{arm}_{cell}" if f"{arm}_{cell}" in arms else arm], start=1))

    return judge(figure, values)


HALF = [0.50, 0.52, 0.48, 0.51, 0.49]
ONE = [1.0] * 5


def test_a_claim_without_a_number_is_its_direction() -> None:
    found = verdict(figure(check()), new=HALF, old=ONE)
    assert (found.word, found.readings) == ("reproduced", None)
    (one,) = found.findings
    # The mean log ratio is ln(0.5 * 0.52 * 0.48 * 0.51 * 0.49) / 5 = -0.6935.
    assert math.log(one.effect.estimate) == pytest.approx(math.log(0.5 * 0.52 * 0.48 * 0.51 * 0.49) / 5)
    assert one.effect.low < 0.5 < one.effect.high < 0.55


@pytest.mark.parametrize(
    ("paper", "word"),
    [
        ("0.5", "reproduced"),
        ("0.6", "reproduced"),  # |0.4998 - 0.6| = 0.1002 is at most 20 % of 0.6, which is 0.12
        ("0.63", "direction only"),  # 0.1302 is more than 20 % of 0.63, which is 0.126, and outside the interval
        ("0.3", "direction only"),
        ("[1.0, 2.0]", "reproduced"),  # numbers of both arms: the ratio is 0.5
    ],
)
def test_the_paper_s_number_decides_between_reproduced_and_direction(paper: str, word: str) -> None:
    assert verdict(figure(check(paper=paper)), new=HALF, old=ONE).word == word


def test_the_other_side_is_not_seen() -> None:
    assert verdict(figure(check(relation='"above"')), new=HALF, old=ONE).word == "not seen"


def test_an_interval_that_holds_claim_and_null_is_not_settled_however_narrow_it_is() -> None:
    near = [1.001, 1.002, 0.999, 1.0, 0.998]
    (one,) = verdict(figure(check()), new=near, old=ONE).findings
    # The mean log ratio is 0, so that no number of seeds settles it.
    assert (one.word, one.is_small, one.seeds_needed) == ("not settled", True, math.inf)
    (one,) = verdict(figure(check()), new=[0.5, 1.5, 0.7, 1.2, 0.8], old=ONE).findings
    assert (one.word, one.is_small) == ("not settled", False)
    assert 5 < one.seeds_needed < 1000


def test_equal_values_on_all_seeds_exclude_a_difference() -> None:
    (one,) = verdict(figure(check()), new=ONE, old=ONE).findings
    assert (one.effect.low, one.effect.high, one.word) == (1.0, 1.0, "not seen")


def test_the_seeds_of_a_figure_settle_its_verdict() -> None:
    """One check that turns into "not seen" is enough; otherwise every check has to be settled."""
    toward, against = [0.6, 1.1, 0.8, 0.9, 0.7], [1.7, 0.9, 1.3, 1.1, 1.4]
    more = check(left='"third"')
    both = verdict(figure(check() + more), new=toward, third=[0.6, 1.5, 0.8, 1.1, 0.7], old=ONE)
    assert both.word == "not settled"
    assert both.seeds_needed == max(one.seeds_needed for one in both.findings)
    mixed = verdict(figure(check() + more), new=toward, third=against, old=ONE)
    assert [one.is_contrary for one in mixed.findings] == [False, True]
    assert mixed.seeds_needed == mixed.findings[1].seeds_needed


def test_holm_does_not_count_for_a_check_that_is_contrary_to_the_claim() -> None:
    """The interval without correction excludes a claim, so that further checks do not raise the number of seeds."""
    against = [1.7, 0.9, 1.3, 1.1, 1.4]
    alone = verdict(figure(check()), new=against, old=ONE).findings[0]
    several = verdict(figure(check() + 4 * check(left='"third"')), new=against, third=[0.9] * 4 + [1.2], old=ONE)
    assert several.findings[0].seeds_needed == alone.seeds_needed


@pytest.mark.parametrize(
    ("new", "word"),
    [([1.001, 1.002, 0.999, 1.0, 0.998], "reproduced"), (HALF, "not seen"), ([0.9, 1.2, 1, 1, 1.1], "not settled")],
)
def test_equality_needs_an_interval_inside_the_margin(new: list[float], word: str) -> None:
    (one,) = verdict(figure(check(relation='"equal"')), new=new, old=ONE).findings
    assert one.word == word
    assert math.isnan(one.p)


def test_a_shortened_figure_is_at_most_direction_only_but_can_exclude_a_claim() -> None:
    short = 'shortened = "Few rounds."\n'
    assert verdict(figure(check(), short), new=HALF, old=ONE).word == "direction only"
    assert verdict(figure(check(relation='"above"'), short), new=HALF, old=ONE).word == "not seen"


def test_an_order_is_checked_pair_by_pair_and_the_worst_word_counts() -> None:
    order = '[[checks]]\nsays = "it"\noutcome = "x"\norder = ["old", "new", "third"]\nrelation = "above"\n'
    good = verdict(figure(order), old=ONE, new=HALF, third=[0.1, 0.11, 0.12, 0.1, 0.1])
    assert [one.word for one in good.findings] == ["reproduced", "reproduced"]
    bad = verdict(figure(order), old=ONE, new=HALF, third=[0.9, 0.95, 0.9, 0.9, 0.91])
    assert ([one.word for one in bad.findings], bad.word) == (["reproduced", "not seen"], "not seen")


def test_the_seeds_that_would_do_are_enough() -> None:
    """With the same values again and again, the spread stays, and the suggested number of seeds settles the check."""
    weak = [0.5, 1.5, 0.7, 1.2, 0.8, 0.75]
    (one,) = verdict(figure(check()), new=weak, old=[1.0] * 6).findings
    enough = math.ceil(one.seeds_needed / 6) + 1
    assert verdict(figure(check()), new=weak * enough, old=[1.0] * 6 * enough).word == "reproduced"
    near = [0.9, 1.15, 1.0, 1.02, 1.1, 0.85]
    (one,) = verdict(figure(check(relation='"equal"')), new=near, old=[1.0] * 6).findings
    assert one.word == "not settled"
    enough = math.ceil(one.seeds_needed / 6) + 1
    assert verdict(figure(check(relation='"equal"')), new=near * enough, old=[1.0] * 6 * enough).word == "reproduced"


def test_holm_counts_all_checks_of_a_figure() -> None:
    """The check alone has p = 0.035 (t = 0.2624 / (0.1874 / sqrt(5)) = 3.13 with 4 degrees of freedom)."""
    weak = [0.60, 0.95, 0.75, 0.70, 0.90]
    alone = verdict(figure(check()), new=weak, old=ONE)
    assert alone.findings[0].p == pytest.approx(0.035, abs=0.001)
    several = verdict(figure(check() + check(left='"third"')), new=weak, old=ONE, third=weak)
    assert several.findings[0].p == pytest.approx(2 * alone.findings[0].p)
    assert several.word == "not settled"


def test_holm_counts_the_checks_of_all_readings() -> None:
    weak = [0.60, 0.95, 0.75, 0.70, 0.90]
    two = verdict(figure(check(reading='"means"') + check(reading='"realized"')), new=weak, old=ONE)
    assert [one.p for one in two.findings] == pytest.approx([2 * 0.035, 2 * 0.035], abs=0.002)
    assert (two.word, two.readings) == ("not settled", {"means": "not settled", "realized": "not settled"})


CELLS = '[cells."N = 2"]\n[cells."N = 4"]\n'


def test_a_check_without_cells_holds_in_every_cell() -> None:
    found = verdict(figure(check(), cells=CELLS), new=HALF, old=ONE)
    assert [str(one.comparison.left) for one in found.findings] == ["new, N = 2", "new, N = 4"]


def test_cells_and_differences_are_compared() -> None:
    grows = check(left='"old - new @ N = 4"', right='"old - new @ N = 2"', relation='"above"')
    arms = {"old": ONE, "new_N = 2": [0.9, 0.91, 0.92, 0.9, 0.9], "new_N = 4": HALF}
    (one,) = verdict(figure(grows, cells=CELLS), **arms).findings
    # 1 - 0.5 is the mean difference in the second cell, 1 - 0.906 in the first.
    assert (one.effect.estimate, one.word) == (pytest.approx(0.5 - 0.094), "reproduced")
    assert not one.comparison.is_ratio


def test_a_number_replaces_the_right_arm() -> None:
    (one,) = verdict(figure(check(right="2.0")), new=HALF).findings
    assert (one.effect.estimate, one.right) == (pytest.approx(0.25, rel=0.01), 2.0)


def test_two_readings_with_different_words_are_a_setting_that_is_not_given() -> None:
    two = check(reading='"means"') + check(reading='"realized"', relation='"above"')
    found = verdict(figure(two), new=HALF, old=ONE)
    assert found.word == "setting not given"
    assert found.readings == {"means": "reproduced", "realized": "not seen"}
    same = verdict(figure(check(reading='"means"') + check(reading='"realized"')), new=HALF, old=ONE)
    assert same.word == "reproduced"
    assert len(same.findings) == 2


def test_a_missing_outcome_is_not_settled() -> None:
    assert verdict(figure(check()), new=[math.nan] * 5, old=ONE).word == "not settled"


# Mean 0.02, standard error 0.0045, Student's 2.776: the interval of the logs is 0.0076 to 0.0324, and p is 0.011.
ABOVE = [0.01, 0.01, 0.02, 0.03, 0.03]
# Mean 0, standard error 0.0071: the interval of the logs is -0.0196 to 0.0196.
NONE = [-0.02, -0.01, 0.0, 0.01, 0.02]


@pytest.mark.parametrize(
    ("logs", "others", "keys", "expected"),
    [
        (ABOVE, 0, {}, "reproduced"),
        # Holm's factor is 6, and 6 x 0.011 is above 0.05. But the interval does not exclude the claim.
        (ABOVE, 5, {}, "not settled"),
        # The interval holds the claim, however narrow it is. The paper's ratio does not matter for this.
        (NONE, 0, {}, "not settled"),
        (NONE, 0, {"paper": "1.01"}, "not settled"),
        (NONE, 0, {"paper": "1.1"}, "not settled"),
        ([-log for log in ABOVE], 0, {"paper": "1.01"}, "not seen"),
    ],
)
def test_an_effect_below_the_margin_of_equality(
    logs: list[float], others: int, keys: dict[str, str], expected: str
) -> None:
    """The word of a check, among other checks without any effect."""
    more = others * check(left='"third"', relation='"above"')
    new = [math.exp(log) for log in logs]
    third = [math.exp(log) for log in (-0.1, 0.1, 0.0, 0.02, -0.02)]
    found = verdict(figure(check(relation='"above"', **keys) + more), new=new, old=ONE, third=third)
    assert found.findings[0].word == expected


def test_words_are_counted_in_a_fixed_order() -> None:
    assert describe_words(["not run", "reproduced", "not run"]) == "1 reproduced, 2 not run"
