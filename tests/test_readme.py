"""Every program and every command of README.md and docs/ runs as printed; what cannot is listed here, with its reason.

The ordinary run has each once, Python's slow imports taken from :mod:`tests.warm`. The slow run has each in a shell or
a Python of its own, as a reader has it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedsel_flwr.selectors import names
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.reproductions.paper_figure import PAPERS as REPRODUCED
from tests.flwr_command import ANSI, LocalSuperLink
from tests.pages import COMMANDS, PAGES, ROOT, SITE, Block, blocks, dead_anchors, links
from tests.processes import environment
from tests.warm import Warm

BLOCKS = [block for page in PAGES for block in blocks(page)]
OTHER = ("diff", "text", "toml", "yaml")
ELSEWHERE = {"docs/smoke-tests.md": "tests/test_smoke_tests.py", "docs/tutorial.md": "tests/site/test_tutorial.py"}
PAPERS = "docs/papers/"
CARDS = """
import numpy as np

predict, inputs, labels = (lambda arrays, inputs: inputs @ arrays[0]), np.eye(3), np.arange(3)
"""
"""What the cards of the papers take as given: their programs show what a strategy is told."""

NOT_RUN = {
    ("README.md", "python3 -m venv .venv"): "installs",
    ("README.md", "fedsel compare phones"): "over a minute",
    ("docs/your-flower-project.md", "flwr run . --stream"): "SuperLink",
    ("docs/README.md", "fedsel compare phones"): "over a minute",
    ("docs/advising.md", "fedsel advise latencies.csv"): "your own rows",
    ("docs/beyond-one-machine.md", "fedsel run fashion-500"): "Fashion-MNIST",
    ("docs/beyond-one-machine.md", "python benchmarks/many_clients.py"): "Fashion-MNIST",
    ("docs/reliability.md", "python benchmarks/superlink_load.py"): "minutes",
    ("docs/beyond-one-machine.md", "# on the first machine"): "several machines",
    ("docs/beyond-one-machine.md", "# the head, then another node"): "test_two_raylet_comparisons",
    ("docs/beyond-one-machine.md", "export RAY_ADDRESS"): "cluster",
    ("docs/beyond-one-machine.md", "# on the SuperLink's machine"): "several machines",
    ("docs/command-line.md", "fedsel run --resume"): "a folder of yours",
    ("docs/command-line.md", "fedsel compare --resume"): "a folder of yours",
    ("docs/comparing.md", "fedsel compare phones"): "over a minute",
    ("docs/examples.md", "pip install"): "installs",
    ("docs/installing.md", "python3 -m venv"): "installs",
    ("docs/installing.md", 'pip install "fedsel-flwr[sim]"'): "installs",
    ("docs/installing.md", "pip install build"): "installs",
    ("docs/installing.md", "pip install dist/"): "installs",
    ("docs/installing.md", 'pip install "fedsel-flwr[sim] @'): "installs",
    ("docs/installing.md", "pip install -c constraints.txt . ./examples"): "installs",
    ("docs/installing.md", "export PIP_FIND_LINKS"): "installs",
    ("docs/installing.md", "pip download"): "downloads",
    ("docs/installing.md", "pip install --no-index"): "installs",
    ("docs/observing.md", "pip install tensorboard"): "does not install",
    ("docs/observing.md", "from fedsel_flwr.simulations import compare"): "does not install",
    ("docs/observing.md", "from fedsel_flwr.callbacks import MLflow"): "does not install",
    ("docs/observing.md", 'pip install "fedsel-flwr[metrics]"'): "installs",
    ("docs/performance.md", "python benchmarks/maximize.py"): "needs a clone",
    ("docs/statistics.md", "fedsel compare phones --selectors"): "over a minute",
    ("docs/statistics.md", "fedsel compare phones --set"): "over a minute",
    ("docs/own-data.md", "from flwr_datasets import"): "downloads",
    ("docs/restarting.md", "try:"): "SuperNodes",
    ("docs/simulations.md", "fedsel run fashion-500"): "Fashion-MNIST",
    ("docs/simulations.md", "fedsel run digits --data-dir"): "QMNIST",
    ("docs/simulations.md", "export FLWR_DISABLE"): "SuperLink",
}
NOT_RUN |= {(f"docs/results/{paper}.md", f"fedsel reproduce {paper}"): "takes hours" for paper in REPRODUCED}
"""Page and beginning of the block -> a word of the reason that the page gives."""

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
    "priority.py": r"^1 \[0, 1, 2, 4, 8\]\n2 \[0, 1, 2, 6, 8\]\n3 \[0, 1, 2, 3, 5\]$",
    "quiet.py": r"(\d 0\.\d+ [\d.]+ s [\d.]+ J\n){5}\[\(10, 64\), \(10,\)\]",
}
"""Program -> what its output has."""


def is_code(block: Block) -> bool:
    """Whether a block is a program, or commands."""
    return block.language in ("python", "sh") or (not block.language and block.first.startswith(COMMANDS))


RUN = [b for b in BLOCKS if is_code(b) and not b.not_run and b.page not in ELSEWHERE and not b.page.startswith(PAPERS)]
ON_PAPERS = [block for block in BLOCKS if is_code(block) and not block.not_run and block.page.startswith(PAPERS)]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
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
    """What a block says; it must succeed."""
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


def check_block(block: Block, folder: Path, warm: Warm | None) -> None:
    said = run_block(block, folder, warm)
    assert re.search(SAYS.get(block.file, ""), said, re.MULTILINE), said[-4000:]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_it_runs_as_printed(block: Block, warm: Warm, folder_of: Callable[[Block], Path]) -> None:
    check_block(block, folder_of(block), warm)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=str)
def test_it_runs_as_printed_in_a_shell(block: Block, folder_of: Callable[[Block], Path]) -> None:
    check_block(block, folder_of(block), None)


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


def test_the_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for gone in (r"^```.*?^```$", r"<!--.*?-->", r"\]\([^)]*\)"):
        text = re.sub(gone, "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(text.split()) < 600
    assert text.split()[2] == str(len(names()))  # selectors


def test_the_readmes_two_lines_are_those_of_the_example() -> None:
    (shown,) = [block.text for block in BLOCKS if block.page == "README.md" and block.language == "diff"]
    before, after = [(ROOT / "examples" / "drop-in" / app / "server_app.py").read_text() for app in ("before", "after")]
    added = [line[1:] for line in shown.splitlines() if line.startswith("+")]
    assert [line for line in added if f"{line}\n" not in after] == []
    assert [line for line in added if f"{line}\n" in before] == []
    assert [line[1:] for line in shown.splitlines() if line.startswith(" ") and f"{line[1:]}\n" not in before] == []


def test_nothing_is_left_out_in_silence() -> None:
    left = {(b.page, b.first): b.not_run for b in BLOCKS if is_code(b) and b.not_run}
    for (page, first), why in left.items():
        print(f"not run: {page}: {first}: {why}")
    unknown = [key for key in left if not any(key[0] == page and key[1].startswith(begin) for page, begin in NOT_RUN)]
    assert unknown == []
    for (page, begin), word in NOT_RUN.items():
        (why,) = [why for (other, first), why in left.items() if other == page and first.startswith(begin)]
        assert word in why
    assert [page for page in ELSEWHERE.values() if not (ROOT / page).is_file()] == []
    for block in BLOCKS:
        known = is_code(block) or block.page in ELSEWHERE or block.language in OTHER or not block.language
        known |= block.page in SITE and block.language.startswith("{")  # a directive of the site
        assert known, f"{block}: {block.language}"
        if not is_code(block):
            names = tuple(f"{name} " for name in COMMANDS)
            told = [one for one in block.text.splitlines() if one.startswith(names) and not re.match(r"flwr \d", one)]
            assert told == [], f"{block} holds commands: call it sh"
    assert {block.file for block in RUN if block.language == "python" and block.file} == set(SAYS)


def test_the_selector_alone_comes_to_prefer_the_fast(warm: Warm, tmp_path: Path) -> None:
    (block,) = [block for block in RUN if block.file == "alone.py"]
    plays = [int(number) for number in re.findall(r"\d+", run_block(block, tmp_path, warm))]
    assert sum(plays) == 5000
    assert sum(plays[:5]) > 1.5 * 5 * 250
    assert sum(plays[-5:]) < 5 * 250


def test_a_client_takes_the_seconds_of_fedscale(
    warm: Warm, folder_of: Callable[[Block], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedScale at 7ec441c, ``ClientMetadata.get_completion_time``, with batches of one example, which are all full."""
    (program,) = [block for block in RUN if block.file == "traces.py"]
    (command,) = [block for block in RUN if block.page == program.page and block.language == "sh"]
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


def test_links_lead_somewhere_and_the_index_has_every_page() -> None:
    assert [(page.name, link) for page in PAGES for link in links(page) if not (ROOT / link).exists()] == []
    everywhere = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    assert [(page.name, anchor) for page in everywhere for anchor in dead_anchors(page)] == []
    listed = set(links(ROOT / "docs" / "README.md"))
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES if page.parent == ROOT / "docs"}
    assert pages - {"docs/README.md"} - SITE <= listed
    assert {"docs/papers/README.md", "README.md"} <= listed


def words(text: str) -> str:
    """A text with single spaces, without the signs of a quotation."""
    return " ".join(" ".join(line.removeprefix(">") for line in text.splitlines()).split())


@pytest.mark.slow
def test_the_demo_prints_what_the_pages_show(tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if block.page == "README.md" and "--rounds-on-flower" in block.text]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert block.text.strip() in makefile
    said = in_a_shell(block.text, tmp_path)
    table = said[said.index("           accuracy") :]
    *printed, folder = table.strip().splitlines()
    assert words("\n".join(printed)) in words((ROOT / "docs" / "comparing.md").read_text(encoding="utf-8"))
    verdict = "\n".join(printed[next(i for i, line in enumerate(printed) if line.startswith("random reaches")) :])
    assert words(verdict) in words((ROOT / "README.md").read_text(encoding="utf-8"))
    assert (Path(folder) / "comparison.png").is_file()
