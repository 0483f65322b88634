"""Checks of the installed packages for ``fedsel doctor``: Python, requirements, extras, selectors of other packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

import fedsel_flwr
from fedsel_flwr.selectors.registry import ENTRY_POINTS, describe

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT = "fedsel-flwr"
EXTRAS_BEGUN_BY = {"sim": ("tomli-w", "torch")}
"""Extra -> packages that are together in few other environments. If all are installed, the whole extra is expected. Ray
does not count, because Flower's own extra installs it on servers."""
EXTRAS_UNREPORTED = ("dev", "fast")
"""Extras that users do not need: ``dev`` is for work on this package, and ``fast`` is a part of ``sim``."""

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


def check_python() -> Iterator[Finding]:
    """Check the version of Python and the operating system."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ImportError):
        from packaging.specifiers import SpecifierSet

        needed = importlib.metadata.metadata(PROJECT)["Requires-Python"]
        if not SpecifierSet(needed).contains(platform.python_version(), prereleases=True):
            cure = f"python3.13 -m venv .venv && . .venv/bin/activate && {install_command()}"
            yield Finding("Python", "problem", f"{text}; {PROJECT} needs {needed}", cure)
            return
    if platform.system() == "Linux":
        yield Finding("Python", "ok", text)
    else:
        yield Finding("Python", "note", f"{text}; this project is tested on Linux only")


def check_packages() -> Iterator[Finding]:
    """Check this package, its requirements, and its extras."""
    try:
        from packaging.requirements import Requirement

        distribution = importlib.metadata.distribution(PROJECT)
    except importlib.metadata.PackageNotFoundError:
        text = f"{PROJECT} runs from {Path(fedsel_flwr.__file__).parent} without an installation; no version is checked"
        yield Finding("packages", "note", text, install_command())
        return
    except ImportError:
        yield Finding("packages", "problem", "packaging, which Flower needs, is not installed", "pip install packaging")
        return
    requirements = [Requirement(line) for line in distribution.requires or ()]
    yield Finding("packages", "ok", f"{PROJECT} {distribution.version}")
    for one in requirements:
        if _applies(one, ""):
            faults = list(_faults(one))
            if faults:
                yield Finding("packages", "problem", _summary(faults), f"pip install '{_plain(one)}'")
            else:
                version = importlib.metadata.version(one.name)
                yield Finding("packages", "ok", f"{one.name} {version} (needs {_range(one) or 'any version'})")
    for extra in distribution.metadata.get_all("Provides-Extra") or ():
        if extra not in EXTRAS_UNREPORTED:
            yield _extra(extra, [one for one in requirements if _applies(one, extra) and not _applies(one, "")])


def _extra(extra: str, requirements: list[Requirement]) -> Finding:
    """Return the finding for an extra."""
    faults = [fault for one in requirements for fault in _faults(one)]
    if not faults:
        if not requirements:
            return Finding(f"extra {extra}", "note", "needs nothing on this platform")
        versions = (f"{one.name} {importlib.metadata.version(one.name)}" for one in requirements)
        return Finding(f"extra {extra}", "ok", ", ".join(sorted(versions)))
    begun_by = EXTRAS_BEGUN_BY.get(extra)
    if begun_by and all(version_of(name) for name in begun_by):
        return Finding(f"extra {extra}", "problem", f"incomplete; {_summary(faults)}", install_command(extra))
    return Finding(f"extra {extra}", "note", f"not installed; {_summary(faults)}", install_command(extra))


def install_command(extra: str = "") -> str:
    """Return the command that installs this package from its original source again, with an extra.

    Args:
        extra: The extra; empty for none.
    """
    wanted = f"[{extra}]" if extra else ""
    try:
        # pip writes this file for packages that do not come from an index.
        origin = json.loads(importlib.metadata.distribution(PROJECT).read_text("direct_url.json") or "{}")
    except importlib.metadata.PackageNotFoundError:
        return f"pip install -e '{Path(fedsel_flwr.__file__).parent.parent}{wanted}'"
    url = str(origin.get("url", ""))
    if "dir_info" in origin and (folder := Path(url2pathname(urlsplit(url).path))).is_dir():
        return f"pip install {'-e ' if origin['dir_info'].get('editable') else ''}'{folder}{wanted}'"
    if "vcs_info" in origin:
        return f"pip install '{PROJECT}{wanted} @ {origin['vcs_info']['vcs']}+{url}'"
    return f"pip install '{PROJECT}{wanted}'"


def version_of(name: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _applies(requirement: Requirement, extra: str) -> bool:
    """Return whether a requirement belongs to an extra (to the core if ``extra`` is empty) on this platform."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _plain(requirement: Requirement) -> str:
    """Return a requirement in the form for ``pip install``, without its marker."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{_range(requirement)}"


def _range(requirement: Requirement) -> str:
    """Return the versions that a requirement allows, with the lower bound first."""
    return ",".join(sorted(map(str, requirement.specifier), reverse=True))


def _summary(faults: Sequence[tuple[str, str]]) -> str:
    """Return faults in one line: the missing packages, then the packages with a wrong version."""
    missing = [name for name, wrong in faults if not wrong]
    return "; ".join(filter(None, (f"missing: {', '.join(missing)}" if missing else "", *(one[1] for one in faults))))


def _faults(requirement: Requirement) -> Iterator[tuple[str, str]]:
    """Yield the missing or wrong packages of a requirement and its extras: the name, and the fault of its version."""
    from packaging.requirements import Requirement

    version = version_of(requirement.name)
    if not version:
        yield requirement.name, ""
        return
    if not requirement.specifier.contains(version, prereleases=True):
        yield requirement.name, f"{requirement.name} {version} is installed, {_range(requirement)} is needed"
    for line in importlib.metadata.requires(requirement.name) or () if requirement.extras else ():
        inner = Requirement(line)
        if not _applies(inner, "") and any(_applies(inner, extra) for extra in requirement.extras):
            yield from _faults(inner)


def check_selectors() -> Iterator[Finding]:
    """Check that the selectors of installed packages can be loaded."""
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        package = point.dist.name if point.dist else point.module.partition(".")[0]
        facts = describe(point.name)
        if "problem" in facts:
            cure = f"pip install --upgrade --force-reinstall {package}"
            yield Finding("selectors", "problem", f"{point.name} of {package}: {facts['problem']}", cure)
        else:
            yield Finding("selectors", "ok", f"{point.name} of {package}")
