"""docs/command-line.md has every command, option and exit status; running this file as a program renews its tables."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from fedsel_flwr import cli
from fedsel_flwr.cli import build_parser
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import JOURNAL
from fedsel_flwr.rounds.history import ClientRecord, RoundRecord
from fedsel_flwr.simulations.comparisons.plan_files import PLAN
from fedsel_flwr.simulations.run_record import RUN

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"


def commands() -> dict[str, argparse.ArgumentParser]:
    return dict(build_parser()[1])


def table(parser: argparse.ArgumentParser) -> str:
    """What a command takes, a row each, in the words of its help."""
    rows = ["| argument | what it is |", "| --- | --- |"]
    none = len(rows)
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        named = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
        if action.option_strings and action.nargs != 0:
            value = action.metavar or (" or ".join(action.choices) if action.choices else action.dest.upper())
            named = f"{named} {value}"
        said = str(action.help) % {"default": action.default}
        rows.append(f"| `{named.replace('|', chr(92) + '|')}` | {said} |")
    return "It takes no argument.\n" if len(rows) == none else "\n".join(rows) + "\n"


def block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", list(commands()))
def test_every_option_stands_on_the_page(name: str) -> None:
    found = block(name).search(PAGE.read_text("utf-8"))
    assert found, f"docs/command-line.md has no block <!-- {name} -->"
    assert found[0] == table(commands()[name]), "run python -m tests.test_command_line_page"


def test_every_exit_status_stands_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    assert set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE)) == {
        "0",
        "1",
        str(cli.EXIT_ERROR),
        str(cli.EXIT_INTERRUPTED),
    }


def test_every_file_and_column_that_is_named_is_there() -> None:
    page = PAGE.read_text("utf-8")
    files = set(re.findall(r"^\| `([a-z-]+\.[a-z]+)` \|", page, re.MULTILINE))
    own = {run_folder.ROUNDS, run_folder.CLIENTS, run_folder.MODEL, run_folder.SCENARIO, RUN, JOURNAL}
    made = {"flower.log", "comparison.png", "rounds.png", "runs.csv", "comparison.tex", "summary.json", "verdict.json"}
    assert files == own | made | {"regret.parquet", "classes.parquet", PLAN}
    assert {"client", "client_id"} <= {field.name for field in fields(ClientRecord)}
    for record in (RoundRecord, ClientRecord):
        assert "round" in {field.name for field in fields(record)}


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    for name, parser in commands().items():
        before, after = block(name).split(text, maxsplit=1)
        text = before + table(parser) + after
    PAGE.write_text(text, "utf-8")
