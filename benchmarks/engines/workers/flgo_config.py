"""What FLGo copies into the benchmark that it generates: data and model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import TensorDataset
from turns import Task

_task = Task(os.environ["ENGINES_TASK"])
_inputs, _labels = torch.tensor(_task.inputs[:]), torch.tensor(_task.labels)
train_data = TensorDataset(_inputs, _labels)
train_data.classes = list(range(10))  # FLGo's generators ask for them
test_data = TensorDataset(_inputs[:100], _labels[:100])  # never measured here


def get_model(*args: Any, **kwargs: Any) -> Any:
    """The first model."""
    return _task.model()
