"""Telemetry of a client: a Flower mod that reports the cost of training, ``ClientApp(mods=[telemetry])``.

The mod adds its measurements to the reply, and leaves out values that it cannot measure. A failed measurement never
loses an update. The mod imports neither NumPy nor Flower, because Flower starts a process for each message.
:class:`EnergyMeter` measures by RAPL and NVML, through the library zeus.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fedsel_flwr.errors import RunError

if TYPE_CHECKING:
    from flwr.app import Context, Message

logger = logging.getLogger("fedsel_flwr")
LEGACY = "fitres.metrics"
"""The record in which Flower carries the metrics of the legacy API's ``fit``."""


def telemetry(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Report the cost of training with the update, in the formats of both APIs.

    ``compute_s`` is the wall-clock time from the message's arrival in the mod to the reply of the app, seconds. It
    covers reading the data, training, and the mods that follow in the list. It excludes the start of the process and
    the transfer of the models. ``energy_j`` is the measurement of :class:`EnergyMeter` over the same time, joules. It
    is absent without zeus or without a readable meter.

    Both are in the reply's only ``MetricRecord``, in the legacy API among the metrics that ``fit`` returned. Values
    that the app itself reports under these names stay. Errors, replies without exactly one such record, and replies
    other than to training (such as to probes) pass unchanged.

    Args:
        message: Message from the server.
        context: Context of the client.
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
    # An app may return anything, and Flower itself reports the error in it.
    except Exception as error:
        logger.warning("telemetry cannot be added to the reply: %s", error)
    return reply


class EnergyMeter:
    """Meter of the joules that the processors of this machine use while a block runs.

    The meter counts all processes that run at the same time. Without a readable meter the result is None, and the
    client reports no ``energy_j``. If a meter fails, the log names it, and the result is None. The block runs in any
    case.

    Attributes:
        joules: Energy of the last block: processors, memory and GPUs that have a meter; None if none has.

    Raises:
        RunError: zeus is not installed (at construction).

    Example::

        meter = EnergyMeter()
        with meter:
            train(...)
        if meter.joules is not None:
            metrics["energy_j"] = meter.joules
    """

    def __init__(self) -> None:
        try:
            from zeus.monitor import ZeusMonitor
        except ImportError as error:
            raise RunError("energy needs zeus, which is not installed: pip install 'fedsel-flwr[meter]'") from error
        self.joules: float | None = None
        # None without a meter on this machine, and after a failure.
        self._monitor: Any = self._tried(ZeusMonitor)

    def __enter__(self) -> EnergyMeter:
        """Start measuring."""
        self.joules = None
        if self._monitor is not None:
            self._tried(lambda: self._monitor.begin_window("fedsel", sync_execution=False))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Stop measuring."""
        if self._monitor is None:
            return
        window = self._tried(lambda: self._monitor.end_window("fedsel", sync_execution=False))
        if window is None:
            return
        parts = [*(window.gpu_energy or {}).values(), *(window.cpu_energy or {}).values()]
        parts += [joules for joules in (window.dram_energy or {}).values() if joules is not None]
        self.joules = float(sum(parts)) if parts else None

    def _tried(self, act: Callable[[], Any]) -> Any:
        """Return the result of an act of the meter; None if it fails, and the meter is then not used again."""
        try:
            return act()
        # A driver may raise any error: no permission, no device.
        except Exception as error:
            logger.warning("the energy meter failed and is not used: %s", error)
            self._monitor = None
            return None


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
    """Replace the record of metrics by one that also has the measurements."""
    if reply.has_error():
        return
    content = reply.content
    names = [LEGACY] if LEGACY in content.config_records else list(content.metric_records)
    if len(names) == 1:
        # The record may be of either kind. Values that the app reports under these names come last, so they stay.
        record: Any = content[names[0]]
        content[names[0]] = type(record)({**measured, **record})
