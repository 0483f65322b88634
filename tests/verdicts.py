"""Writes the pages of reproduced figures, and the verdicts in the package: ``python -m tests.verdicts``.

Both follow from the CSV files in ``docs/results``. Run it after new rows, or after a change of a figure's file.
"""

from __future__ import annotations

from pathlib import Path

import fedsel_flwr.simulations.reproductions as reproductions
from fedsel_flwr.simulations.reproductions.paper_figure import PAPERS, figure_names
from fedsel_flwr.simulations.reproductions.result_pages import record_verdicts, write_pages

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RECORDED = Path(reproductions.__file__).parent / "verdicts.json"


def main() -> None:
    """Write everything."""
    record_verdicts(RESULTS, RECORDED)
    write_pages(RESULTS, {paper for paper in PAPERS if any(name.startswith(f"{paper}-") for name in figure_names())})


if __name__ == "__main__":
    main()
