"""Results of old code are not taken for those of new code, and a flipped bit in any file of a run is found."""

from __future__ import annotations

import runpy
import shutil
import sys
import threading
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fedsel_flwr.clients.objectives import Objective
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.references import OWN_FILES
from fedsel_flwr.report.run_folder import read_history
from fedsel_flwr.selectors import BSFL, Random
from fedsel_flwr.simulations import Comparison, OwnData, compare, load_scenario, run_identity, simulate
from fedsel_flwr.simulations.results import read_run
from fedsel_flwr.simulations.run_identity import fingerprint_of, read_record, write_record
from tests.processes import run_python
from tests.simulations.cut_off_runs import FASTEST, cut_off, smoke

pytestmark = pytest.mark.usefixtures("no_pictures")
SMOKE = smoke(4)
SHORT = load_scenario("smoke", {"rounds": 3, "engine": "vectorized"})


def rewritten(path: Path, text: str) -> None:
    """Change a file as between two processes: what was imported from it is forgotten."""
    path.write_text(text)
    for name in [name for name in sys.modules if name.startswith(OWN_FILES)]:
        del sys.modules[name]


def choices(folder: Path) -> list[tuple[int, str]]:
    return [(row.round, row.client_id) for row in read_history(folder).clients]


def test_a_changed_selector_is_refused_by_name_or_played_again(tmp_path: Path, fedsel: Any, refused: Any) -> None:
    rewritten(tmp_path / "mine.py", FASTEST)
    argv = ["--selectors", f"{tmp_path}/mine.py:Fastest,random", "--rounds", "6", "--runs-dir", f"{tmp_path}/runs"]
    fedsel("compare", "smoke", "--seeds", "1", "--quiet", *argv)
    (folder,) = (tmp_path / "runs").iterdir()
    resume = ["compare", "--resume", str(folder), "--quiet", "--trust"]
    before = choices(folder / "Fastest-seed1"), (folder / "random-seed1" / "run.json").stat().st_mtime_ns
    rewritten(tmp_path / "mine.py", FASTEST.replace("- mean", "+ mean"))
    said = "was made with other code or data. Changed since then: selector 'Fastest'. Repeat it with --replay"
    assert said in refused(*resume)
    assert choices(folder / "Fastest-seed1") == before[0]
    fedsel(*resume, "--replay")
    assert choices(folder / "Fastest-seed1") != before[0]
    assert (folder / "random-seed1" / "run.json").stat().st_mtime_ns == before[1]  # it fits, and was read back
    fedsel(*resume)


class Fixed(Random):
    name: ClassVar[str] = "Fixed"

    def __init__(self, *, clients_per_round: int = 3, seed: int | None = 1, first: int = 0) -> None:
        super().__init__(clients_per_round=clients_per_round, seed=seed)
        self.first = first


class OtherCode(Fixed):
    def _select(self, available: Any) -> Any:
        return available[-3:]


OF_OTHER_CODE = {
    "finished, parameters": ("folder", False, lambda: Fixed(first=2), "selector 'Fixed'"),
    "cut off, class": ("folder", True, lambda: BSFL(clients_per_round=3, seed=1, min_latency=0.1), "of selector is "),
    "checkpoints elsewhere": ("checkpoint_dir", True, OtherCode, "of selector is [0-9a-f]+ there and [0-9a-f]+ here"),
}


@pytest.mark.parametrize(("place", "stopped", "make", "said"), OF_OTHER_CODE.values(), ids=OF_OTHER_CODE)
def test_a_run_of_other_code_is_refused_or_played_from_the_start(
    place: str, stopped: bool, make: Any, said: str, tmp_path: Path
) -> None:
    where: dict[str, Any] = {place: tmp_path, "label": "Fixed"}
    if stopped:
        cut_off(SMOKE, selector=Fixed(), **where)
    else:
        simulate(SMOKE, selector=Fixed(), **where)
    with pytest.raises(RunError, match=said):
        simulate(SMOKE, selector=make(), resume=True, **where)
    if place == "checkpoint_dir":
        assert len(simulate(SMOKE, selector=Fixed(), resume=True, **where).history.rounds) == 4
        return
    told: list[Any] = []
    simulate(SMOKE, selector=make(), resume=True, replay=True, on_round=told.append, **where)
    assert [record.round for record in told] == [1, 2, 3, 4]


def examples(seed: int) -> tuple[Any, Any]:
    inputs = np.random.default_rng(seed).normal(size=(60, 4))
    return inputs, (inputs[:, 0] > 0).astype(int)


def data(seed: int = 1, shift: int = 0) -> OwnData:
    return OwnData(examples(seed), examples(0), partition=[np.arange(5 * k, 5 * k + 5) + shift for k in range(10)])


def layers(input_shape: tuple[int, ...], num_classes: int) -> Any:
    import torch

    return torch.nn.Linear(input_shape[0], num_classes)


def two_layers(input_shape: tuple[int, ...], num_classes: int) -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(input_shape[0], 3), torch.nn.Linear(3, num_classes))


two_layers.__qualname__ = layers.__qualname__  # the scenario names it, too


def test_model_data_and_partition_count(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seeds": 2, "folder": tmp_path, "data": data(), "model": layers}
    compare(SMOKE, ["random"], **options)
    assert len(compare(SMOKE, ["random"], resume=True, **options).runs) == 2
    changes: list[tuple[dict[str, Any], str]] = [
        ({"data": data(2)}, "data"),
        ({"data": data(1, 3)}, "data, partition"),
        ({"model": two_layers}, "model"),
    ]
    for changed, named in changes:
        with pytest.raises(RunError, match=rf"Changed since then: {named}\. Repeat it"):
            compare(SMOKE, ["random"], resume=True, **options | changed)
    again = compare(SMOKE, ["random"], resume=True, replay=True, **options | changes[0][0])
    assert Comparison.load(tmp_path).runs[0].result.fingerprints == again.runs[0].result.fingerprints


def test_runs_that_differ_are_not_pooled(tmp_path: Path) -> None:
    def played(name: str, selectors: Any, own: OwnData, seed: int = 1) -> Path:
        compare(SMOKE.model_copy(update={"seed": seed}), selectors, folder=tmp_path / name, data=own, seeds=1)
        return tmp_path / name

    first = played("first", {"random": "random", "mine": Fixed}, data())
    other = {"mine": partial(Fixed, first=3), "random": "random"}
    for name, selectors, own, seed, part in (
        ("partition", ["bsfl"], data(1, 3), 1, "(data|partition)"),
        ("data", ["bsfl"], data(2), 1, "data"),
        ("code", other, data(), 2, "selector 'mine'"),
    ):
        with pytest.raises(ParameterError, match=f"cannot be compared: {part} is not the same in both"):
            Comparison.load(first, played(name, selectors, own, seed))
    assert len(Comparison.load(first, played("second", {"random": "random", "mine": Fixed}, data(), 2)).runs) == 4


def test_a_drawn_partition_is_compared_on_its_seed_only(tmp_path: Path) -> None:
    compare(SMOKE, ["random", "bsfl"], seeds=2, folder=tmp_path)
    runs = Comparison.load(tmp_path).runs
    assert len(runs) == 4
    assert len({run.result.fingerprints["partition"] for run in runs}) == 2


def test_a_run_whose_record_has_lost_its_identity_is_refused(tmp_path: Path) -> None:
    simulate(SMOKE, folder=tmp_path)
    write_record(tmp_path, {key: one for key, one in read_record(tmp_path).items() if key != "identity"})
    with pytest.raises(RunError, match=r"Changed since then: selector .*, scenario, data, partition"):
        simulate(SMOKE, folder=tmp_path, resume=True)
    simulate(SMOKE, folder=tmp_path, resume=True, replay=True)
    assert len(simulate(SMOKE, folder=tmp_path, resume=True).history.rounds) == 4


def test_a_damaged_run_is_played_again(tmp_path: Path) -> None:
    whole = simulate(SMOKE, folder=tmp_path)
    (tmp_path / "clients.parquet").write_bytes(b"PAR1")
    with pytest.raises(FedSelError, match=r"clients.parquet' is damaged"):
        simulate(SMOKE, folder=tmp_path, resume=True)
    for replay in (True, False):
        again = simulate(SMOKE, folder=tmp_path, resume=True, replay=replay)
        assert repr(again.history.rounds) == repr(whole.history.rounds)


PROGRAM = """
import functools
from fedsel_flwr.selectors import BSFL, Random
from fedsel_flwr.simulations.run_identity import fingerprint_of
from mine import Fastest

def help(x):
    return {frozenset(("a", "b", "c")): x, "pair": (1, 2.0)}

class Own(Random):
    names = frozenset(("a", "b", "c"))

    def _select(self, available):
        help(available)
        return super()._select(available)

made = (BSFL, Fastest, Own, functools.partial(Fastest, patience=2), lambda **keys: Own(first=3, **keys))
print(*map(fingerprint_of, made))
"""


def test_fingerprints_are_equal_in_every_process_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another hash seed, in another folder of the same name, at another line."""
    here, there = tmp_path / "here", tmp_path / "there"
    for number, folder in enumerate((here, there)):
        folder.mkdir()
        (folder / "mine.py").write_text(FASTEST)
        (folder / "program.py").write_text("\n" * number + PROGRAM)
    done = run_python("program.py", cwd=there, PYTHONHASHSEED="2")
    monkeypatch.syspath_prepend(here)
    runpy.run_path(str(here / "program.py"), run_name="__main__")
    del sys.modules["mine"]
    assert (told := capsys.readouterr().out.split()) == done.stdout.split()
    assert len(set(told)) == 5
    assert told[0] == fingerprint_of(BSFL)


def test_code_without_source_text_counts_by_name() -> None:
    names: dict[str, Any] = {"__name__": "typed"}
    exec("def one(x): return 2 * x\nclass Net: pass\n", names)
    assert len({fingerprint_of(names["one"]), fingerprint_of(names["Net"])}) == 2


def test_functions_count_inside_partials_decorators_and_objectives() -> None:
    given = (layers, partial(layers, num_classes=3), cache(layers), str.upper, Objective(layers, layers))
    prints = [fingerprint_of(one) for one in given]
    assert prints[0] == prints[2]
    assert len(set(prints)) == 4
    assert fingerprint_of(partial(layers, num_classes=4)) != prints[1]
    assert fingerprint_of(Objective(layers, str.upper)) != prints[4]


def test_values_count_by_content_and_else_by_kind() -> None:
    def held(**parts: Any) -> str:
        return fingerprint_of({"lock": threading.Lock(), "random": np.random.default_rng(), **parts})

    assert held(a=np.arange(3), b={"x": 1, 2: {"y", "z"}}) == held(b={2: {"z", "y"}, "x": 1}, a=np.arange(3))
    assert held(a=np.arange(3)) != held(a=np.arange(3.0))
    assert held(a=np.float32(1)) != held(a=np.float64(1))


def test_the_fingerprint_of_ours_is_its_source_and_that_of_its_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(BSFL)
    read = run_identity.module_source
    for module in ("fedsel_flwr.selectors.bsfl", "fedsel_flwr.selectors.base"):
        with monkeypatch.context() as patch:
            patch.setattr(run_identity, "module_source", lambda name, m=module: read(name) + "#" * (name == m))
            assert fingerprint_of(BSFL) != before, module
    assert fingerprint_of(BSFL) == before


# ---- digests of the files --------------------------------------------------------------------------------------------

FILES = (
    "client-accuracy.parquet", "clients.parquet", "model.safetensors", "regret.parquet", "rounds.parquet", "run.json",
    "scenario.toml",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digests") / "run"
    simulate(SHORT, folder=folder)
    # The wall times have no digest, because equal runs have equal records.
    assert {path.name for path in folder.iterdir()} == {*FILES, "timing.parquet"}
    return folder


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def flip(file: Path, content: bytes, place: int) -> None:
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    file.write_bytes(changed)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(name: str, copied: Path) -> None:
    content = (copied / name).read_bytes()
    for place in np.random.default_rng(7).choice(8 * len(content), size=20, replace=False).tolist():
        flip(copied / name, content, place)
        with pytest.raises(ParameterError):
            Comparison.load(copied)
    (copied / name).write_bytes(content)
    assert len(Comparison.load(copied).runs) == 1


def test_the_file_is_named_with_the_cure(copied: Path) -> None:
    model = (copied / "model.safetensors").read_bytes()
    flip(copied / "model.safetensors", model, 8 * len(model) - 20)
    said = r"model.safetensors' is damaged: its content has another digest than run.json. .*--replay"
    with pytest.raises(ParameterError, match=said):
        Comparison.load(copied)
    with pytest.raises(FedSelError, match=said):
        simulate(SHORT, folder=copied, resume=True)


def test_a_file_that_is_gone_is_named(copied: Path) -> None:
    (copied / "regret.parquet").unlink()
    with pytest.raises(ParameterError, match=r"regret.parquet' is damaged: No such file"):
        Comparison.load(copied)


def test_a_name_in_the_record_leads_nowhere_else(copied: Path) -> None:
    record = read_record(copied)
    record["files"]["../run/model.safetensors"] = record["files"]["model.safetensors"]
    write_record(copied, record)
    with pytest.raises(ParameterError, match=r"'\.\./run/model.safetensors' is not a file of a run"):
        read_run(copied)


def test_a_record_without_digests_is_refused(copied: Path) -> None:
    write_record(copied, {key: one for key, one in read_record(copied).items() if key != "files"})
    for read in (lambda: Comparison.load(copied), lambda: simulate(SHORT, folder=copied, resume=True)):
        with pytest.raises(FedSelError, match=r"run.json' is damaged: it lacks digests"):
            read()
