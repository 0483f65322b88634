"""An interpreter for each framework that ours lacks: a virtual environment on top of ours, with a few packages more.

They see the torch and the NumPy of this environment through a path file, so that all sides compute with the same
libraries; what they need beyond is installed without dependencies.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from cast import HERE


def interpreter(name: str, folder: Path, given: dict[str, str]) -> str:
    """The interpreter of a framework's environment, which is made if it is not there.

    Args:
        name: Of the requirements file; "": ours.
        folder: Where environments are made.
        given: Interpreters that the user names.

    Returns:
        A path.

    Raises:
        RuntimeError: The packages cannot be installed; the reason.
    """
    if not name:
        return sys.executable
    if name in given:
        return given[name]
    home, wanted = folder / name, HERE / "requirements" / f"{name}.txt"
    python, done = home / "bin" / "python", home / "installed"
    if done.exists() and done.read_text() == wanted.read_text():
        return str(python)
    venv.create(home, with_pip=True, clear=True)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "zz_ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(wanted)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ran.returncode:
        errors = [line for line in ran.stderr.splitlines() if "ERROR" in line] or ["ERROR: failed"]
        raise RuntimeError(f"pip: {errors[-1][:200]}")
    done.write_text(wanted.read_text())
    return str(python)


def version(python: str, package: str) -> str:
    """The version of a distribution in an environment; "" if it is not there."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return ran.stdout.strip()
