"""Client selection algorithms: one paper, one file, NumPy only.

A selector is an ask/tell object over dense client indices ``0..K-1``. It never sees Flower, a model or a clock:

>>> import numpy as np
>>> from fedsel_flwr.selectors import RoundReport, create
>>> selector = create("cs-ucb", clients_per_round=2, max_latency=5.0, seed=1)
>>> chosen = selector.select(np.arange(4))
>>> selector.observe(RoundReport(clients=chosen, completed=[True, True], latency=[0.5, 1.0]))
>>> len(np.intersect1d(chosen, selector.select(np.arange(4))))  # next come the two clients without a play
0

Each paper has a file, which ``catalogue`` names. The other files are:

==================  ===============================================================
room                contents
==================  ===============================================================
``catalogue``       the list of our selectors, with examples of their parameters
``registry``        selectors by name: look up, create, describe, cite
``base``            the interface: probe, select, observe, inform
``selector_state``  declared state: grow, forget, save, load
``_contract``       checks of an author's declarations, reports and choices
``columns``         the table of columns: names, sources, ranges
``round_report``    the report of a round, the probe, failures in a row
``_draws``          top scores, weighted draws, numbers of examples
``_vectors``        vectors by client, random projections
``bsfl_solvers``    BSFL's objective: the exact sweep, simulated annealing, ALSA
==================  ===============================================================
"""

from __future__ import annotations

from fedsel_flwr.selectors.base import Probe as Probe
from fedsel_flwr.selectors.base import Selector as Selector
from fedsel_flwr.selectors.catalogue import *  # noqa: F403
from fedsel_flwr.selectors.registry import create as create
from fedsel_flwr.selectors.registry import names as names
from fedsel_flwr.selectors.round_report import RoundReport as RoundReport
