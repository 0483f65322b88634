"""Arguments of the command line: a table of all commands, hints for misspelt options, and conversion into settings.

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

DEFAULT_SCENARIO = "digits"
"""Scenario that runs by default."""
DEFAULT_SELECTORS = "bsfl,cs-ucb,random"
"""Selectors that are compared by default."""
Argument = tuple[str, Mapping[str, Any], str]
"""Argument of a command: its name, its settings in :meth:`argparse.ArgumentParser.add_argument`, and its help."""
SWITCH = {"action": "store_true"}
"""Settings of an option without a value."""
DATA_DIR: Argument = (
    "--data-dir", {"metavar": "DIR"}, "read torchvision's data sets from DIR (default: $FEDSEL_DATA)",
)  # fmt: skip
PRINT_JSON: Argument = ("--json", SWITCH, "print JSON, and nothing else")
RESULTS_AS_JSON: Argument = ("--json", SWITCH, "print the results as JSON, and nothing else")
SCENARIO: tuple[Argument, ...] = (
    ("scenario", {"nargs": "?"}, "use this scenario: a name or a TOML file (default: digits)"),
    DATA_DIR,
    ("--rounds", {"type": int}, "set the number of rounds (default: the number in the scenario)"),
    ("--set", {"action": "append", "default": [], "metavar": "KEY=VALUE", "dest": "overrides"},
     "set scenario keys, such as --set training.learning_rate=0.05,rounds=5 (may be repeated)"),
    ("--engine", {"choices": ("ray", "vectorized")},
     "train each client with Flower on Ray, or train all clients of a round together in one process. Default: "
     "vectorized for compare, otherwise the scenario's engine"),
)  # fmt: skip
"""Arguments that describe a scenario."""
MACHINE: tuple[Argument, ...] = (
    ("--num-cpus", {"type": int, "metavar": "N"},
     "let Ray use N cores (default: all cores; not allowed on a cluster). For vectorized runs on a cluster: "
     "give each run N cores (default: 1)"),
    ("--num-gpus", {"type": int, "metavar": "N"},
     "let Ray use N GPUs, shared equally by the clients that train at the same time. Default: all GPUs if "
     "--client-gpus is above 0, otherwise none. For vectorized runs on a cluster: give each run N GPUs (default: 1 "
     "if --device is a GPU, otherwise 0)"),
    ("--client-cpus", {"type": float, "metavar": "X"}, "give each client X cores on Ray (default: 1)"),
    ("--client-gpus", {"type": float, "metavar": "X"}, "give each client X GPUs on Ray, such as 0.25 (default: 0)"),
    ("--ray-address", {"metavar": "HOST:PORT"},
     "use the Ray cluster at HOST:PORT. With the vectorized engine, each run is a task on the cluster. The "
     "word auto means the cluster that this machine belongs to. The word local means this machine alone. Default: "
     "the value of $RAY_ADDRESS, otherwise local. The vectorized engine ignores $RAY_ADDRESS"),
    ("--device", {"metavar": "DEVICE"},
     "train on DEVICE in the vectorized engine, such as cuda (default: cpu)"),
)  # fmt: skip
"""Options of the machine on which runs train."""
FOLDER: tuple[Argument, ...] = (
    ("--quiet", SWITCH, "print only the results and the folder, no progress"),
    ("--runs-dir", {"default": "runs", "metavar": "DIR"}, "create run folders in DIR (default: ./runs)"),
    ("--resume", {"nargs": "?", "const": True, "metavar": "FOLDER"},
     "resume the interrupted run or comparison in FOLDER with its original settings (without FOLDER: the "
     "newest one that was started with the same arguments)"),
    ("--trust", SWITCH,
     "with --resume FOLDER: load the code that FOLDER refers to, such as ./file.py:Class. This code runs with "
     "your rights"),
    ("--replay", SWITCH,
     "with --resume: repeat each run that is damaged, or whose selector, model, data or scenario has changed "
     "(default: stop with an error)"),
    ("--no-checkpoints", SWITCH, "write no checkpoints: an interrupted run then starts again from round 1"),
    ("--track", {"metavar": "TRACKER[:ADDRESS]"},
     "send the parameters and metrics of each run to a tracker: tensorboard[:LOGDIR], mlflow[:URI], "
     "wandb[:PROJECT], or your class ./file.py:Class"),
    ("--track-clients", {"metavar": "N|A,B,C"},
     "with --track: also send separate metrics of N clients, or of the clients A,B,C (default: 50)"),
)  # fmt: skip
"""Options of what runs print, keep and send, and of resuming them."""
COMMANDS: Mapping[str, tuple[str, tuple[Argument, ...]]] = {
    "list": ("list the scenarios and the selectors", (PRINT_JSON,)),
    "run": ("run a scenario with one selector", (
        *SCENARIO, *MACHINE, *FOLDER,
        ("--selector", {},
         "use this selector: a name, package.module:Class or ./file.py:Class (default: the scenario's selector)"),
        ("--seed", {"type": int}, "set the seed (default: the seed in the scenario)"),
        ("--checkpoint-dir", {"metavar": "DIR"},
         "write checkpoints to DIR, and do not delete them after the run. With --resume: continue from the "
         "checkpoints in DIR. Default: write them to the run folder, and delete them after the run"),
        RESULTS_AS_JSON,
    )),
    "compare": ("run a scenario with several selectors", (
        *SCENARIO, *MACHINE, *FOLDER,
        ("--selectors", {"action": "append", "metavar": "A,B,C"},
         "compare these selectors, separated by commas: names, package.module:Class, ./file.py:Class, or all "
         f"(default: {DEFAULT_SELECTORS})"),
        ("--seeds", {"metavar": "N|A,B,C"},
         "run each selector on N consecutive seeds, beginning with the scenario's seed, or on the seeds A,B,C "
         "(default: 10 seeds)"),
        ("--sweep", {"action": "append", "default": [], "metavar": "KEY=A,B,C"},
         "compare several values of a selector's parameter, for example selectors.bsfl.alpha=0.3,1,3. The table "
         "has a row for each value. If you repeat the option, it has a row for each combination of values"),
        ("--jobs", {"type": int, "metavar": "N"},
         "execute N runs at the same time, in processes that share the cores (default: 1; only for the vectorized "
         "engine on the CPU). With --ray-address: at most N runs on the cluster (default: as many as fit)"),
        ("--reference", {"metavar": "NAME"},
         "compare all other selectors with the selector NAME, seed by seed (default: random, if it is compared)"),
        ("--rounds-on-flower", {"type": int, "default": 0, "metavar": "N"},
         "first run N rounds of the first selector with Flower on Ray, and check that both engines select the "
         "same clients"),
        RESULTS_AS_JSON,
    )),
    "show": ("print a scenario with all keys, units and defaults", (
        *SCENARIO, ("--meanings", SWITCH, "print the meaning of each key above the key"), PRINT_JSON,
    )),
    "cite": ("print the BibTeX entries of selectors' papers", (
        ("cited", {"nargs": "*", "metavar": "SELECTOR"},
         "print the papers of this selector: a name, package.module:Class or ./file.py:Class (without SELECTOR: "
         "print the entry of this package)"),
    )),
    "doctor": ("check the installation and this machine", (
        ("--data-dir", {"metavar": "DIR"}, "look for data sets in DIR (default: $FEDSEL_DATA)"),
        ("--runs-dir", {"default": "runs", "metavar": "DIR"},
         "check the free disk space for run folders in DIR (default: ./runs)"),
        ("--start-ray", SWITCH, "start Ray for a moment, which takes some seconds"),
        PRINT_JSON,
    )),
    "advise": ("advise whether selection by latency pays, from a history of latencies", (
        ("source", {"metavar": "FOLDER|CSV"},
         "read the folder of a run, of a comparison or of checkpoints, or a CSV file with the columns "
         "client,seconds"),
        ("--clients", {"type": int, "metavar": "N"},
         "the fleet has N clients (default: the folder's number; for a CSV file, the clients with a row)"),
        ("--clients-per-round", {"type": int, "metavar": "N"},
         "select N clients per round (default: the folder's number; for a CSV file, 5 %% of its clients)"),
        ("--max-latency", {"type": float, "metavar": "SECONDS"},
         "latencies are cut off at SECONDS (default: the folder's max_latency; for a CSV file, nothing is cut off)"),
        ("--rounds", {"type": int, "metavar": "N"},
         "predict N rounds (default: the rounds of the folder's scenario, or 300)"),
        ("--seed", {"type": int, "default": 1, "metavar": "N"}, "set the seed of the prediction (default: 1)"),
        PRINT_JSON,
    )),
    "reproduce": ("reproduce figures and tables of the papers, with a verdict on each", (
        ("figures", {"nargs": "*", "metavar": "NAME"},
         "reproduce these figures: names of --list, the name of a paper (such as xia), or all"),
        ("--list", SWITCH, "print name, verdict, minutes and claim of each figure"),
        ("--smoke", SWITCH,
         "run a few rounds of each run on one seed, print no verdict, and write nothing. If a data set is missing, "
         "the digits of scikit-learn replace it"),
        ("--jobs", {"type": int, "metavar": "N"},
         "use N processes (default: 1). With --ray-address: at most N runs on the cluster (default: as many as "
         "fit)"),
        ("--ray-address", {"metavar": "HOST:PORT"},
         "execute the runs on the Ray cluster at HOST:PORT, each with one core (default: on this machine)"),
        ("--seeds", {"type": int, "metavar": "N"}, "run the seeds 1 to N (default: the figure's number of seeds)"),
        ("--out", {"default": "reproductions", "metavar": "DIR"},
         "write rows, checks and pictures to DIR, and take finished rows from it (default: ./reproductions)"),
        DATA_DIR,
    )),
    "report": ("combine finished runs, or report on a deployment", (
        ("folders", {"nargs": "+", "metavar": "FOLDER"},
         "read the folder of a comparison or of a run, or the checkpoint_dir of a deployment"),
        ("--reference", {"metavar": "NAME"}, "compare all other selectors with NAME, as in compare"),
        ("--out", {"metavar": "DIR"},
         "write report.html, picture and summaries to DIR (default: FOLDER, if you give only one)"),
        RESULTS_AS_JSON,
    )),
}  # fmt: skip
"""Command -> its help, and its arguments in the order of the help."""
NOT_EMPTY = ("scenario", "selector", "selectors", "seeds", "reference", "runs_dir", "data_dir", "out", "resume",
             "checkpoint_dir", "sweep", "track", "track_clients", "source")  # fmt: skip
"""Options whose value must not be empty. Otherwise an unset shell variable would look like a missing option."""

FIXED_BY_FOLDER = (
    "scenario", "overrides", "engine", "selector", "selectors", "seed", "seeds", "reference", "rounds_on_flower",
    "no_checkpoints", "sweep",
)  # fmt: skip
"""Arguments that a run's folder already fixes. They are refused with ``--resume FOLDER``."""


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and the parsers of the commands by name."""
    # Imported here, because the version is read from a file.
    from fedsel_flwr import __version__

    parser = argparse.ArgumentParser(
        prog="fedsel", description="Compare client selectors for federated learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"fedsel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (about, arguments) in COMMANDS.items():
        made = commands.add_parser(command, allow_abbrev=False, help=about)
        for name, settings, text in arguments:
            made.add_argument(name, help=text, **settings)
    return parser, commands.choices


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; the error for an unknown option names the most similar option.

    Args:
        argv: Arguments without the program's name. If None, the arguments of the process.

    Returns:
        The arguments. ``typed`` is the command line as it was typed, ``track_options`` the part about trackers.

    Raises:
        ParameterError: An option has an empty value, or ``--trust`` is used without ``--resume``.
        SystemExit: The line cannot be parsed. The status is 2, after a message.
    """
    parser, commands = build_parser()
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
        raise ParameterError(f"--resume {args.resume} already sets where checkpoints are. Leave out --checkpoint-dir")
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
