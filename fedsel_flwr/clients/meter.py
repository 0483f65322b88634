"""Measured energy of a client outside simulation: RAPL and NVML, through the library zeus.

In simulation the model of :mod:`fedsel_flwr.clients.system` is the only source: a package meter counts everything that
runs on the machine, all actors together.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from fedsel_flwr.errors import RunError

logger = logging.getLogger("fedsel_flwr")


class EnergyMeter:
    """Measures the joules that the processors of this machine draw while a block runs.

    Everything that runs meanwhile is counted. A machine without a readable meter gives None, and the client reports no
    ``energy_j``. A meter that fails is named in the log and gives None; the block runs in any case.

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
            raise RunError("measuring energy needs zeus: pip install 'fedsel-flwr[meter]'") from error
        self.joules: float | None = None
        self._monitor: Any = None  # none on this machine, or it has failed
        try:
            self._monitor = ZeusMonitor()
        except Exception as error:  # whatever a driver raises: no permission, no device
            logger.warning("no energy meter on this machine: %s", error)

    def __enter__(self) -> EnergyMeter:
        """Start measuring."""
        self.joules = None
        if self._monitor is not None:
            try:
                self._monitor.begin_window("fedsel", sync_execution=False)
            except Exception as error:
                self._failed(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop measuring."""
        if self._monitor is None:
            return
        try:
            window = self._monitor.end_window("fedsel", sync_execution=False)
        except Exception as failure:
            return self._failed(failure)
        parts = [*(window.gpu_energy or {}).values(), *(window.cpu_energy or {}).values()]
        parts += [joules for joules in (window.dram_energy or {}).values() if joules is not None]
        self.joules = float(sum(parts)) if parts else None

    def _failed(self, error: Exception) -> None:
        logger.warning("the energy meter failed and is not asked again: %s", error)
        self._monitor = None
