"""Runs on Flower: apps, strategies, rounds over a grid, and Ray.

In the order in which a run passes through them:

=================  ===================================================================================================
``ray_resources``  cores and GPUs of Ray and of each client; the cluster to join; checks before Ray starts
``ray_session``    Ray started or joined, watched, and shut down; the world in its object store
``app``            the ServerApp and the ClientApp of ``flwr run``; the device of an actor; one-line errors
``driving``        the nodes are awaited, the strategy is built, the rounds run
``building``       the strategy: base, selector with its parameters, validation, availability
``flower_apis``    the legacy and the Message API: base strategies, rounds, client apps
=================  ===================================================================================================
"""
