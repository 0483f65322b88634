"""What travels to the nodes of a Ray cluster: code, the files that scenarios name, and data sets.

Ray sends a folder once to each node. It holds this package, the user's modules that are loaded here, and the files that
scenarios name. The nodes need only the installed packages, such as torch, in the same versions.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fedsel_flwr
from fedsel_flwr.errors import RunError
from fedsel_flwr.references import WORKING_DIR, is_reference
from fedsel_flwr.simulations.comparisons.parallel_runs import THREADS
from fedsel_flwr.simulations.run_identity import versions
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds import image_files
from fedsel_flwr.simulations.worlds.ingredients import WRITERS, OwnParts, find_writers, own_data_of
from fedsel_flwr.simulations.worlds.own_data import OwnData

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
"""Files of a module's folder that do not travel."""


@contextlib.contextmanager
def runtime_environment(scenarios: Sequence[Scenario], threads: int) -> Iterator[dict[str, Any]]:
    """Yield Ray's runtime environment. Its folder is in the search path for modules on the nodes.

    Args:
        scenarios: Scenarios of the runs.
        threads: Number of threads of each run.

    Raises:
        ParameterError: A file of a scenario cannot be found.
        RunError: The folder cannot be written.
    """
    with TemporaryDirectory(prefix="fedsel-code-") as place:
        try:
            _write_code(Path(place), scenarios)
        except (OSError, shutil.Error) as error:
            raise RunError(
                f"the code of the runs cannot be copied to {place!r}: {error!s:.200}. Free disk space, or set "
                "TMPDIR to another folder"
            ) from error
        variables = {name: str(threads) for name in THREADS} | {WORKING_DIR: str(Path.cwd())}
        yield {"working_dir": place, "env_vars": variables}


def _write_code(place: Path, scenarios: Sequence[Scenario]) -> None:
    """Write everything that travels as files: modules, the version of this package, and the files of scenarios."""
    shutil.copytree(Path(fedsel_flwr.__file__).parent, place / "fedsel_flwr", ignore=LEFT_OUT)
    # The record of a run states the version of the code that ran, not of a package that the node may have installed.
    version = importlib.metadata.version("fedsel-flwr")
    metadata = place / f"fedsel_flwr-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: fedsel-flwr\nVersion: {version}\n", encoding="utf-8")
    for name, source in own_modules().items():
        if source.is_dir():
            shutil.copytree(source, place / name, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
        else:
            suffix = source.suffix if source.suffix == ".py" else "".join(source.suffixes)
            shutil.copyfile(source, place / f"{name}{suffix}")
    (place / image_files.SENT_FILES).mkdir()
    for scenario in scenarios:
        trace = scenario.availability.trace if scenario.availability.kind == "trace" else ""
        for key, path in (("system.devices", scenario.system.devices), ("availability.trace", trace)):
            target = place / image_files.SENT_FILES / image_files.sent_file(path).name
            if path and not target.exists():
                shutil.copyfile(image_files.find_file(path, key=key, data_dir=scenario.data.data_dir or None), target)


def own_modules() -> dict[str, Path]:
    """Return the user's modules that are loaded: name -> folder or file; without installed packages and submodules."""
    installed = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    folders = tuple(Path(folder).resolve() for folder in installed if folder)
    found = {}
    for name, module in list(sys.modules.items()):
        # Some modules of libraries raise errors on access to attributes.
        attributes = getattr(module, "__dict__", {})
        place = next(iter(attributes.get("__path__") or ()), None) or attributes.get("__file__")
        if name in ("__main__", "fedsel_flwr") or "." in name or not isinstance(place, str):
            continue
        source = Path(place).resolve()
        if source.exists() and not any(source.is_relative_to(folder) for folder in folders):
            found[name] = source
    return found


def read_inputs(scenarios: Sequence[Scenario], own: OwnParts) -> dict[str, Any]:
    """Read the data sets of scenarios, each once, for :data:`~fedsel_flwr.simulations.worlds.image_files.SENT_INPUTS`.

    Args:
        scenarios: Scenarios of the runs.
        own: The user's parts. Data from Python code replace the data sets of the scenarios.

    Returns:
        Name of an input -> its value. :func:`restored` turns a value from a node's object store back.

    Raises:
        ParameterError: The data cannot be read.
    """
    found: dict[str, Any] = {}
    for scenario in scenarios:
        name = scenario.data.dataset
        if own.data is None and name in image_files.IMAGE_SETS and name not in found:
            halves = image_files.read_image_set(name, image_files.find_data_folder(scenario.data.data_dir or None))
            found[name] = [(*image_files.without_gaps(pixels), labels) for pixels, labels in halves]
        if own.data is None and is_reference(name) and name not in found:
            # A function of the seed runs on the nodes, and travels as code.
            given = own_data_of(scenario, own)
            if isinstance(given, OwnData):
                found[name] = given
        if scenario.partition.kind == "writers" and WRITERS not in found:
            found[WRITERS] = find_writers(scenario)
    return found


def restored(name: str, value: Any) -> Any:
    """Return an input as the function returns it that reads it from files."""
    if name not in image_files.IMAGE_SETS:
        return value
    return tuple((pixels.transpose(axes), labels) for pixels, axes, labels in value)


def check_versions(expected: dict[str, str]) -> None:
    """Refuse to run on a node with other versions of the packages on which a run depends.

    Args:
        expected: The versions on the machine that started the runs.

    Raises:
        RunError: A version differs. The error names it.
    """
    here = versions()
    if different := [name for name, version in expected.items() if here.get(name) != version]:
        listed = ", ".join(f"{name} {here.get(name)} instead of {expected[name]}" for name in different)
        raise RunError(
            f"the node {platform.node()} has {listed}, so its runs would differ by rounding. Install the same versions "
            "on every machine"
        )
