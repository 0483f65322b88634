"""Reports of runs: run folder, progress display, summaries, verdict, tables and pictures.

Modules, in the order in which a run uses them:

==============  =====================================================================================================
``progress``    progress display on the terminal; logs during a run go to a file (needs rich)
``run_folder``  the folder of a run: scenario, journal or Parquet files, model (pyarrow, safetensors on first use)
``summary``     the figures of a run (accuracy, time and energy to the target, Jain index), over seeds and settings
``paired``      ratios and differences to a reference on the same seeds, intervals, tests, Holm's correction (SciPy)
``verdict``     verdict on each selector: sooner, later, no difference, not settled; the profile over targets
``tables``      the comparison as a terminal table, data frames, LaTeX (needs rich; pandas on first use)
``plots``       the pictures as PNG, PDF or SVG: by simulated seconds, and by rounds (Altair on first use)
``page``        pages for a browser: a comparison to explore, a deployment to watch (the extra ``report``)
``latencies``   the latencies in a folder or a CSV file: measured, cut off, failed (pyarrow on first use)
``components``  variance components: how much clients differ, and how much each client varies (SciPy)
``choices``     selectors that select from a modelled fleet without training; random selection, sorted groups
``advice``      whether selection by latency pays, and with which selector: ``fedsel advise`` (SciPy)
==============  =====================================================================================================

Importing this package loads only NumPy. Import the modules by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedsel_flwr.report.summary import (
    RunSummary,
    SelectorRow,
    Spread,
    aggregate,
    find_target_rounds,
    jain_index,
    summarize,
)

if TYPE_CHECKING:
    from fedsel_flwr.report.advice import Advice, advise

__all__ = [
    "Advice", "RunSummary", "SelectorRow", "Spread", "advise", "aggregate", "find_target_rounds", "jain_index",
    "summarize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Loaded on first use, because most readers of a run need no selectors.
    if name not in ("Advice", "advise"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedsel_flwr.report import advice

    return getattr(advice, name)
