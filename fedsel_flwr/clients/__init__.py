"""Simulated clients: their computations, the time that these take, and the energy that they cost.

Import the rooms directly. The table has them in the order in which a client's round uses them:

=====================  ==============================================================================================
``torch_client``       the Flower client, for both APIs (Flower and torch)
``streams``            random streams by seed, purpose, partition and round
``device``             delays of a round, methods of a system model, true mean latencies, dropout (NumPy only)
``system``             Xia's cell as system model (NumPy only)
``phones``             a fleet of phones as system model (NumPy only)
``training_settings``  settings of local training (NumPy only)
``answering``          answers about the received model, metrics of an update, and their cost (Flower and torch)
``objectives``         loss and quality; a model's parameters as arrays (torch)
``training``           local SGD, evaluation, augmentation, one torch thread for each of several computations (torch)
``telemetry``          Flower mod for real devices that reports the cost of training; energy meter
``batched``            the local training of a whole round as one computation (torch)
=====================  ==============================================================================================
"""
