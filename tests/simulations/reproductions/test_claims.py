"""Words of checks and figures, on values whose words follow by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
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
    """The verdict for the values of each arm, seed by seed, the same in all cells and outcomes.

    Five values are those of ten seeds, each twice.
    """

    def values(outcome: str, arm: str, cell: str) -> Mapping[int, float]:
        own = arms[f"{arm}_{cell}" if f"{arm}_{cell}" in arms else arm]
        return dict(enumerate(own * 2 if len(own) == 5 else own, start=1))

    return judge(figure, values)


HALF = [0.50, 0.52, 0.48, 0.51, 0.49]
ONE = [1.0] * 5


def test_the_effect_is_a_geometric_mean_with_its_interval() -> None:
    found = verdict(figure(check()), new=HALF, old=ONE)
    assert found.readings is None
    (one,) = found.findings
    # The mean log ratio is ln(0.5 * 0.52 * 0.48 * 0.51 * 0.49) / 5 = -0.6935.
    assert math.log(one.effect.estimate) == pytest.approx(math.log(0.5 * 0.52 * 0.48 * 0.51 * 0.49) / 5)
    assert one.effect.low < 0.5 < one.effect.high < 0.55


NEAR = [1.001, 1.002, 0.999, 1.0, 0.998]
WEAK_AND_WIDE = [0.5, 1.5, 0.7, 1.2, 0.8]
SHORTENED = 'shortened = "Few rounds."\n'
ABOVE, EQUAL = {"relation": '"above"'}, {"relation": '"equal"'}


@pytest.mark.parametrize(
    ("keys", "head", "new", "word", "reason"),
    [
        # A claim without a number is its direction.
        ({}, "", HALF, "reproduced", ""),
        (ABOVE, "", HALF, "not seen", "contrary"),
        # The paper's number decides between reproduced and direction.
        ({"paper": "0.5"}, "", HALF, "reproduced", ""),
        # |0.4998 - 0.6| = 0.1002 is at most 20 % of 0.6, which is 0.12
        ({"paper": "0.6"}, "", HALF, "reproduced", ""),
        # 0.1302 is more than 20 % of 0.63, which is 0.126, and outside the interval
        ({"paper": "0.63"}, "", HALF, "direction only", ""),
        ({"paper": "0.3"}, "", HALF, "direction only", ""),
        ({"paper": "[1.0, 2.0]"}, "", HALF, "reproduced", ""),  # numbers of both arms: the ratio is 0.5
        # An interval inside the margin is no difference; one that holds both settles nothing.
        ({}, "", NEAR, "not seen", "no difference"),
        ({}, "", ONE, "not seen", "no difference"),
        ({}, "", WEAK_AND_WIDE, "not settled", ""),
        (EQUAL, "", NEAR, "reproduced", ""),
        (EQUAL, "", HALF, "not seen", "contrary"),
        (EQUAL, "", [0.9, 1.2, 1, 1, 1.1], "not settled", ""),
        # A shortened figure is at most direction only, but can exclude a claim.
        ({}, SHORTENED, HALF, "direction only", ""),
        (ABOVE, SHORTENED, HALF, "not seen", "contrary"),
        # A missing outcome, and fewer than six seeds however equal they are, settle nothing.
        ({}, "", [math.nan] * 5, "not settled", ""),
        *((keys, "", [0.5] * 4, "not settled", "") for keys in ({}, ABOVE, EQUAL)),
        ({}, "", [0.5] * 6, "reproduced", ""),
    ],
)
def test_the_word_of_a_check(keys: dict[str, str], head: str, new: list[float], word: str, reason: str) -> None:
    found = verdict(figure(check(**keys), head), new=new, old=ONE)
    assert (found.word, found.findings[0].reason) == (word, reason)


def test_equal_values_on_all_seeds_have_an_interval_of_one_value() -> None:
    (one,) = verdict(figure(check()), new=ONE, old=ONE).findings
    assert (one.effect.low, one.effect.high) == (1.0, 1.0)


def test_an_order_is_checked_pair_by_pair_and_the_worst_word_counts() -> None:
    order = '[[checks]]\nsays = "it"\noutcome = "x"\norder = ["old", "new", "third"]\nrelation = "above"\n'
    good = verdict(figure(order), old=ONE, new=HALF, third=[0.1, 0.11, 0.12, 0.1, 0.1])
    assert [one.word for one in good.findings] == ["reproduced", "reproduced"]
    bad = verdict(figure(order), old=ONE, new=HALF, third=[0.9, 0.95, 0.9, 0.9, 0.91])
    assert ([one.word for one in bad.findings], bad.word) == (["reproduced", "not seen"], "not seen")


def test_seeds_needed_make_the_interval_as_narrow_as_the_margin() -> None:
    """From eight seeds on. With the same values again and again, the spread stays but for the divisor n - 1."""
    weak = [0.5, 1.5, 0.7, 1.2, 0.8, 0.75, 1.3, 0.9]
    seeds, least, most = verdict(figure(check()), new=weak, old=[1.0] * 8).seeds_needed
    assert least < seeds < most
    enough = math.ceil(seeds / 8)
    (one,) = verdict(figure(check()), new=weak * enough, old=[1.0] * 8 * enough).findings
    assert math.log(one.effect.high / one.effect.low) / 2 == pytest.approx(math.log(1.05), rel=0.08)
    assert math.isnan(verdict(figure(check()), new=weak[:7], old=[1.0] * 7).seeds_needed[0])
    # Half of the paper's gap, ln(1.02) / 2, is narrower than 5 %.
    assert verdict(figure(check(paper="0.98")), new=weak, old=[1.0] * 8).seeds_needed[0] > 4 * seeds


# Alone p = .033: t = 0.2009 / (0.2531 / sqrt(10)) = 2.51 with 9 degrees of freedom.
WEAK = [0.55, 1.15, 0.75, 0.70, 1.00]


def test_a_conjunction_needs_no_correction_but_its_parts_do() -> None:
    """Two checks of p = .04 each are shown together. Each by itself has 2 x .04 = .08."""
    alone = verdict(figure(check()), new=WEAK, old=ONE)
    assert 0.025 < alone.findings[0].p <= 0.05
    assert (alone.word, alone.parts_shown) == ("reproduced", (1, 1))
    both = verdict(figure(check() + check(left='"third"')), new=WEAK, old=ONE, third=WEAK)
    assert [one.p for one in both.findings] == [alone.findings[0].p] * 2
    assert (both.word, both.parts_shown) == ("reproduced", (0, 2))
    assert verdict(figure(check() + check(left='"third"')), new=WEAK, old=ONE, third=HALF).parts_shown == (2, 2)


def test_a_part_is_as_weak_as_its_weakest_cell() -> None:
    arms = {"old": ONE, "new_N = 2": HALF, "new_N = 4": [0.9, 1.2, 1.0, 1.0, 1.1]}
    found = verdict(figure(check() + check(left='"third"'), cells=CELLS), third=HALF, **arms)
    assert [one.is_part_shown for one in found.findings] == [False, False, True, True]
    assert (found.word, found.parts_shown) == ("not settled", (1, 2))


def test_one_contrary_check_is_enough_so_that_holm_counts_them_all() -> None:
    """Four p-values for two checks: of each, one for the opposite and one for no difference."""
    against = [1 / value for value in WEAK]
    assert verdict(figure(check()), new=against, old=ONE).word == "not settled"  # 2 x .04
    clear = [1 / value for value in HALF]
    several = verdict(figure(check() + 5 * check(left='"third"')), new=clear, old=ONE, third=WEAK)
    assert (several.word, several.findings[0].reason) == ("not seen", "contrary")


def test_twelve_equal_arms_seldom_exclude_a_claim() -> None:
    """Brute force: 200 figures with twelve checks of arms without any effect, ten seeds."""
    rng = np.random.default_rng(3)
    twelve = figure("".join(check(left='"new"', cells=f'["c{i}"]') for i in range(12)), cells=TWELVE)
    words = []
    for _ in range(200):
        arms = {f"new_c{i}": np.exp(0.3 * rng.standard_normal(10)).tolist() for i in range(12)}
        words.append(verdict(twelve, old=[1.0] * 10, **arms).word)
    assert words.count("not seen") <= 12
    assert words.count("reproduced") == 0


TWELVE = "".join(f"[cells.c{i}]\n" for i in range(12))
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


def test_skewed_ratios_are_judged_as_in_a_comparison() -> None:
    """Mostly slightly below, rarely far above, with mean 0: Student's test alone shows 9 % of such arms, ten seeds."""
    rng = np.random.default_rng(2)
    words = [
        verdict(figure(check()), new=np.exp(0.2 * (rng.gamma(1, 1, 10) - 1)).tolist(), old=[1.0] * 10).word
        for _ in range(1000)
    ]
    assert words.count("reproduced") < 65


def test_runs_that_do_not_get_there_count_by_their_signs() -> None:
    """Infinite in both arms is a tie, and no difference is ever shown."""
    never = [math.inf] * 10
    assert verdict(figure(check()), new=never, old=never).word == "not settled"
    (one,) = verdict(figure(check()), new=[50.0] * 10, old=[*[100.0] * 9, math.inf]).findings
    assert (one.word, one.p) == ("reproduced", 2.0**-9)
    (one,) = verdict(figure(check()), new=never, old=[100.0] * 10).findings
    assert (one.word, one.reason) == ("not seen", "contrary")


def test_decimal_numbers_that_agree_are_no_difference() -> None:
    exact = check(left='"new - old"', right="0.2")
    assert verdict(figure(exact), new=[0.3] * 8, old=[0.1] * 8).findings[0].reason == "no difference"


def test_papers_numbers_of_differences_are_differences() -> None:
    """The paper's arms differ by 1, ours by 2: shown, but not in the paper's size."""
    other = check(left='"new"', right='"old - third"', relation='"above"', paper="[2.0, 1.0]")
    found = verdict(figure(other), new=[4.0, 4.01, 3.99, 4.0, 4.0], old=[3.0, 3.01, 2.99, 3.0, 3.0], third=ONE)
    assert found.word == "direction only"


# Mean 0.02, standard error 0.003, Student's 2.262: the interval of the logs is 0.0133 to 0.0267, and p is 0.002.
SLIGHTLY_ABOVE = [0.01, 0.01, 0.02, 0.03, 0.03]
# Mean 0, standard error 0.0047: the interval of the logs is -0.0107 to 0.0107.
NONE = [-0.02, -0.01, 0.0, 0.01, 0.02]


@pytest.mark.parametrize(
    ("logs", "others", "keys", "expected"),
    [
        # The direction comes first, though the interval is inside the margin.
        (SLIGHTLY_ABOVE, 0, {}, "reproduced"),
        (SLIGHTLY_ABOVE, 5, {}, "reproduced"),
        (NONE, 0, {}, "not seen"),
        # Half of the paper's gap is .005, and the interval is wider. Of ratio 1.1 it is .048.
        (NONE, 0, {"paper": "1.01"}, "not settled"),
        (NONE, 0, {"paper": "1.1"}, "not seen"),
        ([-log for log in SLIGHTLY_ABOVE], 0, {"paper": "1.01"}, "not seen"),
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
