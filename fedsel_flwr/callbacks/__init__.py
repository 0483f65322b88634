"""Callbacks for ``on_round`` that hand each finished round to a tracking library.

Each library is imported when its callback is made, and is not installed with this package. A callback opens its run
when it is made, so that a wrong address is an error there; whatever the library raises later ends nothing and is logged
once.
"""

from __future__ import annotations

from fedsel_flwr.callbacks.mlflow import MLflow
from fedsel_flwr.callbacks.recorder import Recorder, figures, together
from fedsel_flwr.callbacks.tensorboard import TensorBoard
from fedsel_flwr.callbacks.wandb import WandB

__all__ = ["MLflow", "Recorder", "TensorBoard", "WandB", "figures", "together"]
