"""Wrapping a Flower strategy: transport, records, waiting, failures and resuming, for both of Flower's APIs."""
