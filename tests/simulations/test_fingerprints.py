"""Results of old code are not taken for those of new code: selector, model, data, partition and scenario count."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.references import OWN_FILES
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.selectors import BSFL, Random
from fedsel_flwr.simulations import Comparison, OwnData, compare, load_scenario, simulate
from fedsel_flwr.simulations.fingerprints import fingerprint
from tests.processes import ROOT

SELECTOR = """
import numpy as np
from fedsel_flwr.selectors import Selector

class Mine(Selector):
    client_state = {"_seconds": 0.0}

    def _select(self, available):
        return self._largest(SIGN * self._seconds[available] - 0.001 * available, available)

    def _observe(self, report):
        self._seconds[report.clients] = report.latency

SIGN = +1
"""
KEYS: dict[str, Any] = {"rounds": 4, "engine": "vectorized"}
SMOKE = load_scenario("smoke", KEYS)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than these runs."""
    for name in ("plot", "plot_rounds"):
        monkeypatch.setattr(Comparison, name, lambda self, path, *rest: Path(path).touch())


def rewritten(path: Path, text: str) -> None:
    """Change a file as between two processes: what was imported from it is forgotten."""
    path.write_text(text)
    for name in [name for name in sys.modules if name.startswith(OWN_FILES)]:
        del sys.modules[name]


def choices(folder: Path) -> list[tuple[int, str]]:
    return [(row.round, row.client_id) for row in read_history(folder).clients]


def test_a_changed_selector_is_refused_by_name_or_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(tmp_path / "mine.py", SELECTOR)
    argv = ["--selectors", f"{tmp_path}/mine.py:Mine,random", "--rounds", "6", "--runs-dir", f"{tmp_path}/runs"]
    assert main(["compare", "smoke", "--quiet", *argv]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    resume = ["compare", "--resume", str(folder), "--quiet", "--trust"]
    before = choices(folder / "Mine-seed1"), (folder / "random-seed1" / "run.json").stat().st_mtime_ns
    rewritten(tmp_path / "mine.py", SELECTOR.replace("SIGN = +1", "SIGN = -1"))
    capsys.readouterr()
    assert main(resume) == 2
    said = capsys.readouterr().err
    assert "was begun with other code or data than there is now: selector 'Mine'. Play it again with --replay" in said
    assert choices(folder / "Mine-seed1") == before[0]
    assert main([*resume, "--replay"]) == 0
    assert choices(folder / "Mine-seed1") != before[0]
    assert (folder / "random-seed1" / "run.json").stat().st_mtime_ns == before[1]  # it fits, and was read back
    assert main(resume) == 0


class Fixed(Random):
    """Takes a parameter."""

    name: ClassVar[str] = "Fixed"

    def __init__(self, *, clients_per_round: int, seed: int | None = None, first: int = 0) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.first = first


def test_parameters_of_a_selector_count_for_a_single_run_too(tmp_path: Path) -> None:
    simulate(SMOKE, selector=Fixed(clients_per_round=3, seed=1), folder=tmp_path)
    same = simulate(SMOKE, selector=Fixed(clients_per_round=3, seed=1), folder=tmp_path, resume=True)
    assert same.fingerprints["selector"]
    with pytest.raises(RunError, match=r"was made with other code or data than there is now: selector 'Fixed'\. Play"):
        simulate(SMOKE, selector=Fixed(clients_per_round=3, seed=1, first=2), folder=tmp_path, resume=True)
    other = Fixed(clients_per_round=3, seed=1, first=2)
    played = simulate(SMOKE, selector=other, folder=tmp_path, resume=True, replay=True)
    assert played.fingerprints != same.fingerprints


class Stop(Exception):
    pass


def stop(record: RoundRecord) -> None:
    if record.round == 3:
        raise Stop


def test_a_run_that_was_cut_off_is_refused_or_played_from_the_start(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        simulate(SMOKE, selector=Fixed(clients_per_round=3, seed=1), folder=tmp_path, on_round=stop)
    other: dict[str, Any] = {"selector": BSFL(clients_per_round=3, seed=1, min_latency=0.1), "label": "Fixed"}
    with pytest.raises(RunError, match=r"fingerprint of selector = \w+, this one has .* Play it again with --replay"):
        simulate(SMOKE, folder=tmp_path, resume=True, **other)
    rounds: list[int] = []
    simulate(SMOKE, folder=tmp_path, resume=True, replay=True, on_round=lambda one: rounds.append(one.round), **other)
    assert rounds == [1, 2, 3, 4]


def test_checkpoints_elsewhere_are_refused_by_name_too(tmp_path: Path) -> None:
    def mine(first: int) -> dict[str, Any]:
        return {"selector": Fixed(clients_per_round=3, seed=1, first=first), "checkpoint_dir": tmp_path}

    class Other(Fixed):
        def _select(self, available: Any) -> Any:
            return available[-3:]

    with pytest.raises(Stop):
        simulate(SMOKE, on_round=stop, **mine(1))
    with pytest.raises(RunError, match=r"fingerprint of selector = [0-9a-f]+, this one has [0-9a-f]+"):
        simulate(SMOKE, resume=True, **mine(1) | {"selector": Other(clients_per_round=3, seed=1, first=1)})
    assert len(simulate(SMOKE, resume=True, **mine(1)).history.rounds) == 4


def examples(seed: int) -> tuple[Any, Any]:
    inputs = np.random.default_rng(seed).normal(size=(60, 4))
    return inputs, (inputs[:, 0] > 0).astype(int)


def data(seed: int = 1, shift: int = 0) -> OwnData:
    parts = [np.arange(5 * k, 5 * k + 5) + shift for k in range(10)]
    return OwnData(examples(seed), examples(0), partition=parts)


def one_layer(input_shape: tuple[int, ...], num_classes: int) -> Any:
    import torch

    return torch.nn.Linear(input_shape[0], num_classes)


def two_layers(input_shape: tuple[int, ...], num_classes: int) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(input_shape[0], 3), torch.nn.Linear(3, num_classes))


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"data": data(2)}, "data"), ({"data": data(1, 3)}, "data, partition"), ({"model": two_layers}, "model"),
     ({}, "")],
)  # fmt: skip
def test_model_data_and_partition_count(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": data(), "model": one_layer}
    two_layers.__qualname__ = one_layer.__qualname__ = "layers"  # the scenario names it, too
    compare(SMOKE, ["random"], seeds=2, folder=tmp_path, **given)
    if not named:
        assert len(compare(SMOKE, ["random"], seeds=2, folder=tmp_path, resume=True, **given).runs) == 2
        return
    with pytest.raises(RunError, match=rf"than there is now: {named}\. Play it again"):
        compare(SMOKE, ["random"], seeds=2, folder=tmp_path, resume=True, **given | changed)
    again = compare(SMOKE, ["random"], seeds=2, folder=tmp_path, resume=True, replay=True, **given | changed)
    assert Comparison.load(tmp_path).runs[0].result.fingerprints == again.runs[0].result.fingerprints


def test_runs_that_differ_are_not_pooled(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seeds": 1}
    compare(SMOKE, {"random": "random", "mine": Fixed}, folder=tmp_path / "a", data=data(), **options)
    second = SMOKE.model_copy(update={"seed": 2})
    parts = {"partition": data(1, 3), "data": data(2)}
    for name, own in parts.items():
        compare(SMOKE, ["bsfl"], folder=tmp_path / name, data=own, **options)
        said = f"cannot be compared: {'data' if name == 'data' else '(data|partition)'} is not the same in both"
        with pytest.raises(ParameterError, match=said):
            Comparison.load(tmp_path / "a", tmp_path / name)
    other = {"mine": partial(Fixed, first=3), "random": "random"}
    compare(second, other, folder=tmp_path / "b", data=data(), **options)
    with pytest.raises(ParameterError, match="cannot be compared: selector 'mine' is not the same in both"):
        Comparison.load(tmp_path / "a", tmp_path / "b")
    compare(second, {"random": "random", "mine": Fixed}, folder=tmp_path / "c", data=data(), **options)
    assert len(Comparison.load(tmp_path / "a", tmp_path / "c").runs) == 4


def test_a_drawn_partition_is_compared_on_its_seed_only(tmp_path: Path) -> None:
    compare(SMOKE, ["random", "bsfl"], seeds=2, folder=tmp_path / "a")
    assert len(Comparison.load(tmp_path / "a").runs) == 4
    prints = [run.result.fingerprints for run in Comparison.load(tmp_path / "a").runs]
    assert len({one["partition"] for one in prints}) == 2
    said = json.loads((tmp_path / "a" / "plan.json").read_text())["fingerprints"]
    assert set(said) == {"selectors", "seed", "scenario", "data", "partition"}
    assert set(said["selectors"]) == {"random", "bsfl"}


def test_a_run_of_an_older_version_is_refused_by_name_and_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from fedsel_flwr.simulations.run_record import read_record, write_record

    simulate(SMOKE, folder=tmp_path)
    write_record(tmp_path, {key: one for key, one in read_record(tmp_path).items() if key != "fingerprints"})
    with pytest.raises(RunError, match=r"of an older version, which kept no fingerprint of selector, model and data"):
        simulate(SMOKE, folder=tmp_path, resume=True)
    with caplog.at_level(logging.WARNING, "fedsel_flwr"):
        assert len(Comparison.load(tmp_path).runs) == 1
    assert "without fingerprints" in caplog.text
    simulate(SMOKE, folder=tmp_path, resume=True, replay=True)
    assert len(simulate(SMOKE, folder=tmp_path, resume=True).history.rounds) == 4


def test_a_damaged_run_is_played_again(tmp_path: Path) -> None:
    whole = simulate(SMOKE, folder=tmp_path)
    (tmp_path / "clients.parquet").write_bytes(b"PAR1")
    with pytest.raises(FedSelError, match=r"clients.parquet' is damaged"):
        simulate(SMOKE, folder=tmp_path, resume=True)
    assert repr(simulate(SMOKE, folder=tmp_path, resume=True, replay=True).history.rounds) == repr(whole.history.rounds)
    assert len(simulate(SMOKE, folder=tmp_path, resume=True).history.rounds) == 4


def test_replay_needs_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParameterError, match="replay = True"):
        simulate(SMOKE, folder=tmp_path, replay=True)
    with pytest.raises(ParameterError, match="replay = True"):
        compare(SMOKE, ["random"], folder=tmp_path, replay=True)
    assert main(["run", "smoke", "--replay"]) == 2
    assert "--replay needs --resume" in capsys.readouterr().err


PROGRAM = """
import functools
from fedsel_flwr.selectors import BSFL, Random
from fedsel_flwr.simulations.fingerprints import fingerprint
from mine import Mine

def help(x):
    return {frozenset(("a", "b", "c")): x, "pair": (1, 2.0)}

class Own(Random):
    names = frozenset(("a", "b", "c"))

    def _select(self, available):
        help(available)
        return super()._select(available)

print(fingerprint(BSFL), fingerprint(Mine), fingerprint(Own), fingerprint(functools.partial(Mine, first=2)),
      fingerprint(lambda **keys: Own(first=3, **keys)))
"""


def test_fingerprints_are_equal_in_every_process_and_place(tmp_path: Path) -> None:
    told = []
    for number, seed in enumerate(("1", "2")):
        folder = tmp_path / f"place{number}"
        folder.mkdir()
        (folder / "mine.py").write_text(SELECTOR)
        (folder / "program.py").write_text("\n" * number + PROGRAM)  # no line number counts
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split())
        shutil.rmtree(folder)
    assert told[0] == told[1]
    assert len(set(told[0])) == 5
    assert told[0][0] == fingerprint(BSFL)


def typed(text: str) -> dict[str, Any]:
    """What a notebook's cell defines, which has no file."""
    names: dict[str, Any] = {"__name__": "typed"}
    exec(text, names)
    return names


def test_functions_without_a_file_count_with_those_that_they_use() -> None:
    cell = "def one(x): return 2 * x\ndef two(x): return one(x)\nclass Net:\n def go(self): return two(1)\n"
    names, same, other = typed(cell), typed("\n\n" + cell), typed(cell.replace("2 * x", "3 * x"))
    for name in ("one", "two", "Net"):
        assert fingerprint(names[name]) == fingerprint(same[name]) != fingerprint(other[name])


def test_values_count_by_content_and_else_by_kind() -> None:
    def held(**parts: Any) -> str:
        return fingerprint({"lock": threading.Lock(), "random": np.random.default_rng(), **parts})

    assert held(a=np.arange(3), b={"x": 1, 2: {"y", "z"}}) == held(b={2: {"z", "y"}, "x": 1}, a=np.arange(3))
    assert held(a=np.arange(3)) != held(a=np.arange(3.0))
    assert held(a=np.float32(1)) != held(a=np.float64(1))


def test_the_fingerprint_of_ours_is_its_source_and_that_of_its_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsel_flwr.simulations import fingerprints

    before = fingerprint(BSFL)
    read = fingerprints.module_source
    for module in ("fedsel_flwr.selectors.bsfl", "fedsel_flwr.selectors.base"):
        with monkeypatch.context() as patch:
            patch.setattr(fingerprints, "module_source", lambda name, m=module: (read(name) or "") + "#" * (name == m))
            assert fingerprint(BSFL) != before, module
    assert fingerprint(BSFL) == before


def test_runs_side_by_side_have_the_fingerprints_of_runs_in_turn(tmp_path: Path) -> None:
    own = {"mine": partial(Fixed, first=3), "random": "random"}
    in_turn = compare(SMOKE, own, seeds=1, folder=tmp_path)
    beside = compare(SMOKE, own, seeds=1, jobs=2)
    assert [run.result.fingerprints for run in in_turn.runs] == [run.result.fingerprints for run in beside.runs]
