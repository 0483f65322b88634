"""Runs read and write no pickle; ``test_imports.py`` has the files that may."""

from __future__ import annotations

import _pickle
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr import cli
from fedsel_flwr.selectors import Random
from fedsel_flwr.simulations import vectorized
from fedsel_flwr.simulations.comparisons import parallel_runs
from fedsel_flwr.strategies import CSUCB
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import Federation, fedavg, fleet
from tests.strategies.message.helpers import FakeGrid, crowd, play
from tests.strategies.message.helpers import fedavg as message_fedavg


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


def test_strategies_of_both_apis_pickle_nothing(no_pickle: None) -> None:
    legacy = CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg())
    assert np.isfinite(Federation(legacy, fleet(3)).play(3).arrays()[0]).all()
    CSUCB(clients_per_round=2, max_latency=9.0, seed=0, base=fedavg()).load_state_dict(legacy.state_dict())
    message = MessageStrategy(Random(clients_per_round=2, seed=0), message_fedavg(), max_latency=9.0)
    _, models = play(message, FakeGrid(crowd(3)), 2)
    assert len(models) == 2


def is_pickle(data: bytes) -> bool:
    """Whether bytes are a pickle of protocol 2 or later; a safetensors file may begin with the same two bytes."""
    try:
        return data[:1] == b"\x80" and bool(list(pickletools.genops(data)))
    except Exception:  # it raises many kinds
        return False


def test_pickles_are_found(request: pytest.FixtureRequest) -> None:
    assert all(is_pickle(pickle.dumps({"a": np.ones(3)}, protocol)) for protocol in range(2, 6))
    assert not is_pickle(b"\x80\x01\x00\x00\x00\x00\x00\x00" + b'{"w": {"dtype": "F32"}}')
    request.getfixturevalue("no_pickle")
    with pytest.raises(AssertionError, match="a pickle was read"):
        pickle.loads(b"N.")


def test_a_run_pickles_nothing_and_no_file_of_it_is_a_pickle(no_pickle: None, tmp_path: Path) -> None:
    assert cli.main(["run", "smoke", "--engine", "vectorized", "--runs-dir", str(tmp_path)]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_bytes()
        assert not is_pickle(data), path
        assert not data.startswith(b"PK"), path  # a zip file, as torch.save and np.savez write
