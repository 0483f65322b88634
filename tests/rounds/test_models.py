"""A list of models and a stack of them: the same numbers and verdicts; updates that are too large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.models import ModelList, ModelStack, fault_in_arrays, update_norm
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import Random, create
from tests.rounds.written import Written, core_of, facts, reply
from tests.strategies import numpy_world as world
from tests.strategies.scripted import Spy

SHAPES = ((2, 3), (3,), ())
REFERENCE = [np.zeros(shape, dtype=np.float32) for shape in SHAPES]
DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.int8, np.bool_, np.complex64])
NUMBERS = st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e300]) | st.integers(-5, 5)


@st.composite
def layers(draw: Any) -> list[np.ndarray]:
    """A stack of up to four models, some of them wrong in shape, type or number."""
    count = draw(st.integers(1, 4))
    shapes = draw(st.sampled_from([SHAPES, SHAPES, SHAPES, SHAPES[:2], ((2, 3), (4,), ())]))
    stack = []
    for shape in shapes:
        dtype = np.dtype(draw(DTYPES))
        values = draw(hnp.arrays(np.float64, (count, *shape), elements=NUMBERS))
        if dtype.kind in "iub":
            values = np.nan_to_num(values, posinf=1, neginf=-1).clip(-100, 100)
        with np.errstate(all="ignore"):
            stack.append(values.astype(dtype))
    return stack


@settings(max_examples=100, deadline=None)
@given(layers())
def test_the_same_verdicts_on_a_stack_as_on_each_model(stack: list[np.ndarray]) -> None:
    one_by_one = [fault_in_arrays([layer[i] for layer in stack], REFERENCE) for i in range(len(stack[0]))]
    assert ModelStack(stack).faults(REFERENCE) == one_by_one


def test_what_is_wrong_with_an_array_is_named() -> None:
    """Where squares overflow, numbers are looked at one by one."""
    halves = [np.zeros(4, dtype=np.float16), np.zeros(2, dtype=np.float32)]
    stack = [np.full((4, 4), 6e4, dtype=np.float16), np.full((4, 2), 9e17, dtype=np.float32)]
    stack[0][1, 0], stack[1][2, 1], stack[1][3, 0] = np.inf, -2e18, np.nan
    wrong = ["", "arrays: not finite at 0", "arrays: 2e+18 at 1, beyond 1e+18", "arrays: not finite at 1"]
    assert ModelStack(stack).faults(halves) == wrong
    assert [fault_in_arrays([layer[i] for layer in stack], halves) for i in range(4)] == wrong
    waves = [np.ones(2, np.complex64)]
    assert fault_in_arrays(waves, waves) == "arrays: expected real numbers at 0, got complex64"


@pytest.mark.parametrize("name", ["gpfl", "fedcm-ucb", "pczfl", "spy"])
def test_the_server_measures_the_same_on_a_stack_as_on_a_list(name: str) -> None:
    selector = Spy("update", "accuracy") if name == "spy" else create(name, **world.selector_params(name))
    trained = world.train(world.initial(), np.arange(6)).reshape(6, world.FEATURES, world.CLASSES)
    stack = ModelStack([trained.reshape(6, -1)])
    listed = ModelList([[one] for one in trained.reshape(6, -1)])
    columns = []
    for models in (stack, listed):
        chosen = Filter() if name == "fedcm-ucb" else None
        settings = Settings(validation=world.validation(), filter=chosen, learning_rate=world.ETA)
        measurer = Measurer(selector, settings)
        measurer.direction.start(np.ones((1, world.PARAMETERS)))
        columns.append(measurer.models(models, [world.initial()]))
        assert len(models) == 6
        np.testing.assert_array_equal(models.take(np.array([4, 1])).flat(), trained.reshape(6, -1)[[4, 1]])
    assert columns[0].keys() == columns[1].keys()
    assert columns[0]
    for key in columns[0]:
        np.testing.assert_array_equal(columns[0][key], columns[1][key])


def test_models_come_in_the_types_of_the_global_one_and_taking_all_copies_nothing() -> None:
    stack = ModelStack([np.ones((2, *shape), dtype=np.float64) for shape in SHAPES])
    assert {layer.dtype for layer in stack.cast_like(REFERENCE).layers} == {np.dtype(np.float32)}
    assert stack.cast_like([layer[0] for layer in stack.layers]) is stack.take(np.arange(2)) is stack
    assert len(stack.take(np.array([1]))) == 1


def test_updates_of_the_initialization_are_not_held_twice() -> None:
    """GPFL's round 1 has a model of every client: gradients overwrite the updates."""
    settings = Settings(validation=world.validation(), learning_rate=0.5)
    measurer = Measurer(create("gpfl", **world.selector_params("gpfl")), settings)
    updates = np.array([[1.0, -2.0]])
    gradients = measurer.direction.gradients(updates, in_place=True)
    assert gradients is updates
    assert gradients.tolist() == [[-2.0, 4.0]]


GLOBAL = [np.full((2, 2), 1.0, dtype=np.float32), np.zeros(1, dtype=np.float32), np.array(3, dtype=np.int64)]
MODELS = [  # differences (2, 0, 0, 0), (0): norm 2; (0, 3, 0, 0), (4): norm 5; (0, 3, 0, 12), (4): norm 13
    [np.array([[3.0, 1.0], [1.0, 1.0]], np.float32), np.zeros(1, np.float32), np.array(403)],
    [np.array([[1.0, 4.0], [1.0, 1.0]], np.float32), np.full(1, 4.0, np.float32), np.array(3)],
    [np.array([[1.0, 4.0], [1.0, 13.0]], np.float32), np.full(1, 4.0, np.float32), np.array(3)],
    [np.full((2, 2), np.nan, np.float32), np.zeros(1, np.float32), np.array(3)],
]


def _collected(limit: float | None, *, stacked: bool) -> Any:
    core = core_of(Random(clients_per_round=4, seed=0), max_latency=5.0, max_update_norm=limit)
    nodes = core.choose(list("abcd"), GLOBAL, Written(facts(*"abcd")))
    if stacked:
        stack = ModelStack([np.stack([model[i] for model in MODELS]) for i in range(3)])
        return core.collect(dict.fromkeys(nodes, reply(arrays=None)), stack)
    return core.collect({node: reply(arrays=model) for node, model in zip(nodes, MODELS, strict=True)})


def test_the_norm_is_over_all_floating_point_arrays() -> None:
    assert [update_norm(model, GLOBAL) for model in MODELS[:3]] == [2.0, 5.0, 13.0]


@pytest.mark.parametrize("stacked", [False, True])
def test_a_larger_update_is_refused_by_name(stacked: bool) -> None:
    assert _collected(None, stacked=stacked).usable == ["a", "b", "c"]
    outcome = _collected(5.0, stacked=stacked)
    assert outcome.usable == ["a", "b"]
    problems = {node: result.problems for node, result in outcome.results.items()}
    assert problems["c"] == ("update norm: 13 is above max_update_norm = 5",)
    assert problems["d"] == ("arrays: not finite at 0",)  # the first thing that is wrong
    assert outcome.results["c"].latency_s == 5.0


def test_a_client_cannot_hide_an_update_in_integers() -> None:
    """The global model decides which arrays count."""
    core = core_of(Random(clients_per_round=1, seed=0), max_latency=5.0, max_update_norm=5.0)
    core.choose(["a"], GLOBAL, Written(facts("a")))
    outcome = core.collect({"a": reply(arrays=[np.full((2, 2), 900), *GLOBAL[1:]])})
    assert outcome.results["a"].problems == ("update norm: 1798 is above max_update_norm = 5",)


def test_there_is_no_limit_where_there_are_no_norms() -> None:
    core = core_of(Random(clients_per_round=1), max_update_norm=1.0)
    core.choose(["a"], None, Written(facts("a")))  # a global model that cannot be decoded
    with pytest.raises(RunError, match="max_update_norm needs its numbers"):
        core.collect({"a": reply(arrays=None)})
