"""Simulated clients: what they compute, how long it takes, and the energy it costs.

Import the modules directly: :mod:`~fedsel_flwr.clients.system` (delays and energy, NumPy only),
:mod:`~fedsel_flwr.clients.training` (torch), :mod:`~fedsel_flwr.clients.torch_client` (Flower and torch).
"""
