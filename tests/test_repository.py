"""The repository itself: the root links, what the tools and archives see, imports, and machine paths."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedsel_flwr

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fedsel_flwr"
LINKS = ("strategies", "clients", "simulations")
# Who may import whom, lowest layer first: each part imports the layers below its own. Everyone may import errors.
LAYERS = (
    {"errors"},
    {"arguments", "checks", "commands", "flower", "references"},
    {"aggregation", "selectors", "wireless"},
    {"rounds", "testing", "theory"},
    {"callbacks", "clients", "report", "strategies"},
    {"simulations"},
    {"cli"},
)
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

in_checkout = pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an unpacked sdist has no links and no history")


def output_of(*command: str) -> str:
    """Standard output of a command run at the repository root; if it fails, the test fails with its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{said}"
    return done.stdout


def package_files(suffix: str = "") -> set[str]:
    """Paths, relative to the root, of the package's own files, or of those with this suffix."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob(f"*{suffix}")
        if path.is_file() and "__pycache__" not in path.parts
    }


def under_a_link(names: Iterator[str] | list[str] | set[str]) -> list[str]:
    """Those of the names that go through one of the links at the root."""
    return [name for name in names if name.split("/")[0] in LINKS]


@in_checkout
@pytest.mark.parametrize("name", LINKS)
def test_link_is_relative_and_points_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"fedsel_flwr/{name}"
    assert (link / "__init__.py").samefile(PACKAGE / name / "__init__.py")


@in_checkout
def test_ruff_leaves_the_links_out() -> None:
    show = (sys.executable, "-m", "ruff", "check", "--show-files")
    listed = {Path(line).relative_to(ROOT).as_posix() for line in output_of(*show).splitlines()}
    assert package_files(".py") <= listed
    assert under_a_link(listed) == []
    named_outright = subprocess.run([*show, *LINKS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ".py" not in named_outright.stdout


def test_mypy_leaves_the_links_out() -> None:
    from mypy.config_parser import parse_config_file
    from mypy.find_sources import create_source_list
    from mypy.fscache import FileSystemCache
    from mypy.options import Options

    options = Options()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        parse_config_file(options, lambda: None, str(ROOT / "pyproject.toml"))
        configured = create_source_list(options.files, options, FileSystemCache())
        everything = create_source_list(["."], options, FileSystemCache())
    assert {os.path.relpath(source.path, ROOT) for source in configured} == package_files(".py")
    assert under_a_link({os.path.normpath(source.path) for source in everything}) == []


def test_pytest_leaves_the_links_out(tmp_path: Path) -> None:
    # our settings over a tree of the same shape: collecting the real one would import torch and Flower once more
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    example = '"""\n>>> 1 + 1\n2\n"""\n\n\ndef test_example() -> None:\n    pass\n'
    for name in LINKS:
        for file in (tmp_path / "fedsel_flwr" / name / "core.py", tmp_path / "tests" / name / "test_core.py"):
            file.parent.mkdir(parents=True)
            file.write_text(example)
        (tmp_path / name).symlink_to(f"fedsel_flwr/{name}")
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", ".")
    collected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout
    paths = {line.partition("::")[0] for line in collected.splitlines() if "::" in line}
    expected = {f"fedsel_flwr/{name}/core.py" for name in LINKS} | {f"tests/{name}/test_core.py" for name in LINKS}
    assert paths == expected, collected


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built with the backend that is installed."""
    folder = tmp_path_factory.mktemp("dist")
    output_of(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(folder), str(ROOT))
    return folder


def test_wheel_is_the_package_and_nothing_else(archives: Path) -> None:
    [wheel] = archives.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == package_files()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_has_package_and_tests_and_no_links(archives: Path) -> None:
    [sdist] = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert package_files() <= names
    assert {"tests/conftest.py", "tests/test_repository.py", "LICENSE", "README.md", "constraints.txt"} <= names
    assert {"examples/drop-in/README.md", "examples/drop-in/after/pyproject.toml"} <= names
    assert under_a_link(names) == []
    assert [member.name for member in members if not member.isfile()] == []
    assert [name for name in names if name.startswith(("runs/", ".venv/", ".git/"))] == []


def test_flower_app_bundle_is_the_package_and_nothing_else(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    # a copy without the tens of thousands of files of a virtual environment, through which Flower's walk takes seconds
    app = tmp_path / "fedsel-flwr"
    shutil.copytree(ROOT, app, symlinks=True, ignore=shutil.ignore_patterns(".*venv*", ".git", "runs"))
    run = app / "runs" / "digits" / "scenario.toml"
    run.parent.mkdir(parents=True)
    run.write_text("seed = 1")
    names = set(zipfile.ZipFile(BytesIO(build_fab_from_disk(app))).namelist())
    expected = package_files() - {"fedsel_flwr/py.typed"}
    assert names == expected | {"README.md", "LICENSE", "pyproject.toml", ".info/CONTENT"}


def test_flower_app_configuration_can_be_bundled() -> None:
    app = CONFIG["tool"]["flwr"]["app"]
    assert "federations" not in CONFIG["tool"]["flwr"]  # flwr run would rewrite pyproject.toml
    assert {"scenario", "selector"} <= app["config"].keys()
    for key, value in flatten_dict(app["config"]).items():  # raises for a list, which flwr build refuses
        assert isinstance(value, str | int | float | bool), f"{key}: flwr build refuses {value!r}"


@pytest.mark.parametrize(
    "module", ["fedsel_flwr", "fedsel_flwr.selectors", "fedsel_flwr.testing", "fedsel_flwr.theory"]
)
def test_import_is_light(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    loaded = set(json.loads(output_of(sys.executable, "-c", code)))
    assert "fedsel_flwr" in loaded
    assert loaded & {"flwr", "torch", "ray", "pandas", "scipy", "sklearn", "matplotlib", "pyarrow", "pydantic"} == set()


def part_of(module: str) -> str:
    """The part of the package that a dotted module name belongs to: fedsel_flwr.selectors.bsfl -> selectors."""
    return module.removeprefix("fedsel_flwr").removeprefix(".").partition(".")[0]


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and part for every import of our own package in a file, inside functions and relative ones too."""
    home = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*home[: -node.level], node.module or ""]).strip(".") if node.level else node.module or ""
            modules = [f"{base}.{alias.name}" for alias in node.names] if base == "fedsel_flwr" else [base]
        else:
            continue
        for module in modules:
            if module.split(".")[0] == "fedsel_flwr":
                yield node.lineno, part_of(module)


@pytest.mark.parametrize("path", sorted(package_files(".py")))
def test_imports_point_one_way(path: str) -> None:
    own = part_of(Path(path).with_suffix("").as_posix().replace("/", "."))
    level = {part: height for height, layer in enumerate(LAYERS) for part in layer}
    if own == "__init__":
        allowed = {"errors"}
    else:
        assert own in level, f"{path}: name the new part {own!r} in LAYERS"
        allowed = {own, "", "__version__"} | {part for part in level if level[part] < level[own]}
    wrong = [f"{path}:{line} imports {part}" for line, part in imported_parts(ROOT / path) if part not in allowed]
    assert wrong == []


def tracked_files() -> list[Path]:
    """Every file that git tracks or would add."""
    try:
        listed = output_of("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file() and not path.is_symlink()]


@in_checkout
def test_no_path_of_a_machine() -> None:
    needle = re.compile(rb"/(?:wo" rb"rk|ro" rb"ot|t" rb"mp)/")
    found = [(str(path.relative_to(ROOT)), needle.findall(path.read_bytes())) for path in tracked_files()]
    assert [(path, hits) for path, hits in found if hits] == []


@in_checkout
def test_no_runs_large_files_or_pictures_without_their_command_are_tracked() -> None:
    assert "runs/" in (ROOT / ".gitignore").read_text().splitlines()
    files = tracked_files()
    assert [path for path in files if path.relative_to(ROOT).parts[0] == "runs"] == []
    pictures = [path for path in files if path.suffix in {".png", ".jpg", ".jpeg", ".gif", ".pdf"}]
    assert [path for path in pictures if path.parents[-len(ROOT.parents) - 2] != ROOT / "docs"] == []
    index = (ROOT / "docs" / "README.md").read_text()  # has the command that makes each
    written = "".join(
        path.read_text() for path in files if path.suffix == ".md" and "\nWritten by `" in path.read_text()
    )
    assert [path for path in pictures if f"docs/{path.name}\n" not in index and f"]({path.name})" not in written] == []
    assert [path for path in files if path.stat().st_size > 500_000] == []


def test_version_is_the_same_everywhere() -> None:
    version = CONFIG["project"]["version"]
    assert fedsel_flwr.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_constraints_pin_every_direct_dependency() -> None:
    project = CONFIG["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonicalize_name(name): version for name, found, version in (line.partition("==") for line in lines) if found
    }
    for requirement in map(Requirement, wanted):
        # an extra that brings another extra
        if requirement.name == project["name"]:
            continue
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
