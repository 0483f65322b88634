"""The local training of a round's clients as one batched computation; torch, no Flower.

:class:`BatchedTrainer` trains many models at once and gives what :func:`fedsel_flwr.clients.training.train` gives one
by one: the same draws, steps and losses; weights within rounding. It runs on the CPU and, untested here, on other
devices, where examples given as tensors stay. :class:`SharedTrainer` does the same with the :class:`Helpers` that other
processes are.
"""

from fedsel_flwr.clients.batched.evaluation import logits_batched
from fedsel_flwr.clients.batched.examples import Examples
from fedsel_flwr.clients.batched.trainer import BatchedTrainer, train_batched
from fedsel_flwr.clients.batched.worker_processes import Helpers, SharedTrainer

__all__ = ["BatchedTrainer", "Examples", "Helpers", "SharedTrainer", "logits_batched", "train_batched"]
