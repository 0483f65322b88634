"""Worlds: what a simulated federation consists of. Data, partition, model, availability.

In the order in which a world is built:

====================  ================================================================================================
``image_files``       scikit-learn's digits; torchvision's image sets from a folder or the network
``data``              data sets by name, split into training, server-validation and test examples
``own_data``          the user's own data: arrays, torch data sets, Hugging Face's through flwr-datasets
``given_partitions``  partitions by given numbers of examples or classes, or by sampling
``partitions``        partitions by name: i.i.d., Dirichlet, shards, and the ones above
``architectures``     models by name; the multiplications of a model
``ingredients``       examples, partition, model and objective of a scenario, or the user's own in their place
``devices``           your own devices: a CSV file with the speeds and links of each client, or of kinds of devices
``world``             all of it together, with the system model; its clients; the cache of a process
``availability``      the clients that are there in a round: by probability, or by a trace
====================  ================================================================================================
"""
