"""Runs on Flower: apps, strategies, rounds over a grid, and Ray.

Modules, in the order in which a run uses them:

=================  ===================================================================================================
``ray_resources``  cores and GPUs of Ray and of each client, the cluster to join, and checks before Ray starts
``ray_session``    starting or joining Ray, watching it and shutting it down; the world in its object store
``app``            the ServerApp and the ClientApp of ``flwr run``, the rounds over a grid, one-line errors
``building``       the strategy with its base and selector, the rounds and the clients' app, in either API
=================  ===================================================================================================
"""
