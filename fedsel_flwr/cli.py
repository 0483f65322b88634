"""The command ``fedsel``: list, run, compare, report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsel_flwr.arguments import overrides_of, parse, resumed_folder, seeds_of, where_of
from fedsel_flwr.commands import DEFAULT_SCENARIO, DEFAULT_SELECTORS, parser_of
from fedsel_flwr.errors import FedSelError, ParameterError, RunError

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparisons.comparison import Comparison
    from fedsel_flwr.simulations.comparisons.plan import Plan
    from fedsel_flwr.simulations.shutdown import Leaving

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130
INTERRUPTED = "fedsel: interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, 2 after an error, 130 after Ctrl-C)."""
    parser, of_commands = parser_of()
    alone = argv is None and threading.current_thread() is threading.main_thread()
    if alone:  # until leaving_at_once listens, SIGTERM is as Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = _command(parse(parser, of_commands, argv))
        sys.stdout.flush()
        if alone:  # everything is said: Python ends, which takes a while with all that was loaded
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_IGN)
        return status
    except BrokenPipeError:  # the reader has what it wants, as in | head
        from fedsel_flwr.report.progress import fall_silent

        fall_silent()
        return 0
    except FedSelError as error:
        print(f"fedsel: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except MemoryError as error:  # numbers of the scenario, or of a plan that somebody else made
        print(f"fedsel: error: there is not enough memory for this: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:  # before leaving_at_once listens
        print(INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED


def _command(args: argparse.Namespace) -> int:
    if args.command == "list":
        _require("pydantic")
        return _list()
    _require("pydantic", "torch", "ray", "flwr_datasets")
    _set_environment()
    if args.command == "report":
        return _report(args)

    from fedsel_flwr.simulations.shutdown import leaving_at_once

    with leaving_at_once(lambda: None, lambda: INTERRUPTED, EXIT_INTERRUPTED) as leaving:
        return _compare(args, leaving)


def _list() -> int:
    from fedsel_flwr.selectors.registry import description, names
    from fedsel_flwr.simulations.scenario_files import load_scenario, scenario_names

    print("scenarios")
    for name in scenario_names():
        print(f"  {name:<16}{load_scenario(name).description}")
    print("selectors")
    for name in names():
        first, *more = description(name)
        print(f"  {name:<16}{first}")
        for line in more:
            print(f"      {line}")
    return 0


def _compare(args: argparse.Namespace, leaving: Leaving) -> int:
    """Run the runs, print table, verdict and folder; ``fedsel run`` is a comparison of one."""
    going_on = resumed_folder(args)
    if args.replay and args.resume is None:
        raise ParameterError("--replay needs --resume: it plays runs of a folder again that do not fit")
    plan = _plan(args) if going_on is None else _plan_of(Path(going_on), args)

    from fedsel_flwr.report.progress import Progress
    from fedsel_flwr.report.run_folder import create_run_folder, load_optional
    from fedsel_flwr.simulations.comparisons.plan_files import held_folder, newest_like
    from fedsel_flwr.simulations.logs import in_one_line, logging_to
    from fedsel_flwr.simulations.results import rounds_in
    from fedsel_flwr.simulations.shutdown import adopt_orphans, end_descendants
    from fedsel_flwr.simulations.worlds.world import world_of

    if going_on is None and args.resume and getattr(args, "checkpoint_dir", None) is None:
        going_on = str(newest_like(plan.said(), Path(args.runs_dir), _say))
    world_of(plan.them[0].scenario(plan.scenario, plan.seeds[0]))  # faults in the data come before anything is written
    folder = (Path(going_on) if going_on else create_run_folder(plan.scenario.name, args.runs_dir)).resolve()
    held = held_folder(folder)  # before the log is opened: the refusal must not name rounds of another process
    adopt_orphans()
    # A signal in the midst of this import, at the first run's end, would find half a module to read the rounds with.
    load_optional("pyarrow.parquet")

    def holds() -> str:
        there = rounds_in(folder)
        further = f"; fedsel {args.command} {plan.resumed_by(folder)} goes on"
        return f"{folder} holds {there or 'no round yet'}{further if there and not args.no_checkpoints else ''}"

    try:
        with (
            logging_to(folder / "flower.log"),
            in_one_line(folder / "flower.log"),
            Progress(_console(args)) as progress,
        ):
            leaving.last, leaving.message, leaving.folder = progress.stop, lambda: f"{INTERRUPTED}; {holds()}", folder
            options = {"replay": args.replay, "quiet": args.quiet, "on_wait": progress.on_wait}
            comparison = plan.run(
                folder,
                progress.start_run,
                progress.update,
                resume=args.resume is not None,
                **options,
            )
    except RunError as error:
        raise RunError(f"{error}; {holds()}") from error
    finally:
        end_descendants()
        del held
    _show(comparison, args.json)
    if not args.json:
        print(f"{folder}")
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    from fedsel_flwr.references import located
    from fedsel_flwr.simulations.scenario_files import load_scenario

    given = ",".join(args.selectors or [DEFAULT_SELECTORS]) if args.command == "compare" else ""
    named = [name.strip() for name in given.split(",") if name.strip()]
    everybody = named == ["all"]
    named = [] if everybody else [located(name, Path.cwd()) for name in named]
    scenario = load_scenario(args.scenario or DEFAULT_SCENARIO, overrides_of(args), named)
    if args.command == "run":
        named = [scenario.selector]
    elif not everybody and (not named or len(set(named)) != len(named)):
        raise ParameterError(f"--selectors must name at least one selector, each once, got {given!r}")
    seeds = seeds_of(args) if args.command == "compare" else 1
    checkpoints: dict[str, Any] = {"checkpoint_every": 0} if args.no_checkpoints else {}
    if getattr(args, "checkpoint_dir", None) is not None:
        if args.no_checkpoints:
            raise ParameterError("--checkpoint-dir and --no-checkpoints contradict each other: leave out one of them")
        checkpoints = {"checkpoint_dir": str(Path(args.checkpoint_dir).expanduser().resolve())}

    from fedsel_flwr.simulations.comparisons.contenders import every_selector
    from fedsel_flwr.simulations.comparisons.plan import Plan
    from fedsel_flwr.simulations.on_flower.ray_resources import Where

    left_out: dict[str, str] = {}
    if everybody:
        named, left_out = every_selector(scenario)
    return Plan.of(
        scenario, named, seeds=seeds, engine=scenario.engine, reference=getattr(args, "reference", None),
        rounds_on_flower=getattr(args, "rounds_on_flower", 0), where=Where(**where_of(args)),
        device=args.device or "cpu", processes=args.processes, left_out=left_out, checkpoints=checkpoints,
        jobs=1 if (jobs := getattr(args, "jobs", None)) is None else jobs,
    )  # fmt: skip


def _plan_of(folder: Path, args: argparse.Namespace) -> Plan:
    """What was begun in a folder, to be run where the command line says."""
    from fedsel_flwr.simulations.comparisons.plan import Plan
    from fedsel_flwr.simulations.on_flower.ray_resources import Where

    elsewhere: dict[str, Any] = {"where": Where(**given)} if (given := where_of(args)) else {}
    named = ("device", "processes", "jobs")
    elsewhere |= {key: value for key in named if (value := getattr(args, key, None)) is not None}
    elsewhere |= {"trust": args.trust, "checkpoint_dir": getattr(args, "checkpoint_dir", None), "command": args.typed}
    return Plan.load(folder, {"rounds": args.rounds, "data.data_dir": args.data_dir}, **elsewhere)


def _report(args: argparse.Namespace) -> int:
    """Pool runs that are there: table and verdict; into a folder, picture and files too."""
    from fedsel_flwr.simulations.comparisons.comparison import Comparison

    comparison = Comparison.load(*args.folders, reference=args.reference)
    target = args.out or (args.folders[0] if len(args.folders) == 1 else None)
    if target or not comparison.runs:
        comparison.report(Path(target or "."))  # refuses a comparison without a finished run
    _show(comparison, args.json)
    if target and not args.json:
        print(f"{Path(target).resolve()}")
    return 0


def _console(args: argparse.Namespace) -> Any:
    """Where the progress goes: nowhere, if it is not wanted or standard output is for JSON."""
    from rich.console import Console

    return Console(quiet=True) if args.json or args.quiet else None


def _show(comparison: Comparison, as_json: bool) -> None:
    from fedsel_flwr.report.summary import aggregate
    from fedsel_flwr.report.tables import render_table

    if as_json:
        print(json.dumps(comparison.figures(), indent=2, allow_nan=False))
        return
    render_table(aggregate(comparison.summaries), comparison.scenario.target_accuracy)
    for run in comparison.runs:
        if run.result.trouble:
            print(f"{run.selector}, seed {run.scenario.seed}: {run.result.trouble}")
    for name, reason in comparison.left_out.items():
        print(f"left out: {name}: {reason}")
    for run in comparison.cut_off:
        print(f"left out: {run.selector}, seed {run.scenario.seed}, cut off after {len(run.history.rounds)} rounds")
    if comparison.agreement:
        print(comparison.agreement.sentence)
    if said := comparison.verdict:
        print(said.sentence)


def _say(line: str) -> None:
    print(f"fedsel: {line}", file=sys.stderr)


def _require(*packages: str) -> None:
    lacking = [name for name in packages if not importlib.util.find_spec(name)]
    if lacking:
        raise RunError(f"{', '.join(lacking)} not installed: pip install 'fedsel-flwr[sim]'")


def _set_environment() -> None:
    """What Flower and Ray read when they are imported."""
    for key, value in (
        ("FLWR_TELEMETRY_ENABLED", "0"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(key, value)


if __name__ == "__main__":
    sys.exit(main())
