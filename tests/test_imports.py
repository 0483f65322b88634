"""Import rules of the package: one way, no circles, nothing heavy, no pickles, one file for Flower's inner modules."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import NamedTuple

from fedsel_flwr.flower_entries import ENTRIES, installed_version, missing
from tests.processes import run_python
from tools.house import LAYERS, PACKAGE, ROOT, House, Room

HOUSE = House.here()
LEVEL = {part: height for height, layer in enumerate(reversed(LAYERS)) for part in layer}
EVERYONE = {"", "errors", "__version__"}
"""What every part may import."""
FLOWER_PUBLIC = (
    "flwr.app", "flwr.client", "flwr.clientapp", "flwr.common", "flwr.server", "flwr.server.strategy", "flwr.serverapp",
    "flwr.serverapp.strategy", "flwr.simulation",
)  # fmt: skip
DEPRECATED = {"run_simulation", "start_simulation", "start_client", "start_server", "start_numpy_client", "Driver"}
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CARRIERS = {"loky", "multiprocessing"}
"""Modules that pickle what they carry."""
PICKLE_CALLS = {("torch", "load"), ("torch", "save"), ("pd", "read_pickle"), ("pandas", "read_pickle")}
MAY_PICKLE = {
    "simulations/on_flower/ray_session.py": "Ray carries the data to its actors; of pickle only an error's name",
    "simulations/comparisons/parallel_runs.py": "runs of a comparison go to processes that this one starts",
    "testing/conformance.py": "a selector's factory goes to a process that this one starts",
}
"""Files that pickle, or use what pickles, and what for; docs/security.md names them too."""


class Import(NamedTuple):
    """One imported name; empty for a whole module. ``loads``: the import runs when the importing module is loaded."""

    line: int
    module: str
    name: str
    loads: bool


def imports(tree: ast.AST, loads: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, one.name, "", loads) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (Import(node.lineno, module, one.name, loads) for one in node.names)
        else:
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            )
            yield from imports(node, loads and not later)


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: fedsel_flwr.selectors.bsfl -> selectors."""
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def target_of(one: Import) -> str:
    return f"{one.module}.{one.name}" if one.module == PACKAGE else one.module


def test_imports_point_one_way() -> None:
    wrong = []
    for room in HOUSE.rooms:
        own = part_of(room.module)
        assert own in LEVEL or not own, f"{room.path}: name the new part {own!r} in LAYERS of tools/house.py"
        lower = {part for part, level in LEVEL.items() if own and level < LEVEL[own]}
        for one in imports(room.tree):
            ours = one.module.startswith(".") or one.module.split(".")[0] == PACKAGE
            if ours and part_of(target_of(one)) not in lower | EVERYONE | {own}:
                wrong.append(f"{room.path}:{one.line} imports {target_of(one)}")
    assert wrong == []


def test_every_room_can_be_imported_first() -> None:
    """A circle, ``__init__`` files included, works or fails with the order of imports, so with the command."""
    known = {room.module for room in HOUSE.rooms}
    needs: dict[str, set[str]] = {module: set() for module in known}
    for room in HOUSE.rooms:
        for one in imports(room.tree):
            if one.loads and one.name:
                target = f"{one.module}.{one.name}"
                parts = (target if target in known else one.module).split(".")
                loaded = known & {".".join(parts[:k]) for k in range(1, len(parts) + 1)}
                needs[room.module] |= {each for each in loaded if not f"{room.module}.".startswith(f"{each}.")}
    left = dict(needs)
    while ready := [module for module, others in left.items() if not others & left.keys()]:
        for module in ready:
            del left[module]
    assert sorted(left) == []


LIGHT = """
import importlib, pkgutil, sys

def lacks(step, *heavy):
    found = sorted(set(heavy) & {name.partition(".")[0] for name in sys.modules})
    assert not found, f"{step} loads {found}"

heavy = ("flwr", "torch", "ray", "pandas", "scipy", "sklearn", "matplotlib", "pyarrow")
for name in ("fedsel_flwr", "fedsel_flwr.selectors", "fedsel_flwr.testing", "fedsel_flwr.theory"):
    importlib.import_module(name)
    lacks(name, *heavy, "pydantic")
from fedsel_flwr.cli import main
for argv in (["list"], ["list", "--json"], ["cite"], ["cite", "bsfl"]):
    assert main(argv) == 0
    lacks(f"fedsel {argv[0]}", *heavy, "datasets", "pydantic")
assert main(["show", "smoke"]) == 0
lacks("fedsel show", *heavy, "datasets")
from fedsel_flwr.simulations.scenario_files import load_scenario, scenario_names
import fedsel_flwr.clients.phones, fedsel_flwr.clients.system
assert [load_scenario(name).training.settings() for name in scenario_names()]
lacks("a scenario", *heavy, "datasets")
for part in ("rounds", "selectors", "aggregation", "wireless", "checks"):
    package = importlib.import_module(f"fedsel_flwr.{part}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"fedsel_flwr.{part}."):
        importlib.import_module(module.name)
lacks("rounds", "flwr", "torch", "ray")
import fedsel_flwr.report, fedsel_flwr.report.run_folder, fedsel_flwr.report.plots
lacks("report", "rich", "matplotlib", "pyarrow", "safetensors", "flwr", "torch")
import fedsel_flwr.strategies, fedsel_flwr.strategies.message  # Flower may load Ray
lacks("strategies", "torch")
"""


def test_imports_are_light() -> None:
    """Selectors need NumPy alone, ``rounds`` neither Flower nor torch nor Ray, and ``fedsel list`` nothing heavy."""
    done = run_python("-c", LIGHT)
    assert done.stderr == ""
    assert "smoke" in done.stdout


# ---- Flower ----------------------------------------------------------------------------------------------------------


def of_flower(room: Room) -> Iterator[Import]:
    return (one for one in imports(room.tree) if one.module.split(".")[0] == "flwr")


def is_public(one: Import) -> bool:
    if one.module not in FLOWER_PUBLIC or one.name in DEPRECATED:
        return False
    return one.name in importlib.import_module(one.module).__all__


def test_one_file_imports_what_flower_has_deprecated_or_not_made_public() -> None:
    """Each of its names is in the table that ``fedsel doctor`` checks, and is there."""
    (inside,) = [room for room in HOUSE.rooms if room.path.as_posix() == f"{PACKAGE}/flower.py"]
    others = [room for room in HOUSE.rooms if room is not inside]
    assert [f"{room.path}:{one}" for room in others for one in of_flower(room) if not is_public(one)] == []
    assert {entry.name for entry in ENTRIES} == {f"{one.module}.{one.name}" for one in of_flower(inside)}
    assert list(missing(installed_version())) == []


# ---- pickles ---------------------------------------------------------------------------------------------------------


def pickles(tree: ast.AST) -> Iterator[str]:
    """What a source has to do with pickles: a program, run by whoever reads one that somebody else has changed."""
    for one in imports(tree):
        name = f"{one.module}.{one.name}"
        if set(name.split(".")) & (PICKLERS | CARRIERS):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in PICKLERS | CARRIERS:  # importlib.import_module("dill")
            yield str(node.value)
        if isinstance(node, ast.Attribute) and (getattr(node.value, "id", ""), node.attr) in PICKLE_CALLS:
            yield f"torch.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


def test_only_the_named_files_have_to_do_with_pickles() -> None:
    found = {room.path.relative_to(PACKAGE).as_posix(): sorted(set(pickles(room.tree))) for room in HOUSE.rooms}
    assert {name for name, offences in found.items() if offences} == set(MAY_PICKLE), found
    page = ROOT / "docs" / "security.md"
    assert not page.exists() or not [name for name in MAY_PICKLE if name not in page.read_text(encoding="utf-8")]
    for source in (
        "import pickle", "import a, dill.x", "from joblib import load", "from torch import multiprocessing as m",
        "importlib.import_module('cloudpickle')", "torch.load(f)", "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)", "import shelve", "def f():\n    import marshal",
    ):  # fmt: skip
        assert list(pickles(ast.parse(source))), source
    assert not list(pickles(ast.parse("np.load(f, allow_pickle=False); safetensors.load(f); json.load(f)")))
