"""What goes in and comes out of batched training, on one thread and on several."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsel_flwr.clients.batched import BatchedTrainer, Examples
from fedsel_flwr.clients.batched.examples import Schedule, longest_first
from fedsel_flwr.clients.batched.trainer import default_chunk
from fedsel_flwr.clients.objectives import get_arrays
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from tests.clients.batched.helpers import Remembering, built, generators, pooled, seeded, settings_of, world

SETTINGS = TrainingSettings(learning_rate=0.1, batch_size=2)
INPUTS = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
LABELS = np.array([0, 1, 0, 1, 1, 0, 0, 1, 1])
ROWS = [np.array([0, 4]), np.array([8, 1, 2, 3, 5]), np.array([7])]
EXAMPLES = Examples(INPUTS, LABELS, ROWS)
WAYS: list[Any] = ["manual", "vmap", "sequential"]


def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)))


def drawn(count: int = 3) -> list[np.random.Generator]:
    return [np.random.default_rng(i) for i in range(count)]


def test_batches_by_hand() -> None:
    """5, 3 and 1 examples in batches of 2, one pass: lengths 2, 2, 1 and 2, 1 and 1.

    Padding repeats a row of the batch: its loss is as finite as the batch's. test_against_loop has the loop's batches.
    """
    assert longest_first([1, 3, 5], SETTINGS).tolist() == [2, 1, 0]
    schedule = Schedule([np.array([3, 9, 4, 7, 1]), np.array([8, 2, 6]), np.array([5])], SETTINGS, drawn())
    assert schedule.steps.tolist() == [3, 2, 1]
    assert schedule.lengths.tolist() == [[2, 2, 1], [2, 1, 0], [1, 0, 0]]
    assert schedule.extents == [(3, 2), (2, 2), (1, 1)]
    assert schedule.weights[:, 1].tolist() == [[0.5, 0.5], [1, 0], [0, 0]]
    assert (schedule.rows[:, 2, :][:1] == 5).all()
    assert schedule.rows[2, 0, 0] == schedule.rows[2, 0, 1]
    assert schedule.rows[1, 1, 0] == schedule.rows[1, 1, 1]


def test_one_step_by_hand() -> None:
    # Logistic regression of one input x = 2 from zero weights, label 0: p = (1/2, 1/2), so that the gradient by the
    # weights is (p - (1, 0)) x = (-1, 1), by the biases (-1/2, 1/2); a step of 0.1 gives (0.1, -0.1), (0.05, -0.05).
    start = [np.zeros((2, 1), dtype=np.float32), np.zeros(2, dtype=np.float32)]
    one = Examples(np.full((1, 1), 2, dtype=np.float32), np.zeros(1, dtype=np.int64), [np.array([0])] * 2)
    layers, losses = BatchedTrainer(nn.Sequential(nn.Linear(1, 2)), SETTINGS).train(start, one, drawn(2))
    np.testing.assert_allclose(layers[0], [[[0.1], [-0.1]]] * 2, rtol=1e-6)
    np.testing.assert_allclose(layers[1], [[0.05, -0.05]] * 2, rtol=1e-6)
    np.testing.assert_allclose(losses, [np.log(2)] * 2, rtol=1e-6)


@pytest.mark.parametrize("backend", WAYS)
def test_tensors_and_read_only_arrays_are_the_same(backend: Any) -> None:
    network, locked = model(), INPUTS.copy()
    locked.flags.writeable = False
    others = [Examples(locked, LABELS, ROWS), Examples(torch.tensor(INPUTS), torch.tensor(LABELS), ROWS)]
    first, *runs = (
        BatchedTrainer(network, SETTINGS, backend=backend).train(get_arrays(network), form, drawn())
        for form in (EXAMPLES, *others)
    )
    for run in runs:
        np.testing.assert_equal(run, first)


@pytest.mark.parametrize("backend", WAYS)
def test_nothing_that_was_given_changes_and_no_global_stream_moves(backend: Any) -> None:
    network = model().eval()
    before = copy.deepcopy(network.state_dict())
    start = [array + 1 for array in get_arrays(network)]
    given = [array.copy() for array in start]
    inputs, state = INPUTS.copy(), torch.get_rng_state()
    layers, _ = BatchedTrainer(network, SETTINGS, backend=backend).train(start, Examples(inputs, LABELS, ROWS), drawn())
    layers[0][:] = 7  # the caller's from here on
    assert all(np.array_equal(a, b) for a, b in zip(start, given, strict=True))
    assert np.array_equal(inputs, INPUTS)
    assert torch.equal(torch.get_rng_state(), state)
    assert not network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("backend", WAYS[:2])
def test_training_that_diverges_is_not_a_number_and_harms_nobody_else(backend: Any) -> None:
    inputs = INPUTS.copy()
    inputs[8] = np.inf
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    trainer = BatchedTrainer(network, TrainingSettings(learning_rate=0.1, batch_size=2, momentum=0.9), backend=backend)
    apart = Examples(inputs, LABELS, [np.array([0]), np.array([8, 1, 2, 3, 5]), np.array([4])])
    sane = Examples(inputs, LABELS, [np.array([0]), np.array([0]), np.array([4])])
    layers, losses = trainer.train(get_arrays(network), apart, drawn())
    expected, expected_losses = trainer.train(get_arrays(network), sane, drawn())
    assert np.isnan(losses[1])
    for found, alone in zip([*layers, losses], [*expected, expected_losses], strict=True):
        assert np.isfinite(found[[0, 2]]).all()
        np.testing.assert_allclose(found[[0, 2]], alone[[0, 2]], rtol=1e-5)


def test_one_trainer_serves_rounds_of_other_clients_and_models() -> None:
    network = model()
    trainer = BatchedTrainer(network, SETTINGS)
    trainer.train([array * 0 for array in get_arrays(network)], EXAMPLES, drawn())
    few = Examples(INPUTS, LABELS, [np.arange(9)])
    fresh = BatchedTrainer(network, SETTINGS).train(get_arrays(network), few, drawn(1))
    np.testing.assert_equal(trainer.train(get_arrays(network), few, drawn(1)), fresh)


@pytest.mark.parametrize("where", ["mean", "plain", "list", "calls"])
def test_each_client_starts_from_a_fresh_copy_of_everything_that_the_module_holds(where: str) -> None:
    """A client's model does not depend on the clients before it, in this round and in earlier ones."""
    network, examples = seeded(lambda: Remembering(where)), world(np.float32)
    trainer = BatchedTrainer(network, settings_of("plain"))
    start = get_arrays(network)
    together, _ = trainer.train(start, examples, generators())
    for k in range(len(examples.rows)):
        for one in (BatchedTrainer(network, settings_of("plain")), trainer):
            layers, _ = one.train(start, examples.subset([k]), generators()[k : k + 1])
            assert one.backend == "sequential"
            assert all((a[0] == b[k]).all() for a, b in zip(layers, together, strict=True))


def test_no_clients_are_an_empty_stack() -> None:
    layers, losses = BatchedTrainer(model(), SETTINGS).train(get_arrays(model()), Examples(INPUTS, LABELS, []), [])
    assert [layer.shape for layer in layers] == [(0, 4, 3), (0, 4), (0, 2, 4), (0, 2)]
    assert losses.shape == (0,)


def test_chunks_follow_from_sizes() -> None:
    inputs = torch.zeros(1, 1, 8, 8)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    mlp, cnn = built("mlp")(), built("cnn")()
    # 6,420 parameters, and outputs of 64 + 2 * 64 + 2 * 30 + 10 numbers for each of 10 examples, of 4 bytes
    assert default_chunk(mlp, inputs, 10, cpu) == 12 * 2**20 // (4 * (6_420 + 10 * 262))
    assert (
        default_chunk(cnn, inputs, 10, cpu) < default_chunk(mlp, inputs, 10, cpu) < default_chunk(mlp, inputs, 10, gpu)
    )
    assert default_chunk(cnn, inputs, 10**6, cpu) == 1


def test_chunks_on_two_threads_are_the_same_models(monkeypatch: pytest.MonkeyPatch) -> None:
    network, before, used = seeded(pooled), torch.get_num_threads(), list[int]()
    unwatched = BatchedTrainer._train_chunks

    def watched(self, firsts, kernel, train_chunk):  # type: ignore[no-untyped-def]
        def chunk(first, own):  # type: ignore[no-untyped-def]
            used.append(torch.get_num_threads())
            train_chunk(first, own)

        unwatched(self, firsts, kernel, chunk)

    def trained(threads: int) -> Any:
        torch.set_num_threads(threads)
        trainer = BatchedTrainer(network, settings_of(), chunk=2, backend="manual")
        for _ in range(2):
            result = trainer.train(get_arrays(network), world(np.float32), generators())
        return result

    try:
        alone = trained(1)
        monkeypatch.setattr(BatchedTrainer, "_train_chunks", watched)
        np.testing.assert_equal(trained(2), alone)
        assert used == [1] * 6  # three chunks, twice, each on one thread
        with ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 2
        with pytest.raises(AttributeError):  # what fails in a chunk fails the round
            BatchedTrainer(network, settings_of(), chunk=1, backend="manual").train(
                get_arrays(network), world(np.float32), [*generators()[:-1], None]
            )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def trained(**change: Any) -> Any:
    arguments: dict[str, Any] = {"start": get_arrays(model()), "examples": EXAMPLES, "generators": drawn()}
    return BatchedTrainer(model(), SETTINGS).train(**(arguments | change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trained(generators=drawn(2)), "one generator for each client; got 2 for 3 clients"),
        (lambda: trained(start=get_arrays(model())[:3]), "expected 4 arrays"),
        (lambda: trained(start=[np.zeros((1, 1))] * 4), "expected numbers of shape"),
        (lambda: Examples(INPUTS, LABELS, [np.array([0]), np.array([], dtype=np.int64)]), "client 1 has none"),
        (lambda: Examples(INPUTS, LABELS, [np.array([9, -1])]), r"expected rows in \[0, 9\), got -1…9"),
        (lambda: Examples(INPUTS, LABELS[:2], []), "got 9 examples, 2 labels"),
        (lambda: BatchedTrainer(model(), SETTINGS, backend="fast"), "^backend"),  # type: ignore[arg-type]
        (lambda: BatchedTrainer(model(), SETTINGS, chunk=0), "^chunk"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()
