"""The reward of CS-UCB and CS-UCB-Q.

References:
    W. Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE Transactions on Wireless
    Communications 19(11), 2020, section III-B.
"""

from __future__ import annotations

import numpy as np

from fedsel_flwr.checks import FloatArray
from fedsel_flwr.selectors.report import RoundReport


def latency_reward(report: RoundReport, max_latency: float) -> FloatArray:
    """Return r_k, shape (n,): it falls from 1 to 0 as the latency rises from 0 to ``max_latency``; 0 where failed."""
    reward = 1.0 - np.minimum(report.latency, max_latency) / max_latency  # r_k, below (12)
    return np.where(report.completed, reward, 0.0)
