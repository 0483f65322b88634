"""What clients answer about the received model, against NumPy by hand, and what answering costs, in both APIs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import Context
from torch import nn

from fedsel_flwr.clients.answering import (
    ANSWERABLE,
    SKETCH_BITS,
    answer,
    asked_columns,
    losses_and_gradient,
    mini_batch,
    sketch,
)
from fedsel_flwr.clients.objectives import get_arrays, set_arrays
from fedsel_flwr.clients.streams import stream
from fedsel_flwr.clients.torch_client import TorchClient, make_message_app
from fedsel_flwr.clients.training import TrainingSettings
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors.columns import ASKED
from tests.clients.helpers import DELAYS, FREQUENCY, SYSTEM, WATT, Clock, same
from tests.strategies.message.helpers import FakeGrid

RNG = np.random.default_rng(4)
INPUTS = RNG.normal(size=(600, 3)).astype(np.float32)  # more than two batches of 256
LABELS = RNG.integers(0, 4, size=600)
TEST_INPUTS, TEST_LABELS = RNG.normal(size=(50, 3)).astype(np.float32), RNG.integers(0, 4, size=50)
WEIGHT, BIAS = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=4).astype(np.float32)
GLOBAL = [WEIGHT, BIAS]
EVERYTHING = ",".join(sorted(ASKED))
SETTINGS = TrainingSettings(learning_rate=0.1, batch_size=60, weight_decay=0.3)


def client(model: nn.Module | None = None, **how: Any) -> TorchClient:
    """Client 3 of 20: 600 examples of four classes, a linear model, ten local steps."""
    return TorchClient(
        partition_id=3, model=model or nn.Linear(3, 4), inputs=INPUTS, labels=LABELS, test_inputs=TEST_INPUTS,
        test_labels=TEST_LABELS, system=SYSTEM, **{"latency_mode": "model", "settings": SETTINGS} | how,
    )  # fmt: skip


def probabilities(inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The softmax of the linear model, shape (n, 4)."""
    scores = np.exp(inputs.astype(float) @ WEIGHT.T.astype(float) + BIAS)
    return np.asarray(scores / scores.sum(axis=1, keepdims=True))


def oracle() -> dict[str, Any]:
    """Each column by its formula."""
    chances = probabilities(INPUTS)
    planes, middle = stream(7, "sketch", 0).standard_normal((64, 3)).tolist(), INPUTS.mean(axis=0, dtype=float).tolist()
    losses = -np.log(chances[np.arange(600), LABELS])
    error = (chances - np.eye(4)[LABELS]) / 600
    batch = stream(7, "mini-batch", 3, 2).permutation(600)[:60]  # seed 7, client 3, round 2, batches of 60
    return {
        "batch_loss": losses[batch].mean(),
        "loss": losses.mean(),
        "rms_loss": math.sqrt((losses**2).mean()),
        "local_accuracy": (probabilities(TEST_INPUTS).argmax(axis=1) == TEST_LABELS).mean(),
        "gradient": np.concatenate([(error.T @ INPUTS).ravel(), error.sum(axis=0)]),  # weight, then bias
        "sketch": [float(sum(x * m for x, m in zip(plane, middle, strict=True)) > 0) for plane in planes],
    }


def check(said: dict[str, Any], names: set[str]) -> None:
    """The answers are exactly those of ``names``, and right."""
    expected = oracle()
    assert said.keys() & ASKED == names
    for name in names - {"gradient", "sketch"}:
        assert said[name] == pytest.approx(expected[name], rel=1e-6), name
    if "gradient" in names:
        vector = np.frombuffer(said["gradient"], dtype=np.float32)
        assert vector.shape == (16,)
        np.testing.assert_allclose(vector, expected["gradient"], atol=1e-6)
    if "sketch" in names:
        assert np.frombuffer(said["sketch"], dtype=np.float32).tolist() == expected["sketch"]


def test_a_client_can_answer_every_column() -> None:
    assert ASKED == ANSWERABLE
    assert asked_columns(None) == asked_columns("") == asked_columns("energy,accuracy") == frozenset()


CASES = [
    ("loss", {"loss"}),
    ("batch_loss", {"batch_loss"}),
    ("batch_loss,loss", {"batch_loss", "loss"}),
    ("rms_loss", {"rms_loss"}),
    ("local_accuracy", {"local_accuracy"}),
    ("gradient", {"gradient"}),
    ("sketch", {"sketch"}),
    (" gradient, loss,energy", {"gradient", "loss"}),
    (EVERYTHING, {"loss", "batch_loss", "rms_loss", "local_accuracy", "gradient", "sketch"}),
]


@pytest.mark.parametrize(("names", "answered"), CASES)
def test_fit_and_probe_answer_by_hand(names: str, answered: set[str]) -> None:
    """At the received model: training comes after, and changes it."""
    trained, _, metrics = client().fit(GLOBAL, {"round": 2, "needs": names})
    assert not np.allclose(trained[0], WEIGHT, atol=1e-3)
    check(metrics, answered)
    check(client().evaluate(GLOBAL, {"round": 2, "probe": names})[2], answered)


def test_without_needs_everything_stays_to_the_last_bit() -> None:
    plain = client().fit(GLOBAL, {"round": 2})
    for names in ("", "energy"):
        other = client().fit(GLOBAL, {"round": 2, "needs": names})
        assert same(other[0], plain[0])
        assert other[1:] == plain[1:]
    assert not plain[2].keys() & ASKED


def test_answering_changes_neither_the_training_nor_torchs_random_state() -> None:
    dropout = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    arrays, state = [array + 0.1 for array in get_arrays(dropout)], torch.random.get_rng_state()
    plain, asked = (client(model=dropout).fit(arrays, {"round": 2, **more}) for more in ({}, {"needs": EVERYTHING}))
    assert same(plain[0], asked[0])
    assert plain[2]["train_loss"] == asked[2]["train_loss"]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_dropout_is_off_and_the_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    set_arrays(model, GLOBAL)
    model.train()
    batch = mini_batch(7, 3, 2, 600, 60)
    check(answer(model, ASKED, (INPUTS, LABELS), (TEST_INPUTS, TEST_LABELS), seed=7, batch=batch), set(ANSWERABLE))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same(get_arrays(model), GLOBAL)


@pytest.mark.parametrize("batch_size", [1, 7, 600])
def test_batches_change_rounding_only(batch_size: int) -> None:
    model = nn.Linear(3, 4)
    set_arrays(model, GLOBAL)
    losses, gradient = losses_and_gradient(model, INPUTS, LABELS, batch_size=batch_size)
    assert losses.shape == (600,)
    assert losses.mean() == pytest.approx(oracle()["loss"], rel=1e-6)
    np.testing.assert_allclose(gradient, oracle()["gradient"], atol=2e-6)


def test_no_examples_are_refused() -> None:
    with pytest.raises(ParameterError, match="got 0 examples, 0 labels"):
        losses_and_gradient(nn.Linear(3, 4), INPUTS[:0], LABELS[:0])
    with pytest.raises(ParameterError, match="at least one training example"):
        sketch(np.zeros((0, 3), np.float32), 1)


def test_the_bits_of_a_sketch_by_hand() -> None:
    """Two examples of shape (1, 2) with the mean (2, -1): bit b is whether 2 h_b1 - h_b2 is above 0."""
    planes = stream(5, "sketch", 0).standard_normal((SKETCH_BITS, 2))
    expected = [float(2 * one - other > 0) for one, other in planes.tolist()]
    assert 10 < sum(expected) < 54
    examples = np.array([[[1.0, 0.0]], [[3.0, -2.0]]], np.float32)
    assert sketch(examples, 5).tolist() == expected
    assert sketch(examples, 6).tolist() != expected
    assert (sketch(examples, 5).dtype, sketch(examples, 5).shape) == (np.float32, (64,))


@pytest.mark.parametrize("degrees", [10, 90, 150])
def test_the_share_of_different_bits_is_the_angle_over_pi(degrees: int) -> None:
    """Over 100 seeds, 6,400 bits: within 4.5 standard deviations of degrees / 180."""
    angle = math.radians(degrees)
    one, other = np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32)
    one[:, 0], other[:, 0], other[:, 3] = 2.0, math.cos(angle), math.sin(angle)
    shares = [float((sketch(one, seed) != sketch(other, seed)).mean()) for seed in range(100)]
    deviation = math.sqrt(degrees / 180 * (1 - degrees / 180) / 6400)
    assert abs(float(np.mean(shares)) - degrees / 180) < 4.5 * deviation


def test_a_mini_batch_is_drawn_without_replacement_from_the_clients_own_stream() -> None:
    """The same rows whenever they are asked for, others in another round or for another client; never more than all."""
    rows = mini_batch(7, 3, 2, 600, 60)
    assert sorted(rows.tolist()) == sorted(set(rows.tolist()))
    assert rows.tolist() == mini_batch(7, 3, 2, 600, 60).tolist()
    others = [mini_batch(7, 3, 1, 600, 60), mini_batch(7, 4, 2, 600, 60), mini_batch(8, 3, 2, 600, 60)]
    assert all(set(rows.tolist()) != set(other.tolist()) for other in others)
    assert sorted(mini_batch(7, 3, 2, 5, 60).tolist()) == [0, 1, 2, 3, 4]


def test_a_gradient_has_the_floating_point_parameters_only() -> None:
    """Zeros for frozen and unused ones, so that all clients have the same numbers in the same places."""
    model = nn.Linear(3, 4)
    model.register_parameter("count", nn.Parameter(torch.tensor(3), requires_grad=False))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.bias.requires_grad_(False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(WEIGHT))
        model.bias.copy_(torch.tensor(BIAS))
    _, gradient = losses_and_gradient(model, INPUTS, LABELS)
    expected = {"weight": oracle()["gradient"][:12], "bias": np.zeros(4), "unused": np.zeros(2)}
    order = [expected[name] for name, _ in model.named_parameters() if name in expected]
    np.testing.assert_allclose(gradient, np.concatenate(order), atol=1e-6)


# ---- costs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [600, 1800, 150])
@pytest.mark.parametrize(
    ("names", "read"),
    [
        ("energy", 0), ("loss", 600), ("rms_loss", 600), ("loss,rms_loss", 600), ("local_accuracy", 50),
        ("loss,local_accuracy", 650), ("gradient", 1800), ("gradient,loss,rms_loss", 1800), ("sketch", 600),
        ("loss,sketch", 1200), ("batch_loss", 60), ("batch_loss,rms_loss", 600), ("batch_loss,local_accuracy", 110),
        ("batch_loss,gradient", 1800), (EVERYTHING, 2450),
    ],
)  # fmt: skip
def test_an_answer_costs_the_examples_that_it_reads(names: str, read: int, trained: int) -> None:
    """2 samples at phi samples/s: 2 / phi s for the examples of a round; reading as many costs a third of that.

    With the update a gradient is sent like an update. Of a probe, numbers are 64 of the 5,000 bits of an update, a
    sketch 64 more; what asks for nothing that clients answer is evaluated on the test examples all the same.
    """
    batch = {600: {}, 1800: {"local_epochs": 3}, 150: {"local_steps": 3, "batch_size": 50}}[trained]
    if trained == 150:
        read -= 10 * ("batch_loss" in names and not {"loss", "rms_loss", "gradient"} & asked_columns(names))
    one, passes = client(settings=TrainingSettings(**{"learning_rate": 0.1, "batch_size": 60} | batch)), read / trained
    numbers = 5000 if "gradient" in names else 64 * (names != "sketch")
    fitted = one.fit(GLOBAL, {"round": 2, "needs": names})[2]
    probed = one.evaluate(GLOBAL, {"round": 2, "probe": names})[2]
    sent = DELAYS.upload_s * (numbers + 64 * ("sketch" in names)) / 5000
    for metrics, thirds, upload in (
        (fitted, 3 + passes, DELAYS.upload_s * (2 if "gradient" in names else 1)),
        (probed, passes or 50 / trained, sent),
    ):
        compute, cycles = thirds / 3 * 2 / DELAYS.computing_rate, thirds / 3 * 2e7
        assert metrics["latency_s"] == pytest.approx(DELAYS.download_s + compute + upload, rel=1e-12)
        assert metrics["energy_j"] == pytest.approx(WATT * upload + 1e-28 * cycles * FREQUENCY**2, rel=1e-12)
    assert fitted["compute_s"] == pytest.approx((3 + passes) / 3 * 2 / DELAYS.computing_rate, rel=1e-12)
    assert (fitted["download_s"], fitted["upload_s"]) == (
        DELAYS.download_s, DELAYS.upload_s * (2 if "gradient" in names else 1),
    )  # fmt: skip


def test_a_measured_probe_for_a_mini_batch_is_not_charged_for_the_test_examples(clock: Clock) -> None:
    """The evaluation that Flower wants takes 4 s, the answer 0.5 s."""
    clock.lasting(answer=0.5, evaluate=4.0)
    seconds = {}
    for names in ("batch_loss", "loss"):
        metrics = client(latency_mode="measured").evaluate(GLOBAL, {"round": 2, "probe": names})[2]
        seconds[names] = float(metrics["latency_s"]) - DELAYS.download_s - DELAYS.upload_s * 64 / 5000
    assert seconds == pytest.approx({"batch_loss": 0.5, "loss": 4.5})


def test_measured_time_runs_from_before_the_answer_to_after_the_training(clock: Clock) -> None:
    clock.lasting(answer=2.0, train=0.5)
    metrics = client(latency_mode="measured").fit(GLOBAL, {"round": 2, "needs": "loss"})[2]
    assert metrics["compute_s"] == 2.5
    assert metrics["latency_s"] == pytest.approx(DELAYS.download_s + 2.5 + DELAYS.upload_s, rel=1e-12)
    assert metrics["energy_j"] == pytest.approx(WATT * DELAYS.upload_s + 1e-28 * 2.5 * FREQUENCY**3, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "config", "records"),
    [
        (MessageType.TRAIN, {"server-round": 2, "needs": EVERYTHING}, {"metrics", "arrays", "gradient", "sketch"}),
        (MessageType.EVALUATE, {"round": 2, "probe": EVERYTHING}, {"metrics", "gradient", "sketch"}),
        (MessageType.TRAIN, {"server-round": 2}, {"metrics", "arrays"}),
        (MessageType.TRAIN, {"server-round": 2, "needs": "loss"}, {"metrics", "arrays"}),
        (MessageType.EVALUATE, {"round": 2, "probe": "local_accuracy"}, {"metrics"}),
    ],
)
def test_the_message_api_carries_a_vector_in_a_record_of_its_own(
    kind: str, config: dict[str, Any], records: set[str]
) -> None:
    """Both APIs: the same numbers to the last bit."""
    FakeGrid()  # messages know their run from here on
    content = RecordDict({"arrays": ArrayRecord(GLOBAL), "config": ConfigRecord(config)})
    context = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={})
    app = make_message_app(lambda context: client())
    reply = app(Message(content, dst_node_id=5, message_type=kind), context).content
    assert set(reply) == records
    vectors = {}
    for name in records - {"metrics", "arrays"}:
        assert list(reply[name]) == [name]
        array = reply[name][name].numpy()  # type: ignore[index]
        assert (array.dtype, array.shape) == (np.float32, (16 if name == "gradient" else 64,))
        vectors[name] = array.tobytes()
    said = {**reply["metrics"], **vectors}
    if kind == MessageType.TRAIN:
        assert said == {"num-examples": 600, **client().fit(GLOBAL, {"round": 2, "needs": config.get("needs", "")})[2]}
    elif vectors:
        check(said, set(ANSWERABLE))
