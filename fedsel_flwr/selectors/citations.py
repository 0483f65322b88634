"""Papers behind our selectors: their keys in ``papers.bib``, and their BibTeX entries.

Each selector names its papers in :attr:`~fedsel_flwr.selectors.Selector.citations`, by a key of this file or as BibTeX;
``fedsel cite`` prints the entries. The file is read only then: it is not in Flower's app bundle.
``tests/selectors/test_citations.py`` compares the entries with the selectors' docstrings, and the entry of this package
with ``CITATION.cff``.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

MCMAHAN = "mcmahan2017communication"
LI = "li2020federated"
XIA = "xia2020multi"
BEN_AMI = "benami2025client"
KIM = "kim2020accurate"
ANONYMOUS_PCZFL = "pczfl2025optimizing"
NA = "na2024gpfl"
CHO = "cho2022towards"
GOETZ = "goetz2019active"
LAI = "lai2021oort"
NISHIO = "nishio2019client"
CHAI = "chai2020tifl"
TANG = "tang2022fedcor"
BALAKRISHNAN = "balakrishnan2022diverse"
PAN = "pan2024contextual"


@functools.cache
def papers() -> dict[str, str]:
    """Return the entries of ``papers.bib`` by their keys."""
    text = resources.files("fedsel_flwr.selectors").joinpath("papers.bib").read_text("utf-8")
    return {entry[2]: entry[1] for entry in re.finditer(r"^(@\w+\{([\w-]+),\n.*?^\})", text, re.MULTILINE | re.DOTALL)}


def package_entry() -> str:
    """Return the entry of this package.

    >>> print(package_entry().splitlines()[1])
      author  = {{The fedsel-flwr authors}},
    """
    from fedsel_flwr import __version__

    return f"""@software{{fedsel_flwr,
  author  = {{{{The fedsel-flwr authors}}}},
  title   = {{fedsel-flwr: client selection for federated learning as {{Flower}} strategies}},
  version = {{{__version__}}},
}}"""
