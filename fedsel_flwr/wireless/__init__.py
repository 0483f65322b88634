"""The wireless cell: an OFDMA channel, its fading, where the clients stand, and how long a round takes."""

from __future__ import annotations

from fedsel_flwr.wireless.cell import rayleigh_power, uniform_disc
from fedsel_flwr.wireless.channel import OFDMAChannel
from fedsel_flwr.wireless.waves import finish_times, round_time

__all__ = ["OFDMAChannel", "finish_times", "rayleigh_power", "round_time", "uniform_disc"]
