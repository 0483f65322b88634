"""The command ``fedsel``: list, run, compare."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr import __version__
from fedsel_flwr.errors import FedSelError, ParameterError, RunError

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, 2 after an error, 130 after Ctrl-C)."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "list":
            _require("pydantic")
            return _list()
        _require("pydantic", "torch", "ray", "flwr_datasets")
        _set_environment()
        return _compare(args)
    except FedSelError as error:
        print(f"fedsel: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:  # while loading; during the runs, see leaving_at_once
        print("fedsel: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedsel", description="Compare client selectors for federated learning.")
    parser.add_argument("--version", action="version", version=f"fedsel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="show the scenarios and the selectors")
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
    common.add_argument("--runs-dir", default="runs", metavar="DIR", help="where run folders go (default: ./runs)")
    run = commands.add_parser("run", parents=[common], help="run a scenario with one selector")
    run.add_argument("--selector", help="instead of the scenario's")
    compare = commands.add_parser("compare", parents=[common], help="run a scenario with several selectors")
    compare.add_argument("--selectors", default="bsfl,cs-ucb,random", metavar="A,B,C", help="names, with commas")
    compare.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each selector (default: 1)")
    compare.add_argument(
        "--reference", metavar="NAME",
        help="the selector that the last sentence compares the others with, seed by seed (default: random, if it runs)",
    )  # fmt: skip
    compare.add_argument(
        "--rounds-on-flower", type=int, default=0, metavar="N",
        help="first play N rounds of the first selector with Flower on Ray, and say whether both engines choose alike",
    )  # fmt: skip
    return parser


def _list() -> int:
    from fedsel_flwr.selectors.registry import names, selector_class
    from fedsel_flwr.simulations.scenario_files import load_scenario, scenario_names

    print("scenarios")
    for name in scenario_names():
        print(f"  {name:<16}{load_scenario(name).description}")
    print("selectors")
    for name in names():
        print(f"  {name:<16}{(selector_class(name).__doc__ or '').strip().splitlines()[0]}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Run the runs, print table and folder; ``fedsel run`` is a comparison of one."""
    from fedsel_flwr.selectors.registry import selector_class
    from fedsel_flwr.simulations.scenario_files import load_scenario

    scenario = load_scenario(args.scenario, _overrides(args))
    if args.command == "run":
        selectors, seeds = [scenario.selector], 1
    else:
        selectors, seeds = [name.strip() for name in args.selectors.split(",") if name.strip()], args.seeds
        if not selectors or len(set(selectors)) != len(selectors):
            raise ParameterError(f"--selectors must name at least one selector, each once, got {args.selectors!r}")
    if seeds < 1:
        raise ParameterError(f"--seeds must be at least 1, got {seeds}")
    for name in selectors:
        selector_class(name)
    reference, rounds_on_flower = _reference(args, selectors), getattr(args, "rounds_on_flower", 0)
    if rounds_on_flower < 0 or (rounds_on_flower and scenario.engine == "ray"):
        raise ParameterError(
            f"--rounds-on-flower must be 0 or more, and 0 where Ray is the engine of all runs; got {rounds_on_flower} "
            f"with the engine {scenario.engine!r}"
        )

    from fedsel_flwr.report.progress import Progress
    from fedsel_flwr.report.run_folder import create_run_folder
    from fedsel_flwr.report.summary import aggregate
    from fedsel_flwr.report.table import render_table
    from fedsel_flwr.simulations.building import check_selectors
    from fedsel_flwr.simulations.comparison import Comparison
    from fedsel_flwr.simulations.engine import check_engine
    from fedsel_flwr.simulations.processes import adopt_orphans, end_descendants, leaving_at_once
    from fedsel_flwr.simulations.world import world_of

    check_selectors(scenario, selectors)
    check_engine(scenario)
    world_of(scenario)  # faults in the data come before anything is written
    folder = create_run_folder(scenario.name, args.runs_dir).resolve()
    _log_to(folder / "flower.log")
    comparison = Comparison(scenario, selectors, seeds, folder, reference, rounds_on_flower)
    adopt_orphans()
    message = f"fedsel: interrupted; finished runs are in {folder}"
    try:
        with Progress() as progress, leaving_at_once(progress.stop, message, EXIT_INTERRUPTED):
            summaries = comparison.run(progress.start_run, progress.update)
    finally:
        end_descendants()
    render_table(aggregate(summaries), scenario.target_accuracy)
    if comparison.agreement:
        print(comparison.agreement.sentence)
    if comparison.verdict:
        print(comparison.verdict.sentence)
    print(f"{folder}")
    return 0


def _reference(args: argparse.Namespace, selectors: Sequence[str]) -> str | None:
    """With which selector the others are compared; None where there is nothing to compare."""
    given: str | None = getattr(args, "reference", None)
    if given is None:
        return "random" if "random" in selectors and len(selectors) > 1 else None
    if given not in selectors or len(selectors) < 2:
        raise ParameterError(f"--reference {given!r} must be one of at least two selectors: {', '.join(selectors)}")
    return given


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {"data.data_dir": args.data_dir, "rounds": args.rounds}
    overrides["selector"] = getattr(args, "selector", None)
    overrides["engine"] = args.engine or ("vectorized" if args.command == "compare" else None)
    for text in args.overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ParameterError(f"--set expects KEY=VALUE, got {text!r}")
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


def _log_to(path: Path) -> None:
    """Send Flower's and our own log records to a file; the terminal belongs to the progress display."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("flwr", "fedsel_flwr"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False


if __name__ == "__main__":
    sys.exit(main())
