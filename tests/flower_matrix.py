"""This repository with the oldest, the pinned and the newest Flower: ``make flower-matrix``.

Each version is installed with its dependencies into an environment of its own, in front of the packages of the one
that runs this; where they cannot be had together (a requirement that no package index here has), without them. Then
``tests/oldest_flower.py``, the tests of the strategies and ``fedsel run smoke`` are run with it. The tests are made for
the pinned Flower: of another one those files count that it can import at all, and how many it cannot is said.
"""

from __future__ import annotations

import argparse
import os
import re
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = "1.22.0", "newest"
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors")
CHECKS = {
    "both APIs": ("tests/oldest_flower.py",),
    "tests/strategies": (*TESTS, "tests/strategies"),
    "fedsel run smoke": ("-m", "fedsel_flwr.cli", "run", "smoke", "--rounds", "3", "--runs-dir", "RUNS"),
}
LONGEST_S = 3600
"""Seconds for one check."""
QUIET = ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
"""Switched on for every check."""


def main() -> int:
    """Run everything and print a table; the status is 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"(default: {OLDEST}, that of constraints.txt, the newest)")
    parser.add_argument("--checks", nargs="*", choices=CHECKS, default=list(CHECKS))
    args = parser.parse_args()
    rows, failed = [("flwr", "ray", "installed", *args.checks)], False
    for version in args.versions or (OLDEST, pinned(), NEWEST):
        with tempfile.TemporaryDirectory(prefix="flower-") as folder:
            python, how = installed(version, Path(folder))
            found = [told(python, f"import {name}; print({name}.__version__)") for name in ("flwr", "ray")]
            results = [checked(python, CHECKS[name], Path(folder) / "runs") for name in args.checks]
        rows.append((*found, how, *results))
        failed |= any(not result.startswith("passed") for result in results)
        print("  ".join(rows[-1]), flush=True)
    print("", *(f"| {' | '.join(row)} |" for row in rows), sep="\n")
    return int(failed)


def pinned() -> str:
    """The version in constraints.txt."""
    (version,) = re.findall(r"^flwr==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return str(version)


def installed(version: str, folder: Path) -> tuple[Path, str]:
    """An environment with this flwr: its Python, and how the dependencies were had."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (here,) = folder.glob("lib/python*/site-packages")
    exact = "flwr" if version == NEWEST else f"flwr=={version}"
    pip = (python, "-m", "pip", "install", "--quiet")
    wanted = "flwr[simulation]" + exact.removeprefix("flwr")
    how = "with its dependencies"
    if version == NEWEST or run(*pip, wanted).returncode:  # pip would take an older one in place of the newest
        done = run(*pip, "--no-deps", exact)
        if done.returncode:
            raise SystemExit(f"flwr {version} cannot be had:\n{done.stderr[-2000:]}")
        how = "alone"
    behind = "\n".join(path for path in site.getsitepackages() if Path(path).is_dir())
    (here / "behind.pth").write_text(f"{behind}\n", encoding="utf-8")
    return python, how


def checked(python: Path, arguments: tuple[str, ...], runs: Path) -> str:
    """Run a check; what it came to, in a few words."""
    try:
        done = run(python, *(str(runs) if one == "RUNS" else one for one in arguments))
    except subprocess.TimeoutExpired:
        return f"failed: no end within {LONGEST_S} s"
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
    return last(run(python, "-c", program).stdout)


def last(text: str) -> str:
    """A text's last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing said")[:200]


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, and keep what it says."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    tools = f"{Path(str(argv[0])).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment |= {"PATH": tools, "PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0", **dict.fromkeys(QUIET, "1")}
    return subprocess.run(
        [str(one) for one in argv], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_S
    )


if __name__ == "__main__":
    sys.exit(main())
