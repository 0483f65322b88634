"""Worlds of simulations: data, partition, model, clients and availability.

Modules, in the order in which a world is built:

====================  ================================================================================================
``image_files``       digits; image sets from a folder, an archive, the network, or sent to this node of a Ray cluster
``data``              data sets by name, split into training, server-validation and test examples
``own_data``          your own data: arrays, torch data sets, or Hugging Face data sets through flwr-datasets
``partitions``        partitions by name: i.i.d., Dirichlet, shards, given numbers, writers, or sampling
``architectures``     models by name; the number of multiplications of a model
``ingredients``       examples, partition, model and objective of a scenario, or your own ones instead
``world``             the world: all parts together, the system model, the clients, and a cache
``availability``      availability of clients in each round: by probability, or by a trace; speeds and links by a file
====================  ================================================================================================
"""
