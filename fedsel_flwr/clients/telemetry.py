"""Telemetry of a client: a Flower mod that reports the cost of training, ``ClientApp(mods=[telemetry])``.

The mod measures and adds to the reply, and never costs an update: what it cannot measure it leaves out. It imports
neither NumPy nor Flower, for Flower starts a process for each message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fedsel_flwr.clients.metrics import EnergyMeter
from fedsel_flwr.errors import RunError

if TYPE_CHECKING:
    from flwr.app import Context, Message

logger = logging.getLogger("fedsel_flwr")
LEGACY = "fitres.metrics"
"""The record in which Flower carries the metrics of the legacy API's ``fit``."""


def telemetry(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Report the cost of training with the update, in the formats of both APIs.

    ``compute_s`` is the time from the message's arrival in the mod to the reply of the app, seconds by the clock on the
    wall: reading the data, training, and the mods that follow in the list. It excludes the start of the process and the
    transfer of the models. ``energy_j`` is what :class:`~fedsel_flwr.clients.metrics.EnergyMeter` measured meanwhile,
    joules; it is absent without zeus or without a readable meter.

    Both stand in the reply's one ``MetricRecord``, in the legacy API among the metrics that ``fit`` returned. What the
    app reports itself under these names stays. Errors, replies without that one record, and whatever is no training
    (probes are not) pass unchanged.

    Args:
        message: From the server.
        context: The client's.
        call_next: The app, or the next mod.

    Returns:
        The app's reply.
    """
    if message.metadata.message_type.partition(".")[0] != "train":
        return call_next(message, context)
    with _meter() as meter:
        start = time.perf_counter()
        reply = call_next(message, context)
        measured = {"compute_s": time.perf_counter() - start}
    if meter is not None and meter.joules is not None:
        measured["energy_j"] = meter.joules
    try:
        _add(measured, reply)
    # an app may return anything, and Flower says what is wrong with it
    except Exception as error:
        logger.warning("telemetry cannot be added to the reply: %s", error)
    return reply


def _meter() -> EnergyMeter | nullcontext[None]:
    """Return a meter, or an empty context if zeus is missing or cannot be loaded."""
    try:
        return EnergyMeter()
    except RunError:
        pass
    except Exception as error:
        logger.warning("no energy is measured: %s", error)
    return nullcontext()


def _add(measured: dict[str, float], reply: Message) -> None:
    """Replace the record of metrics by one that has the measurements too."""
    if reply.has_error():
        return
    content = reply.content
    names = [LEGACY] if LEGACY in content.config_records else list(content.metric_records)
    if len(names) == 1:
        # of either kind; what the app reports under these names comes last and stays
        record: Any = content[names[0]]
        content[names[0]] = type(record)({**measured, **record})
