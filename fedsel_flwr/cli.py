"""Command line of ``fedsel``: its commands.

Each command imports the modules that it needs when it runs, so that ``fedsel --help`` and errors in the arguments
appear at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsel_flwr import arguments
from fedsel_flwr.arguments import DEFAULT_SCENARIO, DEFAULT_SELECTORS
from fedsel_flwr.errors import FedSelError, ParameterError, RunError
from fedsel_flwr.operating_system import adopt_orphans, shell_line

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparisons.plan import Plan
    from fedsel_flwr.simulations.shutdown import SignalShutdown

EXIT_UNHEALTHY, EXIT_ERROR, EXIT_INTERRUPTED = 1, 2, 130
INTERRUPTED = "fedsel: interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0, 1 if ``fedsel doctor`` finds a problem, 2 after an error, 130 after Ctrl-C.
    """
    owns_process = argv is None and threading.current_thread() is threading.main_thread()
    # Until SignalShutdown handles signals, SIGTERM interrupts in the same way as Ctrl-C.
    if owns_process:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = _run_command(arguments.parse(argv))
        sys.stdout.flush()
        # Everything has been printed. With torch and Ray loaded, Python takes time to exit, and an interrupt would now
        # only add a traceback.
        if owns_process:
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_IGN)
        return status
    # The reader has closed the pipe, as in "| head".
    except BrokenPipeError:
        from fedsel_flwr.report.progress import discard_stdout

        discard_stdout()
        return 0
    except FedSelError as error:
        print(f"fedsel: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    # Sizes come from scenarios, or from plans that other people made.
    except MemoryError as error:
        print(f"fedsel: error: there is not enough memory for this run: {error}", file=sys.stderr)
        return EXIT_ERROR
    # Ctrl-C came before SignalShutdown handled signals.
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED


def _run_command(args: argparse.Namespace) -> int:
    _set_environment()
    small: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "list": _list, "show": _show_scenario, "cite": _cite, "doctor": _doctor, "advise": _advise,
        "reproduce": _reproduce, "report": _report,
    }  # fmt: skip
    if args.command in small:
        return small[args.command](args) or 0
    _require("pydantic", "torch", "ray", "flwr_datasets")
    from fedsel_flwr.simulations.shutdown import SignalShutdown

    with SignalShutdown(lambda: None, lambda: INTERRUPTED, EXIT_INTERRUPTED).listening() as shutdown:
        _compare(args, shutdown)
    return 0


def _print(args: argparse.Namespace, facts: Callable[[], object], lines: Callable[[], Iterable[str]]) -> None:
    """Print facts as JSON if the user wants that, otherwise lines."""
    print(json.dumps(facts(), indent=2, allow_nan=False, default=repr) if args.json else "\n".join(lines()))


def _list(args: argparse.Namespace) -> None:
    from fedsel_flwr.simulations.listing import list_facts, list_lines

    _print(args, list_facts, lambda: list_lines(shutil.get_terminal_size().columns))


def _show_scenario(args: argparse.Namespace) -> None:
    """Print a scenario with all its keys."""
    _require("pydantic", "tomli_w")
    from fedsel_flwr.simulations.scenario_files import load_scenario
    from fedsel_flwr.simulations.scenario_text import scenario_facts, scenario_lines

    overrides = {key: value for key, value in arguments.overrides_of(args).items() if value is not None}
    scenario = load_scenario(args.scenario or DEFAULT_SCENARIO, overrides)
    _print(args, lambda: scenario_facts(scenario), lambda: scenario_lines(scenario, overrides, meanings=args.meanings))


def _cite(args: argparse.Namespace) -> None:
    """Print BibTeX entries, each once."""
    from fedsel_flwr.selectors.registry import citations, package_entry

    print("\n\n".join(dict.fromkeys([entry for name in args.cited for entry in citations(name)])) or package_entry())


def _doctor(args: argparse.Namespace) -> int:
    """Check the installation; return the exit status 1 if there is a problem."""
    from dataclasses import asdict

    from fedsel_flwr.simulations.doctor import examine, report_lines

    findings = list(examine(args.data_dir, args.runs_dir, args.start_ray))
    healthy = all(finding.status != "problem" for finding in findings)
    facts = {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}
    _print(args, lambda: facts, lambda: report_lines(findings, shutil.get_terminal_size().columns))
    return 0 if healthy else EXIT_UNHEALTHY


def _advise(args: argparse.Namespace) -> None:
    """Print the advice for a history of latencies."""
    _require("scipy")
    from fedsel_flwr.report.advice import advise

    advice = advise(
        args.source, clients_per_round=args.clients_per_round, max_latency=args.max_latency, rounds=args.rounds,
        seed=args.seed, num_clients=args.clients,
    )  # fmt: skip
    _print(args, advice.facts, advice.lines)


def _reproduce(args: argparse.Namespace) -> None:
    """Reproduce figures, or list them."""
    _require("pydantic")
    from fedsel_flwr.simulations.reproductions import reproducing

    if args.list:
        print("\n".join(reproducing.list_figures()))
        return
    names, data_dir = reproducing.named_figures(args.figures), args.data_dir or ""
    _require("torch", "flwr", "scipy", "altair", "vl_convert")
    if args.smoke:
        reproducing.smoke(names, data_dir)
    else:
        reproducing.reproduce(
            names, args.out, jobs=args.jobs, seeds=args.seeds, data_dir=data_dir, ray_address=args.ray_address
        )


def _compare(args: argparse.Namespace, shutdown: SignalShutdown) -> None:
    """Run a comparison, print its table, verdict and folder; ``fedsel run`` is a comparison of one selector."""
    resumed = arguments.resumed_folder(args)
    if args.replay and args.resume is None:
        raise ParameterError("--replay needs --resume. Give both, or leave --replay out")
    plan = _new_plan(args) if resumed is None else _resumed_plan(Path(resumed), args)

    from fedsel_flwr.callbacks.tracking import Tracking
    from fedsel_flwr.report.progress import PipeSafeConsole, errors_in_one_line, logging_to
    from fedsel_flwr.report.run_folder import create_run_folder, load_optional
    from fedsel_flwr.simulations.comparisons.comparing import PlanProgress, run_plan
    from fedsel_flwr.simulations.comparisons.plan import find_newest_run
    from fedsel_flwr.simulations.comparisons.report_page import report_scenarios
    from fedsel_flwr.simulations.results import describe_runs, hold_folder
    from fedsel_flwr.simulations.run_options import RunOptions
    from fedsel_flwr.simulations.shutdown import end_descendants
    from fedsel_flwr.simulations.worlds.world import world_of

    if resumed is None and args.resume and getattr(args, "checkpoint_dir", None) is None:
        resumed = str(find_newest_run(plan, Path(args.runs_dir), _print_note))
    scenario = plan.scenario
    tracking: Tracking | None = args.track and Tracking.of(
        args.track, scenario.name, scenario.num_clients, folder=args.runs_dir, track_clients=args.track_clients
    )
    # The world is built here, so that errors in the data come before anything is written.
    world_of(plan.selectors[0].scenario(scenario, plan.seeds[0]))
    folder = (Path(resumed) if resumed else create_run_folder(scenario.name, args.runs_dir)).resolve()
    # Locked before the log is opened, because a refusal must not name rounds of another process.
    held = hold_folder(folder)
    tracking = tracking and tracking.begin(folder, _print_note)
    adopt_orphans()
    # Imported now, not when the first run ends. A signal during the import would find half a module for reading rounds.
    load_optional("pyarrow.parquet")

    # Silent if the user wants no progress, or JSON on standard output.
    console = PipeSafeConsole(quiet=args.json or args.quiet)

    def holds() -> str:
        there = describe_runs(folder)
        further = f". Resume with: fedsel {args.command} {plan.resume_options(folder)}{args.track_options}"
        return f"{folder} holds {there or 'no round yet'}{further if there and not args.no_checkpoints else ''}"

    try:
        with (
            logging_to(folder / "flower.log"),
            errors_in_one_line(folder / "flower.log"),
            PlanProgress(plan, announces=args.command == "compare" and resumed is None, console=console) as progress,
        ):
            shutdown.on_signal, shutdown.folder = progress.stop, folder
            shutdown.message = lambda: f"{INTERRUPTED}; {holds()}"
            options = RunOptions(
                folder=folder,
                resume=args.resume is not None,
                replay=args.replay,
                track=tracking,
                # Only one display at a time is possible, and the run's bar already moves while Ray starts.
                quiet=args.quiet or progress.is_live,
            )
            comparison = run_plan(plan, options, progress.start_run, progress.update, progress.show_runs)
    except RunError as error:
        raise RunError(f"{error}; {holds()}") from error
    finally:
        if tracking is not None:
            tracking.end_service()
        end_descendants()
        # The lock is released with this object.
        del held
    report_scenarios({scenario.name: comparison}, None, as_json=args.json)
    if not args.quiet:
        _print_note_on_page(folder)
    if not args.json:
        print(f"{folder}")


def _new_plan(args: argparse.Namespace) -> Plan:
    """Return the plan that the command line describes."""
    from fedsel_flwr.references import absolute_reference
    from fedsel_flwr.simulations.scenario_files import load_scenario

    given = ",".join(args.selectors or [DEFAULT_SELECTORS]) if args.command == "compare" else ""
    named = [name.strip() for name in given.split(",") if name.strip()]
    named = [absolute_reference(name, Path.cwd()) for name in named]
    scenario = load_scenario(args.scenario or DEFAULT_SCENARIO, arguments.overrides_of(args), named)
    if args.command == "run":
        named = [scenario.selector]
    elif not named or len(set(named)) != len(named):
        raise ParameterError(f"--selectors must name selectors, each only once, got {given!r}")
    seeds = arguments.read_numbers(args.seeds or "10", "--seeds") if args.command == "compare" else 1
    checkpoints: dict[str, Any] = {"checkpoint_every": 0} if args.no_checkpoints else {}
    if getattr(args, "checkpoint_dir", None) is not None:
        if args.no_checkpoints:
            raise ParameterError("--checkpoint-dir and --no-checkpoints contradict each other. Leave out one of them")
        checkpoints = {"checkpoint_dir": str(Path(args.checkpoint_dir).expanduser().resolve())}

    from fedsel_flwr.simulations.comparisons.plan import Plan
    from fedsel_flwr.simulations.on_flower.ray_resources import RayResources

    return Plan.of(
        scenario, named[0] if named == ["all"] else named, seeds=seeds, engine=scenario.engine,
        reference=getattr(args, "reference", None), sweep=arguments.read_sweep(getattr(args, "sweep", [])),
        rounds_on_flower=getattr(args, "rounds_on_flower", 0), where=RayResources(**arguments.ray_options_of(args)),
        device=args.device or "cpu", checkpoints=checkpoints,
        jobs=getattr(args, "jobs", None),
    )  # fmt: skip


def _resumed_plan(folder: Path, args: argparse.Namespace) -> Plan:
    """Return the plan in a folder, with the command line's options for this machine."""
    from fedsel_flwr.simulations.comparisons.plan import Plan
    from fedsel_flwr.simulations.on_flower.ray_resources import RayResources

    elsewhere: dict[str, Any] = {"where": RayResources(**given)} if (given := arguments.ray_options_of(args)) else {}
    named = ("device", "jobs")
    elsewhere |= {key: value for key in named if (value := getattr(args, key, None)) is not None}
    elsewhere |= {"trust": args.trust, "checkpoint_dir": getattr(args, "checkpoint_dir", None), "command": args.typed}
    return Plan.load(folder, {"rounds": args.rounds, "data.data_dir": args.data_dir}, **elsewhere)


def _report(args: argparse.Namespace) -> None:
    """Pool existing runs: print the table and the verdict, and write pictures and files; or report on a deployment."""
    from fedsel_flwr.report.page.deployment_page import report_deployment
    from fedsel_flwr.report.page.deployment_tables import deployment_folder

    if deployed := deployment_folder(args.folders, args.reference):
        if target := report_deployment(deployed, args.out, as_json=args.json):
            _print_note_on_page(target)
        return
    _require("pydantic", "torch", "ray", "flwr_datasets")
    from fedsel_flwr.simulations.comparisons.comparison import Comparison
    from fedsel_flwr.simulations.comparisons.report_page import report_scenarios

    target = args.out or (args.folders[0] if len(args.folders) == 1 else None)
    found = Comparison.load_each(*args.folders, reference=args.reference)
    report_scenarios(found, Path(target) if target else None, as_json=args.json)
    if target:
        _print_note_on_page(Path(target))
    if target and not args.json:
        print(f"{Path(target).resolve()}")


def _print_note(line: str) -> None:
    print(f"fedsel: {line}", file=sys.stderr)


def _print_note_on_page(folder: Path) -> None:
    """Say how to get the page if its packages are not installed."""
    from fedsel_flwr.report.page.document import INSTALL, missing_packages

    if missing := missing_packages():
        _print_note(
            f"no report.html was written, because {', '.join(missing)} is not installed. To get it, enter: {INSTALL}; "
            f"fedsel report {shell_line(str(folder))}"
        )


def _require(*packages: str) -> None:
    lacking = [name for name in packages if not importlib.util.find_spec(name)]
    if lacking:
        raise RunError(f"{', '.join(lacking)} not installed. Enter: pip install 'fedsel-flwr[sim]'")


def _set_environment() -> None:
    """Set the environment variables that Flower and Ray read on import, unless the user has set them."""
    for key, value in (
        ("FLWR_TELEMETRY_ENABLED", "0"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(key, value)


if __name__ == "__main__":
    sys.exit(main())
