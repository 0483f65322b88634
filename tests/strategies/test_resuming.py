"""Runs that go on from a checkpoint, in either API and in an engine of its own: what they take, what they are told."""

from __future__ import annotations

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

from fedsel_flwr.aggregation.filter import Filter
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.checkpoints import Checkpoint, read_checkpoint
from fedsel_flwr.selectors import create
from fedsel_flwr.strategies import GPFL, SelectionStrategy
from fedsel_flwr.strategies.wrapping.base_state import load_base, save_base
from fedsel_flwr.strategies.wrapping.legacy_results import from_checkpoint, to_checkpoint
from tests.strategies import numpy_world as world
from tests.strategies.flower_world import legacy_base
from tests.strategies.resumed_runs import APIS, Run, Seen
from tests.strategies.third_adapter import play_stacked

ALL, CUT = 10, 4


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def cut(run: Run, folder: Path) -> Run:
    """A run whose first rounds are done, by another object; returns what goes on."""
    replace(run, rounds=CUT).play(folder)
    return run


@pytest.mark.parametrize("api", APIS)
def test_base_and_clients_see_the_absolute_round(api: str, tmp_path: Path) -> None:
    """The last round is evaluated again, and told of again."""
    run = Run(api, rounds=ALL)
    straight, rest = run.play(), cut(run, tmp_path).play(tmp_path)
    assert rest.result() == straight.result()
    assert straight.evaluated == [*range(ALL + 1)]
    assert rest.evaluated == [*range(CUT, ALL + 1)]
    assert sorted({*rest.trained}) == [number for number in range(CUT + 1, ALL + 1) if number != 6]
    assert rest.told == straight.told[CUT - 1 :]
    if api == "message":
        assert rest.metrics == [number for number in straight.metrics if number > CUT]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_run_that_had_finished_returns_its_result(api: str, evaluates: bool, tmp_path: Path) -> None:
    run = Run(api, rounds=CUT, evaluates=evaluates)
    first = run.play(tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("round-*")}
    again = run.play(tmp_path, resume="must")
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("round-*")} == written
    assert again.result() == first.result()
    assert again.journal == first.journal
    assert again.trained == []
    assert again.evaluated == ([CUT] if evaluates else [])
    assert again.told == first.told[-1:]


@pytest.mark.parametrize("api", APIS)
def test_without_a_central_evaluation_a_round_is_finished_by_itself(api: str, tmp_path: Path) -> None:
    run = Run(api, rounds=ALL, evaluates=False)
    assert cut(run, tmp_path).play(tmp_path).result() == run.play().result()


@pytest.mark.parametrize("api", APIS)
def test_a_round_has_its_checkpoint_before_it_is_evaluated(api: str, tmp_path: Path) -> None:
    """An evaluation that takes hours, or fails, costs no round."""
    there: list[list[str]] = []

    def step(kind: str) -> None:
        if kind == "e":
            there.append(sorted(path.stem for path in tmp_path.glob("round-*")))

    Run(api, rounds=3).play(tmp_path, step=step)
    names = [f"round-00000{number}" for number in (1, 2, 3)]
    assert there == [names[:number] for number in range(4)]


@pytest.mark.parametrize("api", APIS)
def test_so_often_and_after_the_last_round(api: str, tmp_path: Path) -> None:
    Run(api, rounds=ALL, options={"checkpoint_every": 4, "keep_checkpoints": 9}).play(tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("round-*")) == ["round-000004", "round-000008", "round-000010"]


BASES: list[tuple[str, dict[str, Any]]] = [
    ("FedAvg", {}), ("FedAdagrad", {}), ("FedYogi", {}), ("FedAvgM", {"server_momentum": 0.7}), ("FedTrimmedAvg", {}),
]  # fmt: skip


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("base", "options"), BASES)
def test_flowers_bases_go_on(api: str, base: str, options: dict[str, Any], tmp_path: Path) -> None:
    run = Run(api, base, "cs-ucb", rounds=7, base_options=options)
    assert cut(run, tmp_path).play(tmp_path).result() == run.play().result()


def adaptive(api: str) -> Any:
    """A wrapper whose clipping norm adapts, around moments; its noise is nothing."""
    module = legacy_bases if api == "legacy" else message_bases
    kwargs = {"initial_parameters": legacy_base().initial_parameters} if api == "legacy" else {}
    inner = module.FedAdam(fraction_evaluate=0.0, **kwargs)  # type: ignore[attr-defined]
    wrapper = module.DifferentialPrivacyServerSideAdaptiveClipping  # type: ignore[attr-defined]
    return wrapper(inner, noise_multiplier=0.0, num_sampled_clients=3, clipped_count_stddev=0.0)


@pytest.mark.parametrize("api", APIS)
def test_every_layer_of_a_wrapped_base_is_saved(api: str) -> None:
    base = adaptive(api)
    base.clipping_norm, base.strategy.m_t, base.strategy.v_t = 0.25, [np.ones(2)], None
    other = adaptive(api)
    load_base(other, save_base(base))
    assert other.clipping_norm == 0.25
    assert np.array_equal(other.strategy.m_t[0], np.ones(2))
    assert other.strategy.v_t is None


def test_records_and_parameters_of_flowers_bases_come_back() -> None:
    message, legacy = message_bases.FedAvgM(server_momentum=0.5), legacy_bases.FedAvgM(server_momentum=0.5)
    message.current_arrays = ArrayRecord({"b": Array(np.arange(3.0)), "a": Array(np.zeros((2, 0), np.float32))})
    legacy.initial_parameters = Parameters([b"one", b""], "odd")
    load_base(other := message_bases.FedAvgM(), save_base(message))
    assert other.current_arrays == message.current_arrays
    load_base(another := legacy_bases.FedAvgM(), save_base(legacy))
    assert another.initial_parameters == legacy.initial_parameters


class Forgetful(legacy_bases.FedAvg):
    """Keeps something that nobody knows of."""

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


class Plain(legacy_bases.FedAvg):
    """Keeps nothing of its own."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        return super().aggregate_fit(server_round, results, failures)


def strategy_of(base: Any, folder: Path, **options: Any) -> SelectionStrategy:
    selector = create("cs-ucb", **world.selector_params("cs-ucb"))
    return SelectionStrategy(selector, base, max_latency=world.MAX_LATENCY, checkpoint_dir=folder, **options)


def test_a_base_that_keeps_what_nobody_knows_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"Forgetful, which keeps rounds_aggregated\b.*state_dict\(\)"):
        strategy_of(Forgetful(), tmp_path)
    namesake = Plain(fraction_evaluate=0.0)
    namesake.num_examples = 3  # type: ignore[attr-defined]  # Flower's methods read this name, but assign it nowhere
    with pytest.raises(ParameterError, match=r"Plain, which keeps num_examples\b"):
        strategy_of(namesake, tmp_path)
    strategy_of(Plain(fraction_evaluate=0.0), tmp_path)
    base = Faithful()
    strategy_of(base, tmp_path)
    base.rounds_aggregated = 7
    load_base(other := Faithful(), save_base(base))
    assert other.rounds_aggregated == 7


def test_a_base_that_does_not_take_its_state_is_left_as_it_was(tmp_path: Path) -> None:
    base, state = Faithful(), save_base(Faithful())
    base.rounds_aggregated = 3
    state["layers"][0]["own"] = {"surprise": 1}
    with pytest.raises(StateError, match="base: KeyError: 'rounds'"):
        load_base(base, state)
    assert base.rounds_aggregated == 3
    with pytest.raises(StateError, match=r"the state is that of \['Faithful'\], this base is \['FedAvg'\]"):
        load_base(legacy_bases.FedAvg(), save_base(base))


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"params": {"alpha": 3.0}}, r"selector\.alpha = 2\.0, this one has 3\.0"),
    ({"params": {"clients_per_round": 2}}, r"selector\.clients_per_round = 3, this one has 2"),
    ({"selector": "cs-ucb"}, r"selector = bsfl, this one has cs-ucb"),
    ({"base": "FedYogi"}, r"base = FedAdam \(flwr\.server\), this one has FedYogi \(flwr\.server\)"),
    ({"api": "message"}, r"base = FedAdam \(flwr\.server\), this one has FedAdam \(flwr\.serverapp\)"),
    ({"options": {"averaging": "mean"}}, r"averaging = None, this one has 'mean'"),
    ({"options": {"filter": Filter(score="accuracy")}}, r"filter = None, this one has 'accuracy'"),
    ({"options": {"learning_rate": 0.25}}, r"learning_rate = 0\.5, this one has 0\.25"),
]


@pytest.mark.parametrize(("changes", "reason"), CHANGES)
def test_a_checkpoint_of_something_else_is_refused_by_name(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = Run("legacy", rounds=ALL)
    cut(run, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")}
    wanted = rf"none of the checkpoints in .*round-000004\.safetensors: it was written by a run with .*{reason}"
    with pytest.raises(RunError, match=wanted):
        replace(run, **changes).play(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")} == before
    assert run.play(tmp_path).result() == run.play().result()


def test_a_state_that_does_not_fit_changes_neither_base_nor_selector(tmp_path: Path) -> None:
    """Nor does it matter which of the two it is that refuses."""
    cut(run := Run("legacy", rounds=ALL), tmp_path)
    kept = read_checkpoint(tmp_path / "round-000004.safetensors")
    for part, reason in (("selector", "selector: the state does not belong to bsfl"), ("base", "base: the state is")):
        spoilt: dict[str, Any] = {"state": {**kept.state, "selector": {}}} if part == "selector" else {"base": {}}
        strategy = run.strategy(None, Seen())
        before = repr(strategy.state_dict()), repr(save_base(strategy.base))
        with pytest.raises(StateError, match=reason):
            strategy._resuming._take(replace(kept, **spoilt), None)
        assert (repr(strategy.state_dict()), repr(save_base(strategy.base))) == before


def test_whoever_knows_more_adds_what_a_checkpoint_must_agree_with(tmp_path: Path) -> None:
    run = Run("legacy", rounds=CUT)
    for scenario, agrees in (("a", True), ("b", False)):
        strategy = run.strategy(tmp_path, Seen())
        strategy.fingerprint["scenario"] = scenario
        if agrees:
            assert strategy.resumed is None
            drive(strategy, 2)
            continue
        with pytest.raises(RunError, match="scenario = a, this one has b"):
            _ = strategy.resumed


@pytest.mark.parametrize("api", APIS)
def test_a_model_of_other_shapes_is_refused(api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(run := Run(api, "FedAvg", rounds=ALL), tmp_path)
    monkeypatch.setattr(world, "initial", lambda: np.zeros(7))
    wanted = r"its model has arrays of the shapes \w+ \(12,\), the initial model \w+ \(7,\)"
    with pytest.raises(RunError, match=wanted):
        run.play(tmp_path)


def drive(strategy: Any, rounds: int) -> list[world.Array]:
    """An engine of its own: it drives the core, from where the run was; returns the models."""
    done = strategy.resumed
    first, model = (1, world.initial()) if done is None else (done.round + 1, done.model[0])
    models = []
    if done is not None:
        strategy.round_ended(done.round, 0.5, 0.25)
    for number in range(first, rounds + 1):
        (model,) = play_stacked(strategy.core, 1, model)
        models.append(model)
        strategy.round_trained(number, [model])
        strategy.round_ended(number, 0.5, 0.25)
    return models


def test_an_engine_that_drives_the_core_goes_on(tmp_path: Path) -> None:
    run = Run("legacy", rounds=ALL)
    straight, first, rest = (run.strategy(folder, Seen()) for folder in (None, tmp_path, tmp_path))
    models = drive(straight, ALL)
    drive(first, CUT)
    assert np.array_equal(drive(rest, ALL)[-1], models[-1])
    for records in ("rounds", "clients"):
        assert repr(list(getattr(rest.history, records))) == repr(list(getattr(straight.history, records)))


def test_a_damaged_checkpoint_costs_the_rounds_since_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = cut(Run("message", rounds=ALL, options={"checkpoint_every": 2}), tmp_path)
    newest = tmp_path / "round-000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    rest = run.play(tmp_path)
    assert rest.evaluated[0] == 2
    assert rest.result() == run.play().result()


def test_an_engine_that_never_looked_for_a_checkpoint_overwrites_none(tmp_path: Path) -> None:
    run = Run("legacy", rounds=ALL)
    drive(run.strategy(tmp_path, Seen()), CUT)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("round-*")}
    strategy = run.strategy(tmp_path, Seen())
    (model,) = play_stacked(strategy.core, 1)
    with pytest.raises(RunError, match=r"round 1 .*resume.*strategy\.resumed"):
        strategy.round_trained(1, [model])
    assert {path.name: path.read_bytes() for path in tmp_path.glob("round-*")} == before


def test_damage_to_the_journal_costs_the_checkpoints_that_need_it(tmp_path: Path) -> None:
    """That of round 4 needs the first three lines, that of round 2 the first one; round 3's was not kept."""
    run, journal = Run("legacy", rounds=ALL, options={"checkpoint_every": 2}), tmp_path / "journal.jsonl"
    cut(run, tmp_path)
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == CUT
    journal.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"round_s": ', b'"round_s": 1'), *lines[3:]]))
    rest = run.play(tmp_path)
    assert rest.evaluated[0] == 2
    assert rest.result() == run.play().result()
    journal.write_bytes(journal.read_bytes()[5:])
    wanted = r"none of the checkpoints .*round-000010\.safetensors: history: .*round-000008\.safetensors: history: "
    with pytest.raises(RunError, match=wanted):
        run.play(tmp_path)


@pytest.mark.parametrize("api", APIS)
def test_a_full_disk_ends_the_run_and_nothing_is_lost(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_last_round_is_one_number() -> None:
    gpfl = {"clients_per_round": 2, "total_rounds": 9, "validation": world.validation(), "learning_rate": 0.1}
    assert GPFL(**gpfl)._resuming.total_rounds is None, "the selector's constant ends no run unasked"
    with pytest.raises(ParameterError, match=r"total_rounds is 8.* but 9"):
        SelectionStrategy(
            create("gpfl", clients_per_round=2, total_rounds=9), learning_rate=0.1, validation=world.validation(),
            total_rounds=8,
        )  # fmt: skip
    with pytest.raises(ParameterError, match="resume=True needs checkpoint_dir"):
        SelectionStrategy(create("random", clients_per_round=2), resume=True)
    with pytest.raises(ParameterError, match="total_rounds must be a whole number of at least 1"):
        SelectionStrategy(create("random", clients_per_round=2), total_rounds=0)


def test_gpfl_with_checkpoints_ends_with_its_own_number(tmp_path: Path) -> None:
    run = Run("legacy", "FedAvg", "gpfl", rounds=ALL, options={"total_rounds": None}, params={"total_rounds": 5})
    assert len(run.play(tmp_path).finished) == 5


@pytest.mark.parametrize("api", APIS)
def test_nobody_is_chosen_past_the_last_round(api: str) -> None:
    seen = Run(api, rounds=ALL, options={"total_rounds": CUT}).play()
    assert len(seen.finished) == CUT
    assert seen.evaluated == [*range(CUT + 1)]


def test_a_server_without_a_last_round_is_told_that_its_rounds_come_on_top(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run("legacy", rounds=3, options={"total_rounds": None})
    run.play(tmp_path)
    strategy = run.strategy(tmp_path, Seen())
    logging.getLogger("fedsel_flwr").setLevel(logging.WARNING)
    strategy.initialize_parameters(None)
    assert "rounds come on top of the 3 that were done" in caplog.text
    assert len(run.play(tmp_path).finished) == 6


def test_models_that_are_no_arrays_come_back_as_they_were() -> None:
    trees = Parameters([b'{"trees": 1}', b"\x00\xff"], "")
    names, model = to_checkpoint(trees)
    kept = Checkpoint(round=1, model=model, names=names, state={})
    assert from_checkpoint(kept) == trees
    with pytest.raises(RunError, match=r"model of list\b.*checkpoint_dir"):
        to_checkpoint([trees, None])  # type: ignore[arg-type]


def test_the_initial_model_of_a_wrapped_base_is_compared_as_well(tmp_path: Path) -> None:
    for shape, agrees in (((12,), True), ((5,), False)):
        inner = legacy_bases.FedAvg(fraction_evaluate=0.0, initial_parameters=ndarrays_to_parameters([np.zeros(shape)]))
        base = legacy_bases.DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1.0, world.COHORT)
        strategy = strategy_of(base, tmp_path, resume=True)
        if agrees:
            drive(strategy, 2)
            continue
        with pytest.raises(RunError, match=r"its model has arrays of the shapes 0 \(12,\), the initial model 0 \(5,\)"):
            strategy.initialize_parameters(None)  # type: ignore[arg-type]
