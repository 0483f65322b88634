"""A user's own file with everything in it that can be wrong: what the tests of wrong inputs write and refer to."""

OWN_CODE = """
import numpy as np
import torch
from fedsel_flwr.selectors import Random, Selector

class NoSelector: ...

class Bare(Selector):
    name = "bare"

class Needs(Random):
    name = "needs"
    def __init__(self, *, clients_per_round, speed, seed=None): ...

class Unlicensed(Random):
    name = "unlicensed"
    def __init__(self, *, clients_per_round, seed=None):
        raise RuntimeError("no licence")

class Greedy(Random):
    name = "greedy"
    def _select(self, available):
        return [0, 0, 99]

class Fragile(Random):
    name = "fragile"
    def _select(self, available):
        raise KeyError("speed")

def function(): return 3

def model_raises(): raise OSError("no disk")
def model_of_numpy(): return np.eye(3)
def model_too_small(input_shape, num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
def model_too_wide(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(65, 10))
def model_needs(input_shape, num_classes, width): return torch.nn.Linear(64, 10)
def model_of_nothing(): return torch.nn.Flatten()

x, y = np.random.default_rng(0).normal(size=(100, 4)), np.arange(100) % 2
def data_raises(): raise FileNotFoundError("no camera.csv")
def data_of_three(): return 1, 2, 3
def data_lengths(): return (x, y[:9]), (x, y)
def data_nan(): return (x * np.nan, y), (x, y)
def data_text(): return (x, np.array(["a"] * 100)), (x, y)
def data_negative(): return (x, y - 1), (x, y)
def data_other(): return (x, y), (x[:, :2], y)
def data_needs(path): return (x, y), (x, y)
"""
