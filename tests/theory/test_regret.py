"""BSFL's regret (5)-(7) is logarithmic where random's and CS-UCB's are linear: Ben Ami et al. (2023), Fig. 5 left.

K = 20 clients, m = 5 a round, 20,000 rounds. Mean speeds U(.1, .9), observed speed = mean +- U(.05), latency =
.1 s / speed, min_latency = .1 s, alpha = 10, beta = 1, i.i.d. target; CS-UCB with max_latency = 2 s, the slowest answer
there can be. CS-UCB grows faster than a straight line because it keeps to the five fastest, whose g then falls, and
with alpha = 10 g weighs most. docs/papers/ben-ami.md has the numbers; test_genie.py checks `bsfl_regret`.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.theory import bsfl_regret
from tests.theory.playing import play

ROUNDS = 20_000
PARAMETERS = {"bsfl": {"min_latency": 0.1, "alpha": 10.0}, "cs-ucb": {"max_latency": 2.0}, "random": {}}


@pytest.mark.slow
def test_only_bsfl_s_regret_flattens() -> None:
    """A logarithm would grow by ln(20,000)/ln(10,000) = 1.08, a straight line by 2; no round gains on the genie."""
    mean = np.random.default_rng(2023).uniform(0.1, 0.9, 20)
    latency = 0.1 / (mean + np.random.default_rng(7).uniform(-0.05, 0.05, (ROUNDS, 20)))
    regret, growth = {}, {}
    for name, more in PARAMETERS.items():
        chosen = play(name, latency, 5, **more)
        assert (chosen.sum(axis=1) == 5).all()
        regret[name] = bsfl_regret(mean, chosen, 5, 10.0)
        assert np.diff(regret[name], prepend=0.0).min() > -1e-9
        growth[name] = regret[name][-1] / regret[name][ROUNDS // 2 - 1]
    assert regret["bsfl"][-1] < 0.05 * regret["random"][-1]
    assert growth["bsfl"] < 1.7
    assert min(growth["random"], growth["cs-ucb"]) > 1.85
