"""Callbacks for ``on_round`` that send each finished round to a tracking library.

The libraries are not installed with this package. A callback imports its library when you create it, and opens its run
then. Later errors of the library do not end the run; the first one is logged.

============  =====================================================================================================
``tracking``  the tracker that the option ``track`` names, and its address
``trackers``  a class for each library, their base class, and the callback of one run for any of them
============  =====================================================================================================
"""

from __future__ import annotations

from fedsel_flwr.callbacks.trackers import MLflow, Recorder, TensorBoard, WandB, figures, together

__all__ = ["MLflow", "Recorder", "TensorBoard", "WandB", "figures", "together"]
