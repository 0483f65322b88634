"""What goes in and comes out of batched training."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.evaluation import logits_batched
from fedsel_flwr.clients.batched.trainer import default_chunk
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.worlds.architectures import build_model

SETTINGS = TrainingSettings(learning_rate=0.1, batch_size=2)
INPUTS = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
LABELS = np.array([0, 1, 0, 1, 1, 0, 0, 1, 1])
ROWS = [np.array([0, 4]), np.array([8, 1, 2, 3, 5]), np.array([7])]


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def drawn() -> list[np.random.Generator]:
    return [np.random.default_rng(i) for i in range(3)]


def test_one_step_by_hand() -> None:
    # Logistic regression of one input x = 2 from zero weights, label 0: p = (1/2, 1/2), so that the gradient by the
    # weights is (p - (1, 0)) x = (-1, 1), by the biases (-1/2, 1/2); a step of 0.1 gives (0.1, -0.1), (0.05, -0.05).
    start = [np.zeros((2, 1), dtype=np.float32), np.zeros(2, dtype=np.float32)]
    one = Examples(np.full((1, 1), 2, dtype=np.float32), np.zeros(1, dtype=np.int64), [np.array([0])] * 2)
    layers, losses = BatchedTrainer(nn.Sequential(nn.Linear(1, 2)), SETTINGS).train(start, one, drawn()[:2])
    np.testing.assert_allclose(layers[0], [[[0.1], [-0.1]]] * 2, rtol=1e-6)
    np.testing.assert_allclose(layers[1], [[0.05, -0.05]] * 2, rtol=1e-6)
    np.testing.assert_allclose(losses, [np.log(2)] * 2, rtol=1e-6)


def test_rows_tensors_and_read_only_arrays_are_the_same() -> None:
    network = model()
    locked = INPUTS.copy()
    locked.flags.writeable = False
    specs = [
        Examples(INPUTS, LABELS, ROWS),
        Examples(locked, LABELS, ROWS),
        Examples(torch.tensor(INPUTS), torch.tensor(LABELS), ROWS),
    ]
    for backend in ("manual", "vmap", "sequential"):
        runs = []
        for form in specs:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                trainer = BatchedTrainer(network, SETTINGS, backend=backend)  # type: ignore[arg-type]
                runs.append(trainer.train(get_arrays(network), form, drawn()))
        for layers, losses in runs[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(layers, runs[0][0], strict=True))
            assert np.array_equal(losses, runs[0][1])


def test_nothing_that_was_given_changes_and_no_global_stream_moves() -> None:
    network = model().eval()
    start = [array + 1 for array in get_arrays(network)]
    given = [array.copy() for array in start]
    inputs, state = INPUTS.copy(), torch.get_rng_state()
    for backend in ("manual", "vmap", "sequential"):
        trainer = BatchedTrainer(network, SETTINGS, backend=backend)  # type: ignore[arg-type]
        layers, _ = trainer.train(start, Examples(inputs, LABELS, ROWS), drawn())
        layers[0][:] = 7  # the caller's from here on
    assert all(np.array_equal(a, b) for a, b in zip(start, given, strict=True))
    assert np.array_equal(inputs, INPUTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert not network.training


def test_training_that_diverges_is_not_a_number_and_harms_nobody_else() -> None:
    inputs = INPUTS.copy()
    inputs[8] = np.inf
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    settings = TrainingSettings(learning_rate=0.1, batch_size=2, momentum=0.9)
    apart = Examples(inputs, LABELS, [np.array([0]), np.array([8, 1, 2, 3, 5]), np.array([4])])
    sane = Examples(inputs, LABELS, [np.array([0]), np.array([0]), np.array([4])])
    for backend in ("manual", "vmap"):
        trainer = BatchedTrainer(network, settings, backend=backend)  # type: ignore[arg-type]
        layers, losses = trainer.train(get_arrays(network), apart, drawn())
        expected, expected_losses = trainer.train(get_arrays(network), sane, drawn())
        assert np.isnan(losses[1])
        assert np.isfinite(losses[[0, 2]]).all()
        np.testing.assert_allclose(losses[[0, 2]], expected_losses[[0, 2]], rtol=1e-5)
        for found, alone in zip(layers, expected, strict=True):
            np.testing.assert_allclose(found[[0, 2]], alone[[0, 2]], rtol=1e-5)


def test_one_trainer_serves_rounds_of_other_clients_and_models() -> None:
    network = model()
    trainer = BatchedTrainer(network, SETTINGS)
    trainer.train([array * 0 for array in get_arrays(network)], Examples(INPUTS, LABELS, ROWS), drawn())
    few = Examples(INPUTS, LABELS, [np.arange(9)])
    again, losses = trainer.train(get_arrays(network), few, drawn()[:1])
    fresh, fresh_losses = BatchedTrainer(network, SETTINGS).train(get_arrays(network), few, drawn()[:1])
    assert all(np.array_equal(a, b) for a, b in zip(again, fresh, strict=True))
    assert np.array_equal(losses, fresh_losses)


def test_no_clients_are_an_empty_stack() -> None:
    layers, losses = BatchedTrainer(model(), SETTINGS).train(get_arrays(model()), Examples(INPUTS, LABELS, []), [])
    assert [layer.shape for layer in layers] == [(0, 4, 3), (0, 4), (0, 2, 4), (0, 2)]
    assert losses.shape == (0,)


def test_chunks_follow_from_sizes() -> None:
    inputs = torch.zeros(1, 1, 28, 28)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    mlp, cnn = (build_model(name, (1, 28, 28), 10, 0) for name in ("mlp", "cnn"))
    # 52,500 parameters, and outputs of 784 + 2 * 64 + 2 * 30 + 10 numbers for each of 10 examples, of 4 bytes
    assert default_chunk(mlp, inputs, 10, cpu) == 12 * 2**20 // (4 * (52_500 + 10 * 982))
    assert (
        default_chunk(cnn, inputs, 10, cpu) < default_chunk(mlp, inputs, 10, cpu) < default_chunk(mlp, inputs, 10, gpu)
    )
    assert default_chunk(cnn, inputs, 10**6, cpu) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generators": drawn()[:2]}, "one generator for each client; got 2 for 3 clients"),
        ({"start": get_arrays(model())[:3]}, "expected 4 arrays"),
        ({"start": [np.zeros((1, 1))] * 4}, "expected numbers of shape"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    arguments = {
        "start": get_arrays(model()), "examples": Examples(INPUTS, LABELS, ROWS), "generators": drawn()
    }  # fmt: skip
    with pytest.raises(ParameterError, match=message):
        BatchedTrainer(model(), SETTINGS).train(**(arguments | change))  # type: ignore[arg-type]


def test_examples_and_ways_are_checked() -> None:
    with pytest.raises(ParameterError, match="client 1 has none"):
        Examples(INPUTS, LABELS, [np.array([0]), np.array([], dtype=np.int64)])
    with pytest.raises(ParameterError, match=r"expected rows in \[0, 9\); client 0 has -1…9"):
        Examples(INPUTS, LABELS, [np.array([9, -1])])
    with pytest.raises(ParameterError, match="got 9 examples, 2 labels"):
        Examples(INPUTS, LABELS[:2], [])
    with pytest.raises(ParameterError, match="backend"):
        BatchedTrainer(model(), SETTINGS, backend="fast")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="chunk must be a whole number"):
        BatchedTrainer(model(), SETTINGS, chunk=0)
    with pytest.raises(ParameterError, match="expected stacks of shapes"):
        logits_batched(model(), get_arrays(model()), INPUTS)


def test_a_copy_of_the_model_is_trained() -> None:
    network = model()
    before = copy.deepcopy(network.state_dict())
    start = [array + 1 for array in get_arrays(network)]
    BatchedTrainer(network, SETTINGS).train(start, Examples(INPUTS, LABELS, ROWS), drawn())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
