"""Write the traces of the authors' code: ``python tools/authors_traces.py FOLDER``.

FOLDER holds clones of the repositories in ``authors_sources.py``, each at its commit. Their code is read from there
and run as it stands; nothing of it is kept here, only the numbers that it returned. The README.md beside the traces,
in tests/golden/authors, says more.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.util
import logging
import platform
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.golden.authors.recipe import (
    ACTIVE_FL_CHOSEN,
    DIVFL,
    FEDCOR,
    FEDSCALE,
    FOLDER,
    LOSSES,
    OORT,
    PISCES,
    POWER_OF_CHOICE_CHOSEN,
    REFL,
    FedCorCase,
    Floats,
    GradientFleet,
    LateCase,
    LossCase,
    OortFleet,
    PiscesFleet,
    inputs,
)
from tools.authors_sources import SOURCES

EVERY = 10
"""One in so many rows holds the chances as well."""


class Watched:
    """NumPy for the authors' code, except that ``choice`` answers a draw and ``draws`` keeps what it was asked."""

    def __init__(self, answer: Callable[[list[int], int], Sequence[int]]) -> None:
        self.random = types.SimpleNamespace(choice=self._choice, seed=lambda seed: None)
        self.draws: list[tuple[list[int], int, list[float]]] = []
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def _choice(self, a: Any, size: int, replace: bool = True, p: Any = None) -> Any:
        if replace:
            raise SystemExit("a draw with replacement was not expected")
        among = [int(k) for k in a]
        self.draws.append((among, int(size), [] if p is None else [float(chance) for chance in p]))
        return np.array(self._answer(among, size), dtype=np.int64)


def module_at(path: Path, name: str, *missing: str) -> Any:
    """The module of a file, as one of a package; the ``missing`` modules of the package are empty."""
    package = types.ModuleType(name)
    package.__path__ = [str(path.parent)]
    sys.modules[name] = package
    for part in missing:
        sys.modules[f"{name}.{part}"] = types.ModuleType(f"{name}.{part}")
    spec = importlib.util.spec_from_file_location(f"{name}.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def oort_rounds(fleet: OortFleet, module: Any) -> list[list[Any]]:
    """The clients of each round from the second on, likeliest first; the code continues with its own choices."""
    settings = types.SimpleNamespace(
        exploration_factor=0.0, exploration_decay=0.95, exploration_min=0.0, exploration_alpha=0.3,
        round_threshold=fleet.percentile, round_penalty=fleet.penalty, sample_window=5.0,
        pacer_step=10**6, pacer_delta=5, blacklist_rounds=-1, blacklist_max_len=0.3,
        clip_bound=fleet.clip, cut_off_util=fleet.cut_off,
    )  # fmt: skip
    selector = module.create_training_selector(settings)
    module.np2 = watched = Watched(lambda among, size: among[:size])  # the code sorts them by their scores
    sizes, durations, _ = fleet.clients_of()
    everybody = range(fleet.clients)

    def report(clients: Iterable[int], number: int) -> None:
        losses = fleet.losses(number)
        for k in clients:
            told = {"reward": sizes[k] * losses[k], "duration": durations[k], "time_stamp": number, "status": True}
            selector.update_client_util(k, told)

    for k in everybody:
        selector.register_client(k, {"reward": sizes[k], "duration": durations[k]})
    report(everybody, 1)
    selector.training_round = 1  # it counts its own choices: so the one of round t takes ln t, not ln(t - 1)
    rows: list[list[Any]] = []
    for number in range(2, fleet.rounds + 2):
        chosen = [int(k) for k in selector.select_participant(fleet.chosen, feasible_clients=set(everybody))]
        _, _, chances = watched.draws.pop()
        odds = [chance / chances[0] for chance in chances[: fleet.chosen]] if number % EVERY == 0 else []
        rows.append([fleet.setting, fleet.seed, number, joined(chosen), joined(odds)])
        report(chosen, number)
    return rows


def fedcor_choice(case: FedCorCase, module: Any) -> list[int]:
    """The clients in the order in which the code takes them."""
    import torch

    process = module.Kernel_GPR(case.clients, dimension=case.dimension, kernel=module.Poly_Kernel, order=1, Normalize=0)
    process.Projection.PMatrix.data = torch.tensor(case.embedding(), dtype=torch.float32)
    process.discount = torch.tensor(case.discounts(), dtype=torch.float32)
    sizes = case.sizes()
    with torch.no_grad():
        return [int(k) for k in process.Select_Clients(case.chosen, 0.0, sizes / sizes.sum())]


def lines_at(path: Path, wanted: Callable[[ast.AST], bool]) -> list[ast.stmt]:
    """The body of the one ``if`` of a script that is wanted."""
    found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if wanted(node)]
    if len(found) != 1 or not isinstance(found[0], ast.If):
        raise SystemExit(f"{path}: expected one such branch, found {len(found)}")
    return found[0].body


def branch(option: str, name: str) -> Callable[[ast.AST], bool]:
    """Whether a node is ``if args.option:`` with a body that first assigns to ``name``."""

    def wanted(node: ast.AST) -> bool:
        if not isinstance(node, ast.If) or ast.unparse(node.test) != f"args.{option}":
            return False
        first = node.body[0]
        return isinstance(first, ast.Assign) and ast.unparse(first.targets[0]) == name

    return wanted


def run(body: list[ast.stmt], known: dict[str, Any]) -> dict[str, Any]:
    """Run statements with these names, and return all names after them."""
    exec(compile(ast.Module(body=body, type_ignores=[]), "authors", "exec"), known)
    return known


def active_fl_choice(case: LossCase, path: Path) -> list[Any]:
    """Those that are not dropped, by valuation, their chances, how many are drawn so and how many uniformly."""
    sizes, watched = case.sizes(), Watched(lambda among, size: among[:size])
    args = types.SimpleNamespace(
        num_users=case.clients, alpha1=case.dropped, alpha2=case.temperature, alpha3=case.uniform
    )
    known = {
        "np": watched,
        "args": args,
        "m": ACTIVE_FL_CHOSEN,
        "weights": sizes / sizes.sum(),
        "list_loss": case.losses().tolist(),
        "train_dataset": range(int(sizes.sum())),
    }
    run(lines_at(path, branch("afl", "AFL_Valuation")), known)
    run(lines_at(path, branch("afl", "delete_num")), known)
    (kept, by_value, chances), (others, uniform, _) = watched.draws
    if sorted(others + kept[:by_value]) != list(range(case.clients)):
        raise SystemExit("the uniform part is drawn from others than expected")
    told = chances if case.seed % EVERY == 0 else [chances[0], chances[-1]]
    return [case.seed, joined(kept), by_value, uniform, joined(told)]


def power_of_choice_choice(case: LossCase, path: Path) -> list[Any]:
    """The chosen candidates."""
    sizes, candidates = case.sizes(), case.candidates()
    watched = Watched(lambda among, size: candidates.tolist())
    known = {
        "np": watched,
        "args": types.SimpleNamespace(num_users=case.clients, d=len(candidates)),
        "m": POWER_OF_CHOICE_CHOSEN,
        "weights": sizes / sizes.sum(),
        "gt_global_losses": [case.losses().tolist()],
    }
    chosen = run(lines_at(path, branch("power_d", "A")), known)["idxs_users"]
    if watched.draws != [(list(range(case.clients)), len(candidates), (sizes / sizes.sum()).tolist())]:
        raise SystemExit("the candidates are drawn in another way than expected")
    return [case.seed, joined(sorted(int(k) for k in chosen))]


def divfl_class(path: Path) -> Any:
    """The class of the file with its greedy methods alone: the others, and the imports, need TensorFlow 1."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BaseFedarated"]
    names = ("greedy", "lazy_greedy")
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in names]
    return run([found], {"np": np})["BaseFedarated"]


def divfl_rounds(fleet: GradientFleet, authors: Any) -> tuple[list[list[Any]], int]:
    """The clients of each round, and in how many rounds the code's other greedy method takes others."""
    from sklearn.metrics import pairwise_distances

    server = authors()
    server.clients = list(range(fleet.clients))
    gradients: Floats = fleet.first()
    # distances as in train of flearn/trainers/fedavg.py, lines 62-63 and 132-133, which needs TensorFlow 1
    server.norm_diff = pairwise_distances(gradients, metric="euclidean")
    np.fill_diagonal(server.norm_diff, 0)
    rows: list[list[Any]] = []
    other = 0
    for number in range(1, fleet.rounds + 1):
        chosen = sorted(int(k) for k in server.lazy_greedy(fleet.chosen))
        other += chosen != sorted(int(k) for k in server.greedy(fleet.chosen))
        rows.append([fleet.kind, fleet.clients, fleet.chosen, fleet.seed, number, joined(chosen)])
        gradients[chosen] = fleet.next(number, gradients[chosen])
        server.norm_diff[chosen] = pairwise_distances(gradients[chosen], gradients, metric="euclidean")
        server.norm_diff[:, chosen] = server.norm_diff[chosen].T
    return rows, other


class Binomials:
    """NumPy for the authors' code; it keeps the draws of a binomial number, and their chance."""

    def __init__(self, seed: int) -> None:
        self.random = types.SimpleNamespace(binomial=self._binomial, seed=lambda seed: None)
        self._generator = np.random.default_rng(seed)
        self.drawn: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def _binomial(self, n: int, p: float, size: int) -> Any:
        found = self._generator.binomial(n, p, size)
        self.drawn.append((int(found[0]), p))
        return found


def pisces_module(path: Path) -> tuple[Any, Any]:
    """The module of the file, and that of its configuration; the code of Oort in the same package is not loaded."""
    for name, folder in (("plato", path.parents[1]), ("plato.client_managers", path.parent)):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    config, oort = types.ModuleType("plato.config"), types.ModuleType("plato.client_managers.oort")
    config.Config, oort.create_training_selector = None, None  # type: ignore[attr-defined]
    sys.modules |= {config.__name__: config, oort.__name__: oort}
    return importlib.import_module("plato.client_managers.sirius"), config


def pisces_rounds(fleet: PiscesFleet, module: Any, config: Any) -> list[list[Any]]:
    """The exploited and the explored clients of each round; the code continues with its own choices."""
    sirius = types.SimpleNamespace(
        explore_factor=0.9, exploration_decaying_factor=0.98, min_explore_factor=0.3, seed=fleet.seed,
        staleness_penalty_factor=fleet.beta, statistical_only=True, version=2,
    )  # fmt: skip
    settings = types.SimpleNamespace(
        clients=types.SimpleNamespace(total_clients=fleet.clients, per_round=fleet.chosen),
        server=types.SimpleNamespace(asynchronous=types.SimpleNamespace(seconds_per_step=5, sirius=sirius)),
        data=types.SimpleNamespace(),
    )
    config.Config = sys.modules["plato.client_managers.base"].Config = module.Config = lambda: settings  # type: ignore[attr-defined]
    module.np = watched = Binomials(fleet.seed)
    manager = module.ClientManager()
    for k, size in enumerate(fleet.sizes().tolist()):
        manager.set_trainset_size(k + 1, size)  # its clients begin with 1
    rows: list[list[Any]] = []
    for number in range(1, fleet.rounds + 1):
        present, losses, staleness = fleet.present(number), fleet.losses(number), fleet.staleness(number)
        before = set(manager.explored_clients)
        chosen = manager.choose_clients([k + 1 for k in present.tolist()], fleet.chosen, use_cache=False)
        parts = [sorted(k - 1 for k in chosen if (k in before) is explored) for explored in (True, False)]
        [(planned, epsilon)] = watched.drawn
        watched.drawn.clear()
        rows.append([fleet.beta, fleet.seed, number, planned, joined([epsilon]), *map(joined, parts)])
        for k in chosen:
            manager.record_training_start(k, 0.0, number - int(staleness[k - 1]))
            manager.record_training_end(k, 1.0)
            manager.update_utilities_using_loss(k, losses[k - 1])
        manager.record_aggregation(chosen, 1.0, number)
    return rows


def refl_function(path: Path) -> Callable[[Any], None]:
    """The method of the file alone: its module starts a server."""
    import math

    import torch

    found = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "update_importance"
    ]
    function: Callable[[Any], None] = run(list(found), {"torch": torch, "math": math, "np": np})["update_importance"]
    return function


def refl_weights(case: LateCase, authors: Callable[[Any], None]) -> list[Any]:
    """The weight of each late update. The parameters hold the sum of the updates in time at that moment."""
    import torch

    def layers(numbers: Floats) -> list[torch.Tensor]:
        return [torch.tensor(part) for part in (numbers[: case.first], numbers[case.first :])]

    parameters = [types.SimpleNamespace(data=part) for part in layers(case.fresh().sum(axis=0))]
    late = range(len(case.late()))
    aggregator = types.SimpleNamespace(
        round_stale_param={c: layers(case.late()[c]) for c in late},
        update_stale_rounds=dict(enumerate(case.staleness().tolist())),
        client_importance=dict.fromkeys(late, 1.0),
        tasks_round=len(case.fresh()),
        args=types.SimpleNamespace(stale_factor=-4, stale_beta=0.35),
        scale_coff=case.scale_coff,
        model=types.SimpleNamespace(parameters=lambda: parameters),
    )
    authors(aggregator)
    return [case.scale_coff, case.seed, joined(aggregator.client_importance[c] for c in late)]


def joined(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.13g}" for number in numbers)


def write(name: str, told: Sequence[str], columns: str, rows: Iterable[Sequence[Any]]) -> None:
    """Write a trace: a head of comments, the columns' names and the rows."""
    source = SOURCES[name]
    head = [
        f"repository: https://github.com/{source.repository}",
        f"commit: {source.commit}",
        f"code: {source.file}, {source.code}",
        f"licence of that code: {source.licence}; nothing of it is copied here, these are numbers that it returned",
        f"made by: tools/authors_traces.py on {date.today()}",
        *told,
    ]
    with (FOLDER / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in head)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns.split())
        writer.writerows(rows)


def main() -> None:
    """Run the authors' code and write every trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="holds the clones, each at its commit")
    folder = parser.parse_args().folder
    import sklearn
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    path = {name: source.path(folder) for name, source in SOURCES.items()}
    base = f"Python {platform.python_version()}, NumPy {np.__version__}"

    odds = f"odds: chance of each of them to be drawn first, over that of the first; in one row of {EVERY}"
    for name, fleets in (("oort", OORT), ("fedscale", FEDSCALE)):
        # Oort's other half, the choice of clients for tests, imports Gurobi in these modules
        module = module_at(path[name], f"authors_{name}", "utils", "utils.lp")
        told = [f"versions: {base}", f"inputs: sha256 {inputs(fleets)}", odds]
        write(
            name,
            told,
            "setting seed round chosen odds",
            [row for fleet in fleets for row in oort_rounds(fleet, module)],
        )

    module = module_at(path["fedcor"], "authors_fedcor")
    rows = [[case.seed, joined(fedcor_choice(case, module))] for case in FEDCOR]
    told = [f"versions: {base}, torch {torch.__version__}", f"inputs: sha256 {inputs(FEDCOR)}"]
    write("fedcor", [*told, "chosen: in the order of the choice"], "seed chosen", rows)

    told = [f"versions: {base}", f"inputs: sha256 {inputs(LOSSES)}"]
    rows = [active_fl_choice(case, path["active-fl"]) for case in LOSSES]
    more = [
        "kept: those that are not dropped, lowest valuation first",
        "chances: of the first and the last of them to be drawn first; of all of them in one row of ten",
    ]
    write("active-fl", [*told, *more], "seed kept by_value uniform chances", rows)
    rows = [power_of_choice_choice(case, path["power-of-choice"]) for case in LOSSES]
    write("power-of-choice", told, "seed chosen", rows)

    authors = divfl_class(path["divfl"])
    runs = [divfl_rounds(fleet, authors) for fleet in DIVFL]
    told = [
        f"versions: {base}, scikit-learn {sklearn.__version__} (distances)",
        f"inputs: sha256 {inputs(DIVFL)}",
        f"greedy of the same file takes another set than lazy_greedy in {sum(other for _, other in runs)} rounds",
    ]
    write("divfl", told, "kind clients count seed round chosen", [row for rows, _ in runs for row in rows])

    module, config = pisces_module(path["pisces"])
    told = [
        f"versions: {base}",
        f"inputs: sha256 {inputs(PISCES)}",
        "planned: the binomial number of places for unexplored clients, drawn with the chance epsilon",
    ]
    write(
        "pisces",
        told,
        "beta seed round planned epsilon exploited explored",
        [row for fleet in PISCES for row in pisces_rounds(fleet, module, config)],
    )

    authors = refl_function(path["refl"])
    told = [f"versions: {base}, torch {torch.__version__}", f"inputs: sha256 {inputs(REFL)}"]
    write("refl", told, "scale_coff seed weights", [refl_weights(case, authors) for case in REFL])


if __name__ == "__main__":
    main()
