"""Wireless cell of Xia et al.: distances and fading, an OFDMA channel, and the time of a round. NumPy only.

===========  ==================================================================================================
``channel``  an OFDMA channel with drawn distances and fading; the time of a round, in waves if clients share channels
===========  ==================================================================================================
"""

from __future__ import annotations

from fedsel_flwr.wireless.channel import OFDMAChannel, finish_times, rayleigh_power, round_time, uniform_disc

__all__ = ["OFDMAChannel", "finish_times", "rayleigh_power", "round_time", "uniform_disc"]
