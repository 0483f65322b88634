"""The wireless cell of Xia et al.: distances and fading, an OFDMA channel, and the time of a round. NumPy only.

===========  =================================================================================
``cell``     random draws: the clients' distances to the access point, and Rayleigh fading
``channel``  an OFDMA channel: path loss, signal-to-noise ratio, rate, transfer time, energy
``waves``    the time of a round, in waves if there are more clients than channels
===========  =================================================================================
"""

from __future__ import annotations

from fedsel_flwr.wireless.cell import rayleigh_power, uniform_disc
from fedsel_flwr.wireless.channel import OFDMAChannel
from fedsel_flwr.wireless.waves import finish_times, round_time

__all__ = ["OFDMAChannel", "finish_times", "rayleigh_power", "round_time", "uniform_disc"]
