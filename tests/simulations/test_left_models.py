"""A simulation that an error ends leaves its rounds and the last model in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common import Context, RecordDict

from fedsel_flwr.report.run_folder import read_history, read_model
from fedsel_flwr.simulations import engine, load_scenario, simulate
from fedsel_flwr.simulations.on_flower import app
from tests.simulations.inprocess import in_process
from tests.simulations.test_driving import SMOKE, grid_of


class Mistake(Exception):
    """In somebody's own code."""


def _mistake(record: Any) -> None:
    if record.round == 2:
        raise Mistake


def _run(way: str, rounds: int, **options: Any) -> Any:
    api = {} if way == "vectorized" else {"api": way}
    scenario = load_scenario("smoke", {"rounds": rounds, "selector": "round-robin", **api})
    return simulate(scenario, engine="vectorized" if way == "vectorized" else "ray", **options)


@pytest.mark.parametrize(("way", "every"), [("legacy", 5), ("message", 0), ("vectorized", 0), ("vectorized", 5)])
def test_it_is_there_without_a_checkpoint_that_was_due(
    way: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "run_simulation", in_process)
    expected = _run(way, 2).arrays
    with pytest.raises(Mistake) as caught:
        _run(way, 3, folder=tmp_path, checkpoint_every=every, on_round=_mistake)
    assert caught.value.__notes__[0].startswith("the model after round 2 is strategy.last_model")
    for array, own in zip(read_model(tmp_path, "model-after-round-2.safetensors"), expected, strict=True):
        np.testing.assert_array_equal(array, own)
    assert len(read_history(tmp_path).rounds) == 2
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("round-*"))
    assert checkpoints == (["round-000002.safetensors"] if every else [])
    _run(way, 3, folder=tmp_path, checkpoint_every=every, resume=True)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("api", ["legacy", "message"])
def test_flwr_run_leaves_it_too(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "_log_round", _mistake)
    config: dict[str, Any] = {"scenario": "smoke", "api": api, "runs_dir": str(tmp_path)}
    context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(Mistake):
        app.main(grid_of(SMOKE.model_copy(update={"api": api})), context)
    (folder,) = tmp_path.iterdir()
    assert len(read_history(folder).rounds) == 2
    path = folder / "model-after-round-2.safetensors"
    assert read_model(folder, path.name)[0].dtype == np.float32
    assert f"the rounds that were done, and the model after the last of them: {path}" in caplog.text
