"""Which extras can be installed on which Python and platform, from wheels alone: ``make resolve``.

    python -m tools.resolving           print the table

uv, which Flower brings, resolves the requirements of the wheel and of each extra for every Python that the classifiers
name. Nothing is installed, and no other Python is needed. A cell has the versions that uv found of an extra's main
packages, with a dash for a package that is not required there. If nothing fits, the cell has "no" and the first package
in uv's error.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = tuple(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
EXTRAS = ("", *(extra for extra in PROJECT["optional-dependencies"] if extra not in ("dev", "docs")))
PLATFORMS = {
    "Linux x86_64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
    "Windows x86_64": "x86_64-pc-windows-msvc",
}
SHOWN = {
    "": ("flwr",), "sim": ("ray", "torch"), "meter": ("zeus",), "metrics": ("prometheus-client",),
    "report": ("altair", "vl-convert-python"), "fast": ("numba",),
}  # fmt: skip
"""Extra -> the packages whose versions a cell names."""
LONGEST_S = 300.0
"""Seconds for one resolution."""


def main() -> int:
    """Print the table; the status is 1 if an extra cannot be installed on Linux x86_64."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(prefix="fedsel-") as folder:
        wheel = build_wheel(Path(folder))
        asked = [(extra, name, python) for extra in EXTRAS for name in PLATFORMS for python in PYTHONS]
        with ThreadPoolExecutor(max_workers=8) as pool:
            found = pool.map(lambda one: resolve(wheel, one[0], one[2], PLATFORMS[one[1]]), asked)
            answers = dict(zip(asked, found, strict=True))
        cells = {
            (extra, name): [answers[extra, name, python] for python in PYTHONS]
            for extra in EXTRAS
            for name in PLATFORMS
        }
    print(table(cells))
    return int(
        any(cell.startswith("no:") for (_, name), row in cells.items() if name == "Linux x86_64" for cell in row)
    )


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this repository into a folder, and return its path."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT))
    subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_S)
    (wheel,) = folder.glob("*.whl")
    return wheel


def resolve(wheel: Path, extra: str, python: str, platform: str) -> str:
    """Return the cell of one extra on one Python and platform."""
    wanted = f"fedsel-flwr{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", "--python-version", python, "--python-platform", platform]
    done = subprocess.run(command, input=wanted, text=True, capture_output=True, timeout=LONGEST_S)
    if done.returncode:
        return f"no: {reason(done.stderr)}"
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
    return ", ".join(f"{name} {versions.get(name, '-')}" for name in SHOWN.get(extra, ())) or "yes"


def reason(error: str) -> str:
    """Return the package that uv names first in its error."""
    found = re.search(r"Because (?:only )?([\w.-]+)", error)
    return found[1] if found else " ".join(error.split())[-80:]


def table(cells: dict[tuple[str, str], list[str]]) -> str:
    """Return the table, with the day and the tool."""
    uv = subprocess.run([sys.executable, "-m", "uv", "--version"], text=True, capture_output=True, check=True).stdout
    lines = [
        f"uv {uv.split()[1]}, {time.strftime('%Y-%m-%d')}:",
        "",
        f"| extra | platform | {' | '.join(f'Python {python}' for python in PYTHONS)} |",
        "| --- | --- |" + " --- |" * len(PYTHONS),
        *(
            f"| {f'`{extra}`' if extra else '(none)'} | {platform} | {' | '.join(row)} |"
            for (extra, platform), row in cells.items()
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
