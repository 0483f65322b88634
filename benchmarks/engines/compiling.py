"""How long the compiled loops take before they run: compiled once, and loaded where they are stored."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

TRAIN_ONE = """
import time
import numpy as np
from torch import nn
from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings

model = nn.Sequential(nn.Linear(4, 2))
clients = Examples(np.zeros((1, 4), dtype=np.float32), np.zeros(1, dtype=np.int64), [np.zeros(1, dtype=np.int64)])
trainer = BatchedTrainer(model, TrainingSettings(learning_rate=0.1, batch_size=1), backend="numba")
begin = time.perf_counter()
trainer.train(get_arrays(model), clients, [np.random.default_rng(0)])
print(time.perf_counter() - begin)
"""


def compiling() -> tuple[float, float]:
    """Seconds of a first training where nothing is stored, and of the same in the next process; Numba's import too."""
    with tempfile.TemporaryDirectory() as store:
        ran = [
            subprocess.run(
                [sys.executable, "-c", TRAIN_ONE], env=os.environ | {"NUMBA_CACHE_DIR": store}, check=True,
                stdout=subprocess.PIPE, text=True,
            ).stdout
            for _ in range(2)
        ]  # fmt: skip
    return float(ran[0]), float(ran[1])
