"""Figures of the papers as TOML files: what to run, and what the paper claims.

The files lie in the folder ``figures`` of this package, one for each figure or table. The name of a figure is the path
of its file: ``figures/xia/fig-1a.toml`` is "xia-fig-1a". A file holds a scenario and changes of it, arms, cells and
checks:

* An **arm** is a row of the figure: a selector with parameters, or with keys of the scenario.
* A **cell** is a setting in which every arm runs, such as a number of clients per round.
* A **check** compares two arms in one outcome. The checks together are the paper's claim.

A **reading** is one of several admissible interpretations of a figure, if the paper does not say which one it means.
Each check belongs to one reading, or to all of them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import count, islice, pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from fedsel_flwr.checks import IntArray
from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import load_scenario
from fedsel_flwr.simulations.scenario_tables import Count, CountOrZero, Positive, Table
from fedsel_flwr.theory.regret import Rounding

PAPERS = {
    "xia": "Xia et al., CS-UCB and CS-UCB-Q",
    "bsfl": "Ben Ami et al., BSFL and ALSA",
    "gpfl": "GPFL",
    "kim": "Kim et al., FedCA and FedCM",
    "pczfl": "PCZFL",
}
"""Folder of a paper -> its name on pages."""
Runner = Literal["choices", "training", "solvers"]
Relation = Literal["below", "above", "equal"]
REGRET = "regret."
"""Prefix of keys that replace values of the regret instead of the scenario."""
ROUNDS_TO = "rounds_to."
"""Prefix of an outcome: "rounds_to.fedavg" is the number of rounds until an arm has the final accuracy of fedavg.

The final accuracy is the mean of the last ten measured rounds on the same seed. An arm that never has it counts with
the number of rounds of its run."""
SEARCH = "search."
"""Prefix of keys that replace values of the search instead of the scenario."""
EVERY = ""
"""Name of the only cell of a figure without cells, and of the reading of checks that belong to all readings."""
EACH_CELL = "*"
"""Reading of a check whose cells are readings of their own."""


POINTS = 25
"""Number of points of a curve."""


def points_of(rounds: int, first: int = 1) -> IntArray:
    """Return the rounds or steps at which a curve is recorded."""
    return np.unique(np.round(np.linspace(first, rounds, POINTS)).astype(np.int64))


class Arm(Table):
    """Arm of a figure.

    ``selector`` is the arm's selector; if it is empty, the arm's own name. ``set`` replaces keys of the scenario.
    ``only`` lists the cells in which the arm runs; if it is empty, the arm runs in all cells.
    """

    selector: str = ""
    params: dict[str, Any] = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    only: tuple[str, ...] = ()


class Check(Table):
    """Check of a claim: the outcome of the arm ``left`` is below, above or equal to that of the arm ``right``.

    An arm is written as "cs-ucb", "cs-ucb @ N = 2" or "random - cs-ucb @ N = 2". The first form gives one check for
    each cell of ``cells``. Without ``cells``, it gives one for each cell of the figure. The last form is the difference
    of two arms. ``right`` may be a number.

    Outcomes are compared as ratios left / right. They are compared as differences left - right if ``difference`` is
    true, or if an arm is a difference. ``paper`` is the value of the ratio, or of the difference, in the paper. It may
    be a pair, the paper's numbers for left and right. Without it, the paper states no number.

    ``order`` replaces ``left`` and ``right``: each arm is above (or below) the next one. ``paper`` then has a number
    for each arm.

    ``outcome`` is an outcome of the runs, or "rounds_to.ARM" (:data:`ROUNDS_TO`). ``reading`` is the check's reading,
    or "*" if each of its cells is a reading.
    """

    says: str
    outcome: str
    left: str = ""
    right: str | float = ""
    order: tuple[str, ...] = ()
    relation: Relation
    cells: tuple[str, ...] = ()
    difference: bool = False
    paper: float | tuple[float, ...] | None = None
    margin: Positive = 0.05
    reading: str = EVERY

    @model_validator(mode="after")
    def _compares_two(self) -> Check:
        if bool(self.order) == bool(self.left) or (len(self.order) < 2 if self.order else self.right == ""):
            raise ValueError("a check needs left and right, or order with at least two arms. Give one of them")
        needed = len(self.order) or 2
        if isinstance(self.paper, tuple) and len(self.paper) != needed:
            raise ValueError(f"paper must have {needed} numbers, one for each arm, got {len(self.paper)}")
        if self.order and isinstance(self.paper, float):
            raise ValueError("paper must have one number for each arm of order. Give a list")
        return self


class Regret(Table):
    """Regret of a figure of choices: Xia (14), Xia (25) or Ben Ami (7).

    ``alpha``, ``beta`` and ``min_latency`` belong to "bsfl", ``fairness`` and ``availability`` to "fair". They define
    the reward, and do not depend on the selector. With ``quantized``, the reward of "bsfl" is a multiple of this step,
    "down" or "nearest".
    """

    kind: Literal["none", "xia", "fair", "bsfl"] = "none"
    alpha: Annotated[float, Field(ge=0)] = 1.0
    beta: Count = 1
    min_latency: Positive = 0.05
    data_weights: tuple[Positive, ...] = ()
    fairness: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    availability: Annotated[float, Field(gt=0, le=1)] = 1.0
    quantized: tuple[Positive, Rounding] | None = None


class Search(Table):
    """Search of a figure of solvers, Ben Ami (16) to (19).

    ``instances`` is the distribution of the bounds and of the generalization values. With "bandit", these are such as
    BSFL meets after some rounds. With "uniform", they come from intervals. ``temperature`` is a factor of the paper's.

    If ``pairs`` is 0, a run solves one instance with the arm's solver. Otherwise a run compares ALSA with annealing on
    this number of instances of different sizes.
    """

    instances: Literal["bandit", "uniform"] = "bandit"
    temperature: Positive = 1.0
    pairs: CountOrZero = 0


class Question(Table):
    """Question about a figure that extra runs answer: a table of outcomes, and one sentence without numbers."""

    question: str
    outcomes: tuple[str, ...]
    arms: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    answer: str = ""


class Picture(Table):
    """Picture of a figure.

    With ``curves``, each arm is a line over the rounds, and each cell of each curve a panel. ``bound`` is a curve that
    is added as a dashed line. ``scale`` is the scale of the vertical axis of curves, and ``start`` their first round.
    With ``outcomes``, each arm has a point with an interval in each cell, and each outcome is a panel. ``levels`` are
    horizontal lines: name -> value.
    """

    curves: tuple[str, ...] = ()
    bound: str = ""
    scale: Literal["linear", "log", "symlog"] = "linear"
    start: CountOrZero = 0
    outcomes: tuple[str, ...] = ()
    levels: dict[str, float] = Field(default_factory=dict)
    cells: tuple[str, ...] = ()
    over: str = "round"


class PaperFigure(Table):
    """Figure or table of a paper.

    Attributes:
        name: Name on the command line, for example "xia-fig-1a".
        paper: A key of :data:`PAPERS`.
        figure: Its name in the paper, for example "Fig. 1a".
        claim: What the paper claims, one sentence.
        reason: Why the verdict is not "reproduced".
        runner: How the runs are computed. "choices" draws latencies and trains nothing. "training" simulates the
            scenario. "solvers" searches for the best set of BSFL.
        minutes: Estimated minutes of one core for all runs.
        seeds: Number of seeds.
        first_seed: The first of them. Seeds that were added after a look at others begin after these.
        slowest_client: Only seeds count on which this client, from 1, has the longest mean latency; 0 for all seeds.
        planned_seeds: Number of seeds that was planned, if some of them were not run. The page names these.
        cell_seeds: Cell -> number of its seeds, for cells of questions that need fewer.
        scenario: Name of the scenario.
        set: Dotted key of the scenario -> value.
        arms: The arms.
        cells: Name of each cell -> keys of the scenario that it replaces.
        checks: The checks.
        questions: Questions that extra cells answer. Their cells take part in no check without ``cells``.
        regret: Regret, for figures of choices.
        search: Search, for figures of solvers.
        picture: The picture.
        illustration: True for a figure without a claim. It has no verdict, and has runs only if it has arms.
        left_out: Reason if the figure is not run.
        shortened: Reason if the runs are shorter or smaller than the paper's. The verdict is then at most "direction
            only".
        data: Remark if the data are not the paper's.
        note: Settings that the paper does not give, deviations, and reasons for differences.
        checked: Errors of ours that we looked for before the verdict "not seen": code, deviations, settings.
    """

    name: str
    paper: str
    figure: str
    claim: str
    reason: str = ""
    runner: Runner = "training"
    minutes: Positive = 1.0
    seeds: Count = 20
    first_seed: Count = 1
    slowest_client: CountOrZero = 0
    planned_seeds: CountOrZero = 0
    cell_seeds: dict[str, Count] = Field(default_factory=dict)
    scenario: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, Arm] = Field(default_factory=dict)
    cells: dict[str, dict[str, Any]] = Field(default={EVERY: {}})
    checks: tuple[Check, ...] = ()
    questions: tuple[Question, ...] = ()
    regret: Regret = Regret()
    search: Search = Search()
    picture: Picture = Picture()
    illustration: bool = False
    left_out: str = ""
    shortened: str = ""
    data: str = ""
    note: str = ""
    checked: str = ""

    @model_validator(mode="after")
    def _refers_to_its_own_parts(self) -> PaperFigure:
        asked = {cell for question in self.questions for cell in question.cells}
        named = {cell for check in self.checks for cell in check.cells} | asked | set(self.picture.cells)
        named |= self.cell_seeds.keys()
        if unknown := sorted(named - self.cells.keys()):
            raise ValueError(f"there is no cell {', '.join(map(repr, unknown))}. The cells are {', '.join(self.cells)}")
        for comparison in self.comparisons():
            for arm in comparison.arms:
                arm.check(self)
                if arm.cell in self.cell_seeds:
                    raise ValueError(f"cell {arm.cell!r} takes part in a check. Leave it out of cell_seeds")
                if (outcome := comparison.check.outcome).startswith(ROUNDS_TO):
                    ArmName((outcome.removeprefix(ROUNDS_TO),), arm.cell).check(self)
        return self

    @property
    def has_runs(self) -> bool:
        """Whether there is something to run."""
        return bool(self.arms) and not self.left_out

    @property
    def readings(self) -> tuple[str, ...]:
        """Names of the readings; one empty name if there is only one."""
        return tuple(dict.fromkeys(check.reading for check in self._checks() if check.reading)) or (EVERY,)

    @property
    def claimed_cells(self) -> tuple[str, ...]:
        """Cells that take part in checks without ``cells``: all that no question asks for."""
        asked = {cell for question in self.questions for cell in question.cells}
        return tuple(cell for cell in self.cells if cell not in asked) or tuple(self.cells)

    def comparisons(self) -> Iterator[Comparison]:
        """Yield the comparisons of all checks: one for each cell, and for each neighbouring pair of an order."""
        for check in self._checks():
            pairs: list[tuple[str, str | float]] = [*pairwise(check.order)] or [(check.left, check.right)]
            papers = _papers(check, len(pairs))
            for (left, right), paper in zip(pairs, papers, strict=True):
                for cell in check.cells or self.claimed_cells:
                    other = right if isinstance(right, float) else ArmName.read(right, cell)
                    yield Comparison(check, ArmName.read(left, cell), other, paper)
                    if "@" in left and (isinstance(right, float) or "@" in right):
                        break

    def _checks(self) -> Iterator[Check]:
        """Yield the checks, for each cell if each cell is a reading."""
        for check in self.checks:
            cells = check.cells or self.claimed_cells if check.reading == EACH_CELL else ()
            own = (check.model_copy(update={"reading": cell, "cells": (cell,)}) for cell in cells)
            yield from own if cells else (check,)

    def scenario_of(self, arm: str, cell: str, seed: int, data_dir: str = "") -> Scenario:
        """Return the scenario of a run.

        Raises:
            ParameterError: A key or a value of the file is wrong.
        """
        own = self.arms[arm]
        selector = own.selector or arm
        keys = {key: value for key, value in self._keys(arm, cell).items() if not key.startswith((REGRET, SEARCH))}
        keys |= {f"selectors.{selector}.{key}": value for key, value in own.params.items()}
        keys |= {"seed": seed, "selector": selector, "engine": "vectorized", "data.data_dir": data_dir}
        return load_scenario(self.scenario, keys)

    def regret_in(self, arm: str, cell: str) -> Regret:
        """Return the regret of an arm in a cell."""
        return Regret.model_validate(self.regret.model_dump() | self._keys_with(REGRET, arm, cell))

    def search_in(self, arm: str, cell: str) -> Search:
        """Return the search of an arm in a cell."""
        return Search.model_validate(self.search.model_dump() | self._keys_with(SEARCH, arm, cell))

    def _keys_with(self, prefix: str, arm: str, cell: str) -> dict[str, Any]:
        """Return the keys with a prefix, without it."""
        keys = self._keys(arm, cell).items()
        return {key.removeprefix(prefix): value for key, value in keys if key.startswith(prefix)}

    def _keys(self, arm: str, cell: str) -> dict[str, Any]:
        """Return the keys that the figure, a cell and an arm replace."""
        return dict(self.set) | self.cells[cell] | self.arms[arm].set

    def _seeds(self) -> Iterator[int]:
        """Yield the seeds that count."""
        if not self.slowest_client:
            yield from count(self.first_seed)
        any_run = self.scenario_of(next(iter(self.arms)), next(iter(self.cells)), self.first_seed)
        for seed in count(self.first_seed):
            system = any_run.model_copy(update={"seed": seed}).system_model()
            if mean_latencies(system).argmax() == self.slowest_client - 1:
                yield seed

    def runs(self, seeds: int | None = None) -> Iterator[tuple[str, str, int]]:
        """Yield cell, arm and seed of every run."""
        for number, seed in enumerate(islice(self._seeds(), seeds or self.seeds)):
            for cell in self.cells:
                if number >= self.cell_seeds.get(cell, number + 1):
                    continue
                for name, arm in self.arms.items():
                    if not arm.only or cell in arm.only:
                        yield cell, name, seed


@dataclass(frozen=True)
class ArmName:
    """An arm in a cell, or the difference of two arms in a cell.

    Attributes:
        arms: The arm, or the two arms.
        cell: The cell.
    """

    arms: tuple[str, ...]
    cell: str

    @classmethod
    def read(cls, text: str, cell: str) -> ArmName:
        """Read "arm", "arm @ cell" or "arm - arm @ cell"; ``cell`` is used if the text names none.

        >>> ArmName.read("random - cs-ucb @ N = 2", "").arms
        ('random', 'cs-ucb')
        """
        arms, _, own = text.partition(" @ ")
        return cls(tuple(arms.split(" - ")), own or cell)

    def __str__(self) -> str:
        return " minus ".join(self.arms) + (f", {self.cell}" if self.cell else "")

    def check(self, figure: PaperFigure) -> None:
        """Refuse an arm or a cell that the figure does not have.

        Raises:
            ValueError: Names the arm or the cell.
        """
        for name in self.arms:
            if name not in figure.arms:
                raise ValueError(f"there is no arm {name!r}. The arms are {', '.join(figure.arms)}")
            if self.cell not in figure.cells or (figure.arms[name].only and self.cell not in figure.arms[name].only):
                raise ValueError(f"arm {name!r} does not run in cell {self.cell!r}. Correct the check")


@dataclass(frozen=True)
class Comparison:
    """Comparison of one check: two arms in one outcome.

    Attributes:
        check: The check.
        left: The left arm.
        right: The right arm, or a number.
        paper: Ratio or difference in the paper; None if the paper gives no number.
    """

    check: Check
    left: ArmName
    right: ArmName | float
    paper: float | None

    @property
    def arms(self) -> list[ArmName]:
        """The arms that are not numbers."""
        return [arm for arm in (self.left, self.right) if isinstance(arm, ArmName)]

    @property
    def is_ratio(self) -> bool:
        """Whether the outcomes are compared as a ratio."""
        return not self.check.difference and all(len(arm.arms) == 1 for arm in self.arms)


def _papers(check: Check, pairs: int) -> list[float | None]:
    """Return the paper's ratio or difference of each pair of a check."""
    if not isinstance(check.paper, tuple):
        return [check.paper] * pairs
    differs = check.difference or any(" - " in str(arm) for arm in (check.left, check.right, *check.order))
    return [a - b if differs else a / b for a, b in pairwise(check.paper)]


def _folder() -> Traversable:
    return resources.files("fedsel_flwr.simulations.reproductions") / "figures"


@lru_cache
def figure_names() -> tuple[str, ...]:
    """Return the names of all figures, paper by paper, in the order of the papers."""
    found: list[str] = []
    for paper in PAPERS:
        folder = _folder() / paper
        if folder.is_dir():
            stems = sorted((entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")), key=_order)
            found += [f"{paper}-{stem}" for stem in stems]
    return tuple(found)


def _order(stem: str) -> tuple[str, int, str]:
    """Return a sort key: "fig-2" before "fig-10"."""
    kind, _, rest = stem.partition("-")
    number = re.search("[0-9]+", rest)
    return kind, int(number[0]) if number else 0, rest


def load_figure(name: str) -> PaperFigure:
    """Read a figure.

    Args:
        name: A name from :func:`figure_names`.

    Raises:
        ParameterError: The figure does not exist, or its file is wrong.

    >>> load_figure("xia-fig-1a").claim.split()[0]
    "CS-UCB's"
    """
    if name not in figure_names():
        raise ParameterError(f"there is no figure {name!r}. fedsel reproduce --list shows all names")
    paper, _, stem = name.partition("-")
    return read_figure((_folder() / paper / f"{stem}.toml").read_text("utf-8"), name)


def read_figure(text: str, name: str) -> PaperFigure:
    """Read a figure from the text of its file.

    Raises:
        ParameterError: The text is not valid TOML, or a key is wrong. The error names the key.
    """
    try:
        figure = PaperFigure.model_validate(tomllib.loads(text) | {"name": name})
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"{name} is not valid TOML: {error}. Correct the file") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ParameterError(f"{name}: {faults}. Correct the file") from error
    return figure
