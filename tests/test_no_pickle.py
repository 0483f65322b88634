"""No pickle is read or written: in the package's source but for named exceptions, and in runs that meet no exception.

A pickle is a program. Whoever can change one, in a file or on a wire, runs code in the process that reads it.
"""

from __future__ import annotations

import _pickle
import ast
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsel_flwr
from fedsel_flwr import cli
from fedsel_flwr.selectors import Random
from fedsel_flwr.simulations import vectorized
from fedsel_flwr.simulations.comparisons import parallel_runs
from fedsel_flwr.strategies import CSUCB
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import Federation, fedavg, fleet
from tests.strategies.message.helpers import FakeGrid, crowd, play
from tests.strategies.message.helpers import fedavg as message_fedavg

PACKAGE = Path(fedsel_flwr.__file__).parent
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CARRIERS = {"loky", "multiprocessing"}
"""Modules that pickle what they carry."""
CALLS = {("torch", "load"), ("torch", "save"), ("pd", "read_pickle"), ("pandas", "read_pickle")}
EXCEPTIONS = {
    "simulations/on_flower/ray_session.py": "Ray carries the data to its actors; of pickle only an error's name",
    "simulations/comparisons/parallel_runs.py": "runs of a comparison go to processes that this one starts",
    "simulations/fingerprints.py": "joblib hashes values in their pickled form, which nobody stores or reads",
    "testing/state_conformance.py": "a selector's factory goes to a process that this one starts",
}
"""Files that pickle, or use what pickles, and what for; docs/security.md names them too."""


def _offences(tree: ast.AST) -> Iterator[str]:
    """What a module's source has to do with pickles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # importlib.import_module("cloudpickle")
            found = [node.value] if node.value in PICKLERS | CARRIERS else []
        else:
            found = []
        yield from (name for name in found if set(name.split(".")) & (PICKLERS | CARRIERS))
        if isinstance(node, ast.Attribute) and (getattr(node.value, "id", ""), node.attr) in CALLS:
            yield f"torch.{node.attr}"
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and getattr(node.value, "value", 1) is not False
        ):
            yield "allow_pickle"


def _sources() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_only_the_named_files_have_to_do_with_pickles() -> None:
    found = {name: sorted(set(_offences(tree))) for name, tree in _sources()}
    assert {name for name, offences in found.items() if offences} == set(EXCEPTIONS), found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "import a, dill.x", "from joblib import load", "from torch import multiprocessing as m",
     "importlib.import_module('cloudpickle')", "torch.load(f)", "np.load(f, allow_pickle=True)",
     "np.load(f, allow_pickle=flag)", "import shelve", "def f():\n    import marshal"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(_offences(ast.parse(source)))
    assert not list(_offences(ast.parse("np.load(f, allow_pickle=False); safetensors.load(f); json.load(f)")))


def test_the_security_page_names_every_exception() -> None:
    page = PACKAGE.parent / "docs" / "security.md"
    if not page.exists():
        pytest.skip("an installed package has no docs")
    text = page.read_text(encoding="utf-8")
    assert [name for name in EXCEPTIONS if name not in text] == []


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads or writes a pickle in this process raises; what derives from Pickler is imported before."""
    pytest.importorskip("sklearn.datasets")
    assert vectorized
    assert parallel_runs

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was read or written")

    for module in (pickle, _pickle):
        for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
            monkeypatch.setattr(module, name, refuse)
    for name in ("_load", "_loads", "_dump", "_dumps", "_Pickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


def test_the_patch_would_find_a_pickle(no_pickle: None) -> None:
    with pytest.raises(AssertionError, match="a pickle was read"):
        pickle.loads(b"N.")


def test_strategies_of_both_apis_pickle_nothing(no_pickle: None) -> None:
    legacy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    assert np.isfinite(Federation(legacy, fleet(3)).play(3).arrays()[0]).all()
    state = legacy.state_dict()
    CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg()).load_state_dict(state)
    message = MessageStrategy(Random(clients_per_round=2, seed=0), message_fedavg(), max_latency=9.0)
    _, models = play(message, FakeGrid(crowd(3)), 2)
    assert len(models) == 2


def _is_pickle(data: bytes) -> bool:
    """Whether bytes are a pickle of protocol 2 or later; a safetensors file may begin with the same two bytes."""
    if data[:1] != b"\x80":
        return False
    try:
        return bool(list(pickletools.genops(data)))
    except Exception:  # it raises many kinds
        return False


def test_pickles_are_known_by_their_bytes() -> None:
    assert [_is_pickle(pickle.dumps({"a": np.ones(3)}, protocol)) for protocol in range(2, 6)] == [True] * 4
    assert not _is_pickle(b"\x80\x01\x00\x00\x00\x00\x00\x00" + b'{"w": {"dtype": "F32"}}')


def test_a_run_pickles_nothing_and_no_file_of_it_is_a_pickle(no_pickle: None, tmp_path: Path) -> None:
    assert cli.main(["run", "smoke", "--engine", "vectorized", "--runs-dir", str(tmp_path)]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_bytes()
        assert not _is_pickle(data), path
        assert not data.startswith(b"PK"), path  # a zip file, as torch.save and np.savez write
