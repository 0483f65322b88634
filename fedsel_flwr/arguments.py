"""Arguments of the command line: parsing with hints for misspelt options, and conversion into settings.

:func:`read_assignments` reads scenario keys for the command line and for the run config of ``flwr run``.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.operating_system import shell_line

NOT_EMPTY = ("scenario", "selector", "selectors", "seeds", "reference", "runs_dir", "data_dir", "out", "resume",
             "checkpoint_dir", "sweep", "track", "track_clients", "source")  # fmt: skip
"""Options whose value must not be empty. Otherwise an unset shell variable would look like a missing option."""

FIXED_BY_FOLDER = (
    "scenario", "overrides", "engine", "selector", "selectors", "seed", "seeds", "reference", "rounds_on_flower",
    "no_checkpoints", "sweep",
)  # fmt: skip
"""Arguments that a run's folder already fixes. They are refused with ``--resume FOLDER``."""


def parse(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line; the error for an unknown option names the most similar option.

    Args:
        parser: Parser of the whole command line.
        commands: Name -> parser of each command.
        argv: Arguments without the program's name. If None, the arguments of the process.

    Returns:
        The arguments. ``typed`` is the command line as it was typed, ``track_options`` the part about trackers.

    Raises:
        ParameterError: An option has an empty value, or ``--trust`` is used without ``--resume``.
        SystemExit: The line cannot be parsed. The status is 2, after a message.
    """
    # Not parse_args, because argparse gives no hint, and prints the usage of the wrong command.
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}{_hint(args, unknown, commands)}")
    for name in NOT_EMPTY:
        value = getattr(args, name, None)
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, str) and not one.strip() for one in values):
            option = name if name in ("scenario", "source") else f"--{name.replace('_', '-')}"
            raise ParameterError(f"{option} must not be empty. Give a value, or leave it out")
    if getattr(args, "trust", False) and args.resume is None:
        raise ParameterError("--trust only applies to --resume FOLDER. Give both, or leave --trust out")
    if hasattr(args, "track"):
        _read_tracking(args)
    args.typed = shell_line("fedsel", *(sys.argv[1:] if argv is None else argv))
    return args


def _hint(args: argparse.Namespace, unknown: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Suggest the options that the user probably meant, or the command that has them."""
    hints = []
    for word in (one.partition("=")[0] for one in unknown if one.startswith("--")):
        elsewhere = [name for name, other in commands.items() if word in _options(other)]
        if close := difflib.get_close_matches(word, _options(commands[args.command]), n=1, cutoff=0.7):
            hints.append(f"did you mean {close[0]}?")
        elif elsewhere:
            hints.append(f"{word} belongs to fedsel {' and '.join(elsewhere)}")
    return f" ({'; '.join(hints)})" if hints else ""


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def read_numbers(text: str, option: str) -> int | list[int]:
    """Return a number, or the list of numbers that commas separate; a comma after the only one makes a list."""
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise ParameterError(f"{option} must be a number, or numbers separated by commas, got {text!r}") from None
    return numbers if "," in text else numbers[0]


def add_ray_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of Ray to a command's parser."""
    parser.add_argument(
        "--num-cpus", type=int, metavar="N",
        help="let Ray use N cores (default: all cores; not allowed on a cluster). For vectorized runs on a cluster: "
        "give each run N cores (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--num-gpus", type=int, metavar="N",
        help="let Ray use N GPUs, shared equally by the clients that train at the same time. Default: all GPUs if "
        "--client-gpus is above 0, otherwise none. For vectorized runs on a cluster: give each run N GPUs (default: 1 "
        "if --device is a GPU, otherwise 0)",
    )  # fmt: skip
    parser.add_argument("--client-cpus", type=float, metavar="X", help="give each client X cores on Ray (default: 1)")
    parser.add_argument(
        "--client-gpus", type=float, metavar="X", help="give each client X GPUs on Ray, such as 0.25 (default: 0)"
    )
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT",
        help="use the Ray cluster at HOST:PORT. With the vectorized engine, each run is a task on the cluster. The "
        "word auto means the cluster that this machine belongs to. The word local means this machine alone. Default: "
        "the value of $RAY_ADDRESS, otherwise local. The vectorized engine ignores $RAY_ADDRESS",
    )  # fmt: skip


def add_tracking_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of trackers to a command's parser."""
    parser.add_argument(
        "--track", metavar="TRACKER[:ADDRESS]",
        help="send the parameters and metrics of each run to a tracker: tensorboard[:LOGDIR], mlflow[:URI], "
        "wandb[:PROJECT], or your class ./file.py:Class",
    )  # fmt: skip
    parser.add_argument(
        "--track-clients", metavar="N|A,B,C",
        help="with --track: also send separate metrics of N clients, or of the clients A,B,C (default: 50)",
    )  # fmt: skip


def add_small_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], described: argparse.ArgumentParser
) -> None:
    """Add show, cite, doctor, advise and reproduce, and the option of list.

    Args:
        commands: The existing commands.
        described: The arguments that describe a scenario.
    """
    show = commands.add_parser(
        "show", allow_abbrev=False, parents=[described], help="print a scenario with all keys, units and defaults"
    )
    show.add_argument("--meanings", action="store_true", help="print the meaning of each key above the key")
    cite = commands.add_parser("cite", allow_abbrev=False, help="print the BibTeX entries of selectors' papers")
    cite.add_argument(
        "cited", nargs="*", metavar="SELECTOR",
        help="print the papers of this selector: a name, package.module:Class or ./file.py:Class (without SELECTOR: "
        "print the entry of this package)",
    )  # fmt: skip
    doctor = commands.add_parser("doctor", allow_abbrev=False, help="check the installation and this machine")
    doctor.add_argument("--data-dir", metavar="DIR", help="look for data sets in DIR (default: $FEDSEL_DATA)")
    doctor.add_argument(
        "--runs-dir",
        default="runs",
        metavar="DIR",
        help="check the free disk space for run folders in DIR (default: ./runs)",
    )
    doctor.add_argument("--start-ray", action="store_true", help="start Ray for a moment, which takes some seconds")
    advise = commands.add_parser(
        "advise", allow_abbrev=False, help="advise whether selection by latency pays, from a history of latencies"
    )
    advise.add_argument(
        "source", metavar="FOLDER|CSV",
        help="read the folder of a run, of a comparison or of checkpoints, or a CSV file with the columns "
        "client,seconds",
    )  # fmt: skip
    advise.add_argument(
        "--clients", type=int, metavar="N",
        help="the fleet has N clients (default: the folder's number; for a CSV file, the clients with a row)",
    )  # fmt: skip
    advise.add_argument(
        "--clients-per-round", type=int, metavar="N",
        help="select N clients per round (default: the folder's number; for a CSV file, 5 %% of its clients)",
    )  # fmt: skip
    advise.add_argument(
        "--max-latency", type=float, metavar="SECONDS",
        help="latencies are cut off at SECONDS (default: the folder's max_latency; for a CSV file, nothing is cut off)",
    )  # fmt: skip
    advise.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="predict N rounds (default: the rounds of the folder's scenario, or 300)",
    )
    advise.add_argument("--seed", type=int, default=1, metavar="N", help="set the seed of the prediction (default: 1)")
    _add_reproduce(commands)
    for each in (commands.choices["list"], show, doctor, advise):
        each.add_argument("--json", action="store_true", help="print JSON, and nothing else")


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command that combines finished runs, and return its parser."""
    report = commands.add_parser("report", allow_abbrev=False, help="combine finished runs, or report on a deployment")
    report.add_argument(
        "folders", nargs="+", metavar="FOLDER",
        help="read the folder of a comparison or of a run, or the checkpoint_dir of a deployment",
    )  # fmt: skip
    report.add_argument("--reference", metavar="NAME", help="compare all other selectors with NAME, as in compare")
    report.add_argument(
        "--out",
        metavar="DIR",
        help="write report.html, picture and summaries to DIR (default: FOLDER, if you give only one)",
    )
    return report


def _add_reproduce(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command that reproduces the papers' figures."""
    reproduce = commands.add_parser(
        "reproduce", allow_abbrev=False, help="reproduce figures and tables of the papers, with a verdict on each"
    )
    reproduce.add_argument(
        "figures", nargs="*", metavar="NAME",
        help="reproduce these figures: names of --list, the name of a paper (such as xia), or all",
    )  # fmt: skip
    reproduce.add_argument("--list", action="store_true", help="print name, verdict, minutes and claim of each figure")
    reproduce.add_argument(
        "--smoke", action="store_true",
        help="run a few rounds of each run on one seed, print no verdict, and write nothing. If a data set is missing, "
        "the digits of scikit-learn replace it",
    )  # fmt: skip
    reproduce.add_argument(
        "--jobs", type=int, metavar="N",
        help="use N processes (default: 1). With --ray-address: at most N runs on the cluster (default: as many as "
        "fit)",
    )  # fmt: skip
    reproduce.add_argument(
        "--ray-address", metavar="HOST:PORT",
        help="execute the runs on the Ray cluster at HOST:PORT, each with one core (default: on this machine)",
    )  # fmt: skip
    reproduce.add_argument(
        "--seeds", type=int, metavar="N", help="run the seeds 1 to N (default: the figure's number of seeds)"
    )
    reproduce.add_argument(
        "--out", default="reproductions", metavar="DIR",
        help="write rows, checks and pictures to DIR, and take finished rows from it (default: ./reproductions)",
    )  # fmt: skip
    reproduce.add_argument(
        "--data-dir", metavar="DIR", help="read torchvision's data sets from DIR (default: $FEDSEL_DATA)"
    )


def _read_tracking(args: argparse.Namespace) -> None:
    """Set ``track_options``, the options as typed, and read ``track_clients``: a number or a list of ids."""
    given = args.track_clients
    named = (("--track", args.track), ("--track-clients", given))
    args.track_options = "".join(f" {option} {shell_line(value)}" for option, value in named if value is not None)
    if given is None:
        return
    if args.track is None:
        raise ParameterError("--track-clients is for a tracker. Give --track too, or leave it out")
    args.track_clients = read_numbers(given, "--track-clients")


def ray_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options for Ray that the user has set."""
    named = ("num_cpus", "num_gpus", "client_cpus", "client_gpus", "ray_address")
    return {name: value for name in named if (value := getattr(args, name)) is not None}


def overrides_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the scenario keys that the user has set: dotted key -> value; None keeps the scenario's value."""
    overrides: dict[str, Any] = {"data.data_dir": args.data_dir, "rounds": args.rounds}
    overrides |= {key: getattr(args, key, None) for key in ("selector", "seed")}
    overrides["engine"] = args.engine or ("vectorized" if args.command == "compare" else None)
    for text in args.overrides:
        overrides |= read_assignments(text, "--set")
    return overrides


def read_assignments(text: str, option: str) -> dict[str, Any]:
    """Read scenario keys and their values, "KEY=VALUE, KEY=VALUE".

    Args:
        text: The assignments. A value may contain commas, for example in a list.
        option: Name of the option that holds them, for errors.

    Returns:
        Dotted key -> number, boolean, list or text.

    Raises:
        ParameterError: An assignment has no key or no value.

    >>> read_assignments("wireless.max_latency_s=5, selectors.tifl.credits=40,30, api=message", "--set")
    {'wireless.max_latency_s': 5, 'selectors.tifl.credits': [40, 30], 'api': 'message'}
    """
    assignments = {}
    # A comma separates assignments only if KEY= follows.
    for one in re.split(r",\s*(?=[\w.-]+\s*=)", text):
        key, equals, value = one.partition("=")
        if not equals or not key.strip():
            raise ParameterError(f"{option} expects KEY=VALUE, as in training.learning_rate=0.05, got {one!r}")
        if not value.strip():
            raise ParameterError(f"{option} {one} lacks a value. Give one, or leave the option out")
        assignments[key.strip()] = _toml_value(value.strip())
    return assignments


def read_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read the values of a sweep from texts "KEY=A,B,C".

    Returns:
        Dotted key -> its values.

    Raises:
        ParameterError: A text has no key or no values, or a key occurs twice.

    >>> read_sweep(["selectors.bsfl.alpha=0.3,1,3", "selectors.bsfl.solver=exact,alsa"])
    {'selectors.bsfl.alpha': [0.3, 1, 3], 'selectors.bsfl.solver': ['exact', 'alsa']}
    """
    sweep: dict[str, list[Any]] = {}
    for text in texts:
        for key, value in read_assignments(text, "--sweep").items():
            if key in sweep:
                raise ParameterError(f"--sweep has {key} twice. List all its values once, as in {key}=1,2,3")
            # TOML needs quotes around texts, so a list of texts without quotes is split here.
            values = [_toml_value(one.strip()) for one in value.split(",")] if isinstance(value, str) else value
            sweep[key] = values if isinstance(values, list) else [values]
    return sweep


def _toml_value(text: str) -> Any:
    """Return a number, boolean or list as in TOML, or else the text itself; a list needs no brackets."""
    for written in (text, f"[{text}]"):
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(f"value = {written}")["value"]
    return text


def resumed_folder(args: argparse.Namespace) -> str | None:
    """Return the folder to resume; None if the command begins a run, or finds the folder itself.

    Raises:
        ParameterError: The user has set an argument that the folder already fixes.
    """
    if not isinstance(args.resume, str):
        return None
    begun = (Path(args.resume) / "plan.json").is_file()
    if getattr(args, "checkpoint_dir", None) is not None and not begun:
        raise ParameterError(
            f"--resume {args.resume} already sets where the checkpoints are. Leave out --checkpoint-dir"
        )
    fixed = [name for name in FIXED_BY_FOLDER if getattr(args, name, None)]
    if args.runs_dir != "runs":
        fixed.append("runs_dir")
    if fixed:
        option = "set" if fixed[0] == "overrides" else fixed[0].replace("_", "-")
        what = f"the scenario {args.scenario!r}" if option == "scenario" else f"--{option}"
        raise ParameterError(
            f"--resume {args.resume} keeps the settings of that folder. Leave out {what}. You can set --rounds, "
            "--data-dir and the options for the machine"
        )
    return args.resume
