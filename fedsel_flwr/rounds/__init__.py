"""The course of a round in plain types: arrays, numbers and ids; no Flower, no torch."""
