"""Pages that state facts of the code: smoke tests, the command line, and the papers' cards.

``python -m tests.test_pages`` renews the tables of docs/command-line.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from fedsel_flwr import cli
from fedsel_flwr.report import run_folder
from fedsel_flwr.report.run_folder import JOURNAL
from fedsel_flwr.rounds.history import ClientRecord, RoundRecord
from fedsel_flwr.rounds.round import Stopwatch
from fedsel_flwr.simulations.comparisons.plan_files import PLAN
from fedsel_flwr.simulations.run_record import RUN
from fedsel_flwr.testing import STRATEGY_CHECKS
from tests.pages import ROOT, blocks
from tests.processes import environment

# ---- docs/smoke-tests.md: its pytest file and its workflow do what it says ------------------------------------------

SMOKE = ROOT / "docs" / "smoke-tests.md"


def smoke(language: str) -> str:
    (found,) = [block.text for block in blocks(SMOKE) if block.language == language]
    return found


def run_in(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run the last command of the workflow's one job on the pytest file, with this Python."""
    yaml = pytest.importorskip("yaml", reason="comes with Flower")
    workflow = yaml.safe_load(smoke("yaml"))
    assert workflow[True] == ["push", "pull_request"]  # YAML 1.1 reads "on" so
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] == "ubuntu-latest"
    uses = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
    assert uses == ["actions/checkout", "actions/setup-python"]
    install, test = [step["run"] for step in job["steps"] if "run" in step]
    assert install.startswith("python -m pip install pytest ")
    (folder / "test_selection.py").write_text(program, encoding="utf-8")
    env = {**environment(), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    return subprocess.run(test, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def test_the_workflow_runs_the_tests(tmp_path: Path) -> None:
    done = run_in(tmp_path, smoke("python"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^3 passed", done.stdout, re.MULTILINE), done.stdout


def test_a_strategy_without_its_promises_fails_there(tmp_path: Path) -> None:
    good = "        self._total[report.clients] += report.latency\n"
    program = smoke("python").partition("def test_ten_simulated")[0]
    assert good in program
    done = run_in(tmp_path, program.replace(good, f"{good}        raise RuntimeError('not today')\n"))
    assert done.returncode == 1
    assert "broken promise: no client breaks a round; in round 1" in done.stdout, done.stdout[-3000:]
    assert re.search(r"^2 failed", done.stdout, re.MULTILINE), done.stdout


def test_every_promise_has_its_line() -> None:
    named = re.findall(r"^\| .* \| `(check_\w+)` \|$", SMOKE.read_text("utf-8"), re.MULTILINE)
    assert named == [check.__name__ for check in STRATEGY_CHECKS]
    assert "(docs/smoke-tests.md)" in (ROOT / "README.md").read_text("utf-8")


# ---- docs/command-line.md: every command, option, exit status and file ----------------------------------------------

PAGE = ROOT / "docs" / "command-line.md"


def commands() -> dict[str, argparse.ArgumentParser]:
    return dict(cli.build_parser()[1])


def table(parser: argparse.ArgumentParser) -> str:
    """What a command takes, a row each, in the words of its help."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        named = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
        if action.option_strings and action.nargs != 0:
            value = action.metavar or (" or ".join(action.choices) if action.choices else action.dest.upper())
            named = f"{named} {value}"
        said = str(action.help) % {"default": action.default}
        rows.append(f"| `{named.replace('|', chr(92) + '|')}` | {said} |")
    if not rows:
        return "It takes no argument.\n"
    return "\n".join(["| argument | meaning |", "| --- | --- |", *rows]) + "\n"


def block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", list(commands()))
def test_every_option_stands_on_the_page(name: str) -> None:
    found = block(name).search(PAGE.read_text("utf-8"))
    assert found, f"docs/command-line.md has no block <!-- {name} -->"
    assert found[0] == table(commands()[name]), "run python -m tests.test_pages"


def test_every_exit_status_file_and_column_that_is_named_is_there() -> None:
    page = PAGE.read_text("utf-8")
    statuses = {"0", "1", str(cli.EXIT_ERROR), str(cli.EXIT_INTERRUPTED)}
    assert set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE)) == statuses
    files = set(re.findall(r"^\| `([a-z-]+\.[a-z]+)` \|", page, re.MULTILINE))
    own = {run_folder.ROUNDS, run_folder.CLIENTS, run_folder.MODEL, run_folder.SCENARIO, run_folder.TIMING}
    own |= {RUN, JOURNAL}
    made = {"flower.log", "comparison.png", "rounds.png", "runs.csv", "comparison.tex", "summary.json", "verdict.json"}
    made.add("report.html")
    assert files == own | made | {
        "client-accuracy.parquet",
        "regret.parquet",
        "classes.parquet",
        PLAN,
        "mlflow.db",
    }
    assert {"round", "client", "client_id"} <= {field.name for field in fields(ClientRecord)}
    assert "round" in {field.name for field in fields(RoundRecord)}
    timed = page.split("### Columns of `timing.parquet`")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", timed, re.MULTILINE) == list(Stopwatch().columns(0))


# ---- docs/papers: every file, name and tag that the cards point at is there -----------------------------------------

CARDS = sorted(path for path in (ROOT / "docs" / "papers").glob("*.md") if path.name != "README.md")
CODE = re.compile(r"`([^`]+)`")


def rows_of(card: Path) -> list[tuple[list[Path], list[str]]]:
    """Files and quoted pieces of each row of the table "Equation → code"."""
    text = card.read_text("utf-8").split("## Equation → code")[1].split("\n## ")[0]
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and (named := CODE.findall(cells[1])):
            paths = [ROOT / (name if name.startswith("tests/") else f"fedsel_flwr/{name}") for name in named]
            found.append((paths, CODE.findall(cells[2])))
    return found


def lacks(text: str, piece: str) -> list[str]:
    """What of a quoted piece, a tag or names, does not stand in the text."""
    if piece.startswith("#"):
        return [] if re.search(re.escape(piece) + r"(?!\d)", text) else [piece]
    return [name for name in re.findall(r"\b(?:[A-Z]\w+\.)?(_?[a-zA-Z]\w{3,})\b", piece) if name not in text]


def text_of(path: Path) -> str:
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text("utf-8") for file in files)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_every_row_of_a_card_points_at_what_is_there(card: Path) -> None:
    rows = rows_of(card)
    assert len(rows) >= 8
    lacking = [(piece, lacks("\n".join(map(text_of, paths)), piece)) for paths, pieces in rows for piece in pieces]
    assert [(piece, missing) for piece, missing in lacking if missing] == []


def test_a_tag_or_a_name_that_is_not_there_is_found() -> None:
    code = "def _select(self):  # (18)\n    return self._largest(bound)  # (10)"
    assert lacks(code, "# (18)") == lacks(code, "CSUCB._select") == []
    assert lacks(code, "# (1)") == ["# (1)"]
    assert lacks(code, "CSUCB._observe") == ["_observe"]


if __name__ == "__main__":
    renewed = PAGE.read_text("utf-8")
    for name, parser in commands().items():
        before, after = block(name).split(renewed, maxsplit=1)
        renewed = before + table(parser) + after
    PAGE.write_text(renewed, "utf-8")
