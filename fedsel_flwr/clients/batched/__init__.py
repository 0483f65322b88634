"""The local training of a round's clients as one batched computation; needs torch, not Flower.

:class:`BatchedTrainer` trains many models at once and returns what :func:`fedsel_flwr.clients.training.train` returns
one by one: the same draws, steps and losses; weights within rounding. It runs on the CPU and, untested here, on other
devices, where examples given as tensors stay.

In the order in which a round's training goes through them:

| room | what it does |
| --- | --- |
| `trainer` | trains the clients of a round, in chunks that fit into the caches |
| `backends` | chooses the backend, and says why not the others |
| `examples` | holds all clients' examples once, and draws which of them each step sees |
| `steps` | takes the steps of many clients: SGD on stacked parameters, dropout masks, losses |
| `manual_backprop` | backend "manual": the forward and backward pass of a sequential model |
| `layers` | the layers of many models for it: forward, backward and step |
| `vmap` | backend "vmap": any model that torch.func can batch |
| `numba_mlp` | backend "numba": perceptrons, one client at a time on each thread |
| `numba_kernels` | the compiled loops for it |
| `evaluation` | the outputs of many models on the same examples |
"""

from fedsel_flwr.clients.batched.evaluation import logits_batched
from fedsel_flwr.clients.batched.examples import Examples
from fedsel_flwr.clients.batched.trainer import BatchedTrainer

__all__ = ["BatchedTrainer", "Examples", "logits_batched"]
