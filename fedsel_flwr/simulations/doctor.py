"""Checks of the installation and of this machine: ``fedsel doctor``.

Each check yields findings. A finding is fine, a note, or a problem. A problem comes with the command that fixes it. The
checks need no package beyond a core installation.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import fedsel_flwr
from fedsel_flwr.errors import FedSelError, described
from fedsel_flwr.flower_entries import NEWEST_TESTED, installed_version, missing, newer, version_of
from fedsel_flwr.operating_system import adopt_orphans
from fedsel_flwr.simulations.listing import packaged_text, scenario_names, wrapped
from fedsel_flwr.simulations.on_flower.ray_resources import VARIABLE, RayResources, cluster_address
from fedsel_flwr.simulations.worlds.image_files import DATA_DIR_VARIABLE, IMAGE_SETS, find_data_folder, has_image_set

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT = "fedsel-flwr"
SIM_BEGUN_BY = ("tomli-w", "torch")
"""Packages of the extra ``sim`` that are together in few other environments. If both are installed, the whole extra is
expected. Ray does not count, because Flower's own extra installs it on servers."""
EXTRAS_UNREPORTED = ("dev", "fast")
"""Extras that users do not need: ``dev`` is for work on this package, and ``fast`` is a part of ``sim``."""
LEAST_BYTES = 10**9
"""Free disk space, in bytes, below which a run is likely to fail."""

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """Finding of a check.

    Attributes:
        topic: Subject, such as "packages".
        status: "ok", "note" (you need not do anything) or "problem".
        text: The finding in one line.
        cure: The command that fixes a problem, or that installs the packages in a note; empty if there is none.
    """

    topic: str
    status: Status
    text: str
    cure: str = ""


def examine(data_dir: str | None = None, runs_dir: str = "runs", start_ray: bool = False) -> Iterator[Finding]:
    """Yield the findings of all checks.

    Args:
        data_dir: Folder of the data sets. If None, the environment variable FEDSEL_DATA.
        runs_dir: Folder of all runs. The free space on its disk is checked.
        start_ray: Whether to start Ray for a moment. If False, only its version and the cluster's address are checked.
    """
    yield from check_packages()
    yield from check_flower()
    yield from check_torch()
    yield from check_ray(start_ray)
    yield from check_data(data_dir)
    yield check_disk(Path(runs_dir))


def report_lines(findings: list[Finding], width: int) -> Iterator[str]:
    """Yield the lines of ``fedsel doctor``: the findings, each with its cure, then the result.

    Args:
        findings: Findings of :func:`examine`.
        width: Columns of the terminal. Commands are not wrapped, so that you can copy them.
    """
    for finding in findings:
        yield from wrapped(f"{finding.topic}: {finding.text}", width, f"{finding.status:<9}", " " * 13)
        if finding.cure:
            yield f"{'':11}{finding.cure}"
    problems = sum(finding.status == "problem" for finding in findings)
    yield (
        f"{problems} problem{'s' if problems > 1 else ''} found. Run the command below each, then fedsel doctor again"
        if problems
        else "No problem found"
    )


def check_packages() -> Iterator[Finding]:
    """Check Python, this package, its requirements, and its extras."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    folder = Path(fedsel_flwr.__file__).parent
    try:
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet

        distribution = importlib.metadata.distribution(PROJECT)
    except ImportError as error:
        yield Finding("Python", "ok", python)
        text = f"{PROJECT} in {folder} is not installed ({error}), so no version is checked"
        yield Finding("packages", "note", text, f"pip install -e '{folder.parent}'")
        return
    needed = distribution.metadata["Requires-Python"]
    if SpecifierSet(needed).contains(platform.python_version(), prereleases=True):
        yield Finding("Python", "ok", python)
    else:
        cure = f"python3.13 -m venv .venv && . .venv/bin/activate && pip install {PROJECT}"
        yield Finding("Python", "problem", f"{python}; {PROJECT} needs {needed}", cure)
    requirements = [Requirement(line) for line in distribution.requires or ()]
    core = [Requirement(PROJECT), *(one for one in requirements if _applies(one, ""))]
    yield _check_group("packages", core, f"pip install '{PROJECT}'", wanted=True)
    for extra in distribution.metadata.get_all("Provides-Extra") or ():
        if extra not in EXTRAS_UNREPORTED:
            added = [one for one in requirements if _applies(one, extra) and one not in core]
            begun = extra == "sim" and all(map(version_of, SIM_BEGUN_BY))
            # pip installs what an installed package lacks, wherever that package came from.
            yield _check_group(f"extra {extra}", added, f"pip install '{PROJECT}[{extra}]'", wanted=begun)


def _check_group(topic: str, requirements: list[Requirement], cure: str, *, wanted: bool) -> Finding:
    """Return the finding for the core's requirements or for an extra; what is lacking is a problem if it is wanted."""
    if faults := sorted({fault for one in requirements for fault in _faults(one)}):
        return Finding(topic, "problem" if wanted else "note", f"lacks {', '.join(faults)}", cure)
    versions = sorted(f"{one.name} {version_of(one.name)}" for one in requirements)
    return Finding(topic, "ok", ", ".join(versions) or "needs nothing on this platform")


def _applies(requirement: Requirement, extra: str) -> bool:
    """Return whether a requirement belongs to an extra (to the core if ``extra`` is empty) on this platform."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _faults(requirement: Requirement) -> Iterator[str]:
    """Yield the missing packages of a requirement and its extras, and those whose version is wrong."""
    from packaging.requirements import Requirement

    version = version_of(requirement.name)
    if not version or not requirement.specifier.contains(version, prereleases=True):
        yield f"{requirement.name}{requirement.specifier}" + (f" ({version} is installed)" if version else "")
    for line in importlib.metadata.requires(requirement.name) or () if version and requirement.extras else ():
        inner = Requirement(line)
        if not _applies(inner, "") and any(_applies(inner, extra) for extra in requirement.extras):
            yield from _faults(inner)


def check_flower() -> Iterator[Finding]:
    """Check that Flower has the private and deprecated names that this package uses, and that it is no untested one."""
    if not (version := installed_version()):
        return
    cure = f"pip install 'flwr=={NEWEST_TESTED}.*'"
    faults = list(missing(version))
    for fault in faults:
        yield Finding("Flower", "problem", fault, cure)
    if text := newer(version):
        yield Finding("Flower", "note", text)
    if not faults:
        yield Finding("Flower", "ok", f"{version} has each private or deprecated name that this package uses")


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
        cure = "pip install --force-reinstall torch torchvision"
        yield Finding("torch", "problem", f"torch cannot be imported: {described(error)}", cure)
        return
    seen = f"sees {', '.join(gpus)}" if gpus else "sees no GPU; everything trains on the CPU"
    yield Finding("GPU", "ok", f"torch, built {f'for CUDA {built_for}' if built_for else 'without CUDA'}, {seen}")


def check_ray(start: bool) -> Iterator[Finding]:
    """Check the address of a Ray cluster, and optionally start Ray on this machine for a moment.

    Args:
        start: Whether to start Ray.
    """
    try:
        if (address := cluster_address()) is not None:
            RayResources().check()
            yield Finding("Ray", "ok", f"a server answers at {VARIABLE} = {address}")
    except FedSelError as error:
        yield Finding("Ray", "problem", str(error).rstrip("."), f"unset {VARIABLE}")
    if not (version := version_of("ray")):
        if start:
            cure = f"pip install '{PROJECT}[sim]'"
            yield Finding("Ray", "problem", "Ray is not installed, so it cannot be started", cure)
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
    from fedsel_flwr.simulations.on_flower.ray_session import RaySession
    from fedsel_flwr.simulations.shutdown import end_descendants

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
    for name in scenario_names():
        trace = tomllib.loads(packaged_text(name)).get("availability", {}).get("trace", "")
        if trace and not (folder / trace).is_file() and not Path(trace).is_file():
            text = f"the scenario {name} needs the availability trace {trace}, which is not in {folder}"
            yield Finding("data", "note", text)


def check_disk(runs_dir: Path) -> Finding:
    """Check the disk with the runs: its free space, and whether it can be written to.

    Args:
        runs_dir: Folder of all runs, which need not exist.
    """
    wanted = runs_dir.expanduser().absolute()
    folder = next(place for place in (wanted, *wanted.parents) if place.exists())
    if not os.access(folder, os.W_OK):
        return Finding("disk", "problem", f"{folder} cannot be written to", "fedsel doctor --runs-dir ANOTHER_FOLDER")
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free for run folders in {folder}"
    cure = f"du -sh {folder}/* | sort -h | tail"
    return Finding("disk", "ok", text) if free >= LEAST_BYTES else Finding("disk", "problem", text, cure)
