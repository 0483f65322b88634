"""Callbacks for ``on_round`` that pass each finished round to a tracking library.

The libraries are not installed with this package. Each library is imported when its callback is made. The callback then
opens its run, so that a wrong address raises an error at once. Later errors of the library do not end the run; the
first one is logged. The code is in :mod:`~fedsel_flwr.callbacks.trackers`.
"""

from __future__ import annotations

from fedsel_flwr.callbacks.trackers import MLflow, Recorder, TensorBoard, WandB, figures, together

__all__ = ["MLflow", "Recorder", "TensorBoard", "WandB", "figures", "together"]
