"""Reproduction of figures: simulate the missing runs, judge the claims, write the pages.

Every run is a row of a CSV file, ``<paper>-<runner>.csv`` in the output folder. The row has a fingerprint of everything
that the run depends on. Figures that need the same run share its row, and a repeated command simulates only the missing
runs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.checks import FloatArray, whole
from fedsel_flwr.errors import ParameterError, refusing_faults
from fedsel_flwr.rounds.storage import check_entries
from fedsel_flwr.simulations.on_flower.ray_resources import RayResources, cluster_for_runs
from fedsel_flwr.simulations.reproductions.claims import FigureVerdict, judge
from fedsel_flwr.simulations.reproductions.paper_figure import (
    REGRET,
    ROUNDS_TO,
    PaperFigure,
    Runner,
    figure_names,
    load_figure,
)
from fedsel_flwr.simulations.reproductions.rows import FINGERPRINT, Rows, fingerprint
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import replace_keys

REVISIONS: Mapping[Runner, int] = {"choices": 1, "training": 1, "solvers": 1}
"""Runner -> revision. Raise it when a change of the code changes its results."""
KEY = ("run", "selector", "seed", FINGERPRINT)
"""Columns that order the file. The fingerprint is one of them, because two figures may define another regret."""
COLUMNS = (FINGERPRINT, "run", "selector", "seed", "cpu_s", "outcomes", "curves")
"""Columns of a file. ``outcomes`` and ``curves`` are JSON."""
DIGITS = 5
"""Significant digits of outcomes and curves."""
SMOKE_ROUNDS = 6
"""Largest number of rounds in a smoke test."""
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """Run of a figure: an arm in a cell on a seed.

    Attributes:
        figure: The figure.
        cell: Name of the cell.
        arm: Name of the arm.
        scenario: Scenario of the run.
    """

    figure: PaperFigure
    cell: str
    arm: str
    scenario: Scenario

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the run depends on, without the data folder and values that equal the defaults."""
        own = self.scenario.model_dump(mode="json", exclude={"data": {"data_dir"}}, exclude_defaults=True)
        for key in ("description", "engine", "name"):
            own.pop(key, None)
        tables = self.scenario.selectors
        own["selectors"] = {name: table for name, table in tables.items() if name == self.scenario.selector}
        found: dict[str, Any] = {"scenario": own, "revision": REVISIONS[self.figure.runner]}
        if self.figure.runner == "choices":
            # Data and model have no effect on choices. Training sets the times of phones only.
            unused = ("data", "model", "target_accuracy", "target_rounds")
            for key in unused if self.scenario.system.kind == "phones" else (*unused, "training"):
                own.pop(key, None)
            found["regret"] = self.figure.regret_in(self.arm, self.cell).model_dump(mode="json")
        if self.figure.runner == "solvers":
            used = ("seed", "num_clients", "clients_per_round", "selectors")
            found["scenario"] = {key: own[key] for key in used if key in own}
            found["search"] = self.figure.search_in(self.arm, self.cell).model_dump(mode="json")
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Digest of :attr:`settings`."""
        return fingerprint(runner=self.figure.runner, **self.settings)

    @property
    def run(self) -> str:
        """Description of the run for readers of the file: scenario and changed keys, those of the regret included."""
        keys = dict(self.figure.set) | self.figure.cells[self.cell] | self.figure.arms[self.arm].set
        if self.figure.runner == "choices":
            regret = self.figure.regret_in(self.arm, self.cell).model_dump(exclude_defaults=True)
            keys |= {REGRET + key: value for key, value in regret.items()}
        return " ".join([self.figure.scenario, *(f"{key}={_short(value)}" for key, value in sorted(keys.items()))])

    def simulate(self) -> dict[str, Any]:
        """Simulate the run and return its row."""
        start = time.process_time()
        outcomes, curves = simulate_run(self)
        return {
            FINGERPRINT: self.fingerprint,
            "run": self.run,
            "selector": _selector_text(self.scenario),
            "seed": self.scenario.seed,
            "cpu_s": round(time.process_time() - start, 2),
            "outcomes": _encode({key: value for key, value in outcomes.items() if not math.isnan(value)}),
            "curves": _encode(curves),
        }


def simulate_run(cell: Cell) -> tuple[dict[str, float], dict[str, FloatArray]]:
    """Simulate a run; return its outcomes and curves."""
    figure = cell.figure
    if figure.runner == "choices":
        from fedsel_flwr.simulations.reproductions.choice_runs import run_choices

        return run_choices(cell.scenario, figure.regret_in(cell.arm, cell.cell))
    if figure.runner == "solvers":
        from fedsel_flwr.simulations.reproductions.solver_runs import run_solvers

        return run_solvers(cell.scenario, figure.search_in(cell.arm, cell.cell))
    from fedsel_flwr.simulations.reproductions.training_runs import run_training

    return run_training(cell.scenario)


def cells_of(figure: PaperFigure, seeds: int | None = None, data_dir: str = "") -> list[Cell]:
    """Return all runs of a figure, seed by seed."""
    # The scenario of an arm in a cell is read once, because seeds differ in nothing else.
    first: dict[tuple[str, str], Scenario] = {}
    found = []
    for cell, arm, seed in figure.runs(seeds):
        if (arm, cell) not in first:
            first[arm, cell] = figure.scenario_of(arm, cell, seed, data_dir)
        found.append(Cell(figure, cell, arm, first[arm, cell].model_copy(update={"seed": seed})))
    return found


def open_rows(folder: Path, figure: PaperFigure) -> Rows:
    """Open the file with the runs of a figure."""
    path = folder / f"{figure.paper}-{figure.runner}.csv"
    with refusing_faults(f"{str(path)!r} cannot be used. Delete it, or restore it from a copy"):
        return Rows(path, COLUMNS, KEY)


class Results:
    """Outcomes of the finished runs of a figure.

    Args:
        cells: The runs of the figure.
        rows: The file.

    Attributes:
        missing: The runs without a row.
        seconds: Fingerprint of each finished run -> its processor seconds.
        seed_s: Seed -> processor seconds of its finished runs.
        cpu_s: Their sum.
    """

    def __init__(self, cells: Sequence[Cell], rows: Rows) -> None:
        by_fingerprint = {row[FINGERPRINT]: row for row in rows}
        self._found: dict[tuple[str, str], dict[int, tuple[dict[str, float], dict[str, list[float]]]]] = {}
        self.missing: list[Cell] = []
        self.seconds: dict[str, float] = {}
        self.seed_s: dict[int, float] = {}
        for cell in cells:
            row = by_fingerprint.get(cell.fingerprint)
            if row is None:
                self.missing.append(cell)
                continue
            seed, seconds = cell.scenario.seed, float(row["cpu_s"])
            if cell.fingerprint not in self.seconds:
                self.seed_s[seed] = self.seed_s.get(seed, 0.0) + seconds
            self.seconds[cell.fingerprint] = seconds
            own = self._found.setdefault((cell.arm, cell.cell), {})
            own[seed] = _decode(row["outcomes"]), _decode(row["curves"])
        self.cpu_s = sum(self.seconds.values())

    def values(self, outcome: str, arm: str, cell: str) -> dict[int, float]:
        """Return an outcome of an arm in a cell: seed -> value; NaN if the run has no such outcome."""
        if outcome.startswith(ROUNDS_TO):
            targets = self.values("accuracy_last10", outcome.removeprefix(ROUNDS_TO), cell)
            own = self._found.get((arm, cell), {})
            return {seed: _rounds_to(targets.get(seed, math.nan), one[1]) for seed, one in own.items()}
        return {seed: one[0].get(outcome, math.nan) for seed, one in self._found.get((arm, cell), {}).items()}

    def curves(self, name: str, arm: str, cell: str, over: str = "at") -> list[tuple[FloatArray, FloatArray]]:
        """Return a curve of an arm in a cell for each seed: x and y."""
        found = [one[1] for one in self._found.get((arm, cell), {}).values()]
        return [(np.array(one[over]), np.array(one[name])) for one in found if name in one and over in one]


def _rounds_to(target: float, curves: Mapping[str, Sequence[float]]) -> float:
    """Return the first round with this accuracy; the number of rounds if there is none, NaN without a target.

    >>> _rounds_to(0.5, {"at": [1, 50, 100], "record_at": [1, 7, 30], "record": [0.1, 0.6, 0.7]})
    7
    """
    if math.isnan(target) or "record" not in curves:
        return math.nan
    reached = (at for at, value in zip(curves["record_at"], curves["record"], strict=True) if value >= target)
    return next(reached, curves["at"][-1])


def verdict_of(figure: PaperFigure, results: Results) -> FigureVerdict:
    """Return the verdict on a figure: "not run" if a run is missing."""
    if figure.illustration:
        return FigureVerdict(word="illustration")
    if figure.left_out or results.missing:
        return FigureVerdict(word="not run")
    return judge(figure, results.values)


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
    """Simulate the missing runs of figures, and write the pages of their papers.

    Args:
        names: Names of figures.
        folder: Folder of the CSV files, pages and pictures; created if needed.
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
    from fedsel_flwr.simulations.reproductions.result_pages import write_pages

    where = cluster_for_runs(ray_address)
    if jobs is not None:
        whole("jobs", jobs, 1)
    target, figures = Path(folder), {name: load_figure(name) for name in names}
    check_entries(target)
    for figure in figures.values():
        if figure.has_runs:
            _play_missing(figure, target, jobs, seeds, data_dir, announce, where)
    found = {}
    with refusing_faults(f"the files in {str(target)!r} cannot be used. Delete them, or restore them from a copy"):
        write_pages(target, {figure.paper for figure in figures.values()})
        for name, figure in figures.items():
            found[name] = verdict_of(figure, results_of(figure, target, seeds))
            announce(f"{name}: {found[name].word}")
    return found


def results_of(figure: PaperFigure, folder: Path, seeds: int | None = None) -> Results:
    """Return the outcomes of the finished runs of a figure."""
    if not figure.has_runs:
        return Results([], open_rows(folder, figure))
    return Results(cells_of(figure, seeds), open_rows(folder, figure))


def _play_missing(
    figure: PaperFigure,
    folder: Path,
    jobs: int | None,
    seeds: int | None,
    data_dir: str,
    announce: Announce,
    where: RayResources | None,
) -> None:
    """Simulate the runs of a figure that have no row, and add a row when a run has finished."""
    rows, cells = open_rows(folder, figure), cells_of(figure, seeds, data_dir)
    unique = {cell.fingerprint: cell for cell in cells}
    missing = [cell for mark, cell in unique.items() if not rows.done(mark)]
    announce(f"{figure.name}: {len(unique) - len(missing)} of {len(unique)} runs are finished")
    if not missing:
        return
    # Runs of the same seed and cell share the data of their scenario.
    missing.sort(key=lambda cell: (cell.scenario.seed, cell.cell))
    done = len(unique) - len(missing)
    for row in _on_cluster(missing, where, jobs) if where else _in_processes(missing, jobs or 1):
        rows.add(row)
        done += 1
        announce(f"{figure.name}: {row['selector']}, seed {row['seed']} took {row['cpu_s']:.0f} s "
                 f"({done} of {len(unique)})")  # fmt: skip
    rows.sort()


def _in_processes(cells: Sequence[Cell], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all runs, from one or several processes."""
    if jobs == 1:
        yield from map(Cell.simulate, cells)
        return
    from fedsel_flwr.simulations.comparisons.parallel_runs import map_in_parallel

    yield from map_in_parallel(Cell.simulate, cells, jobs)


def _on_cluster(cells: Sequence[Cell], where: RayResources, jobs: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of all runs, from the nodes of a Ray cluster."""
    from fedsel_flwr.simulations.comparisons.cluster_tasks import ClusterTasks

    # Other runners read no data.
    scenarios = [cell.scenario for cell in cells if cell.figure.runner == "training"]
    names = [f"{cell.figure.name}, {cell.arm}, seed {cell.scenario.seed}" for cell in cells]
    with ClusterTasks(_simulate_on_node, cells, where, jobs, names=names, scenarios=scenarios) as tasks:
        for _, row in tasks:
            yield row


def _simulate_on_node(cell: Cell, _shared: None, _report: Callable[[int], None]) -> dict[str, Any]:
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

    s, keys = cell.scenario, dict[str, Any]()
    name = s.data.dataset
    absent = name in IMAGE_SETS and not has_image_set(name, find_data_folder(data_dir))
    if absent and cell.figure.runner == "training":
        keys = {"data.dataset": "digits", "model.name": "mlp", "partition.sizes": ()}
        if s.partition.kind in ("sizes", "classes"):
            keys |= {"partition.kind": "iid", "partition.classes_per_client": ()}
    if cell.figure.runner == "training":
        keys |= {"training.local_epochs": 1, "training.local_steps": min(s.training.local_steps or 2, 2)}
        # Each evaluation of a convolutional network takes as long as several rounds.
        keys |= {"evaluation_every": SMOKE_ROUNDS // 2}
    if cell.figure.runner == "solvers":
        keys["selectors.bsfl.solver_steps"] = 20
    for key in ("aggregation.warmup_rounds", "selectors.pczfl.warmup_rounds"):
        table = s.aggregation.model_dump() if key.startswith("aggregation") else s.selectors.get("pczfl", {})
        if table.get("warmup_rounds"):
            keys[key] = 2
    short = replace_keys(s.model_dump(), {"rounds": min(s.rounds, SMOKE_ROUNDS), **keys})
    return Cell(cell.figure, cell.cell, cell.arm, short), absent and cell.figure.runner == "training"


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


def _selector_text(scenario: Scenario) -> str:
    """Return the selector and its parameters, for readers of the file."""
    own = scenario.selectors.get(scenario.selector, {})
    return " ".join([scenario.selector, *(f"{key}={_short(value)}" for key, value in sorted(own.items()))])


def _short(value: Any) -> str:
    text = str(value).replace("\n", " ").replace(" ", "")
    return text if len(text) <= 40 else text[:37] + "..."


def _encode(values: Mapping[str, Any]) -> str:
    """Return numbers as JSON with a few digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return [rounded(float(one)) for one in value]
        value = float(f"{value:.{DIGITS}g}")
        return int(value) if value.is_integer() and abs(value) < 1e15 else value

    return json.dumps({key: rounded(value) for key, value in values.items()}, separators=(",", ":"))


def _decode(text: str) -> Any:
    return json.loads(text)
