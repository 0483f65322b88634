"""The device of a client: how fast it computes, and the energy its processor takes.

References:
    [1] W. Xia et al., "Multi-armed bandit-based client scheduling for federated learning", IEEE Transactions on
        Wireless Communications, 2020, section V-A.
    [2] N. H. Tran, W. Bao, A. Zomaya, M. N. H. Nguyen and C. S. Hong, "Federated learning over wireless networks:
        optimization model design and analysis", IEEE INFOCOM, 2019.
"""

from __future__ import annotations

from fedsel_flwr.errors import ParameterError

PRINTED_CLIENTS = 20
"""The largest number of clients in Xia's experiments."""

COMPUTING_STEP = 20.0
"""Width of Xia's ranges of computing rates, samples/s."""


def computing_rate_bounds(index: int, num_clients: int, *, step: float = COMPUTING_STEP) -> tuple[float, float]:
    """Return the range from which a client's computing rate is drawn anew in every round.

    Xia gives client k = 1, 2, …, K the range [(0.5 k + 0.5) x 20, (0.5 k + 1.5) x 20], with K up to 20.

    Deviations:
        Beyond 20 clients the span of the printed 20 is divided evenly, k' = 1 + 19 (k - 1) / (K - 1), or client 500
        would be 170 times as fast as client 1.

    Args:
        index: Partition id of the client, 0-based, below `num_clients`.
        num_clients: Number of clients of the run.
        step: Width of the range, samples/s.

    Returns:
        Lower and upper bound of the uniform distribution, samples/s.

    Raises:
        ParameterError: Unless 0 <= index < num_clients and step > 0.

    References:
        [1], section V-A; the paper prints the lower bound twice, the second is the upper.

    Example:
        >>> computing_rate_bounds(0, 20), computing_rate_bounds(19, 20), computing_rate_bounds(499, 500)
        ((20.0, 40.0), (210.0, 230.0), (210.0, 230.0))
        >>> computing_rate_bounds(2, 3)
        (40.0, 60.0)
    """
    if not 0 <= index < num_clients:
        raise ParameterError(
            f"index must be at least 0 and below num_clients = {num_clients!r}, got {index!r}; "
            "give the partition id of one of the run's clients"
        )
    if not 0 < step < float("inf"):
        raise ParameterError(f"step must be a finite number above 0, got {step!r}; give a width in samples/s")
    rank = 1.0 + int(index)  # k
    if num_clients > PRINTED_CLIENTS:
        rank = 1.0 + (PRINTED_CLIENTS - 1.0) * int(index) / (int(num_clients) - 1)  # k' = 1 + 19 (k-1) / (K-1)
    return (0.5 * rank + 0.5) * step, (0.5 * rank + 1.5) * step  # phi^LB, phi^UB in section V-A


def cpu_energy(cycles: float, frequency_hz: float, effective_capacitance: float) -> float:
    """Return the energy of a computation, from the usual model of dynamic power.

    Args:
        cycles: Processor cycles of the computation.
        frequency_hz: Clock frequency, Hz.
        effective_capacitance: Effective switched capacitance, F (J per cycle and Hz^2); alpha / 2 in [2].

    Returns:
        Energy in J.

    Raises:
        ParameterError: If an argument is negative or not a number.

    References:
        [2], computation energy alpha/2 x cycles x f^2.

    Example:
        >>> round(cpu_energy(2e7, 1e9, 1e-28), 6)
        0.002
    """
    given = {"cycles": cycles, "frequency_hz": frequency_hz, "effective_capacitance": effective_capacitance}
    for name, value in given.items():
        if not value >= 0:
            raise ParameterError(f"{name} must be at least 0, got {value!r}; change {name}")
    return effective_capacitance * cycles * frequency_hz**2
