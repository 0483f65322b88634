"""Builds the archives, and installs the wheel in an empty environment outside the repository: ``make package``.

    python -m tools.installation                every step
    python -m tools.installation --steps core   the archives, and the steps up to this one

The archives: sdist and wheel, ``twine check --strict``, ``check-wheel-contents``, and the same wheel from the sdist as
from the repository. Then one environment gets one thing after the other: NumPy and the wheel alone, the core, a package
with a selector, and each extra. After each step this checks what must work, and the error for what is not installed.
``docs/installing.md`` prints the same commands.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.pages import ROOT, blocks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSION = PROJECT["version"]
WHEEL = f"fedsel_flwr-{VERSION}-py3-none-any.whl"
LONGEST_S = 900.0
"""Seconds for one command."""
SIMULATION_ONLY = ("torch", "ray", "scipy", "pandas", "matplotlib", "sklearn", "zeus")
"""Modules that only extras bring."""

SELECT = """
import numpy as np
from fedsel_flwr.selectors import create

selector = create("bsfl", clients_per_round=2, min_latency=0.1, seed=1)
print("chosen", selector.select(np.arange(9)))
"""
WRAP = """
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server.strategy import FedAdam as LegacyFedAdam
from flwr.serverapp.strategy import FedAdam

from fedsel_flwr.strategies import BSFL as LegacyBSFL
from fedsel_flwr.strategies.message import BSFL
from fedsel_flwr.testing import check_strategy

arrays = [np.zeros((3, 2), dtype=np.float32)]
options = {"clients_per_round": 3, "min_latency": 0.1, "seed": 1}


def legacy():
    base = LegacyFedAdam(initial_parameters=ndarrays_to_parameters(arrays), fraction_evaluate=0.0)
    return LegacyBSFL(base=base, **options)


check_strategy(legacy, arrays=arrays)
check_strategy(lambda: BSFL(base=FedAdam(fraction_evaluate=0.0), **options), arrays=arrays)
print("wrapped in both APIs")
"""
CONFORM = """
from functools import partial

from fedsel_flwr.selectors import create, names
from fedsel_flwr.testing import check_selector

assert "patient" in names()
check_selector(partial(create, "patient", clients_per_round=3))
print("patient conforms")
"""
COMPARE = """
from fedsel_flwr.simulations import compare, load_scenario

compare(load_scenario("smoke"), ["patient", "random"], seeds=2)
"""
METER = """
from fedsel_flwr.clients.telemetry import EnergyMeter

with EnergyMeter() as meter:
    pass
print("metered", meter.joules)
"""
SERVE = """
from urllib.request import urlopen

from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies.message import SelectionStrategy

strategy = SelectionStrategy(Random(clients_per_round=2), metrics_address=0)
strategy.begin_metrics()
print(urlopen(strategy.metrics_url).read().decode())
"""
PAGE = """
from pathlib import Path

from fedsel_flwr.cli import main

main(["run", "smoke", "--quiet"])
for page in Path("runs").glob("*/report.html"):
    print(page.name, "has", page.stat().st_size, "bytes")
"""


@dataclass(frozen=True)
class Check:
    """A command of the environment.

    Attributes:
        command: Its words; the first is a command of the environment.
        prints: A regular expression that its output matches.
        status: Its exit status.
    """

    command: tuple[str, ...]
    prints: str
    status: int = 0


@dataclass(frozen=True)
class Step:
    """An installation into the environment, and what holds after it.

    Attributes:
        name: The extra, or another name.
        install: The arguments of ``pip install``.
        download: The arguments of ``pip download`` before it, if any.
        checks: What works now, and the errors for what is not installed.
        absent: Modules that cannot be imported yet.
    """

    name: str
    install: tuple[str, ...]
    checks: tuple[Check, ...]
    absent: tuple[str, ...] = ()
    download: tuple[str, ...] = ()


def program(text: str, prints: str, status: int = 0) -> Check:
    """Return the check that runs a Python program."""
    return Check(("python", "-c", text), prints, status)


NO_METRICS = program(SERVE, r"RunError: .*pip install 'fedsel-flwr\[metrics\]'", status=1)
NO_METER = program(METER, r"RunError: .*pip install 'fedsel-flwr\[meter\]'", status=1)
STEPS = (
    Step("selectors alone", ("numpy", "--no-deps", "dist/{wheel}"), (program(SELECT, r"chosen \[\d \d\]"),), ("flwr",)),
    Step(
        # As without a network: downloaded first, then installed from the folder.
        "core",
        ("--no-index", "--find-links", "wheels", "fedsel-flwr"),
        (
            Check(("fedsel", "--version"), rf"^fedsel {re.escape(VERSION)}$"),
            Check(("fedsel", "list"), r"(?s)\bsmoke\b.*\bbsfl\b"),
            program(WRAP, "wrapped in both APIs"),
            Check(("fedsel", "run", "smoke"), r"^fedsel: error: .*pip install 'fedsel-flwr\[sim\]'", status=2),
            program(COMPARE, r"RunError: .*pip install 'fedsel-flwr\[sim\]'", status=1),
            NO_METER,
            NO_METRICS,
        ),
        SIMULATION_ONLY,
        download=("--dest", "wheels", "dist/{wheel}"),
    ),
    Step(
        "a package with a selector",
        ("theirs/dist/{theirs}",),
        (Check(("fedsel", "list"), r"\bpatient\b"), program(CONFORM, "patient conforms")),
        SIMULATION_ONLY,
    ),
    # As the errors of the core print it: the wheel that is installed stays.
    Step(
        "sim",
        ("fedsel-flwr[sim]",),
        (
            Check(("fedsel", "run", "smoke"), r"(?s)\bbsfl\b.*smoke-"),
            Check(
                ("fedsel", "compare", "smoke", "--selectors", "patient,random", "--seeds", "2"), r"(?s)patient.*smoke-"
            ),
            NO_METER,
            program(PAGE, r"report\.html has \d{6,} bytes"),
        ),
        ("zeus",),
    ),
    Step(
        "apps",
        ("{root}", "{root}/examples/drop-in/after"),
        (Check(("pip", "show", "digits-after"), "^Requires: fedsel-flwr"),),
    ),
    Step("fast", ("fedsel-flwr[fast]",), (program("import numba; print(numba.__version__)", r"^\d+\.\d+"),)),
    Step("meter", ("fedsel-flwr[meter]",), (program(METER, r"metered (None|[\d.]+)"),)),
    Step("metrics", ("fedsel-flwr[metrics]",), (program(SERVE, r"(?m)^fedsel_rounds_total 0\.0$"),)),
)


class Failed(Exception):
    """A command did not end, or printed something else than it should."""


def main() -> int:
    """Build, check, install; the status is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", choices=[step.name for step in STEPS], help="the last step (default: all)")
    parser.add_argument("--folder", type=Path, help="an empty folder to work in (default: a temporary one)")
    parser.add_argument("--newest", action="store_true", help="install the newest versions, without constraints.txt")
    args = parser.parse_args()
    names = [step.name for step in STEPS]
    steps = STEPS[: names.index(args.steps) + 1] if args.steps else STEPS
    with tempfile.TemporaryDirectory(prefix="fedsel-", ignore_cleanup_errors=True) as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for line in play(folder, steps, () if args.newest else ("-c", str(ROOT / "constraints.txt"))):
                print(f"package: {line}", flush=True)
        except Failed as error:
            print(f"package: failed: {error}", file=sys.stderr)
            return 1
    return 0


def play(folder: Path, steps: tuple[Step, ...], constraints: tuple[str, ...]) -> Iterator[str]:
    """Do everything in a folder; yield a line for each thing that has passed.

    Raises:
        Failed: Something did not.
    """
    start = time.monotonic()
    build_archives(folder)
    yield f"archives: {time.monotonic() - start:.0f} s"
    theirs = build_theirs(folder / "theirs")
    environment = Environment(folder, folder / "environment")
    for step in steps:
        start = time.monotonic()
        names = {"wheel": WHEEL, "theirs": theirs, "root": ROOT}
        # Without --no-compile, pip compiles all of torch, of which the checks import a part.
        for verb, arguments in ((("download",), step.download), (("install", "--no-compile"), step.install)):
            if arguments:
                words = [word.format(**names) for word in arguments]
                environment.run("pip", *verb, "--quiet", *constraints, *words)
        installed_s = time.monotonic() - start
        check(environment, step)
        took_s = time.monotonic() - start
        yield f"{step.name}: {len(step.checks)} checks, {took_s:.0f} s, {installed_s:.0f} of them for pip"


def build_archives(folder: Path) -> None:
    """Build sdist and wheel into ``dist``, check both, and compare the wheel with one built from the repository.

    Raises:
        Failed: An archive is wrong.
    """
    tools = Environment(folder, Path(sys.prefix))
    tools.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", str(ROOT))
    tools.run("python", "-m", "build", "--no-isolation", "--wheel", "--outdir", "direct", str(ROOT))
    if not filecmp.cmp(folder / "dist" / WHEEL, folder / "direct" / WHEEL, shallow=False):
        raise Failed(f"the sdist builds another {WHEEL} than the repository. Compare their files")
    archives = sorted(path.name for path in (folder / "dist").iterdir())
    expected = [WHEEL, f"fedsel_flwr-{VERSION}.tar.gz"]
    if archives != expected:
        raise Failed(f"expected the archives {expected}, got {archives}")
    tools.run("python", "-m", "twine", "check", "--strict", *(f"dist/{name}" for name in archives))
    tools.run("check-wheel-contents", f"dist/{WHEEL}")
    # An environment of its own: cffconvert needs an older jsonschema than Ray.
    citation = Environment(folder, folder / "citation")
    citation.run("pip", "install", "--quiet", "cffconvert==2.0.0")
    citation.run("cffconvert", "--validate", "--infile", str(ROOT / "CITATION.cff"))


def build_theirs(folder: Path) -> str:
    """Build the wheel of another project's package with a selector, from ``docs/own-selector.md``; return its name.

    Raises:
        Failed: It cannot be built.
    """
    found = blocks(ROOT / "docs" / "own-selector.md")
    (code,) = [block.text for block in found if block.file == "patient.py"]
    (entries,) = [block.text for block in found if block.language == "toml"]
    project = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "my-package"
version = "1.0.0"
dependencies = ["fedsel-flwr"]
"""
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "__init__.py").write_text("")
    (folder / "my_package" / "patient.py").write_text(code)
    (folder / "pyproject.toml").write_text(f"{project}\n{entries}")
    Environment(folder, Path(sys.prefix)).run("python", "-m", "build", "--no-isolation", "--wheel")
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel.name


def check(environment: Environment, step: Step) -> None:
    """Check what holds after a step.

    Raises:
        Failed: Something does not.
    """
    place = environment.run("python", "-c", "import fedsel_flwr as f; print(f.__version__, f.__file__)")
    if not place.startswith(f"{VERSION} {environment.prefix}"):
        raise Failed(f"step {step.name}: expected version {VERSION} in {environment.prefix}, got {place}")
    for one in step.checks:
        environment.run(*one.command, prints=one.prints, status=one.status)
    find = f"from importlib.util import find_spec; print([name for name in {step.absent!r} if find_spec(name)])"
    environment.run("python", "-c", find, prints=r"^\[\]$")
    if step.name != STEPS[0].name:
        environment.run("pip", "check")


class Environment:
    """A virtual environment whose commands run in a folder outside the repository.

    Args:
        folder: Where its commands run.
        prefix: The environment; it is made if it does not exist.
    """

    def __init__(self, folder: Path, prefix: Path) -> None:
        self.folder, self.prefix = folder, prefix
        if not prefix.exists():
            venv.create(prefix, with_pip=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "VIRTUAL"))}
        quiet = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "FLWR_HOME": str(folder / "flwr"),
        }
        self.variables = kept | quiet | {"PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}

    def run(self, *words: str, prints: str = "", status: int = 0) -> str:
        """Run a command, and return what it prints.

        Raises:
            Failed: It ends with another exit status, prints something else, or takes too long.
        """
        command = [str(self.prefix / "bin" / words[0]), *words[1:]]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=self.variables, timeout=LONGEST_S, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failed(f"{words} has not ended after {LONGEST_S:g} s") from None
        if done.returncode != status or not re.search(prints, done.stdout, re.MULTILINE):
            wanted = f"expected status {status} and output that matches {prints!r}"
            raise Failed(f"{' '.join(words)}: {wanted}, got status {done.returncode} and\n{done.stdout[-4000:]}")
        return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
