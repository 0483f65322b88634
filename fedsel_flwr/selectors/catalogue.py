"""List of our selectors: a new selector needs a file and a line here (CONTRIBUTING.md has the other steps).

The names, the parameters, the exports of :mod:`fedsel_flwr.selectors`, the tests of every selector and the tables of
the documentation site follow from this file. If a parameter has no default, add its value to :data:`EXAMPLES`.
"""

# With "as", type checkers see the class as exported.
from fedsel_flwr.selectors.active_fl import ActiveFL as ActiveFL
from fedsel_flwr.selectors.baselines import Everyone as Everyone
from fedsel_flwr.selectors.baselines import LocalAccuracy as LocalAccuracy
from fedsel_flwr.selectors.baselines import Random as Random
from fedsel_flwr.selectors.baselines import RandomBySize as RandomBySize
from fedsel_flwr.selectors.baselines import RoundRobin as RoundRobin
from fedsel_flwr.selectors.bsfl import BSFL as BSFL
from fedsel_flwr.selectors.cs_ucb import CSUCB as CSUCB
from fedsel_flwr.selectors.cs_ucb_q import CSUCBQ as CSUCBQ
from fedsel_flwr.selectors.divfl import DivFL as DivFL
from fedsel_flwr.selectors.fedcm import FedCMTS as FedCMTS
from fedsel_flwr.selectors.fedcm import FedCMUCB as FedCMUCB
from fedsel_flwr.selectors.fedcor import FedCor as FedCor
from fedsel_flwr.selectors.fedcs import FedCS as FedCS
from fedsel_flwr.selectors.gpfl import GPFL as GPFL
from fedsel_flwr.selectors.nccb import LSH as LSH
from fedsel_flwr.selectors.nccb import NCCB as NCCB
from fedsel_flwr.selectors.oort import Oort as Oort
from fedsel_flwr.selectors.pczfl import PCZFL as PCZFL
from fedsel_flwr.selectors.pisces import Pisces as Pisces
from fedsel_flwr.selectors.power_of_choice import CPowD as CPowD
from fedsel_flwr.selectors.power_of_choice import PowerOfChoice as PowerOfChoice
from fedsel_flwr.selectors.power_of_choice import RPowD as RPowD
from fedsel_flwr.selectors.tifl import TiFL as TiFL

EXAMPLES: dict[str, dict[str, object]] = {
    "bsfl": {"min_latency": 0.1},
    "cs-ucb": {"max_latency": 5.0},
    "cs-ucb-q": {"max_latency": 5.0},
    "fedcs": {"deadline": 2.0},
    "gpfl": {"total_rounds": 60},
}
"""Example values of parameters without a default, for clients that take about a second each."""
