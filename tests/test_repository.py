"""The repository itself: the root links, what the tools and archives see, and machine paths."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedsel_flwr
from tests.processes import run_python

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fedsel_flwr"
LINKS = ("strategies", "clients", "simulations")
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

in_checkout = pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an unpacked sdist has no links and no history")


def package_files(suffix: str = "") -> set[str]:
    """Paths, relative to the root, of the package's own files, or of those with this suffix."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob(f"*{suffix}")
        if path.is_file() and "__pycache__" not in path.parts
    }


@in_checkout
@pytest.mark.parametrize("name", LINKS)
def test_link_is_relative_and_points_into_the_package(name: str) -> None:
    assert os.readlink(ROOT / name) == f"fedsel_flwr/{name}"
    assert (ROOT / name / "__init__.py").samefile(PACKAGE / name / "__init__.py")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built with the backend that is installed."""
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", folder, ROOT)
    return folder


def test_wheel_is_the_package_and_nothing_else(archives: Path) -> None:
    [wheel] = archives.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_has_package_and_tests_and_no_links(archives: Path) -> None:
    [sdist] = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert package_files() <= names
    assert {"tests/conftest.py", "tests/test_repository.py", "LICENSE", "README.md", "constraints.txt"} <= names
    assert {"examples/drop-in/README.md", "examples/drop-in/after/pyproject.toml"} <= names
    assert [name for name in names if name.split("/")[0] in LINKS] == []
    assert [member.name for member in members if not member.isfile()] == []
    built = ("docs/_build/", "docs/api/", "docs/gallery/")
    assert [name for name in names if name.startswith(("runs/", ".venv/", ".git/", *built))] == []


def test_flower_app_bundle_is_the_package_and_nothing_else(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    # a copy without the tens of thousands of files of a virtual environment, through which Flower's walk takes seconds
    app = tmp_path / "fedsel-flwr"
    shutil.copytree(ROOT, app, symlinks=True, ignore=shutil.ignore_patterns(".*venv*", ".git", "runs"))
    run = app / "runs" / "digits" / "scenario.toml"
    run.parent.mkdir(parents=True)
    run.write_text("seed = 1")
    names = set(zipfile.ZipFile(BytesIO(build_fab_from_disk(app))).namelist())
    # Flower bundles neither py.typed, nor BibTeX, nor the files of the report pages, which an app does not write.
    left_out = (".typed", ".bib", ".html", ".css", ".js")
    expected = {name for name in package_files() if Path(name).suffix not in left_out}
    assert names == expected | {"README.md", "LICENSE", "pyproject.toml", ".info/CONTENT"}


def tracked_files() -> list[Path]:
    """Every file that git tracks or would add."""
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("git is not installed")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file() and not path.is_symlink()]


@in_checkout
def test_no_path_of_a_machine() -> None:
    needle = re.compile(rb"/(?:wo" rb"rk|ro" rb"ot|t" rb"mp)/")
    found = [(str(path.relative_to(ROOT)), needle.findall(path.read_bytes())) for path in tracked_files()]
    assert [(path, hits) for path, hits in found if hits] == []


# ---- one version ---------------------------------------------------------------------------------------------------

VERSION = CONFIG["project"]["version"]


def version_said_in(folder: Path) -> str:
    """The version that a copy of the package in this folder has, without the installed package behind it."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import fedsel_flwr"
    program += "; print(fedsel_flwr.__file__, fedsel_flwr.__version__)"
    file, version = run_python("-I", "-S", "-c", program, cwd=folder).stdout.split()
    assert Path(file).is_relative_to(folder)
    return version


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with the two files of the package that its version needs."""
    (tmp_path / "fedsel_flwr").mkdir()
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / name, tmp_path / "fedsel_flwr")
    return tmp_path


def test_the_version_stands_in_pyproject_only(copied: Path) -> None:
    assert fedsel_flwr.__version__ == VERSION
    assert VERSION not in (PACKAGE / "__init__.py").read_text()
    (copied / "pyproject.toml").write_text('[project]\nname = "fedsel-flwr"\nversion = "7.8.9"\n')
    assert version_said_in(copied) == "7.8.9"


def test_the_version_of_an_installed_package_is_that_of_its_metadata(copied: Path) -> None:
    (copied / "pyproject.toml").write_text('[project]\nname = "another-project"\nversion = "7.8.9"\n')
    assert version_said_in(copied) == "unknown"
    (metadata := copied / "fedsel_flwr-4.5.6.dist-info" / "METADATA").parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: fedsel-flwr\nVersion: 4.5.6\n")
    assert version_said_in(copied) == "4.5.6"


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        fedsel_flwr.version  # noqa: B018


def test_constraints_pin_every_direct_dependency() -> None:
    project = CONFIG["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parts = [line.partition("==") for line in lines]
    pins = {canonicalize_name(name): version for name, found, version in parts if found}
    for requirement in map(Requirement, wanted):
        # an extra that brings another extra
        if requirement.name == project["name"]:
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
