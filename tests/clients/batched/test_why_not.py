"""Why a model is not trained a faster way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer
from fedsel_flwr.clients.objectives import CLASSIFICATION, get_arrays
from fedsel_flwr.errors import ParameterError
from tests.clients.batched.checking import SETTINGS, check_against_loop, seeded, world
from tests.clients.batched.kinds import Branching, Centred, Chance, Counting, Residual, normalized, shared


@pytest.mark.parametrize(
    ("build", "way", "reason"),
    [
        (Residual, "written", "Residual at 'the top' is not among the layers that are written out"),
        (normalized, "written", "BatchNorm2d at '1' is not among"),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(64, 4), nn.Flatten()), "written", "Flatten at '0' keeps axes"),
        (lambda: nn.Sequential(nn.Linear(8, 2), nn.Flatten()), "written", "Linear at '0' reads more than one axis"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten()),
            "written",
            "Conv2d at '0' has groups",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2).requires_grad_(False)), "written", "frozen"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), "written", "expected outputs of shape (n, k)"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 2)), "written", "Linear at '1' cannot read its input"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2).double()), "written", "must share one type"),
        (Chance, "general", "on chance beside nn.Dropout"),
        (Centred, "general", "depend on the rest of the batch"),
        (Counting, "general", "changes its buffers"),
        (Branching, "general", "torch.func cannot batch it: RuntimeError: vmap"),
        (normalized, "general", "BatchNorm2d at '1' reads and keeps statistics"),
        (lambda: nn.Sequential(nn.AlphaDropout(), nn.Flatten(), nn.Linear(64, 2)), "general", "masks of AlphaDropout"),
    ],
)
def test_why_not(build: Any, way: Any, reason: str) -> None:
    model, examples = seeded(build), world()
    with pytest.raises(ParameterError) as error:
        BatchedTrainer(model, SETTINGS, way=way).train(
            get_arrays(model), examples, [np.random.default_rng(i) for i in range(3)]
        )
    assert reason in str(error.value)


def test_the_reasons_can_be_read() -> None:
    model = seeded(normalized)
    trainer = BatchedTrainer(model, SETTINGS)
    trainer.train(get_arrays(model), world(), [np.random.default_rng(i) for i in range(3)])
    assert trainer.way == "loop"
    assert [*trainer.reasons] == ["written", "general"]
    assert "BatchNorm2d" in trainer.reasons["general"]


def test_a_layer_with_a_hook_is_not_written_out() -> None:
    model = seeded(shared).double()
    model[1].register_forward_hook(lambda module, args, output: 2 * output)  # type: ignore[operator]
    trainer = BatchedTrainer(model, SETTINGS)
    check_against_loop(model, world(np.float64), trainer, CLASSIFICATION, atol=1e-12)
    assert trainer.way == "general"
    assert "has hooks" in trainer.reasons["written"]
