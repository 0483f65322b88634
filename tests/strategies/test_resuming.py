"""Resumed runs, in either API and in an engine of its own: what they take, what they are told, and what is refused."""

from __future__ import annotations

import copy
import errno
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.common import Parameters, ndarrays_to_parameters
from flwr.server import strategy as legacy_bases
from flwr.serverapp import strategy as message_bases
from torch.nn import Linear

from fedsel_flwr.aggregation import Filter
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import create, names
from fedsel_flwr.strategies import CSUCB, GPFL, SelectionStrategy
from fedsel_flwr.strategies.wrapping.legacy_transport import from_checkpoint, to_checkpoint
from fedsel_flwr.strategies.wrapping.resuming import load_base, save_base
from tests.strategies import numpy_world as world
from tests.strategies.either_api import base_of, private
from tests.strategies.flower_world import Run, Seen, flat
from tests.strategies.helpers import Federation, fedavg, fleet

pytestmark = pytest.mark.usefixtures("no_syncs")
ALL, CUT = 10, 4


def cut(run: Run, folder: Path) -> Run:
    """A run whose first rounds are done, by another object; returns what resumes it."""
    replace(run, rounds=CUT).play(folder)
    return run


def files(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("round-*"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


@pytest.mark.parametrize("evaluates", [True, False])
def test_base_and_clients_see_the_absolute_round(api: str, evaluates: bool, tmp_path: Path) -> None:
    """The last round is evaluated again, and told of again."""
    run = Run(api, rounds=ALL, evaluates=evaluates)
    straight, rest = run.play(), cut(run, tmp_path).play(tmp_path)
    assert rest.result() == straight.result()
    assert straight.evaluated == [*range(ALL + 1)] * evaluates
    assert rest.evaluated == [*range(CUT, ALL + 1)] * evaluates
    assert sorted({*rest.trained}) == [number for number in range(CUT + 1, ALL + 1) if number != 6]
    assert rest.told == straight.told[CUT - 1 :]
    assert rest.metrics == [number for number in straight.metrics if number > CUT]


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_run_that_had_finished_returns_its_result(api: str, evaluates: bool, tmp_path: Path) -> None:
    run = Run(api, rounds=CUT, evaluates=evaluates)
    first = run.play(tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("round-*")}
    again = run.play(tmp_path, resume="must")
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("round-*")} == written
    assert (again.result(), again.journal, again.trained) == (first.result(), first.journal, [])
    assert again.evaluated == ([CUT] if evaluates else [])
    assert again.told == first.told[-1:]


def test_a_round_has_its_checkpoint_before_it_is_evaluated(api: str, tmp_path: Path) -> None:
    """An evaluation that takes hours, or fails, costs no round."""
    there: list[list[str]] = []

    def step(kind: str) -> None:
        if kind == "e":
            there.append(files(tmp_path))

    Run(api, rounds=3).play(tmp_path, step=step)
    written = [f"round-00000{number}" for number in (1, 2, 3)]
    assert there == [written[:number] for number in range(4)]
    Run(api, rounds=ALL, options={"checkpoint_every": 4, "keep_checkpoints": 9}).play(tmp_path / "seldom")
    assert files(tmp_path / "seldom") == ["round-000004", "round-000008", "round-000010"]


@pytest.mark.parametrize("base", ["FedAvg", "FedAdagrad", "FedYogi", "FedAvgM", "FedTrimmedAvg"])
def test_flowers_bases_go_on(api: str, base: str, tmp_path: Path) -> None:
    run = Run(api, base, "cs-ucb", rounds=7, base_options={"server_momentum": 0.7} if base == "FedAvgM" else {})
    assert cut(run, tmp_path).play(tmp_path).result() == run.play().result()


def core_of(name: str, state: Any = None) -> SelectionCore:
    selector = create(name, **world.selector_params(name))
    settings = resolve_settings(
        selector, max_latency=world.MAX_LATENCY, learning_rate=world.ETA, validation=world.validation(),
        filter=Filter() if name in ("random", "gpfl") else None, cooldown=name == "cs-ucb",
        availability=world.available,
    )  # fmt: skip
    core = SelectionCore(selector, settings)
    if state is not None:
        core.load_state_dict(state)
    return core


def played(name: str, rounds: int) -> tuple[Any, world.Array]:
    """The state and the model after some rounds of the third adapter."""
    core = core_of(name)
    model = world.play_stacked(core, rounds)[-1]
    return core.state_dict(), model


@pytest.mark.parametrize("name", names())
def test_an_engine_goes_on_from_a_state_and_one_that_does_not_fit_changes_nothing(name: str) -> None:
    """Every part in turn is spoilt: it is refused by name, and the run goes on as one that was never asked."""
    straight, last = played(name, ALL)
    for rounds in (1, 4, 7):
        state, model = played(name, rounds)
        core = core_of(name, state)
        assert np.array_equal(world.play_stacked(core, ALL - rounds, model)[-1], last)
        assert flat(core.state_dict()) == flat(straight)
    good, core = state, core_of(name, state)
    earlier, _ = played(name, 4)
    for part in good:
        with pytest.raises(StateError, match=f"{part}: .*surprise"):
            core.load_state_dict({**earlier, part: {**earlier[part], "surprise": 1}})
        with pytest.raises(StateError, match=rf"missing \['{part}'\]"):
            core.load_state_dict({key: value for key, value in good.items() if key != part})
    assert flat(core.state_dict()) == flat(good)


SPOILT = [
    ("roster", "ids", [1, 2]), ("roster", "ids", ["0", "0", "2", "3", "4", "5", "6", "7"]),
    ("roster", "holders", ["node 1"]),
    ("roster", "last_seen", np.zeros(3, dtype=np.int64)), ("roster", "bound", {"node-1": 99}),
    ("roster", "bound", {"node-1": "x"}), ("roster", "refused", ["node-1"]),
    ("roll_call", "in_vain", {"node-1": 1.5}), ("registrar", "sizes", np.ones((2, 2))),
    ("registrar", "initial_accuracy", "good"), ("probing", "seconds", None), ("cooldown", "out_until", np.zeros(1)),
    ("busy", "until", 3),
    ("direction", "direction", ["a"]), ("reporter", "energy_max", True),
    ("reply_structure", "decided", 1), ("reply_structure", "structure", [5]),
    ("history", "rounds", {"round": np.arange(3)}), ("selector", "round", np.nan),
]  # fmt: skip


@pytest.mark.parametrize(("part", "key", "value"), SPOILT)
def test_a_value_of_another_kind_is_refused_by_name(part: str, key: str, value: Any) -> None:
    state, _ = played("cs-ucb", 4)
    core = core_of("cs-ucb", state)
    with pytest.raises(StateError, match=f"^{part}: "):
        core.load_state_dict({**state, part: {**state[part], key: value}})
    assert flat(core.state_dict()) == flat(state)


def test_a_saved_state_is_a_copy_and_another_selectors_is_refused() -> None:
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    federation = Federation(strategy, fleet(4)).play(2)
    state = strategy.state_dict()
    before = copy.deepcopy(flat(state))
    federation.play(3)
    assert flat(state) == before
    other = SelectionStrategy(create("round-robin", clients_per_round=2), fedavg())
    with pytest.raises(StateError, match="selector: the state does not belong to round-robin"):
        other.load_state_dict(state)


def test_a_second_run_of_one_strategy_counts_on_and_a_server_that_counts_otherwise_is_refused() -> None:
    """Flower counts from 1 again; selector and history count on."""
    strategy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    Federation(strategy, fleet(4)).play(3)
    federation = Federation(strategy, fleet(4)).play(2)
    assert [record.round for record in strategy.history.rounds] == [1, 2, 3, 4, 5]
    assert strategy.selector.round == 5
    federation.round = 6
    with pytest.raises(RunError, match=r"starts round 7, but round .* because the selector has seen 5 rounds"):
        federation.play(1)
    strategy.selector.select(np.arange(4))  # what nobody should do
    federation.round = 5
    said = "starts round 6, but round 4 was expected, because the selector has seen 6 rounds"
    with pytest.raises(RunError, match=said):
        federation.play(1)


def test_every_layer_of_a_wrapped_base_is_saved(api: str) -> None:
    base, other = (private(api, base_of(api, "FedAdam"), "ServerSideAdaptive") for _ in range(2))
    base.clipping_norm, base.strategy.m_t, base.strategy.v_t = 0.25, [np.ones(2)], None
    load_base(other, save_base(base))
    assert (other.clipping_norm, other.strategy.v_t) == (0.25, None)
    assert np.array_equal(other.strategy.m_t[0], np.ones(2))


def test_records_and_parameters_of_flowers_bases_come_back() -> None:
    message, legacy = message_bases.FedAvgM(server_momentum=0.5), legacy_bases.FedAvgM(server_momentum=0.5)
    message.current_arrays = ArrayRecord({"b": Array(np.arange(3.0)), "a": Array(np.zeros((2, 0), np.float32))})
    legacy.initial_parameters = Parameters([b"one", b""], "odd")
    load_base(other := message_bases.FedAvgM(), save_base(message))
    assert other.current_arrays == message.current_arrays
    load_base(another := legacy_bases.FedAvgM(), save_base(legacy))
    assert another.initial_parameters == legacy.initial_parameters


class Plain(legacy_bases.FedAvg):
    """Keeps nothing of its own."""

    __slots__ = ("slot",)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        return super().aggregate_fit(server_round, results, failures)


class Forgetful(legacy_bases.FedAvg):
    """Keeps something that nobody knows of."""

    rounds_aggregated: int

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rounds_aggregated = 0

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.rounds_aggregated += 1
        return super().aggregate_fit(server_round, results, failures)


class Faithful(Forgetful):
    """The same, with a word for it."""

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds_aggregated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds_aggregated = {**state}["rounds"]


def strategy_of(base: Any, folder: Path, **options: Any) -> SelectionStrategy:
    selector = create("cs-ucb", **world.selector_params("cs-ucb"))
    return SelectionStrategy(selector, base, max_latency=world.MAX_LATENCY, checkpoint_dir=folder, **options)


def test_a_base_that_keeps_what_nobody_knows_is_refused_before_the_run(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(ParameterError, match=r"Forgetful, which keeps rounds_aggregated\b.*state_dict\(\)"):
        strategy_of(Forgetful(), tmp_path)
    namesake: Any = Plain(fraction_evaluate=0.0)
    namesake.num_examples = 3  # Flower's methods read this name, but assign it nowhere
    with pytest.raises(ParameterError, match=r"Plain, which keeps num_examples\b"):
        strategy_of(namesake, tmp_path)
    strategy_of(plain := Plain(fraction_evaluate=0.0), tmp_path)
    for value, warns in ((np.linalg.norm, 0), (dict, 0), (np.add, 0), (Linear(1, 1), 1)):
        plain.function = value
        strategy_of(plain, tmp_path)
        assert caplog.text.count("checkpoints save no ['function'] of Plain. ") == warns
    plain.slot = 0
    with pytest.raises(ParameterError, match="Plain, which keeps slot\\. "):
        strategy_of(plain, tmp_path)
    strategy_of(base := Faithful(), tmp_path)
    base.rounds_aggregated = 7
    load_base(other := Faithful(), state := save_base(base))
    assert other.rounds_aggregated == 7
    state["layers"][0]["own"] = {"surprise": 1}
    with pytest.raises(StateError, match="base: KeyError: 'rounds'"):
        load_base(base, state)
    assert base.rounds_aggregated == 7
    # The outer layer takes its part before the inner one refuses its own.
    outer = legacy_bases.DifferentialPrivacyServerSideAdaptiveClipping(base, 0.1, num_sampled_clients=2)
    state = save_base(outer)
    state["layers"][0]["known"]["clipping_norm"], state["layers"][1]["own"] = 9.0, {"surprise": 1}
    with pytest.raises(StateError, match="base: KeyError: 'rounds'"):
        load_base(outer, state)
    assert (outer.clipping_norm, base.rounds_aggregated) == (0.1, 7)
    with pytest.raises(StateError, match=r"the state belongs to \['Faithful'\], but this base is \['FedAvg'\]"):
        load_base(legacy_bases.FedAvg(), save_base(base))


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"params": {"alpha": 3.0}}, r"selector\.alpha is 2\.0 there and 3\.0 here"),
    ({"params": {"clients_per_round": 2}}, r"selector\.clients_per_round is 3 there and 2 here"),
    ({"selector": "cs-ucb"}, r"selector is bsfl there and cs-ucb here"),
    ({"base": "FedYogi"}, r"base is FedAdam \(flwr\.server\) there and FedYogi \(flwr\.server\) here"),
    ({"api": "message"}, r"base is FedAdam \(flwr\.server\) there and FedAdam \(flwr\.serverapp\) here"),
    ({"options": {"averaging": "mean"}}, r"averaging is None there and 'mean' here"),
    ({"options": {"filter": Filter(score="accuracy")}}, r"filter is None there and 'accuracy' here"),
    ({"options": {"learning_rate": 0.25}}, r"learning_rate is 0\.5 there and 0\.25 here"),
    ({"options": {"identity": "name"}}, r"identity is None there and 'name' here"),
    ({"params": {"min_latency": "auto"}}, r"selector\.min_latency is 0\.1 there and 'auto' here"),
]


def test_a_checkpoint_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    cut(run := Run("legacy", rounds=ALL), tmp_path)
    before = contents(tmp_path)
    for changes, reason in CHANGES:
        wanted = rf"none of the checkpoints in .*round-000004\.safetensors: it is from another run: .*{reason}"
        with pytest.raises(RunError, match=wanted):
            replace(run, **changes).play(tmp_path)
        assert contents(tmp_path) == before
    assert run.play(tmp_path).result() == run.play().result()


def test_a_model_of_other_shapes_is_refused(api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(run := Run(api, "FedAvg", rounds=ALL), tmp_path)
    monkeypatch.setattr(world, "initial", lambda: np.zeros(7))
    with pytest.raises(RunError, match=r"arrays of the shapes \w+ \(12,\), but the initial model has \w+ \(7,\)"):
        run.play(tmp_path)


def test_the_initial_model_of_a_wrapped_base_is_compared_as_well(tmp_path: Path) -> None:
    def strategy(shape: tuple[int, ...]) -> Any:
        inner = base_of("legacy", initial_parameters=ndarrays_to_parameters([np.zeros(shape)]))
        return strategy_of(private("legacy", inner, clients=world.COHORT), tmp_path, resume=True)

    drive(strategy((12,)), 2)
    said = r"its model has arrays of the shapes 0 \(12,\), but the initial model has 0 \(5,\)"
    with pytest.raises(RunError, match=said):
        strategy((5,)).initialize_parameters(None)


def test_models_that_are_no_arrays_come_back_as_they_were() -> None:
    trees = Parameters([b'{"trees": 1}', b"\x00\xff"], "")
    names, model = to_checkpoint(trees)
    assert from_checkpoint(Checkpoint(round=1, model=model, names=names, state={})) == trees
    mixed: Any = [trees, None]
    with pytest.raises(RunError, match=r"model of list\b.*checkpoint_dir"):
        to_checkpoint(mixed)


def drive(strategy: Any, rounds: int) -> list[world.Array]:
    """Drive the core from where the run was; returns the models."""
    done = strategy.resumed
    first, model = (1, world.initial()) if done is None else (done.round + 1, done.model[0])
    models = []
    if done is not None:
        strategy.round_ended(done.round, 0.5, 0.25)
    for number in range(first, rounds + 1):
        (model,) = world.play_stacked(strategy.core, 1, model)
        models.append(model)
        strategy.round_trained(number, [model])
        strategy.round_ended(number, 0.5, 0.25)
    return models


def test_an_engine_that_drives_the_core_goes_on(tmp_path: Path) -> None:
    """One that never looked for a checkpoint overwrites none; whoever knows more adds what must agree."""
    run = Run("legacy", rounds=ALL)
    straight, first = (run.strategy(folder, Seen()) for folder in (None, tmp_path))
    models = drive(straight, ALL)
    first.fingerprint["scenario"] = "a"
    assert first.resumed is None
    drive(first, CUT)
    before = contents(tmp_path)
    blind, other, rest = (run.strategy(tmp_path, Seen()) for _ in range(3))
    (model,) = world.play_stacked(blind.core, 1)
    with pytest.raises(RunError, match=r"round 1 .*resume.*strategy\.resumed"):
        blind.round_trained(1, [model])
    assert contents(tmp_path) == before
    other.fingerprint["scenario"] = "b"
    with pytest.raises(RunError, match="scenario is a there and b here"):
        _ = other.resumed
    rest.fingerprint["scenario"] = "a"
    assert np.array_equal(drive(rest, ALL)[-1], models[-1])
    for records in ("rounds", "clients"):
        assert repr(list(getattr(rest.history, records))) == repr(list(getattr(straight.history, records)))


@pytest.mark.parametrize("damaged", ["checkpoint", "journal"])
def test_damage_costs_the_rounds_since_the_checkpoint_before(damaged: str, tmp_path: Path) -> None:
    """Round 4's checkpoint needs the journal's first three lines, round 2's the first one; 3's was not kept."""
    run, journal = Run("message", rounds=ALL, options={"checkpoint_every": 2}), tmp_path / "journal.jsonl"
    cut(run, tmp_path)
    newest = tmp_path / "round-000004.safetensors"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == CUT
    if damaged == "checkpoint":
        newest.write_bytes(newest.read_bytes()[:-3])
    else:
        journal.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"round_s": ', b'"round_s": 1'), *lines[3:]]))
    rest = run.play(tmp_path)
    assert rest.evaluated[0] == 2
    assert rest.result() == run.play().result()
    journal.write_bytes(journal.read_bytes()[5:])
    wanted = r"none of the checkpoints .*round-000010\.safetensors: history: .*round-000008\.safetensors: history: "
    with pytest.raises(RunError, match=wanted):
        run.play(tmp_path)


def test_a_full_disk_ends_the_run_and_nothing_is_lost(api: str, tmp_path: Path, monkeypatch: Any) -> None:
    run, write = Run(api, rounds=ALL), os.write

    def full(file: int, content: Any) -> int:
        if "round-000005" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match=r"round 5: the checkpoint '.*' cannot be written: No space left on device"):
        run.play(tmp_path)
    monkeypatch.setattr(os, "write", write)
    rest = run.play(tmp_path)
    assert rest.evaluated[0] == 4
    assert rest.result() == run.play().result()


def test_the_last_round_is_one_number(tmp_path: Path) -> None:
    gpfl: dict[str, Any] = {"clients_per_round": 2, "validation": world.validation(), "learning_rate": 0.1}
    assert GPFL(**gpfl, total_rounds=9)._resuming.total_rounds is None, "the selector's constant ends no run unasked"
    run = Run("legacy", "FedAvg", "gpfl", rounds=ALL, options={"total_rounds": None}, params={"total_rounds": 5})
    assert len(run.play(tmp_path).finished) == 5  # with checkpoints it does
    random = create("random", clients_per_round=2)
    selector = create("gpfl", clients_per_round=2, total_rounds=9)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (selector, {**gpfl, "total_rounds": 8}, "total_rounds is 8.* but 9"),
        (random, {"resume": True}, "resume=True needs checkpoint_dir"),
        (random, {"total_rounds": 0}, "total_rounds must be a whole number of at least 1"),
    ]
    for chosen, options, said in cases:
        options.pop("clients_per_round", None)
        with pytest.raises(ParameterError, match=said):
            SelectionStrategy(chosen, **options)


def test_nobody_is_chosen_past_the_last_round(api: str) -> None:
    seen = Run(api, rounds=ALL, options={"total_rounds": CUT}).play()
    assert len(seen.finished) == CUT
    assert seen.evaluated == [*range(CUT + 1)]


def test_a_server_without_a_last_round_is_told_that_its_rounds_come_on_top(tmp_path: Path, caplog: Any) -> None:
    run = Run("legacy", rounds=3, options={"total_rounds": None})
    run.play(tmp_path)
    strategy = run.strategy(tmp_path, Seen())
    logging.getLogger("fedsel_flwr").setLevel(logging.WARNING)
    strategy.initialize_parameters(None)
    assert "adds its rounds to the 3 rounds that are already done" in caplog.text
    assert len(run.play(tmp_path).finished) == 6


@pytest.mark.parametrize(("before", "after"), [(None, "auto"), ("auto", None), ("auto", 9.0)])
def test_automatic_deadlines_may_be_switched_on_and_off(api: str, before: Any, after: Any, tmp_path: Path) -> None:
    Run(api, rounds=CUT, options={"round_deadline_s": before}).play(tmp_path)
    again = Run(api, rounds=ALL, options={"round_deadline_s": after}).play(tmp_path, resume="must")
    assert (min(again.trained), len(again.told)) == (CUT + 1, ALL - CUT + 1)


@pytest.mark.parametrize("option", [{"concurrency": 6}, {"late": "use"}])
@pytest.mark.parametrize("on", [True, False])
def test_an_option_that_a_resumed_run_cannot_switch_is_named(option: dict[str, Any], on: bool, tmp_path: Path) -> None:
    common: dict[str, Any] = {"round_deadline_s": 9.0} if "late" in option else {}
    begun, resumed = (common, common | option) if on else (common | option, common)
    Run("message", "FedAvg", rounds=CUT, options=begun).play(tmp_path)
    with pytest.raises(RunError, match=f"it is from another run: {next(iter(option))} "):
        Run("message", "FedAvg", rounds=ALL, options=resumed).play(tmp_path, resume="must")
