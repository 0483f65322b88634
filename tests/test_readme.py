"""Every program and every command of README.md and docs/ runs as printed, except where a comment above it says why not.

The ordinary run has the README and the page on Flower projects, but for what starts Ray; the rest has the mark
``pages``.
Python's slow imports are taken from :mod:`tests.warm`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.simulations import load_scenario, simulate
from tests.flwr_command import ANSI, LocalSuperLink
from tests.pages import COMMANDS, PAGES, ROOT, Block, blocks
from tests.processes import environment
from tests.warm import Warm

BLOCKS = [block for page in PAGES for block in blocks(page)]
ELSEWHERE = {"docs/smoke-tests.md", "docs/tutorial.md"}
FIRST = {"README.md", "docs/your-flower-project.md"}
"""Pages whose blocks run in the ordinary run."""
PAPERS = "docs/papers/"
CARDS = """
import numpy as np

predict, inputs, labels = (lambda arrays, inputs: inputs @ arrays[0]), np.eye(3), np.arange(3)
"""
"""What the cards of the papers take as given: their programs show what a strategy is told."""

SAYS = {
    "advice.py": r"^gain bsfl\nspread 0\.5\d, noise 0\.(19|20|21)\nceiling \d\d %$",
    "study.py": r"on the same 3 seeds and partitions(.|\n)*\\begin\{tabular\}",
    "legacy.py": r"\n4 \d+ 0\.\d\d s completed\n",
    "message.py": r"\n4 [0-7] 0\.\d\d s completed\n",
    "fastest.py": r"Fastest +3 (.|\n)*on the same 3 seeds and partitions(.|\n)*Fastest ",
    "pooled.py": r"(alpha 10 (.|\n)*){4}random (.|\n)*on the same 4 seeds(.|\n)*\n8 rounds, ",
    "patient.py": r"^\[\d \d\]$",
    "watch.py": r'((\{"level": "INFO", .*\n)+\{"round": \d, "available": 10, .*"failures": ""\}\n){3}Counter\(\)',
    "lines.py": r"^$",
    "alone.py": r"^\[[\d \n]+\]$",
    "prices.py": r"on the same 3 seeds and one partition for all of them",
    "these.py": r"^\['2', '5', '7'\]$",
    "resuming.py": r"^5 0\.\d{3}$",
    "fleet.py": r"on the same 3 seeds and partitions",
    "early.py": r"^\d+ rounds, 0\.8\d$",
    "oort_loop.py": r"^rounds of a fast client: 20\.5, of a slow client: 5\.5$",
    "traces.py": r"^devices\.csv: 60 rows\navailability\.csv: 780 rows$",
    "plan.py": r"^Wait.+ 855 s\n(.|\n)*^Percent.+ \[4, .+ 419 s\n(.|\n)*^Cut.+ \[3, .+ 360 s$",
    "quiet.py": r"(\d 0\.\d+ [\d.]+ s [\d.]+ J\n){5}\[\(10, 64\), \(10,\)\]",
}
"""Program -> what its output has."""


def is_code(block: Block) -> bool:
    return block.language in ("python", "sh") or (not block.language and block.first.startswith(COMMANDS))


RUN = [
    pytest.param(block, marks=[pytest.mark.pages] * (block.page not in FIRST or "run_simulation" in block.text))
    for block in BLOCKS
    if is_code(block) and not block.not_run and block.page not in ELSEWHERE and not block.page.startswith(PAPERS)
]
ON_PAPERS = [block for block in BLOCKS if is_code(block) and not block.not_run and block.page.startswith(PAPERS)]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    process = Warm(tmp_path_factory.mktemp("statuses"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Block], Path]:
    """The folder of a block's page, with the files that the page has named so far."""
    folders: dict[str, Path] = {}

    def found(block: Block) -> Path:
        folder = folders.setdefault(block.page, tmp_path_factory.mktemp("page"))
        for other in BLOCKS:
            if other.page == block.page and other.file and other.line <= block.line:
                (folder / other.file).write_text(other.text, encoding="utf-8")
        return folder

    return found


def in_a_shell(command: str, folder: Path) -> str:
    """What a command of a shell says, with this Python's commands first in its path; it must succeed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment(), text=True, timeout=280,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def run_block(block: Block, folder: Path, warm: Warm | None) -> str:
    if block.language != "python":
        if warm is None:
            return in_a_shell(block.text, folder)
        told = [warm.run(words, folder) for words in block.commands()]
        assert [status for status, _ in told] == [0] * len(told), told
        return "".join(text for _, text in told)
    name = block.file or f"line_{block.line}.py"
    (folder / name).write_text(block.text, encoding="utf-8")
    if warm is None:
        return in_a_shell(f"python {name}", folder)
    status, text = warm.run([name], folder)
    assert status == 0, text[-4000:]
    return text


@pytest.mark.parametrize("block", RUN, ids=str)
def test_it_runs_as_printed(block: Block, warm: Warm, folder_of: Callable[[Block], Path]) -> None:
    said = run_block(block, folder_of(block), warm)
    assert re.search(SAYS.get(block.file, ""), said, re.MULTILINE), said[-4000:]


@pytest.mark.pages
@pytest.mark.parametrize("block", [block for block in ON_PAPERS if block.language == "python"], ids=str)
def test_the_cards_programs_run(block: Block, warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "card.py").write_text(f"{CARDS}\n{block.text}\nprint(strategy)\n", encoding="utf-8")
    status, said = warm.run(["card.py"], tmp_path)
    assert status == 0, said
    assert said.strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["legacy", "message"])
def test_the_wrapped_strategies_run_under_flwr_run(name: str, tmp_path: Path) -> None:
    page = [block for block in BLOCKS if block.page == "docs/your-flower-project.md"]
    own = {block.file: block for block in page if block.file}
    (command,) = [block for block in page if block.first.startswith("flwr run")]
    (app := tmp_path / "app").mkdir()
    (app / f"{name}.py").write_text(own[f"{name}.py"].text, encoding="utf-8")
    (app / "pyproject.toml").write_text(own["pyproject.toml"].text.replace("message:", f"{name}:"), encoding="utf-8")
    ((flwr, run, here, *options),) = command.commands()
    assert (flwr, run, here) == ("flwr", "run", ".")
    with LocalSuperLink(tmp_path / "home") as superlink:
        done = superlink.run(*options, verb=("run", str(app)))
        assert done.wait(240) == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert re.search(SAYS[f"{name}.py"], ANSI.sub("", done.stdout), re.MULTILINE), done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in ON_PAPERS if block.language != "python"], ids=str)
def test_the_cards_commands_run_for_two_rounds(block: Block, warm: Warm, tmp_path: Path) -> None:
    played = 0
    for words in block.commands():
        if words[-2:] != ["--data-dir", "DIR"]:  # MNIST is not part of the repository
            status, said = warm.run([*words, "--rounds", "2", "--engine", "vectorized"], tmp_path)
            assert status == 0, said
            played += 1
    assert played


@pytest.mark.pages
def test_a_client_takes_the_seconds_of_fedscale(warm: Warm, folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedScale at 7ec441c, ``ClientMetadata.get_completion_time``, with batches of one example, which are all full."""
    (program,) = [block for block in BLOCKS if block.file == "traces.py"]
    shell = [block for block in BLOCKS if block.page == program.page and block.language == "sh"]
    (command,) = [block for block in shell if "fedscale.toml" in block.text]
    run_block(program, folder := folder_of(command), warm)
    monkeypatch.chdir(folder)
    steps, batch, kbit = 5, 1, 1e6 * 8 / 1024
    scenario = load_scenario("fedscale.toml", {"selector": "random", "rounds": 5, "training.batch_size": batch})
    rows = [row for row in simulate(scenario, engine="vectorized").history.clients if row.completed]
    assert len(rows) > 20
    for row in rows:
        k = (int(row.client_id) + 1) % 40
        computation, communication = 10.0 * k, 3000.0 + 500.0 * k
        assert row.compute_s == pytest.approx(3 * batch * steps * computation / 1000)
        assert row.download_s + row.upload_s == pytest.approx(2 * kbit / communication)


@pytest.mark.pages
def test_the_workflow_of_the_smoke_tests_runs_its_pytest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last command of its one job, on the file of the page."""
    yaml = pytest.importorskip("yaml", reason="comes with Flower")
    page = {block.language: block.text for block in BLOCKS if block.page == "docs/smoke-tests.md"}
    (job,) = yaml.safe_load(page["yaml"])["jobs"].values()
    *_, command = [step["run"] for step in job["steps"] if "run" in step]
    (tmp_path / "test_selection.py").write_text(page["python"], encoding="utf-8")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    said = in_a_shell(command, tmp_path)
    assert re.search(r"^3 passed", said, re.MULTILINE), said


@pytest.mark.slow
def test_the_demo_ends_with_a_verdict(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.page == "README.md" and "--rounds-on-flower" in block.text]
    assert block.text.strip() in (ROOT / "Makefile").read_text(encoding="utf-8")
    *_, verdict, folder = in_a_shell(block.text, tmp_path).strip().splitlines()
    assert verdict
    assert (Path(folder) / "comparison.png").is_file()
