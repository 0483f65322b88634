"""Callbacks for ``on_round`` that hand each finished round to a tracking library.

Each library is imported when its callback is made, and is not installed with this package. A callback opens its run
when it is made, so that a wrong address is an error there. Later errors of the library do not end the run; the first
one is logged. The rooms:

=============  ======================================================================================================
``recorder``   the base class: a round's figures, and errors of the library; ``together`` calls several callbacks
``trackers``   a callback for each library: TensorBoard, MLflow, Weights & Biases
=============  ======================================================================================================
"""

from __future__ import annotations

from fedsel_flwr.callbacks.recorder import Recorder, figures, together
from fedsel_flwr.callbacks.trackers import MLflow, TensorBoard, WandB

__all__ = ["MLflow", "Recorder", "TensorBoard", "WandB", "figures", "together"]
