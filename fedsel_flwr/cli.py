"""The command ``fedsel``: list, run, compare, report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsel_flwr import __version__
from fedsel_flwr.arguments import parse
from fedsel_flwr.errors import FedSelError, ParameterError, RunError

if TYPE_CHECKING:
    from fedsel_flwr.simulations.comparison import Comparison

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130
DEFAULT_SELECTORS = "bsfl,cs-ucb,random"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, 2 after an error, 130 after Ctrl-C)."""
    parser, of_commands = _parser()
    try:
        status = _command(parse(parser, of_commands, argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has what it wants, as in | head
        from fedsel_flwr.report.pipes import fall_silent

        fall_silent()
        return 0
    except FedSelError as error:
        print(f"fedsel: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:  # while loading; during the runs, see leaving_at_once
        print("fedsel: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _command(args: argparse.Namespace) -> int:
    if args.command == "list":
        _require("pydantic")
        return _list()
    _require("pydantic", "torch", "ray", "flwr_datasets")
    _set_environment()
    return _report(args) if args.command == "report" else _compare(args)


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the whole command, and those of its commands by name."""
    parser = argparse.ArgumentParser(
        prog="fedsel", description="Compare client selectors for federated learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fedsel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", allow_abbrev=False, help="show the scenarios and the selectors")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("scenario", nargs="?", default="digits", help="name or TOML file (default: digits)")
    common.add_argument("--data-dir", metavar="DIR", help="folder of torchvision's data sets (else $FEDSEL_DATA)")
    common.add_argument("--rounds", type=int, help="number of rounds, instead of the scenario's")
    common.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a scenario key, for example --set training.learning_rate=0.05 (may be repeated)",
    )  # fmt: skip
    common.add_argument(
        "--engine", choices=("ray", "vectorized"),
        help="ray: Flower, each client by itself; vectorized: in this process, a round's clients together "
        "(default: the scenario's for run, vectorized for compare)",
    )  # fmt: skip
    common.add_argument(
        "--processes", type=int, metavar="N",
        help="processes that train in the vectorized engine (default: by the sizes of model and round)",
    )  # fmt: skip
    common.add_argument(
        "--num-cpus", type=int, metavar="N", help="cores that Ray gets (default: all; refused on a cluster)"
    )
    common.add_argument(
        "--num-gpus", type=int, metavar="N",
        help="GPUs that Ray gets, shared out equally to the clients at work (default: what --client-gpus asks for)",
    )  # fmt: skip
    common.add_argument("--client-cpus", type=float, metavar="X", help="cores that a client takes on Ray (default: 1)")
    common.add_argument(
        "--client-gpus", type=float, metavar="X", help="GPUs that a client takes on Ray, such as 0.25 (default: 0)"
    )
    common.add_argument(
        "--ray-address", metavar="HOST:PORT",
        help="head of a Ray cluster to join, auto, or local: Ray on this machine (default: $RAY_ADDRESS, else local)",
    )  # fmt: skip
    common.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="where the vectorized engine trains, such as cuda (default: cpu)",
    )
    common.add_argument(
        "--quiet", action="store_true", help="show no progress: only the table, and where the files are"
    )
    common.add_argument("--runs-dir", default="runs", metavar="DIR", help="where run folders go (default: ./runs)")
    run = commands.add_parser("run", allow_abbrev=False, parents=[common], help="run a scenario with one selector")
    run.add_argument("--selector", help="instead of the scenario's: a name, package.module:Class or ./file.py:Class")
    run.add_argument("--seed", type=int, help="instead of the scenario's")
    compare = commands.add_parser(
        "compare", allow_abbrev=False, parents=[common], help="run a scenario with several selectors"
    )
    compare.add_argument(
        "--selectors",
        action="append",
        metavar="A,B,C",
        help=f"names, package.module:Class or ./file.py:Class, with commas, or all (default: {DEFAULT_SELECTORS})",
    )
    compare.add_argument(
        "--seeds", default="1", metavar="N|A,B,C",
        help="runs of each selector, counted up from the scenario's seed, or the seeds themselves (default: 1)",
    )  # fmt: skip
    compare.add_argument(
        "--reference", metavar="NAME",
        help="the selector that the last sentence compares the others with, seed by seed (default: random, if it runs)",
    )  # fmt: skip
    compare.add_argument(
        "--rounds-on-flower", type=int, default=0, metavar="N",
        help="first play N rounds of the first selector with Flower on Ray, and say whether both engines choose alike",
    )  # fmt: skip
    report = commands.add_parser("report", allow_abbrev=False, help="pool runs that are there: table, verdict, picture")
    report.add_argument("folders", nargs="+", metavar="FOLDER", help="of a comparison, or of a run")
    report.add_argument("--reference", metavar="NAME", help="as in compare")
    report.add_argument("--out", metavar="DIR", help="where picture and summary go (default: the folder, if it is one)")
    for each in (run, compare, report):
        each.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    return parser, commands.choices


def _list() -> int:
    from fedsel_flwr.selectors.describing import described
    from fedsel_flwr.selectors.registry import names
    from fedsel_flwr.simulations.scenario_files import load_scenario, scenario_names

    print("scenarios")
    for name in scenario_names():
        print(f"  {name:<16}{load_scenario(name).description}")
    print("selectors")
    for name in names():
        first, *more = described(name)
        print(f"  {name:<16}{first}")
        for line in more:
            print(f"      {line}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Run the runs, print table, verdict and folder; ``fedsel run`` is a comparison of one."""
    from fedsel_flwr.references import located
    from fedsel_flwr.simulations.scenario_files import load_scenario

    given = ",".join(args.selectors or [DEFAULT_SELECTORS]) if args.command == "compare" else ""
    named = [name.strip() for name in given.split(",") if name.strip()]
    everybody = named == ["all"]
    named = [] if everybody else [located(name, Path.cwd()) for name in named]
    scenario = load_scenario(args.scenario, _overrides(args), named)
    if args.command == "run":
        named = [scenario.selector]
    elif not everybody and (not named or len(set(named)) != len(named)):
        raise ParameterError(f"--selectors must name at least one selector, each once, got {given!r}")
    seeds = _seeds(args) if args.command == "compare" else 1

    from fedsel_flwr.report.progress import Progress
    from fedsel_flwr.report.run_folder import create_run_folder
    from fedsel_flwr.simulations.comparing import Plan
    from fedsel_flwr.simulations.everyone import every_selector
    from fedsel_flwr.simulations.logs import in_one_line, logging_to
    from fedsel_flwr.simulations.processes import adopt_orphans, end_descendants, leaving_at_once
    from fedsel_flwr.simulations.results import rounds_in
    from fedsel_flwr.simulations.where import Where
    from fedsel_flwr.simulations.world import world_of

    left_out: dict[str, str] = {}
    if everybody:
        named, left_out = every_selector(scenario)
    plan = Plan.of(
        scenario, named, seeds=seeds, engine=scenario.engine, reference=getattr(args, "reference", None),
        rounds_on_flower=getattr(args, "rounds_on_flower", 0), where=Where(**_where(args)), device=args.device,
        processes=args.processes,
    )  # fmt: skip
    world_of(plan.them[0].scenario(plan.scenario, plan.seeds[0]))  # faults in the data come before anything is written
    folder = create_run_folder(scenario.name, args.runs_dir).resolve()
    adopt_orphans()

    def holds() -> str:
        return f"{folder} holds {rounds_in(folder) or 'no round yet'}"

    try:
        with (
            logging_to(folder / "flower.log"),
            in_one_line(folder / "flower.log"),
            Progress(_console(args)) as progress,
            leaving_at_once(progress.stop, lambda: f"fedsel: interrupted; {holds()}", EXIT_INTERRUPTED),
        ):
            options = {"quiet": args.quiet, "on_wait": progress.on_wait}
            comparison = plan.run(folder, progress.start_run, progress.update, **options)
    except RunError as error:
        raise RunError(f"{error}; {holds()}") from error
    finally:
        end_descendants()
    comparison.left_out = left_out
    _show(comparison, args.json)
    if not args.json:
        print(f"{folder}")
    return 0


def _report(args: argparse.Namespace) -> int:
    """Pool runs that are there: table and verdict; into a folder, picture and files too."""
    from fedsel_flwr.simulations.comparison import Comparison

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
    from fedsel_flwr.report.table import render_table

    if as_json:
        print(json.dumps(comparison.figures(), indent=2, allow_nan=False))
        return
    render_table(aggregate(comparison.summaries), comparison.scenario.target_accuracy)
    for name, reason in comparison.left_out.items():
        print(f"left out: {name}: {reason}")
    for run in comparison.cut_off:
        print(f"left out: {run.selector}, seed {run.scenario.seed}, cut off after {len(run.history.rounds)} rounds")
    if comparison.agreement:
        print(comparison.agreement.sentence)
    if said := comparison.verdict:
        print(said.sentence)


def _seeds(args: argparse.Namespace) -> int | list[int]:
    """How many seeds, or the seeds themselves."""
    try:
        numbers = [int(part) for part in args.seeds.split(",")]
    except ValueError:
        raise ParameterError(f"--seeds must be a number, or numbers with commas, got {args.seeds!r}") from None
    if "," not in args.seeds and numbers[0] < 1:
        raise ParameterError(f"--seeds must be at least 1, got {args.seeds}")
    return numbers if "," in args.seeds else numbers[0]


def _where(args: argparse.Namespace) -> dict[str, Any]:
    """What Ray is given, as far as it was said."""
    named = ("num_cpus", "num_gpus", "client_cpus", "client_gpus", "ray_address")
    return {name: value for name in named if (value := getattr(args, name)) is not None}


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {"data.data_dir": args.data_dir, "rounds": args.rounds}
    overrides |= {key: getattr(args, key, None) for key in ("selector", "seed")}
    overrides["engine"] = args.engine or ("vectorized" if args.command == "compare" else None)
    for text in args.overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ParameterError(f"--set expects KEY=VALUE, as in training.learning_rate=0.05, got {text!r}")
        if not value.strip():
            raise ParameterError(f"--set {text} lacks a value: give one, or leave it out to keep the scenario's")
        overrides[key.strip()] = _toml_value(value.strip())
    return overrides


def _toml_value(text: str) -> Any:
    """A number, boolean or list as TOML reads it, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


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
