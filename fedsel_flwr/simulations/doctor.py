"""Checks of the installation and of this machine: ``fedsel doctor``.

Each check yields findings. A finding is fine, a note, or a problem. A problem comes with the command that fixes it. The
checks need no package beyond a core installation.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import fedsel_flwr
from fedsel_flwr.errors import FedSelError
from fedsel_flwr.simulations.listing import packaged_text, scenario_names, wrapped
from fedsel_flwr.simulations.on_flower.ray_resources import VARIABLE, cluster_address, start_hint, try_connect
from fedsel_flwr.simulations.package_checks import (
    Finding,
    check_packages,
    check_python,
    check_selectors,
    install_command,
    version_of,
)
from fedsel_flwr.simulations.worlds.image_files import DATA_DIR_VARIABLE, IMAGE_SETS, find_data_folder, has_image_set

LINKS = ("strategies", "clients", "simulations")
"""Symbolic links at the root of a clone."""
LEAST_BYTES = 10**9
"""Free memory and free disk space, in bytes, below which a run is likely to fail."""
TOOL_LIMIT_S = 10.0
"""Longest wait for ``nvidia-smi``, in seconds."""


def examine(data_dir: str | None = None, runs_dir: str = "runs", start_ray: bool = False) -> Iterator[Finding]:
    """Yield the findings of all checks.

    Args:
        data_dir: Folder of the data sets. If None, the environment variable FEDSEL_DATA.
        runs_dir: Folder of all runs. The free space on its disk is checked.
        start_ray: Whether to start Ray for a moment. If False, only its version and the cluster's address are checked.
    """
    yield from check_python()
    yield from check_packages()
    yield from check_selectors()
    yield from check_torch()
    yield from check_ray(start_ray)
    yield from check_data(data_dir)
    yield from check_space(Path(runs_dir))
    yield from check_links(Path(fedsel_flwr.__file__).parent.parent)


def report_lines(findings: list[Finding], width: int) -> Iterator[str]:
    """Yield the lines of ``fedsel doctor``: the findings, each with its cure, then the result.

    Args:
        findings: Findings of :func:`examine`.
        width: Columns of the terminal. Commands are not wrapped, so that you can copy them.
    """
    for finding in findings:
        label = f"{finding.status:<9}"
        yield from wrapped(f"{finding.topic}: {finding.text}", width, label, " " * 13)
        if finding.cure:
            yield f"{'':11}{finding.cure}"
    problems = sum(finding.status == "problem" for finding in findings)
    yield (
        f"{problems} problem{'s' if problems > 1 else ''} found. Run the command below each, then fedsel doctor again"
        if problems
        else "No problem found"
    )


def check_torch() -> Iterator[Finding]:
    """Check that torch can be imported, and find the GPUs that it sees."""
    if not version_of("torch"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch

            gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            built_for = torch.version.cuda or torch.version.hip
    # A broken installation raises errors of many kinds.
    except Exception as error:
        text = f"torch cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        yield Finding("torch", "problem", text, "pip install --force-reinstall torch torchvision")
        return
    if gpus:
        yield Finding("GPU", "ok", f"torch sees {', '.join(gpus)}")
    elif (cards := _graphics_cards()) and not built_for:
        text = f"torch is built for the CPU, so it cannot use {cards}; see https://pytorch.org/get-started/locally"
        yield Finding("GPU", "note", text, "pip install --force-reinstall torch torchvision")
    elif cards:
        yield Finding("GPU", "note", f"torch does not see {cards}; its driver may be too old for torch", "nvidia-smi")
    else:
        yield Finding("GPU", "ok", "none; everything trains on the CPU")


def _graphics_cards() -> str:
    """Return the names of the graphics cards that NVIDIA's driver lists; empty without a driver."""
    if not (tool := shutil.which("nvidia-smi")):
        return ""
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False)
        if done.returncode == 0:
            return ", ".join(done.stdout.split("\n")).strip(", ")
    return ""


def check_ray(start: bool) -> Iterator[Finding]:
    """Check the address of a Ray cluster, and optionally start Ray on this machine for a moment.

    Args:
        start: Whether to start Ray.
    """
    try:
        if (address := cluster_address()) is not None:
            try_connect(address)
            yield Finding("Ray", "ok", f"a server answers at {VARIABLE} = {address}")
    except FedSelError as error:
        yield Finding("Ray", "problem", str(error).rstrip("."), f"unset {VARIABLE}")
    except OSError as error:
        text = f"no server answers at {VARIABLE} = {os.environ[VARIABLE]} ({error}). {start_hint(VARIABLE)}"
        yield Finding("Ray", "problem", text, f"unset {VARIABLE}")
    if not (version := version_of("ray")):
        if start:
            text = "Ray is not installed, so it cannot be started"
            yield Finding("Ray", "problem", text, install_command("sim"))
        return
    if not start:
        yield Finding("Ray", "ok", f"{version}; not started, fedsel doctor --start-ray tries it")
        return
    began = time.monotonic()
    try:
        _start_ray()
    # Ray raises exceptions of many kinds.
    except Exception as error:
        yield Finding("Ray", "problem", " ".join(str(error).split()), "ray stop --force")
    else:
        yield Finding("Ray", "ok", f"{version} started and ended within {time.monotonic() - began:.0f} s")


def _start_ray() -> None:
    """Start Ray with one core, and end it."""
    from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
    from fedsel_flwr.simulations.on_flower.ray_session import RaySession
    from fedsel_flwr.simulations.shutdown import adopt_orphans, end_descendants

    adopt_orphans()
    try:
        with RaySession(RayResources(num_cpus=1, ray_address="local"), quiet=True).open():
            pass
    finally:
        end_descendants()


def check_data(data_dir: str | None) -> Iterator[Finding]:
    """Check the data folder and the data sets in it.

    Args:
        data_dir: The folder. If None, the environment variable FEDSEL_DATA.
    """
    named = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    try:
        folder = find_data_folder(data_dir)
    except FedSelError as error:
        cure = f"mkdir -p {data_dir}" if data_dir else f"unset {DATA_DIR_VARIABLE}"
        yield Finding("data", "problem", str(error).rstrip("."), cure)
        return
    there = [name for name in IMAGE_SETS if has_image_set(name, folder)]
    lacking = [name for name in IMAGE_SETS if name not in there]
    origin = "--data-dir" if data_dir else DATA_DIR_VARIABLE if named else f"{DATA_DIR_VARIABLE} is not set"
    text = f"{folder} ({origin}) holds {', '.join(there) or 'no data set'}"
    if lacking:
        text += f"; a run that needs {' or '.join(lacking)} downloads it"
    yield Finding("data", "ok", text)
    if named and lacking and not os.access(folder, os.W_OK):
        text = f"{folder} cannot be written to, so {' and '.join(lacking)} cannot be downloaded into it"
        yield Finding("data", "note", text)
    for name in scenario_names():
        trace = tomllib.loads(packaged_text(name)).get("availability", {}).get("trace", "")
        if trace and not (folder / trace).is_file() and not Path(trace).is_file():
            text = f"the scenario {name} needs the availability trace {trace}, which is not in {folder}"
            yield Finding("data", "note", text)


def check_space(runs_dir: Path) -> Iterator[Finding]:
    """Check the free memory, and the free space on the disk with the runs.

    Args:
        runs_dir: Folder of all runs, which need not exist.
    """
    memory = _free_memory()
    if memory is not None:
        text, cure = f"{memory / 1e9:.1f} GB available, {os.cpu_count()} cores", "ps aux --sort=-rss | head"
        yield Finding("memory", "ok", text) if memory >= LEAST_BYTES else Finding("memory", "problem", text, cure)
    folder = runs_dir.expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free for run folders in {folder}"
    cure = f"du -sh {folder}/* | sort -h | tail"
    yield Finding("disk", "ok", text) if free >= LEAST_BYTES else Finding("disk", "problem", text, cure)
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "problem", f"{folder} cannot be written to", "fedsel doctor --runs-dir ANOTHER_FOLDER")


def _free_memory() -> int | None:
    """Return the available memory in bytes; None if the system does not report it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ImportError):
        import psutil

        return int(psutil.virtual_memory().available)
    return None


def check_links(root: Path) -> Iterator[Finding]:
    """Check the symbolic links at the root of a clone; yield nothing if this is not a clone.

    Args:
        root: The folder that contains the package.
    """
    # A wheel and an unpacked sdist have no links.
    if not (root / ".git").exists():
        return
    broken = [name for name in LINKS if not (root / name / "__init__.py").is_file()]
    if broken:
        cure = f"git -C {root} config core.symlinks true && git -C {root} checkout -- {' '.join(broken)}"
        yield Finding("links", "problem", f"no symbolic links to the package: {', '.join(broken)}", cure)
    else:
        yield Finding("links", "ok", f"{', '.join(LINKS)} lead into the package")
