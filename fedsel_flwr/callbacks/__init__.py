"""Figures of each finished round for other programs: trackers, which ``on_round`` calls, and Prometheus.

The libraries are not installed with this package. A callback imports its library when you create it, and opens its run
then. Later errors of the library do not end the run; the first one is logged.

==============  ===================================================================================================
``tracking``    the tracker that the option ``track`` names, and its address
``trackers``    a class for each library, their base class, and the callback of one run for any of them
``prometheus``  metrics of a run over HTTP, in the format of Prometheus
==============  ===================================================================================================
"""

from __future__ import annotations

from fedsel_flwr.callbacks.trackers import MLflow, Recorder, TensorBoard, WandB, figures, together

__all__ = ["MLflow", "Recorder", "TensorBoard", "WandB", "figures", "together"]
