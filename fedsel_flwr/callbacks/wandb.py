"""Weights & Biases: a run with a history by round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsel_flwr.callbacks.recorder import Recorder, import_library


class WandB(Recorder):
    """Logs each round's figures to one run of Weights & Biases, the round as their step.

    Args:
        project: Name of the project.
        **settings: Further arguments of ``wandb.init``, such as ``config``, ``name``, ``dir``, ``mode="offline"``, or
            ``id`` and ``resume="allow"`` for a run that is resumed.

    Attributes:
        run: The run of wandb.

    Raises:
        RunError: wandb is not installed.

    Example::

        with WandB("selection", config={"selector": "bsfl"}, mode="offline") as run:
            simulate(load_scenario("smoke"), on_round=run)
    """

    def __init__(self, project: str = "fedsel", **settings: Any) -> None:
        self.run = import_library("wandb", "wandb").init(project=project, **settings)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log the figures."""
        self.run.log(dict(values), step=round)

    def end(self, *, failed: bool) -> None:
        """The run is finished, or failed."""
        self.run.finish(exit_code=int(failed))
