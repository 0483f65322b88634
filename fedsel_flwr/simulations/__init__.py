"""Scenarios, data, the Flower app and the engines that run it."""
