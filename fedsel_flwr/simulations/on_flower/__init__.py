"""The run on Flower and Ray: apps, strategies, driving, resources."""
