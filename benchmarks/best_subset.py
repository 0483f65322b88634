"""How long FedCA's exact filter takes: ``python benchmarks/best_subset.py``."""

from __future__ import annotations

import os
import platform
import time

import numpy as np

from fedsel_flwr.aggregation import best_subset

if __name__ == "__main__":
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    for n, examples, classes in ((8, 5000, 10), (12, 5000, 10), (14, 5000, 10)):
        rng = np.random.default_rng(0)
        labels = rng.integers(0, classes, examples)
        logits = rng.normal(size=(n, examples, classes)) + 2.0 * np.eye(classes)[labels] * rng.uniform(0, 1, (n, 1, 1))
        for score in ("loss", "accuracy"):
            times = []
            for _ in range(3):
                start = time.perf_counter()
                kept, value = best_subset(logits, labels, score)
                times.append(time.perf_counter() - start)
            print(
                f"{n} models x {examples} x {classes}, {score}: min {min(times):.2f} s, keeps {kept.sum()}, {value:.4f}"
            )
