"""Save between any two rounds, load into fresh objects in a new process, go on: as if nothing had happened."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import RunError, StateError
from fedsel_flwr.selectors import create, names
from fedsel_flwr.strategies import CSUCB, SelectionStrategy
from tests.processes import ROOT, Command
from tests.strategies import numpy_world as world
from tests.strategies.continuing import ADAPTERS, Run
from tests.strategies.helpers import Federation, fedavg, fleet

pytestmark = pytest.mark.timeout(240)
CUTS = {"legacy": (1, 4, 7), "message": (1, 4, 7), "third": tuple(range(1, world.ROUNDS))}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if not _same(one[key], other[key])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray | float):
        return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f")
    return bool(one == other)


@pytest.mark.slow
def test_every_run_goes_on_in_a_new_process_as_if_it_had_not_been_cut_off(tmp_path: Path) -> None:
    """Every selector, every adapter; world.ROUNDS rounds with failures, absences, late clients and an empty round."""
    whole, cut = {}, {}
    for adapter in ADAPTERS:
        for name in names():
            whole[adapter, name] = Run(adapter, name).go_on(world.ROUNDS).said()
            for rounds in CUTS[adapter]:
                run = Run(adapter, name).go_on(rounds)
                cut[adapter, name, rounds] = (astuple(run), world.ROUNDS - rounds)
    path = tmp_path / "runs"
    path.write_bytes(pickle.dumps(cut))
    command = Command(sys.executable, "-m", "tests.strategies.continuing", str(path), folder=tmp_path / "out", cwd=ROOT)
    try:
        assert command.wait(200) == 0, command.stderr[-3000:]
    finally:
        command.kill()
    done = pickle.loads(path.read_bytes())
    assert done.keys() == cut.keys()
    wrong = {key: _differences(whole[key[:2]], Run(*fields).said()) for key, fields in done.items()}
    assert {key: differing for key, differing in wrong.items() if differing} == {}
    assert len({tuple(whole["third", name]["history.clients.client"].tolist()) for name in names()}) > 6


@pytest.mark.parametrize("name", names())
def test_a_state_that_does_not_fit_changes_nothing(name: str) -> None:
    """Every part in turn is spoilt: it is refused by name, and the run goes on as one that was never asked."""
    straight = Run("third", name).go_on(6)
    good = straight.state
    assert good is not None
    for part in good:
        spoilt = copy.deepcopy(Run("third", name).go_on(3).state)
        assert spoilt is not None
        spoilt[part] = {**spoilt[part], "surprise": 1}
        core = _loaded(name, good)
        with pytest.raises(StateError, match=f"{part}: .*surprise"):
            core.load_state_dict(spoilt)
        assert _differences(_said(core), _said(_loaded(name, good))) == []
    for missing in good:
        with pytest.raises(StateError, match=rf"missing \['{missing}'\]"):
            _loaded(name, good).load_state_dict({key: state for key, state in good.items() if key != missing})


def _loaded(name: str, state: Any) -> Any:
    from fedsel_flwr.rounds.core import SelectionCore
    from fedsel_flwr.rounds.settings import resolve_settings

    selector = create(name, **world.selector_params(name))
    core = SelectionCore(selector, resolve_settings(selector, learning_rate=world.ETA, validation=world.validation()))
    core.load_state_dict(state)
    return core


def _said(core: Any) -> dict[str, Any]:
    return Run("third", "", world.initial(), core.state_dict()).said()


SPOILT = [
    ("roster", "ids", [1, 2]), ("roster", "ids", ["0", "0", "2", "3", "4", "5", "6", "7"]),
    ("roster", "holders", ["node 1"]),
    ("roster", "last_seen", np.zeros(3, dtype=np.int64)), ("roster", "bound", {"node-1": 99}),
    ("roster", "bound", {"node-1": "x"}), ("roster", "refused", ["node-1"]),
    ("roll_call", "in_vain", {"node-1": 1.5}), ("registrar", "sizes", np.ones((2, 2))),
    ("registrar", "initial_accuracy", "good"), ("probing", "seconds", None), ("cooldown", "out_until", np.zeros(1)),
    ("measurer", "direction", ["a"]), ("reporter", "energy_max", True),
    ("history", "rounds", {"round": np.arange(3)}), ("selector", "round", np.nan),
]  # fmt: skip


@pytest.mark.parametrize(("part", "key", "value"), SPOILT)
def test_a_value_of_another_kind_is_refused_by_name(part: str, key: str, value: Any) -> None:
    state = Run("third", "cs-ucb").go_on(4).state
    assert state is not None
    core = _loaded("cs-ucb", state)
    with pytest.raises(StateError, match=f"^{part}: "):
        core.load_state_dict({**state, part: {**state[part], key: value}})
    assert _differences(_said(core), _said(_loaded("cs-ucb", state))) == []


def test_a_saved_state_is_a_copy() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    federation = Federation(strategy, fleet(4)).play(2)
    state = strategy.state_dict()
    before = copy.deepcopy(Run("third", "", world.initial(), state).said())
    federation.play(3)
    assert _differences(before, Run("third", "", world.initial(), state).said()) == []


def test_another_selectors_state_is_refused() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    Federation(strategy, fleet(4)).play(2)
    other = SelectionStrategy(create("round-robin", clients_per_round=2), fedavg())
    with pytest.raises(StateError, match="selector: the state does not belong to round-robin"):
        other.load_state_dict(strategy.state_dict())


def test_a_second_run_of_one_strategy_counts_on() -> None:
    """Flower counts from 1 again; selector and history count on."""
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    Federation(strategy, fleet(4)).play(3)
    Federation(strategy, fleet(4)).play(2)
    assert [record.round for record in strategy.history.rounds] == [1, 2, 3, 4, 5]
    assert strategy.selector.round == 5


def test_a_server_that_counts_otherwise_is_refused() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    federation = Federation(strategy, fleet(4)).play(3)
    federation.round = 6
    with pytest.raises(RunError, match=r"begins round 7, but the selector has seen 3 rounds, so that round 4 was"):
        federation.play(1)
    strategy.selector.select(np.arange(4))  # what nobody should do
    federation.round = 3
    with pytest.raises(RunError, match=r"begins round 4, but the selector has seen 4 rounds, so that round 5 was"):
        federation.play(1)
