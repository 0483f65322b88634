"""Reading the command line: what argparse leaves open, what the arguments mean, hints where a word is nearly right."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr.errors import ParameterError

NOT_EMPTY = ("scenario", "selector", "selectors", "seeds", "reference", "runs_dir", "data_dir", "out", "resume",
             "checkpoint_dir")  # fmt: skip
"""Options whose value must not be empty: an unset variable of a shell would pass for a value that was never given."""

WHAT = (
    "scenario", "overrides", "engine", "selector", "selectors", "seed", "seeds", "reference", "rounds_on_flower",
    "no_checkpoints",
)  # fmt: skip
"""Arguments that say what is run; the folder of a run knows them."""


def parse(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], argv: Sequence[str] | None
) -> argparse.Namespace:
    """Read the command line; what nobody knows is refused with what was meant, if that can be guessed.

    Args:
        parser: Of the whole command.
        commands: Name -> parser of each command.
        argv: Without the program's name; None takes that of the process.

    Returns:
        What was read; ``typed`` is the line itself.

    Raises:
        ParameterError: An option has an empty value, or ``--trust`` stands without ``--resume``.
        SystemExit: With status 2, after a message, where the line cannot be read.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}{_hint(args, unknown, commands)}")
    for name in NOT_EMPTY:
        value = getattr(args, name, None)
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, str) and not one.strip() for one in values):
            option = name if name == "scenario" else f"--{name.replace('_', '-')}"
            raise ParameterError(f"{option} must not be empty: give a value, or leave it out")
    if getattr(args, "trust", False) and args.resume is None:
        raise ParameterError("--trust is for code that a folder names: give it with --resume FOLDER, or leave it out")
    args.typed = shlex.join(["fedsel", *(sys.argv[1:] if argv is None else argv)])
    return args


def _hint(args: argparse.Namespace, unknown: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The options that were probably meant, or the command that has them."""
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


def seeds_of(args: argparse.Namespace) -> int | list[int]:
    """How many seeds, or the seeds themselves."""
    given = args.seeds or "1"
    try:
        numbers = [int(part) for part in given.split(",")]
    except ValueError:
        raise ParameterError(f"--seeds must be a number, or numbers with commas, got {given!r}") from None
    if "," not in given and numbers[0] < 1:
        raise ParameterError(f"--seeds must be at least 1, got {given}")
    return numbers if "," in given else numbers[0]


def ray_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What Ray is given, as far as it was said."""
    named = ("num_cpus", "num_gpus", "client_cpus", "client_gpus", "ray_address")
    return {name: value for name in named if (value := getattr(args, name)) is not None}


def overrides_of(args: argparse.Namespace) -> dict[str, Any]:
    """The scenario keys that were set: dotted key -> value; None leaves the scenario's own."""
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


def resumed_folder(args: argparse.Namespace) -> str | None:
    """The folder that the command is to go on in; None where it begins a run, or is to look for the folder itself.

    Raises:
        ParameterError: Something is given that the folder says already.
    """
    if not isinstance(args.resume, str):
        return None
    begun = (Path(args.resume) / "plan.json").is_file()
    if getattr(args, "checkpoint_dir", None) is not None and not begun:
        raise ParameterError(
            f"--resume {args.resume} names the folder of a run, which knows its checkpoints: leave out "
            "--checkpoint-dir, or begin with the scenario and end with --resume"
        )
    said = [name for name in WHAT if getattr(args, name, None)]
    if args.runs_dir != "runs":
        said.append("runs_dir")
    if said:
        option = "set" if said[0] == "overrides" else said[0].replace("_", "-")
        what = f"the scenario {args.scenario!r}" if option == "scenario" else f"--{option}"
        raise ParameterError(
            f"--resume {args.resume} goes on with what was begun in that folder: leave out {what}; --rounds, "
            "--data-dir and where it runs may be given"
        )
    return args.resume
