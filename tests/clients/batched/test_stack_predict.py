"""The server's predictions of a stack of models are those of each model."""

from __future__ import annotations

import numpy as np
import pytest

from fedsel_flwr.clients.batched import evaluation
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import torch_predict
from fedsel_flwr.simulations.worlds.architectures import build_model


@pytest.mark.parametrize("name", ["mlp", "logistic", "cnn5"])
def test_as_one_model_after_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models in two parts, on examples that nobody may write to."""
    monkeypatch.setattr(evaluation, "MODELS", 2)
    model, rng = build_model(name, (1, 8, 8), 10, 1), np.random.default_rng(2)
    inputs = rng.normal(size=(70, 1, 8, 8)).astype(np.float32)
    inputs.flags.writeable = False
    layers = [np.stack([array + rng.normal(size=array.shape) / 9 for _ in range(3)]) for array in get_arrays(model)]
    layers = [layer.astype(np.float32) for layer in layers]
    alone = torch_predict(model)
    expected = [alone([layer[i] for layer in layers], inputs) for i in range(3)]
    np.testing.assert_allclose(evaluation.stack_predict(model)(layers, inputs), expected, rtol=1e-5, atol=1e-6)
