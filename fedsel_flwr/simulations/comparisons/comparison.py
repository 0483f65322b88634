"""Result of a comparison: the runs of one scenario as table, summary, verdict, pictures and folder."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import from_json, to_json

from fedsel_flwr.checks import one_of
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.plots import plot_comparison, plot_rounds
from fedsel_flwr.report.run_folder import SCENARIO, atomic_write, read_table, run_name
from fedsel_flwr.report.summary import RunSummary, find_target_rounds
from fedsel_flwr.report.tables import latex_table, runs_frame, safe_texts, summary_frame
from fedsel_flwr.report.verdict import Verdict, verdict
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.storage import check_entries, check_links
from fedsel_flwr.simulations.comparisons.report_page import write_report
from fedsel_flwr.simulations.diagnosis import MANY_LATE, late_share
from fedsel_flwr.simulations.results import RunResult, read_run, write_run
from fedsel_flwr.simulations.run_identity import check_poolable, describe_shared
from fedsel_flwr.simulations.scenario import Scenario, flat_settings

if TYPE_CHECKING:
    import pandas as pd

REGRET = "regret.parquet"
"""Table of a run: the time lost, compared with a genie that knows the clients' mean latencies."""
VARIED = {"name", "description", "selector", "seed", "selectors", "engine"}
"""Keys of a scenario in which the runs of one comparison may differ."""


@dataclass(frozen=True)
class Run:
    """Run of one selector on one seed.

    Attributes:
        selector: The selector's label.
        scenario: Scenario that was run.
        result: History and model.
        place: Folder of the run; None if it has none.
    """

    selector: str
    scenario: Scenario
    result: RunResult
    place: Path | None = None

    @property
    def history(self) -> History:
        """History of the run: records of each round and each client."""
        return self.result.history

    @property
    def name(self) -> str:
        """Name of the run in messages, for example "bsfl, seed 1"."""
        return f"{self.selector}, seed {self.scenario.seed}"


@dataclass(frozen=True)
class Agreement:
    """Agreement of two runs: whether they selected the same clients in their common rounds.

    Attributes:
        rounds: Number of common rounds.
        parted: First round with a different choice; 0 if there is none.
    """

    rounds: int
    parted: int

    @property
    def sentence(self) -> str:
        """Agreement as a sentence."""
        engines = "Flower on Ray and the vectorized engine"
        if self.parted:
            return f"{engines} selected different clients from round {self.parted} on."
        return f"{engines} selected the same clients in all {self.rounds} rounds that both ran."


@dataclass
class Comparison:
    """Comparison: runs of one scenario with several selectors and seeds.

    Args:
        scenario: The scenario. Each run replaces its selector and seed.
        runs: The runs, in the order in which they ended.
        reference: Label of the selector that the others are compared with; None if there is none.
        agreement: Whether Flower on Ray chose the same clients in the rounds that it also ran.
        cut_off: Loaded runs that have not finished. No table, picture or verdict includes them.
        left_out: With "all" selectors, those that cannot run -> the reason.
    """

    scenario: Scenario
    runs: list[Run] = field(default_factory=list)
    reference: str | None = None
    agreement: Agreement | None = None
    cut_off: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def selectors(self) -> list[str]:
        """Labels of the selectors, in the order of their first runs."""
        return list(dict.fromkeys(run.selector for run in self.runs))

    @property
    def histories(self) -> dict[str, list[History]]:
        """Histories of each label, one per seed."""
        return {name: [run.history for run in self.runs if run.selector == name] for name in self.selectors}

    @property
    def summaries(self) -> list[RunSummary]:
        """Figures of each run."""
        return [run.result.summary(run.scenario, run.selector) for run in self.runs]

    def remarks(self) -> list[str]:
        """Return remarks on probable problems, one line each.

        They report runs that diverged, and selectors whose clients often replied too late. They report columns that no
        client reported although the selector reads them. They also report a target that no run reached, or that every
        run reached in the first possible round.
        """
        lines = [f"{run.name}: {run.result.diagnosis}" for run in self.runs if run.result.diagnosis]
        lines += [
            f"{run.name}: {remark.partition(': ')[2]} in {rounds:,} rounds"
            for run in self.runs
            for remark, rounds in run.history.remarks().items()
        ]
        lines += self._remark_on_target()
        for selector in self.selectors:
            own = [run for run in self.runs if run.selector == selector]
            worst = max(own, key=lambda run: late_share(run.scenario, run.history))
            if (share := late_share(worst.scenario, worst.history)) >= MANY_LATE:
                of_seeds = f" This is the largest share of the {len(own)} seeds." if len(own) > 1 else ""
                longest = worst.scenario.wireless.max_latency_s
                lines.append(
                    f"{worst.name}: {100 * share:.0f} % of the selected clients replied too late.{of_seeds} Raise "
                    f"wireless.max_latency_s (now {longest:g} s)?"
                )
        return lines

    def _remark_on_target(self) -> list[str]:
        """Return a remark if the target cannot tell the selectors apart."""
        if len(self.selectors) < 2:
            return []
        # Taken once: each call works the summaries out from the histories.
        summaries = self.summaries
        goal = f"the target accuracy of {100 * self.scenario.target_accuracy:g} %"
        if all(math.isinf(one.rounds_to_target) for one in summaries):
            measured = max(one.target_window for one in summaries)
            return [
                f"no run reached {goal} as a mean of {measured} measured rounds. Raise rounds, or lower the target?"
            ]
        window, every = self.scenario.target_rounds, self.scenario.evaluation_every
        if all(one.target_window == window and one.rounds_to_target <= every * window for one in summaries):
            return [
                f"every run reached {goal} in the first {window} measured rounds, so the selectors cannot differ in "
                "rounds. Raise target_accuracy?"
            ]
        return []

    def table(self) -> pd.DataFrame:
        """Return the figures of :class:`~fedsel_flwr.report.RunSummary`, one row per run."""
        return runs_frame(self.summaries)

    @property
    def summary(self) -> pd.DataFrame:
        """Table with one row per selector: means, standard deviations and, with a reference, ratios and verdict."""
        return summary_frame(self.summaries, self.verdict)

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on which selectors reach the target sooner; None if no reference ran, or with only one selector."""
        if self.reference not in self.selectors or len(self.selectors) < 2:
            return None
        alike = describe_shared({run.scenario.seed: run.result.fingerprints for run in self.runs})
        target = self.scenario.target_accuracy
        return verdict(self.summaries, str(self.reference), target, alike, times=self._times_by_target())

    def _times_by_target(self) -> dict[float, dict[str, dict[int, float]]]:
        """Return the seconds until each run reached each target of the profile; infinity if a run never did."""
        targets = profile_targets(self.scenario.target_accuracy)
        times: dict[float, dict[str, dict[int, float]]] = {target: {} for target in targets}
        for run in self.runs:
            reached = find_target_rounds(run.history.rounds, targets, self.scenario.target_rounds)
            for target, record in zip(targets, reached, strict=True):
                seconds = math.inf if record is None else record.simulated_s
                times[target].setdefault(run.selector, {})[run.scenario.seed] = seconds
        return times

    def plot(self, path: str | Path, panel: str | None = None) -> Path:
        """Draw the picture (:func:`~fedsel_flwr.report.plots.plot_comparison`).

        Args:
            path: Path of the file. Its suffix sets the format: .png, .pdf or .svg.
            panel: The only panel to draw: "accuracy", "ratios", "targets" or "selections". If None, all panels.

        Returns:
            ``path``.

        Raises:
            ParameterError: The suffix or the panel is unknown, or the panel needs a reference.
        """
        return plot_comparison(self.histories, path, verdict=self.verdict, panel=panel, **self._plot_options)

    def plot_rounds(self, path: str | Path, folder: str | Path | None = None) -> Path:
        """Draw the course of the rounds (:func:`~fedsel_flwr.report.plots.plot_rounds`); return the file's path.

        If you pass the comparison's ``folder`` and every run has its regret, the picture shows the regret too.
        """
        lost = self.regret(Path(folder)) if folder else {}
        return plot_rounds(self.histories, path, lost=lost or None, **self._plot_options)

    def regret(self, folder: Path) -> dict[str, list[Any]]:
        """Read theta of each run of each selector; empty if a run has no such table."""
        lost: dict[str, list[Any]] = {}
        for run in self.runs:
            path = self.place(run, folder) / REGRET
            if not path.exists():
                return {}
            lost.setdefault(run.selector, []).append(read_table(path, "theta")["theta"])
        return lost

    def place(self, run: Run, folder: Path) -> Path:
        """Return the folder of a run of this comparison, which is in ``folder`` unless the run was read elsewhere."""
        own = folder / run_name(run.selector, run.scenario.seed)
        # If a comparison has only one run, that run may be in the comparison's folder.
        places = [own, *([run.place] if run.place else []), folder]
        return next((place for place in places if (place / SCENARIO).is_file()), own)

    @property
    def _plot_options(self) -> dict[str, Any]:
        """Options of every picture that come from the scenario."""
        s = self.scenario
        title = f"{s.name}: {s.num_clients} clients, {s.clients_per_round} a round"
        return {
            "num_clients": s.num_clients,
            "target_accuracy": s.target_accuracy,
            "target_rounds": s.target_rounds,
            "title": title,
        }

    def to_csv(self, path: str | Path | None = None, *, spreadsheet: bool = False) -> str:
        """Return :meth:`table` as CSV, and write it to ``path`` unless that is None.

        Args:
            path: The file; None writes no file.
            spreadsheet: Whether texts that a spreadsheet would compute, such as "=1+1", begin with an apostrophe.
        """
        table = self.table()
        return _write_text((safe_texts(table) if spreadsheet else table).to_csv(index=False, lineterminator="\n"), path)

    def to_latex(self, path: str | Path | None = None) -> str:
        """Return the comparison as a LaTeX table (package booktabs), and write it to ``path`` unless that is None."""
        return _write_text(latex_table(self.summaries, self.verdict, self.scenario.target_accuracy), path)

    def _repr_html_(self) -> str:
        found = self.verdict
        return str(self.summary.to_html(index=False)) + (
            f"<p>{html.escape(found.sentence).replace(chr(10), '<br>')}</p>" if found else ""
        )

    def save(self, folder: str | Path) -> Path:
        """Write every run and the summaries to a folder, which :meth:`load` can read.

        Args:
            folder: The folder; created if needed.

        Returns:
            The folder.

        Raises:
            ParameterError: The folder contains a link.
        """
        target = Path(folder)
        check_entries(target)
        for run in self.runs:
            write_run(target / run_name(run.selector, run.scenario.seed), run.scenario, run.result, run.selector)
        self.report(target)
        return target

    def report(self, folder: Path) -> None:
        """Write the pictures, the summaries, the verdict and, with the extra ``report``, the page to a folder.

        Raises:
            ParameterError: No run has finished.
            RunError: The folder cannot be written to. The error names the reason.
        """
        write_report(self, folder)

    def figures(self) -> dict[str, Any]:
        """Return ``summary`` (one entry per run) and ``verdict`` in JSON's types, with null for values not finite."""
        figures: dict[str, Any] = {"summary": self.summaries}
        if found := self.verdict:
            figures["verdict"] = asdict(found) | ({"engines": self.agreement} if self.agreement else {})
        return cast(dict[str, Any], from_json(to_json(figures, inf_nan_mode="null")))

    @classmethod
    def load(cls, *folders: str | Path, reference: str | None = None) -> Comparison:
        """Read runs from folders and pool them.

        Args:
            folders: Folders of comparisons or of single runs.
            reference: Label of the selector that the others are compared with. If None, "random" if it ran.

        Returns:
            The comparison.

        Raises:
            ParameterError: A folder holds no run, a damaged run or a link. Also raised if two runs have the same
                selector and seed. Also raised if runs differ in their scenario, a selector's code, the model, or the
                data or partition of a seed. The error names the difference.
        """
        return cls._pool(_load_runs(folders), reference)

    @classmethod
    def load_each(cls, *folders: str | Path, reference: str | None = None) -> dict[str, Comparison]:
        """Read runs from folders and pool those of the same scenario.

        Args:
            folders: Folders of comparisons or of single runs.
            reference: As for :meth:`load`.

        Returns:
            Name of the scenario -> comparison. If several scenarios have the same name, the keys also have the settings
            in which they differ.

        Raises:
            ParameterError: As for :meth:`load`, but runs may differ in their scenario.
        """
        groups: dict[str, list[Run]] = {}
        for run in _load_runs(folders):
            groups.setdefault(repr(_fixed_settings(run.scenario)), []).append(run)
        labels = _scenario_labels([runs[0].scenario for runs in groups.values()])
        return dict(zip(labels, [cls._pool(runs, reference) for runs in groups.values()], strict=True))

    @classmethod
    def _pool(cls, loaded: Sequence[Run], reference: str | None) -> Comparison:
        """Pool runs of one scenario."""
        _check_one_scenario(loaded)
        check_poolable([(run.selector, run.scenario.seed, run.result.fingerprints, str(run.place)) for run in loaded])
        runs = [run for run in loaded if run.result.arrays]
        cut_off = [run for run in loaded if not run.result.arrays]
        comparison = cls(loaded[0].scenario, runs, cut_off=cut_off)
        if runs:
            comparison.reference = choose_reference(reference, comparison.selectors)
        return comparison


def compare_choices(one: History, other: History) -> Agreement:
    """Compare the clients selected in two runs; the order within a round does not count.

    Args:
        one: A history.
        other: Another history.

    Returns:
        Number of common rounds, and the first round that differs.
    """
    shared = min(len(one.rounds), len(other.rounds))
    for record in one.rounds[:shared]:
        if _chosen(one, record.round) != _chosen(other, record.round):
            return Agreement(shared, record.round)
    return Agreement(shared, 0)


def _chosen(history: History, round: int) -> set[str]:
    return {row.client_id for row in history.clients if row.round == round}


def profile_targets(target_accuracy: float) -> list[float]:
    """Return the target accuracies of the profile: the declared target, two below it and two above it.

    >>> profile_targets(0.9)
    [0.8, 0.85, 0.9, 0.93, 0.95]
    """
    shifted = [round(target_accuracy + shift, 4) for shift in (-0.1, -0.05, 0.0, 0.03, 0.05)]
    return [target for target in shifted if 0 < target < 1]


def choose_reference(given: str | None, labels: Sequence[str]) -> str | None:
    """Return the reference: the label in ``given``; if it is None, "random" if that is one of several selectors.

    Raises:
        ParameterError: The label in ``given`` is not among the selectors, or is the only one.
    """
    if given is None:
        return "random" if "random" in labels and len(labels) > 1 else None
    if len(labels) < 2:
        raise ParameterError(f"reference {given!r} needs another selector to compare with it")
    return one_of("reference", given, tuple(labels))


def _run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, or the folder itself if it holds a run."""
    if (folder / "scenario.toml").is_file():
        check_links(folder)
        return [folder]
    # Only the direct content of a comparison's folder is checked here, because each run's folder is checked when read.
    check_entries(folder)
    found = sorted(path.parent for path in folder.glob("*/scenario.toml"))
    inside = [place for place in found if not place.name.endswith("-on-flower")]
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ParameterError(f"{str(folder)!r} {what}. Give the folder of a run, or of a comparison")
    if not inside:
        raise ParameterError(f"{str(folder)!r} holds no run. Give the folder of a run, or of a comparison")
    for place in inside:
        check_links(place)
    return inside


def _load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read all runs in folders."""
    found = [place for folder in folders for place in _run_folders(Path(folder))]
    if not found:
        raise ParameterError("folders must hold at least one folder of runs, got none. Give one")
    return [Run(*read_run(place), place) for place in found]


def _scenario_labels(scenarios: Sequence[Scenario]) -> list[str]:
    """Return the names of scenarios, with the settings in which they differ if two names are equal."""
    names = [scenario.name for scenario in scenarios]
    if len(set(names)) == len(names):
        return names
    settings = [_fixed_settings(scenario) for scenario in scenarios]
    keys = [key for key in settings[0] if any(own.get(key) != settings[0][key] for own in settings)]
    return [
        f"{name} {', '.join(f'{key}={own.get(key)}' for key in keys)}"
        for name, own in zip(names, settings, strict=True)
    ]


def _check_one_scenario(runs: Sequence[Run]) -> None:
    """Refuse runs of different scenarios, and two runs of the same selector and seed."""
    first, place = _fixed_settings(runs[0].scenario), runs[0].place
    seen: dict[tuple[str, int], Path | None] = {}
    for run in runs:
        other = _fixed_settings(run.scenario)
        for key in first:
            if first[key] != other[key]:
                raise ParameterError(
                    f"{key} is {first[key]!r} in {str(place)!r} and {other[key]!r} in {str(run.place)!r}. Load each"
                )
        name = (run.selector, run.scenario.seed)
        if name in seen:
            raise ParameterError(
                f"{run.selector!r} ran on seed {run.scenario.seed} in {str(seen[name])!r} and in {str(run.place)!r}. "
                "Leave one of them out"
            )
        seen[name] = run.place


def _fixed_settings(scenario: Scenario) -> dict[str, Any]:
    """Return the settings that must be equal in all runs of a comparison: dotted key -> value."""
    return flat_settings(scenario.model_dump(exclude=VARIED))


def _write_text(text: str, path: str | Path | None) -> str:
    """Return a text, and write it to ``path`` unless that is None."""
    if path is not None:
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    return text
