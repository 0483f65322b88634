"""Callbacks for ``on_round`` that hand each finished round to a tracking library.

Each library is imported when its callback is made, and is not installed with this package. A callback opens its run
when it is made, so that a wrong address is an error there. Later errors of the library do not end the run; the first
one is logged. All of it is in :mod:`~fedsel_flwr.callbacks.trackers`.
"""

from __future__ import annotations

from fedsel_flwr.callbacks.trackers import MLflow, Recorder, TensorBoard, WandB, figures, together

__all__ = ["MLflow", "Recorder", "TensorBoard", "WandB", "figures", "together"]
