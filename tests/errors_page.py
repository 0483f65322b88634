"""The tables of docs/errors.md: ``python -m tests.errors_page`` writes them.

``tests/test_wrong_inputs.py`` and ``tests/test_wrong_inputs_in_python.py`` compare each message with its row.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fedsel_flwr.selectors import names
from fedsel_flwr.simulations.scenario_files import scenario_names
from tests.pages import ROOT

PAGE = ROOT / "docs" / "errors.md"
TESTS = ("tests/test_wrong_inputs.py", "tests/test_wrong_inputs_in_python.py")
COLLECTED = "FEDSEL_ERRORS_PAGE"
"""Variable with the file that gets the rows, while the page is written."""
WRITTEN_WITH = (3, 11)
"""Version of Python that wrote the page; argparse and tomllib word some errors differently in others."""
SHORTER = (
    (re.escape(", ".join(scenario_names())), "(every scenario)"),
    (re.escape(", ".join(names())), "(every selector)"),
    (r"'list', 'run', [^)]*", "every command"),
    (r"It has Bare, .* x, y$", "It has (every name in the file)"),
    (r"allowed keys are name, .*\[aggregation\]", "allowed keys are (every key)"),
    (r"; data is 1293 examples.*(?=\. Resume with)", "; …"),
    (r"smoke-\d{8}-\d{6}(-\d+)?", "smoke-20260102-030405"),
    (r"test_wrong_inputs_in_python\.py, line \d+", "own.py, line 3"),
)
"""What differs from run to run or is long, and how the page shows it."""


def row(given: str, message: str, folder: Path) -> str:
    """The row of an input and its message; the working directory is W."""
    message = message.strip().replace(str(folder), "W")
    for pattern, short in SHORTER:
        message = re.sub(pattern, short, message)
    return "| {} | {} |".format(*(cell.replace("|", "\\|") for cell in (given, message)))


def check(table: str, given: str, message: str, folder: Path) -> None:
    """Compare a message with the page, or collect it for the page."""
    expected = row(given, message, folder)
    if COLLECTED in os.environ:
        with Path(os.environ[COLLECTED]).open("a") as file:
            file.write(json.dumps([table, expected]) + "\n")
    elif sys.version_info[:2] == WRITTEN_WITH:
        assert expected in PAGE.read_text("utf-8").splitlines(), "run python -m tests.errors_page"


def main() -> int:
    """Run the tests, and write their messages into the page."""
    with tempfile.TemporaryDirectory() as place:
        collected = Path(place) / "rows"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
            cwd=ROOT,
            env=os.environ | {COLLECTED: str(collected)},
            check=False,
        )
        rows = [json.loads(line) for line in collected.read_text().splitlines()]
    page = PAGE.read_text("utf-8")
    for table in ("command line", "python"):
        lines = "\n".join(line for name, line in rows if name == table)
        head = f"<!-- {table} -->\n| input | message |\n| --- | --- |\n"
        block = re.compile(rf"<!-- {table} -->\n.*?(?=<!-- end -->)", re.DOTALL)
        page = block.sub(lambda _, new=f"{head}{lines}\n": new, page)  # type: ignore[misc]
    PAGE.write_text(page, "utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
