"""What comes out of comparing selectors: runs of one scenario, as table, summary, verdict, picture and folder."""

from __future__ import annotations

import html
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.report.plots import plot_comparison, plot_rounds
from fedsel_flwr.report.run_folder import atomic_write, read_table
from fedsel_flwr.report.summary import RunSummary, summarize
from fedsel_flwr.report.tables import latex_table, runs_frame, summary_frame
from fedsel_flwr.report.verdict import Verdict, verdict
from fedsel_flwr.rounds.history import History
from fedsel_flwr.simulations.comparisons.flower_agreement import Agreement
from fedsel_flwr.simulations.fingerprints import check_poolable, describe_shared
from fedsel_flwr.simulations.results import RunResult, read_run, write_run
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.untrusted_folders import check_entries, check_links

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("fedsel_flwr")
REGRET = "regret.parquet"
"""Of a run: what its choices lost against knowing the clients' means."""
VARIED = frozenset({"name", "description", "selector", "seed", "selectors", "engine"})
"""Keys of a scenario in which the runs of one comparison may differ."""


@dataclass(frozen=True)
class Run:
    """One selector on one seed.

    Attributes:
        selector: Its label.
        scenario: What was run.
        result: What came out.
    """

    selector: str
    scenario: Scenario
    result: RunResult

    @property
    def history(self) -> History:
        """Round by round and client by client."""
        return self.result.history


@dataclass
class Comparison:
    """Runs of one scenario under several selectors and seeds.

    Args:
        scenario: The scenario; of the runs each has its own selector and seed.
        runs: In the order in which they ended.
        reference: The selector that the others are compared with; None where there is none.
        agreement: Whether Flower on Ray chose the same in the rounds that it played too.
        cut_off: Runs that were loaded and had not been finished; they are part of nothing else.
        left_out: Where all selectors were to run: those that cannot, and why.
    """

    scenario: Scenario
    runs: list[Run] = field(default_factory=list)
    reference: str | None = None
    agreement: Agreement | None = None
    cut_off: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def selectors(self) -> list[str]:
        """The labels, in the order of their first runs."""
        return list(dict.fromkeys(run.selector for run in self.runs))

    @property
    def histories(self) -> dict[str, list[History]]:
        """Label -> histories, one a seed."""
        return {name: [run.history for run in self.runs if run.selector == name] for name in self.selectors}

    @property
    def summaries(self) -> list[RunSummary]:
        """One a run."""
        s = self.scenario
        return [
            summarize(
                run.history,
                selector=run.selector,
                seed=run.scenario.seed,
                num_clients=s.num_clients,
                target_accuracy=s.target_accuracy,
            )
            for run in self.runs
        ]

    def table(self) -> pd.DataFrame:
        """The figures of :class:`~fedsel_flwr.report.RunSummary`, a row a run."""
        return runs_frame(self.summaries)

    @property
    def summary(self) -> pd.DataFrame:
        """A row a selector: means, standard deviations and, against the reference, paired differences and intervals."""
        return summary_frame(self.summaries, self.reference)

    @property
    def verdict(self) -> Verdict | None:
        """One sentence on time and energy to the target; None without a reference that ran, or with one selector."""
        if self.reference not in self.selectors or len(self.selectors) < 2:
            return None
        alike = describe_shared({run.scenario.seed: run.result.fingerprints for run in self.runs})
        return verdict(self.summaries, self.reference, self.scenario.target_accuracy, alike)

    def plot(self, path: str | Path) -> Path:
        """Draw the picture (:func:`~fedsel_flwr.report.plots.plot_comparison`) into a PNG file; returns its path."""
        said = self.verdict
        return plot_comparison(self.histories, path, differences=said.times if said else (), **self._of_pictures)

    def plot_rounds(self, path: str | Path, folder: str | Path | None = None) -> Path:
        """Draw what happened by rounds (:func:`~fedsel_flwr.report.plots.plot_rounds`); returns its path.

        With the comparison's ``folder`` also what was lost against knowing the means, where every run has that.
        """
        lost = self._lost(Path(folder)) if folder else {}
        return plot_rounds(self.histories, path, lost=lost or None, **self._of_pictures)

    def _lost(self, folder: Path) -> dict[str, list[Any]]:
        """Selector -> theta of each of its runs; empty where a run has none."""
        lost: dict[str, list[Any]] = {}
        for run in self.runs:
            places = [folder / run_name(run.selector, run.scenario.seed) / REGRET, folder / REGRET]
            path = next((path for path in places if path.exists()), None)
            if path is None:
                return {}
            lost.setdefault(run.selector, []).append(read_table(path)["theta"])
        return lost

    @property
    def _of_pictures(self) -> dict[str, Any]:
        """What every picture says of the scenario."""
        s = self.scenario
        title = f"{s.name}: {s.num_clients} clients, {s.clients_per_round} a round"
        return {"num_clients": s.num_clients, "target_accuracy": s.target_accuracy, "title": title}

    def to_csv(self, path: str | Path | None = None) -> str:
        """:meth:`table` as CSV; written to ``path`` if that is given."""
        return _written(self.table().to_csv(index=False), path)

    def to_latex(self, path: str | Path | None = None) -> str:
        """The comparison as a LaTeX table (package booktabs); written to ``path`` if that is given."""
        return _written(latex_table(self.summaries, self.reference, self.scenario.target_accuracy), path)

    def _repr_html_(self) -> str:
        said = self.verdict
        return str(self.summary.to_html(index=False)) + (f"<p>{html.escape(said.sentence)}</p>" if said else "")

    def save(self, folder: str | Path) -> Path:
        """Write every run and what is made of them; :meth:`load` reads it back.

        Args:
            folder: Made if needed.

        Returns:
            The folder.

        Raises:
            ParameterError: There is a link in it.
        """
        target = Path(folder)
        check_entries(target)
        for run in self.runs:
            write_run(target / run_name(run.selector, run.scenario.seed), run.scenario, run.result, run.selector)
        self.report(target)
        return target

    def report(self, folder: Path) -> None:
        """Write what is made of the runs: picture, summaries, verdict, and what belongs to the comparison.

        Raises:
            ParameterError: No run was finished.
            RunError: The folder cannot be written to; says why.
        """
        if not self.runs:
            told = ", ".join(f"{run.selector!r} after {len(run.history.rounds)} rounds" for run in self.cut_off)
            raise ParameterError(
                f"no run was finished: {told or 'there is none'}; cut_off of the comparison has the rounds"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.plot(folder / "comparison.png")
            self.plot_rounds(folder / "rounds.png", folder)
            self.to_csv(folder / "runs.csv")
            self.to_latex(folder / "comparison.tex")
            figures = self.figures()
            for name in figures.keys() & {"summary", "verdict"}:
                with atomic_write(folder / f"{name}.json") as temporary:
                    temporary.write_text(json.dumps(figures[name], indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"picture and summaries cannot be written to {str(folder)!r}: {error.strerror or error}; "
                "fedsel report makes them of the runs"
            ) from error

    def figures(self) -> dict[str, Any]:
        """Everything as JSON has it, null for what is not known or infinite: ``summary``, a run each, ``verdict``."""
        figures: dict[str, Any] = {"summary": [asdict(summary) for summary in self.summaries]}
        if said := self.verdict:
            engines = {"engines": asdict(self.agreement)} if self.agreement else {}
            figures["verdict"] = asdict(said) | engines
        return {key: _json(value) for key, value in figures.items()}

    @classmethod
    def load(cls, *folders: str | Path, reference: str | None = None) -> Comparison:
        """Read runs back and pool them.

        Args:
            folders: Folders of comparisons or of single runs.
            reference: The selector to compare with; None takes "random" where it ran.

        Returns:
            The comparison.

        Raises:
            ParameterError: A folder holds no run, a damaged one or a link, the runs are of different scenarios, two are
                of the same selector and seed, or a selector, the model, or the data or partition of a seed are not
                the same in all of them; says which.
        """
        found = [place for folder in folders for place in _run_folders(Path(folder))]
        if not found:
            raise ParameterError("give at least one folder of runs to load")
        loaded = [Run(*read_run(place)) for place in found]
        _check_one_scenario(loaded, found)
        _check_fingerprints(loaded, found)
        runs = [run for run in loaded if run.result.arrays]
        cut_off = [run for run in loaded if not run.result.arrays]
        comparison = cls(loaded[0].scenario, runs, cut_off=cut_off)
        if runs:
            comparison.reference = choose_reference(reference, comparison.selectors)
        return comparison


def run_name(label: str, seed: int) -> str:
    """What the folder of a run is called in that of its comparison."""
    return f"{label}-seed{seed}"


def choose_reference(given: str | None, labels: Sequence[str]) -> str | None:
    """The selector that the others are compared with: the one given, else "random" where it runs beside others.

    Raises:
        ParameterError: It is none of at least two.
    """
    if given is None:
        return "random" if "random" in labels and len(labels) > 1 else None
    if given not in labels or len(labels) < 2:
        raise ParameterError(f"reference {given!r} must be one of at least two selectors: {', '.join(labels)}")
    return given


def _run_folders(folder: Path) -> list[Path]:
    if (folder / "scenario.toml").is_file():
        check_links(folder)
        return [folder]
    check_entries(folder)
    inside = sorted(
        path.parent for path in folder.glob("*/scenario.toml") if not path.parent.name.endswith("-on-flower")
    )
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ParameterError(f"{str(folder)!r} {what}: give the folder of a run, or of a comparison")
    if not inside:
        raise ParameterError(f"{str(folder)!r} holds no run: give a folder with scenario.toml, or one of such folders")
    for place in inside:
        check_links(place)
    return inside


def _check_one_scenario(runs: Sequence[Run], places: Sequence[Path]) -> None:
    first = _fixed(runs[0].scenario)
    seen: dict[tuple[str, int], Path] = {}
    for run, place in zip(runs, places, strict=True):
        other = _fixed(run.scenario)
        for key in first:
            if first[key] != other[key]:
                raise ParameterError(
                    f"runs of one comparison share their scenario, but {key} is {first[key]!r} in {str(places[0])!r} "
                    f"and {other[key]!r} in {str(place)!r}"
                )
        name = (run.selector, run.scenario.seed)
        if name in seen:
            raise ParameterError(
                f"{run.selector!r} ran on seed {run.scenario.seed} in {str(seen[name])!r} and in {str(place)!r}: leave "
                "one of them out"
            )
        seen[name] = place


def _check_fingerprints(runs: Sequence[Run], places: Sequence[Path]) -> None:
    """Refuse to pool what was made of different code or data; what is not known is said."""
    for run, place in zip(runs, places, strict=True):
        if not run.result.fingerprints:
            logger.warning(
                "%s holds a run of an older version, without fingerprints: nobody can tell whether its selector, data "
                "and partition are those of the others", place,
            )  # fmt: skip
    check_poolable(
        [
            (run.selector, run.scenario.seed, run.result.fingerprints, str(place))
            for run, place in zip(runs, places, strict=True)
        ]
    )


def _fixed(scenario: Scenario) -> dict[str, Any]:
    """Dotted key -> value, of the keys in which all runs of a comparison are alike."""
    flat: dict[str, Any] = {}
    for key, value in scenario.model_dump(exclude=set(VARIED)).items():
        flat |= {f"{key}.{inner}": own for inner, own in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _json(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_json(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return text
