"""Reproduction of figures: simulate the missing runs, judge the claims, draw the pictures.

The output folder has a CSV file of runs (:mod:`fedsel_flwr.simulations.reproductions.rows`), a table of the checks,
``<paper>-checks.csv``, and the pictures. A repeated command simulates only the missing runs.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedsel_flwr.checks import whole
from fedsel_flwr.errors import ParameterError, refusing_faults
from fedsel_flwr.report.run_folder import atomic_write
from fedsel_flwr.rounds.storage import check_entries
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, cluster_for_runs
from fedsel_flwr.simulations.reproductions.claims import CHECK_COLUMNS, FigureVerdict, verdict_of
from fedsel_flwr.simulations.reproductions.paper_figure import PaperFigure, figure_names, load_figure
from fedsel_flwr.simulations.reproductions.rows import Cell, Rows, cells_of, open_rows, results_of, simulate_run
from fedsel_flwr.simulations.scenario_files import replace_keys

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparisons.parallel_runs import Executor

SMOKE_ROUNDS = 6
"""Largest number of rounds in a smoke test."""
Announce = Callable[[str], None]


def reproduce(
    names: Sequence[str],
    folder: str | Path,
    *,
    jobs: int | None = None,
    seeds: int | None = None,
    data_dir: str = "",
    ray_address: str | None = None,
    announce: Announce = print,
) -> dict[str, FigureVerdict]:
    """Simulate the missing runs of figures; draw the figures and write the checks of their papers.

    Args:
        names: Names of figures.
        folder: Folder of the CSV files and pictures; created if needed.
        jobs: Number of processes. If None, 1, or on a cluster as many runs as it has room for.
        seeds: Number of seeds. If None, the number of each figure.
        data_dir: Folder of the data sets. If empty, $FEDSEL_DATA.
        ray_address: HOST:PORT of the Ray cluster that executes the runs, each with one core. If None or "local", this
            machine.
        announce: Function that receives each line of the progress.

    Returns:
        Name -> verdict.

    Raises:
        ParameterError: A figure does not exist, its data are missing, or an argument cannot be used.
        RunError: No Ray cluster replies at the address.
    """
    from fedsel_flwr.simulations.reproductions.figure_pictures import draw

    where = cluster_for_runs(ray_address)
    if jobs is not None:
        whole("jobs", jobs, 1)
    target, figures = Path(folder), {name: load_figure(name) for name in names}
    check_entries(target)
    for figure in figures.values():
        if figure.has_runs:
            cells, rows = cells_of(figure, seeds, data_dir), open_rows(target, figure)
            _play_missing(figure, cells, rows, jobs, where, announce)
    found = {}
    with refusing_faults(f"the files in {str(target)!r} cannot be used. Delete them, or restore them from a copy"):
        for name, figure in figures.items():
            results = results_of(figure, target, seeds)
            draw(figure, results, target)
            found[name] = verdict_of(figure, results)
            announce(f"{name}: {found[name].word}")
        for paper in dict.fromkeys(figure.paper for figure in figures.values()):
            write_checks(target, paper, found)
    return found


def write_checks(folder: Path, paper: str, found: Mapping[str, FigureVerdict] = MappingProxyType({})) -> Path:
    """Write the checks of a paper's figures, those without all of their runs too, to ``<paper>-checks.csv``.

    Args:
        folder: Folder of the CSV files with the runs.
        paper: A key of :data:`~fedsel_flwr.simulations.reproductions.paper_figure.PAPERS`.
        found: Name -> verdict, for figures that have been judged already.

    Returns:
        The file. It has a line for each check, and one for a figure without checks or runs.
    """
    lines: list[dict[str, Any]] = []
    for name in (name for name in figure_names() if name.startswith(f"{paper}-")):
        figure = load_figure(name)
        verdict = found[name] if name in found else verdict_of(figure, results_of(figure, folder))
        own = {"figure": name, "verdict": verdict.word, "claim": figure.claim}
        lines += [own | finding.facts() for finding in verdict.findings] or [own]
    path = folder / f"{paper}-checks.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CHECK_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return path


def _play_missing(
    figure: PaperFigure, cells: list[Cell], rows: Rows, jobs: int | None, where: RayResources | None, announce: Announce
) -> None:
    """Simulate the runs of a figure that have no row, and add a row when a run has finished."""
    unique = {cell.fingerprint: cell for cell in cells}
    # Runs of the same seed and cell share the data of their scenario.
    missing = sorted(
        (cell for mark, cell in unique.items() if not rows.done(mark)), key=lambda cell: (cell.scenario.seed, cell.cell)
    )
    done = len(unique) - len(missing)
    announce(f"{figure.name}: {done} of {len(unique)} runs are finished")
    if not missing:
        return
    with contextlib.closing(_simulated(missing, jobs, where)) as found:
        for _, row in found:
            rows.add(row)
            done += 1
            took = f"{row['selector']}, seed {row['seed']} took {row['cpu_s']:.0f} s"
            announce(f"{figure.name}: {took} ({done} of {len(unique)})")
    rows.sort()


def _simulated(
    cells: Sequence[Cell], jobs: int | None, where: RayResources | None
) -> Generator[tuple[int, dict[str, Any]]]:
    """Return the rows of runs as they finish: here, in other processes, or on a cluster, with one core each."""
    if where is None and jobs in (None, 1):
        return ((number, cell.simulate()) for number, cell in enumerate(cells))
    from fedsel_flwr.simulations.comparisons.cluster import Cluster
    from fedsel_flwr.simulations.comparisons.parallel_runs import Processes

    # Other runners read no data.
    trained = [cell.scenario for cell in cells if cell.figure.runner == "training"]
    executor: Executor = Cluster(where, jobs, scenarios=trained) if where else Processes(jobs or 1, threads=1)
    names = [f"{cell.figure.name}, {cell.arm}, seed {cell.scenario.seed}" for cell in cells]
    return executor.map(_simulate, cells, names)


def _simulate(cell: Cell, _shared: None, _report: Callable[[int], None]) -> dict[str, Any]:
    return cell.simulate()


def smoke(names: Sequence[str], data_dir: str = "", announce: Announce = print) -> None:
    """Run a short version of figures: every arm and cell for a few rounds on one seed, without a verdict.

    Figures that need the same short run share it.

    Args:
        names: Names of figures.
        data_dir: Folder of the data sets. If a data set is missing, the digits of scikit-learn replace it.
        announce: Function that receives each line.

    Raises:
        ParameterError: A figure does not exist, or a run is impossible.
    """
    done: set[str] = set()
    for name in names:
        figure = load_figure(name)
        if not figure.arms:
            announce(f"{name}: {'illustration' if figure.illustration else 'left out'}, nothing to run")
            continue
        start, replaced = time.monotonic(), False
        unique = {cell.fingerprint: cell for cell in cells_of(figure, 1, data_dir)}
        for cell in unique.values():
            short, own = shortened(cell, data_dir)
            replaced |= own
            if short.fingerprint in done:
                continue
            done.add(short.fingerprint)
            outcomes, _ = simulate_run(short)
            if not any(math.isfinite(value) for value in outcomes.values()):
                raise ParameterError(f"{name}: the run {cell.run!r} of {cell.arm!r} has no finite outcome. Report it")
        remark = " on digits, because the data set is missing" if replaced else ""
        announce(f"{name}: {len(unique)} short run{'s' * (len(unique) > 1)}{remark}, {time.monotonic() - start:.0f} s")


def shortened(cell: Cell, data_dir: str = "") -> tuple[Cell, bool]:
    """Return a short version of a run, and whether digits replace its data set."""
    from fedsel_flwr.simulations.worlds.image_files import IMAGE_SETS, find_data_folder, has_image_set

    s, runner = cell.scenario, cell.figure.runner
    keys: dict[str, Any] = {"rounds": min(s.rounds, SMOKE_ROUNDS)}
    absent = runner == "training" and s.data.dataset in IMAGE_SETS
    absent = absent and not has_image_set(s.data.dataset, find_data_folder(data_dir))
    if absent:
        keys |= {"data.dataset": "digits", "model.name": "mlp", "partition.sizes": ()}
        if s.partition.kind in ("sizes", "classes"):
            keys |= {"partition.kind": "iid", "partition.classes_per_client": ()}
    if runner == "training":
        keys |= {"training.local_epochs": 1, "training.local_steps": min(s.training.local_steps or 2, 2)}
        # Each evaluation of a convolutional network takes as long as several rounds.
        keys |= {"evaluation_every": SMOKE_ROUNDS // 2}
    if runner == "solvers":
        keys["selectors.bsfl.solver_steps"] = 20
    tables = {"aggregation": s.aggregation.model_dump(), "selectors.pczfl": s.selectors.get("pczfl", {})}
    keys |= {f"{name}.warmup_rounds": 2 for name, table in tables.items() if table.get("warmup_rounds")}
    return replace(cell, scenario=replace_keys(s.model_dump(), keys)), absent


def packaged_verdicts() -> dict[str, dict[str, Any]]:
    """Return the recorded verdicts: name -> ``verdict``, ``seeds`` and ``minutes``."""
    file = resources.files("fedsel_flwr.simulations.reproductions") / "verdicts.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}


def named_figures(given: Sequence[str]) -> list[str]:
    """Return the names of figures.

    Args:
        given: Names of figures, names of papers, or "all".

    Raises:
        ParameterError: Nothing is given, or a name is unknown.
    """
    known = figure_names()
    if not given:
        raise ParameterError("no figure is named. Give a name of fedsel reproduce --list, a paper's name, or all")
    found: list[str] = []
    for one in given:
        own = [name for name in known if one in ("all", name) or name.startswith(f"{one}-")]
        if not own:
            raise ParameterError(f"there is no figure or paper {one!r}. fedsel reproduce --list shows all names")
        found += own
    return list(dict.fromkeys(found))


def list_figures() -> Iterator[str]:
    """Yield a line for each figure: name, verdict, minutes and claim."""
    recorded = packaged_verdicts()
    width = max(map(len, figure_names()), default=0)
    for name in figure_names():
        figure = load_figure(name)
        known = recorded.get(name, {})
        word, minutes = known.get("verdict", "not run"), known.get("minutes", figure.minutes)
        if figure.illustration:
            word = "illustration"
        yield f"{name:<{width}}  {word:<17}  {minutes:>5g} min  {figure.claim}"
