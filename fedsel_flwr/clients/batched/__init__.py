"""The local training of a round's clients as one batched computation; needs torch, not Flower.

:class:`BatchedTrainer` trains many models at once, with the results of :func:`fedsel_flwr.clients.training.train` one
by one. Draws, steps and losses are the same, and weights differ only by rounding. Training runs on the CPU or on
another device, where examples given as tensors stay. The backend "sequential" draws the masks of dropout layers on that
device, with other random numbers.

The rooms, in the order in which a round's training uses them:

===================  ================================================================================================
``trainer``          trains the clients of a round, in chunks that fit into the caches
``backends``         chooses the backend, and gives the reasons against the others
``examples``         holds all clients' examples once, and draws the examples of each step
``steps``            takes the steps of many clients: SGD on stacked parameters, dropout masks, losses
``manual_backprop``  backend "manual": a sequential model as layers of many models, forward and backward
``vmap``             backend "vmap": any model that torch.func can batch
``numba_mlp``        backend "numba": perceptrons, one client at a time on each thread
``numba_kernels``    compiled loops for the backend "numba"
``evaluation``       the outputs of many models on the same examples
===================  ================================================================================================
"""

from fedsel_flwr.clients.batched.evaluation import logits_batched
from fedsel_flwr.clients.batched.examples import Examples
from fedsel_flwr.clients.batched.trainer import BatchedTrainer

__all__ = ["BatchedTrainer", "Examples", "logits_batched"]
