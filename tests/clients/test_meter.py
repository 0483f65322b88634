"""The energy meter around zeus; its monitor is replaced, as neither RAPL nor NVML can be counted on."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedsel_flwr.clients.telemetry import EnergyMeter
from fedsel_flwr.errors import RunError


def with_monitor(monkeypatch: pytest.MonkeyPatch, factory: Any) -> None:
    package, module = ModuleType("zeus"), ModuleType("zeus.monitor")
    module.ZeusMonitor = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zeus", package)
    monkeypatch.setitem(sys.modules, "zeus.monitor", module)


class Monitor:
    """Gives one window's energies."""

    def __init__(self, **energies: Any) -> None:
        self.energies, self.open = energies, False

    def begin_window(self, key: str, sync_execution: bool) -> None:
        self.open = True

    def end_window(self, key: str, sync_execution: bool) -> SimpleNamespace:
        assert self.open
        self.open = False
        return SimpleNamespace(**{"gpu_energy": {}, "cpu_energy": None, "dram_energy": None} | self.energies)


def test_everything_with_a_meter_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    energies = {"gpu_energy": {0: 10.0, 1: 5.0}, "cpu_energy": {0: 2.0}, "dram_energy": {0: 0.5, 1: None}}
    with_monitor(monkeypatch, lambda: Monitor(**energies))
    with EnergyMeter() as meter:
        assert meter.joules is None
    assert meter.joules == 17.5


def test_a_machine_without_a_meter_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with_monitor(monkeypatch, Monitor)
    with EnergyMeter() as meter:
        pass
    assert meter.joules is None


def test_a_driver_that_fails_gives_none_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Monitor:
        raise PermissionError("powercap")

    with_monitor(monkeypatch, broken)
    with EnergyMeter() as meter:
        pass
    assert meter.joules is None
    assert "powercap" in caplog.text


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus", None)
    monkeypatch.setitem(sys.modules, "zeus.monitor", None)
    with pytest.raises(RunError, match=r"fedsel-flwr\[meter\]"):
        EnergyMeter()
