"""TensorBoard: event files in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fedsel_flwr.callbacks.recorder import Recorder, import_library


class TensorBoard(Recorder):
    """Writes each round's figures as scalars, the round as their step.

    It is TensorBoard's own writer: neither torch nor TensorFlow is needed. Each round is on disk when it has ended. A
    run that is resumed goes on in the same folder.

    Args:
        folder: The log folder of the run.
        prefix: What the tags begin with.

    Raises:
        RunError: tensorboard is not installed.

    Example::

        with TensorBoard("logs/bsfl") as board:
            simulate(load_scenario("smoke"), on_round=board)
    """

    def __init__(self, folder: str | os.PathLike[str], *, prefix: str = "fedsel/") -> None:
        self._prefix = prefix
        self._writer = import_library("tensorboard.summary", "tensorboard").Writer(os.fspath(folder))

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each figure."""
        for name, value in values.items():
            self._writer.add_scalar(self._prefix + name, value, round)
        self._writer.flush()

    def end(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()
