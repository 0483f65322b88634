"""Data and partition of one's own are fixed, or functions of the seed; the verdict says which of the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations import Comparison, OwnData, compare, load_scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import World

KEYS = {"rounds": 2, "num_clients": 5, "clients_per_round": 2, "engine": "vectorized", "target_accuracy": 0.01}
SMOKE = load_scenario("smoke", KEYS)
MINE = """
import numpy as np
from fedsel_flwr.simulations import OwnData

def examples(seed):
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(60, 4))
    return inputs, (inputs[:, 0] > 0).astype(int)

def by_seed(seed):
    rows = np.random.default_rng(seed).permutation(50)
    return OwnData(examples(seed), examples(0), partition=[rows[10 * k : 10 * k + 10] for k in range(5)])

def fixed():
    return OwnData(examples(1), examples(0), partition=[range(10 * k, 10 * k + 10) for k in range(5)])

def dealt():
    return OwnData(examples(1), examples(0))
"""


def examples(seed: int) -> tuple[Any, Any]:
    inputs = np.random.default_rng(seed).normal(size=(60, 4))
    return inputs, (inputs[:, 0] > 0).astype(int)


def dealt(seed: int) -> list[Any]:
    rows = np.random.default_rng(seed).permutation(50)
    return [rows[10 * k : 10 * k + 10] for k in range(5)]


BLOCKS = [range(10 * k, 10 * k + 10) for k in range(5)]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than these runs."""
    for name in ("plot", "plot_rounds"):
        monkeypatch.setattr(Comparison, name, lambda self, path, *rest: Path(path).touch())


def sentence(data: Any, folder: Path | None = None) -> str:
    comparison = compare(SMOKE, ["round-robin", "random"], seeds=2, data=data, folder=folder)
    assert comparison.verdict is not None
    return comparison.verdict.sentence


def test_a_partition_may_be_a_function_of_the_seed() -> None:
    data = OwnData(examples(1), examples(0), partition=dealt)
    for seed in (1, 2):
        world = World(SMOKE.model_copy(update={"seed": seed}), OwnParts(data=data))
        assert [rows.tolist() for rows in world.partitions] == [sorted(rows.tolist()) for rows in dealt(seed)]


def test_data_may_be_a_function_of_the_seed() -> None:
    comparison = compare(SMOKE, ["round-robin", "random"], seeds=2, data=lambda seed: (examples(seed), examples(0)))
    first, second, third, fourth = (run.result.fingerprints["data"] for run in comparison.runs)
    assert (first, third) == (second, fourth)
    assert first != third


def test_the_sentence_says_which_it_was(tmp_path: Path) -> None:
    fixed = OwnData(examples(1), examples(0), partition=BLOCKS)
    said = sentence(fixed, tmp_path / "fixed")
    assert "; on the same 2 seeds and one partition for all of them, with 95 % intervals, " in said
    loaded = Comparison.load(tmp_path / "fixed").verdict
    assert loaded is not None
    assert loaded.sentence == said
    assert "on the same 2 seeds and partitions," in sentence(OwnData(examples(1), examples(0), partition=dealt))
    assert "on the same 2 seeds and partitions," in sentence((examples(1), examples(0)))
    assert "on the same 2 seeds, data sets and partitions," in sentence(lambda seed: (examples(seed), examples(0)))
    own = sentence(lambda seed: OwnData(examples(seed), examples(0), partition=BLOCKS))
    assert "on the same 2 seeds and data sets, with one partition for all of them," in own


@pytest.mark.parametrize(
    ("name", "said"),
    [("by_seed", "2 seeds, data sets and partitions"), ("fixed", "2 seeds and one partition for all of them"),
     ("dealt", "2 seeds and partitions")],
)  # fmt: skip
def test_on_the_command_line(name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    argv = ["compare", "smoke", "--selectors", "round-robin,random", "--seeds", "2", "--runs-dir", str(tmp_path)]
    keys = {key: value for key, value in KEYS.items() if key != "engine"} | {
        "data.dataset": f"{tmp_path}/mine.py:{name}"
    }
    assert main([*argv, *(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))]) == 0
    assert f"; on the same {said}" in capsys.readouterr().out.replace("\n", " ")


def test_a_function_that_fails_is_named_with_the_seed() -> None:
    def broken(seed: int) -> Any:
        raise KeyError(seed)

    with pytest.raises(ParameterError, match=r"data 'broken' cannot be made for seed 1: KeyError: 1"):
        compare(SMOKE, ["round-robin"], data=broken)
    with pytest.raises(ParameterError, match=r"the partition of data 'own' cannot be made for seed 1: KeyError: 1"):
        compare(SMOKE, ["round-robin"], data=OwnData(examples(1), examples(0), partition=broken))
    with pytest.raises(
        ParameterError, match=r"data 'nothing' must be fedsel_flwr.simulations.OwnData, or a pair .* got NoneT"
    ):
        compare(SMOKE, ["round-robin"], data=nothing)


def nothing(seed: int) -> None:
    """No data."""
