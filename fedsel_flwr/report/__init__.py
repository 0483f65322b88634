"""What a user sees of a run: summaries, the table, the picture, the progress display, the run folder.

Importing this package loads NumPy only. ``table`` and ``progress`` need rich, ``plots`` needs matplotlib and
``run_folder`` loads pyarrow and safetensors at the moment it reads or writes; import those modules by name.
"""

from __future__ import annotations

from fedsel_flwr.report.summary import RunSummary, SelectorRow, Spread, aggregate, jain_index, reaching, summarize

__all__ = ["RunSummary", "SelectorRow", "Spread", "aggregate", "jain_index", "reaching", "summarize"]
