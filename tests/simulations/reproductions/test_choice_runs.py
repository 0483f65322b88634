"""Runs of choices, against counts and regrets that follow by hand or by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import load_scenario
from fedsel_flwr.simulations.reproductions.choice_runs import (
    _bonus,
    _explained,
    _fairness,
    _growth,
    draw_rounds,
    run_choices,
)
from fedsel_flwr.simulations.reproductions.paper_figure import Regret
from fedsel_flwr.theory import fair_optimum, xia_genie

XIA = {"rounds": 320, "seed": 3}
KEYS = {
    "num_clients": 3, "clients_per_round": 2, "rounds": 300, "selector": "cs-ucb-q", "seed": 5,
    "partition.kind": "sizes", "partition.sizes": [1500, 1000, 500],
    "selectors.cs-ucb-q.fairness": [0.6, 0.5, 0.4], "selectors.cs-ucb-q.queue_weight": 0.01,
}  # fmt: skip
FAIR = (0.6, 0.5, 0.4)


def test_the_draws_are_those_of_the_system_model() -> None:
    """The mean of many drawn latencies is the true mean, which another computation gives."""
    scenario = load_scenario("xia-ideal", {"rounds": 4000})
    system = scenario.system_model()
    latency, available = draw_rounds(scenario, system)
    assert latency.shape == available.shape == (4000, 20)
    assert available.all()
    capped = np.minimum(latency, 5.0)
    error = capped.std(axis=0, ddof=1) / math.sqrt(4000)
    assert (np.abs(capped.mean(axis=0) - mean_latencies(system)) <= 4 * error).all()


def test_selectors_get_the_same_draws() -> None:
    one, other = (load_scenario("xia-ideal", XIA | {"selector": name}) for name in ("random", "cs-ucb"))
    np.testing.assert_array_equal(draw_rounds(one, one.system_model())[0], draw_rounds(other, other.system_model())[0])


def test_round_robin_loses_the_same_in_each_cycle() -> None:
    """Every cycle of K / m = 4 rounds selects every client once, so the regret of means is linear over the cycles."""
    scenario = load_scenario("xia-ideal", XIA | {"selector": "round-robin"})
    outcomes, curves = run_choices(scenario, Regret(kind="xia"))
    mean = 1 - mean_latencies(scenario.system_model()) / 5.0
    best = xia_genie(mean, 5)[1]
    groups = [np.arange(start, start + 5) for start in range(0, 20, 5)]
    assert outcomes["regret"] == pytest.approx(80 * sum(best - mean[own].min() for own in groups), rel=1e-6)
    assert (outcomes["jain"], outcomes["largest_count"]) == (1.0, 80)
    assert outcomes["growth"] == pytest.approx(1.0, abs=1e-6)
    assert outcomes["linear_fit"] > 0.999 > outcomes["log_fit"]
    assert curves["regret"][-1] == outcomes["regret"]
    assert outcomes["regret_late"] == pytest.approx(outcomes["regret"] / 2)
    np.testing.assert_allclose(curves["average"] * curves["at"], curves["regret"])
    assert curves["at"][[0, -1]].tolist() == [1, 320]


def test_the_realized_regret_uses_the_drawn_rewards() -> None:
    """By brute force: the printed (14), T mu* minus the sum of the rounds' smallest rewards."""
    scenario = load_scenario("xia-ideal", XIA | {"selector": "round-robin"})
    outcomes, _ = run_choices(scenario, Regret(kind="xia"))
    system = scenario.system_model()
    latency = np.minimum(draw_rounds(scenario, system)[0], 5.0)
    seen = [1 - latency[t, 5 * (t % 4) : 5 * (t % 4) + 5].max() / 5.0 for t in range(320)]
    best = xia_genie(1 - mean_latencies(system) / 5.0, 5)[1]
    assert outcomes["regret_realized"] == pytest.approx(320 * best - sum(seen))
    assert 0 < outcomes["realized_late"] < outcomes["regret_realized"]
    assert outcomes["seconds_per_round"] == pytest.approx(np.mean([5 * (1 - reward) for reward in seen]))


def test_the_realized_regret_of_bsfl_uses_the_drawn_speeds() -> None:
    """A round adds the least mean speed of its clients, the same in each cycle, less the least drawn speed."""
    scenario = load_scenario("xia-ideal", XIA | {"rounds": 20, "selector": "round-robin"})
    _, curves = run_choices(scenario, Regret(kind="bsfl", alpha=1.0, min_latency=0.3))
    latency = np.minimum(draw_rounds(scenario, scenario.system_model())[0], 5.0)
    slowest = [latency[t, 5 * (t % 4) : 5 * (t % 4) + 5].max() for t in range(20)]
    added = np.diff(curves["regret_realized"] - curves["regret"], prepend=0.0)
    mean = added + np.minimum(1.0, 0.3 / np.array(slowest))
    np.testing.assert_allclose(mean.reshape(5, 4), [mean[:4]] * 5)


def test_bsfl_has_less_regret_than_random_selection() -> None:
    keys = XIA | {"rounds": 500, "selectors.bsfl.exploration": 0.1}
    found = {}
    for name in ("bsfl", "random"):
        scenario = load_scenario("xia-ideal", keys | {"selector": name})
        found[name] = run_choices(scenario, Regret(kind="bsfl", alpha=1.0, min_latency=0.05))[0]["regret"]
    assert 0 < found["bsfl"] < found["random"]


def test_a_selector_that_needs_training_is_refused() -> None:
    with pytest.raises(ParameterError, match="global_loss, projection, which only training gives"):
        run_choices(load_scenario("xia-ideal", XIA | {"selector": "gpfl"}), Regret())


def test_growth_and_fits_of_known_curves() -> None:
    number = np.arange(1.0, 1001.0)
    assert _growth(number**2)["growth"] == pytest.approx(2.0)
    logarithm = _growth(np.log(number) + 1)
    assert (logarithm["log_fit"], logarithm["growth"] < 0.2) == (pytest.approx(1.0), True)
    assert _growth(3 * np.log(number) + 1)["log_over_linear"] > 0.1
    assert _growth(3 * number)["log_over_linear"] < -0.1
    assert math.isnan(_explained(number, np.ones(1000)))


def test_the_bonus_falls_below_a_tenth() -> None:
    """One client, always selected, m = 1: sqrt(2 ln t / t) < 0.1 from t = 1,791 (ln 1791 = 7.4906; 0.0083647)."""
    plays = np.arange(1, 3001)[:, np.newaxis]
    first = next(t for t in range(2, 3000) if math.sqrt(2 * math.log(t) / t) < 0.1)
    assert _bonus(plays, 1)["rounds_to_bonus_01"] == first
    assert _bonus(plays[:10], 1)["rounds_to_bonus_01"] == math.inf


def test_the_fairness_is_met_after_the_last_shortfall() -> None:
    """Client 1 has c_1 = 0.5 and is selected in rounds 2, 4 and 5: its shares are 0, 1/2, 1/3, 2/4, 3/5.

    Its differences are -0.5, 0, -0.167, 0 and 0.1, so that the last shortfall is in round 3. Client 2 has c_2 = 0.1 and
    is selected in every round.
    """
    margins = np.array([[-0.5, 0.9], [0.0, 0.9], [1 / 3 - 0.5, 0.9], [0.0, 0.9], [0.1, 0.9]])
    found = _fairness(margins)
    assert found["rounds_to_fair"] == 4
    assert (found["margin_1"], found["margin_2"], found["lowest_margin"]) == (0.1, 0.9, 0.1)
    assert (found["violated_1"], found["violated_2"]) == (0.0, 0.0)
    cut_off = _fairness(margins[:3])
    assert (cut_off["rounds_to_fair"], cut_off["violated_1"], cut_off["violated_2"]) == (3, 1.0, 0.0)


def test_a_shortfall_below_a_hundredth_counts_as_met() -> None:
    found = _fairness(np.array([[-0.011], [-0.009]]))
    assert (found["rounds_to_fair"], found["violated_1"], found["margin_1"]) == (2, 0.0, -0.009)


def test_the_bound_is_that_of_the_selectors_beta() -> None:
    """(29) by hand: Omega = 0.6² + 0.5² + 0.6² = 0.97, beta = 0.01, T = 300."""
    outcomes, curves = run_choices(load_scenario("xia-ideal", KEYS), Regret(kind="fair", fairness=FAIR))
    learning = (math.pi**2 / 3 + 1) * 3 + 4 * math.sqrt(2 * 3 * 2 * 300 * math.log(300))
    assert outcomes["bound"] == pytest.approx(0.01 * 0.97 * 300 / 2 + 0.99 * learning)
    assert curves["bound"].shape == curves["regret"].shape
    assert abs(outcomes["lowest_margin"]) < 0.2
    other, _ = run_choices(
        load_scenario("xia-ideal", KEYS | {"selector": "cs-ucb"}), Regret(kind="fair", fairness=FAIR)
    )
    assert "bound" not in other


@pytest.mark.filterwarnings("error")
def test_a_round_without_clients_has_no_reward() -> None:
    """By brute force: every selector takes all of at most two available clients, so the loop needs no selector."""
    scenario = load_scenario("xia-ideal", KEYS | {"availability.kind": "bernoulli", "availability.probability": 0.3})
    latency, available = draw_rounds(scenario, scenario.system_model())
    assert (available.sum(axis=1) == 0).sum() > 50
    few = available.sum(axis=1) <= 2
    fair = (0.1, 0.1, 0.1)
    outcomes, _ = run_choices(scenario, Regret(kind="fair", fairness=fair, availability=0.3))
    best, _ = fair_optimum(1 - mean_latencies(scenario.system_model()) / 5.0, 0.3, list(fair), 2)
    seen = [(1 - np.minimum(latency[t, available[t]], 5.0) / 5.0).min() if available[t].any() else 0.0
            for t in np.flatnonzero(few)]  # fmt: skip
    rest = [1 - np.minimum(latency[t], 5.0) / 5.0 for t in np.flatnonzero(~few)]
    # With three available clients, the smaller of two rewards is the smallest or the middle one of the three.
    lowest, highest = (sum(np.sort(own)[place] for own in rest) for place in (0, 1))
    regret = 300 * best - sum(seen)
    assert regret - highest - 1e-6 <= outcomes["regret_realized"] <= regret - lowest + 1e-6
