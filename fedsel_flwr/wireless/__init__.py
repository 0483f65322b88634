"""Wireless cell of Xia et al.: distances and fading, an OFDMA channel, and the time of a round. NumPy only.

===========  ======================================================================================
``channel``  an OFDMA channel: path loss, rate, transfer time, energy; distances and fading, drawn
``waves``    the time of a round, with waves if there are more clients than channels
===========  ======================================================================================
"""

from __future__ import annotations

from fedsel_flwr.wireless.channel import OFDMAChannel, rayleigh_power, uniform_disc
from fedsel_flwr.wireless.waves import finish_times, round_time

__all__ = ["OFDMAChannel", "finish_times", "rayleigh_power", "round_time", "uniform_disc"]
