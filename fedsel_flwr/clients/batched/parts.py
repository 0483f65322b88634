"""Which clients of a round each of several processes trains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fedsel_flwr.clients.batched.schedule import num_steps
from fedsel_flwr.clients.settings import TrainingSettings


def shares(sizes: Sequence[int], settings: TrainingSettings, count: int) -> list[slice]:
    """Cut clients into runs of about the same work.

    The cuts follow from the arguments alone, not from who is there to train: a model's last bits may depend on the
    models that are trained together with it.

    Args:
        sizes: Examples of each client, in the order of training.
        settings: How they train.
        count: How many shares at most, at least 1.

    Returns:
        The shares in order, none of them empty.

    Example:
        >>> shares([9, 4, 3, 2], TrainingSettings(learning_rate=0.1, batch_size=1), 2)
        [slice(0, 1, None), slice(1, 4, None)]
    """
    work = np.cumsum([num_steps(size, settings) * min(size, settings.batch_size) for size in sizes])
    if not len(work):
        return []
    ideal = work[-1] * np.arange(1, count) / count
    cuts = sorted({0, len(work), *(int(np.abs(work - each).argmin()) + 1 for each in ideal)})
    return [slice(begin, end) for begin, end in pairwise(cuts)]
