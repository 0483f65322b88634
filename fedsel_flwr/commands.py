"""The commands of ``fedsel`` and what each takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fedsel_flwr import __version__

DEFAULT_SCENARIO = "digits"
"""What is run where nothing is named."""
DEFAULT_SELECTORS = "bsfl,cs-ucb,random"
"""Who is compared where nobody is named."""


def parser_of() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command, and those of its commands by name."""
    parser = argparse.ArgumentParser(
        prog="fedsel", description="Compare client selectors for federated learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fedsel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", allow_abbrev=False, help="show the scenarios and the selectors")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("scenario", nargs="?", help="name or TOML file (default: digits)")
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
        metavar="DEVICE",
        help="where the vectorized engine trains, such as cuda (default: cpu)",
    )
    common.add_argument(
        "--quiet", action="store_true", help="show no progress: only the table, and where the files are"
    )
    common.add_argument("--runs-dir", default="runs", metavar="DIR", help="where run folders go (default: ./runs)")
    common.add_argument(
        "--resume", nargs="?", const=True, default=None, metavar="FOLDER",
        help="go on in the folder of a run or comparison that was cut off, as it was begun; without FOLDER in the "
        "newest one that was begun with the same arguments",
    )  # fmt: skip
    common.add_argument(
        "--trust", action="store_true",
        help="with --resume FOLDER: load the code that its plan names, such as ./file.py:Class, which runs with your "
        "rights",
    )  # fmt: skip
    common.add_argument(
        "--replay", action="store_true",
        help="with --resume: play runs again that are damaged, or whose selector, model, data or scenario was changed "
        "since; without it they are refused",
    )  # fmt: skip
    common.add_argument(
        "--no-checkpoints", action="store_true",
        help="write no checkpoints: a run that is cut off cannot go on, only begin anew",
    )  # fmt: skip
    run = commands.add_parser("run", allow_abbrev=False, parents=[common], help="run a scenario with one selector")
    run.add_argument("--selector", help="instead of the scenario's: a name, package.module:Class or ./file.py:Class")
    run.add_argument("--seed", type=int, help="instead of the scenario's")
    run.add_argument(
        "--checkpoint-dir", metavar="DIR",
        help="where checkpoints go, and stay when the run has finished (default: into the run's folder until then); "
        "with --resume the run goes on from those there",
    )  # fmt: skip
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
        "--seeds", metavar="N|A,B,C",
        help="runs of each selector, counted up from the scenario's seed, or the seeds themselves (default: 1)",
    )  # fmt: skip
    compare.add_argument(
        "--jobs", type=int, metavar="N",
        help="play N runs at a time, in processes that share the cores (default: 1; vectorized engine, on the CPU)",
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
