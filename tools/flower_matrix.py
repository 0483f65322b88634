"""This repository with the oldest, the pinned and the newest Flower, and its nightly: ``make flower-matrix``.

Each version is installed with its dependencies into an environment of its own, in front of the packages of the one
that runs this; where they cannot be had together (a requirement that no package index here has), without them. Then
``tools/oldest_flower.py``, the tests of the strategies and ``fedsel run smoke`` are run with it. The tests are made for
the pinned Flower: of another one those files count that it can import at all, and how many it cannot is said.

Every step has a bound in time, and whatever it started is ended with it. A version has one line: what passed, or why
not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import signal
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST, NIGHTLY = "1.22.0", "newest", "nightly"
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors")
CHECKS = {
    "both APIs": ("tools/oldest_flower.py",),
    "tests/strategies": (*TESTS, "tests/strategies"),
    "fedsel run smoke": ("-m", "fedsel_flwr.cli", "run", "smoke", "--rounds", "3", "--runs-dir", "RUNS"),
}
LONGEST_S = 1800.0
"""Seconds for one check, and for one installation."""
QUIET = ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
"""Switched on for every check."""


class CannotBeHad(Exception):
    """A version could not be installed."""


def main() -> int:
    """Run everything and print a line for each version; the status is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"(default: {OLDEST}, that of constraints.txt, newest, nightly)")
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=list(CHECKS))
    args = parser.parse_args()
    failed = False
    for version in args.versions or (OLDEST, pinned(), NEWEST, NIGHTLY):
        passed, line = tried(version, args.checks)
        failed |= not passed
        print(line, flush=True)
    return int(failed)


def tried(version: str, checks: list[str]) -> tuple[bool, str]:
    """Whether a version passed every check, and a line that says so."""
    with tempfile.TemporaryDirectory(prefix="flower-", ignore_cleanup_errors=True) as folder:
        try:
            python, had, how = installed(version, Path(folder))
        except CannotBeHad as error:
            return False, f"flwr {version}: cannot be had: {error}"
        ray = told(python, "import ray; print(ray.__version__)")
        results = {name: checked(python, CHECKS[name], Path(folder) / "runs") for name in checks}
    said = "; ".join(f"{name}: {result}" for name, result in results.items())
    passed = all(result.startswith("passed") for result in results.values())
    return passed, f"flwr {had} ({how}, ray {ray}): {said}"


def pinned() -> str:
    """The version in constraints.txt."""
    (version,) = re.findall(r"^flwr==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return str(version)


def installed(version: str, folder: Path) -> tuple[Path, str, str]:
    """An environment with this flwr: its Python, the exact version, and how it was had.

    Raises:
        CannotBeHad: No package index here has it, it takes too long, or another flwr is imported in its place.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (here,) = folder.glob("lib/python*/site-packages")
    here_already = version == pinned() == importlib.metadata.version("flwr")
    had, how = (version, "as pinned") if here_already else _install(python, version)
    behind = "\n".join(path for path in site.getsitepackages() if Path(path).is_dir())
    (here / "behind.pth").write_text(f"{behind}\n", encoding="utf-8")
    if not here_already and not (place := told(python, "import flwr; print(flwr.__file__)")).startswith(str(folder)):
        raise CannotBeHad(f"{had} was installed, but flwr is imported from {place}")
    return python, had, how


def _install(python: Path, version: str) -> tuple[str, str]:
    """Install a version; which it is in exact numbers (the nightly does not say so itself), and how it was had."""
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    name = "flwr-nightly" if version == NIGHTLY else "flwr"
    exact = name if version in (NEWEST, NIGHTLY) else f"{name}=={version}"
    try:
        alone = run(*pip, "--no-deps", exact)
        if alone.returncode:
            raise CannotBeHad(last(alone.stderr))
        had = told(python, f"from importlib.metadata import version; print(version({name!r}))")
        together = run(*pip, f"{name}[simulation]=={had}")  # with its number: pip would take an older one that fits
    except subprocess.TimeoutExpired:
        raise CannotBeHad(f"no end within {LONGEST_S:g} s") from None
    return had, "with its dependencies" if together.returncode == 0 else "alone, over the pinned packages"


def checked(python: Path, arguments: tuple[str, ...], runs: Path) -> str:
    """Run a check; what it came to, in a few words."""
    try:
        done = run(python, *(str(runs) if one == "RUNS" else one for one in arguments))
    except subprocess.TimeoutExpired:
        return f"failed: no end within {LONGEST_S:g} s"
    if "pytest" not in arguments:
        return "passed" if done.returncode == 0 else f"failed: {last(done.stderr)}"
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error)", last(done.stdout))}
    files = f", {counts['error']} files cannot be imported" if "error" in counts else ""
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if failed or not counts.get("passed"):
        return f"{len(failed)} failed ({' '.join(failed)}), {counts.get('passed', 0)} passed{files}"
    return f"passed {counts['passed']}{files}"


def told(python: Path, program: str) -> str:
    """The last line that a program prints."""
    try:
        return last(run(python, "-c", program).stdout)
    except subprocess.TimeoutExpired:
        return "unknown"


def last(text: str) -> str:
    """A text's last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing said")[:200]


def run(*argv: object, longest_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, and keep what it says.

    What it says goes to files and not to pipes, which its own children (Ray's) would keep open, and they end with it.

    Raises:
        subprocess.TimeoutExpired: It took longer than the bound.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    tools = f"{Path(str(argv[0])).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment |= {"PATH": tools, "PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0", **dict.fromkeys(QUIET, "1")}
    command = [str(one) for one in argv]
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        _group(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err) as process,
    ):
        status = process.wait(LONGEST_S if longest_s is None else longest_s)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), err.read())


@contextlib.contextmanager
def _group(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group, all of which is ended at the end."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
