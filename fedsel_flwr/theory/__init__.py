"""Theory: each paper's genie, regret and bounds, and the fair optimum, to check selectors against their papers.

No run needs this package. It uses only NumPy, except :func:`~fedsel_flwr.theory.program.fair_optimum`, which imports
SciPy at its call. The rooms:

===========  ===============================================================================================
``regret``   each paper's genie, which knows every client's mean; the regret of a run, and its upper bounds
``program``  the fair optimum: the best policy under fairness and availability, by linear programming
===========  ===============================================================================================

>>> import numpy as np
>>> from fedsel_flwr.theory import xia_genie, xia_regret
>>> mean_reward = np.array([0.9, 0.5, 0.7])
>>> xia_genie(mean_reward, 2)
(array([0, 2]), 0.7)
>>> xia_regret(mean_reward, [[0, 1], [0, 2], [1, 2]], 2).round(6).tolist()  # each round with client 1 loses 0.2
[0.2, 0.2, 0.4]
"""

from __future__ import annotations

from fedsel_flwr.theory.program import fair_optimum
from fedsel_flwr.theory.regret import (
    bsfl_genie,
    bsfl_largest_loss,
    bsfl_regret,
    bsfl_regret_bound,
    cs_ucb_gaps,
    cs_ucb_q_regret_bound,
    cs_ucb_regret_bound,
    fair_regret,
    sorted_groups,
    xia_genie,
    xia_regret,
)

__all__ = [
    "bsfl_genie",
    "bsfl_largest_loss",
    "bsfl_regret",
    "bsfl_regret_bound",
    "cs_ucb_gaps",
    "cs_ucb_q_regret_bound",
    "cs_ucb_regret_bound",
    "fair_optimum",
    "fair_regret",
    "sorted_groups",
    "xia_genie",
    "xia_regret",
]
