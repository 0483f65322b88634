"""The apps in examples/ install, and only the job that publishes gets a token; ``make package`` tries the archives."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import ROOT, blocks

APPS = sorted(path.parent for path in (ROOT / "examples").rglob("pyproject.toml"))
WORKFLOWS = ROOT / ".github" / "workflows"


def workflow(name: str) -> dict[str, Any]:
    """A workflow's text as YAML reads it; "on" is true in YAML 1.1."""
    return {str(key): value for key, value in yaml.safe_load((WORKFLOWS / name).read_text("utf-8")).items()}


# ---- the apps in examples/ -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.relative_to(ROOT / "examples").as_posix())
def test_an_app_installs_its_dependencies_and_no_module_of_a_common_name(app: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(app))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    own = app.name.replace("-", "_")  # a module named server_app would be in every other app's way
    assert [name for name in archive.namelist() if not name.startswith(f"{own}/") and ".dist-info/" not in name] == []
    (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    said = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    wanted = tomllib.loads((app / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert len(said) == len(wanted)


# ---- publishing ----------------------------------------------------------------------------------------------------


def test_only_the_job_that_publishes_gets_a_token() -> None:
    said = workflow("publish.yml")
    assert said["True"] == {"release": {"types": ["published"]}}
    assert said["permissions"] == {"contents": "read"}
    jobs = said["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    publish = jobs["publish"]
    assert (publish["permissions"], publish["environment"], publish["needs"]) == (
        {"id-token": "write"},
        "pypi",
        "build",
    )
    uses = [step["uses"].partition("@") for step in publish["steps"]]
    assert [name for name, _, _ in uses] == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    # A tag or a branch can be moved to other code, which would get the token.
    assert re.fullmatch(r"[0-9a-f]{40}", uses[1][2])
    assert "secrets." not in (WORKFLOWS / "publish.yml").read_text("utf-8")


def test_what_is_published_has_passed_ci_and_the_checks_of_the_archives() -> None:
    jobs = workflow("publish.yml")["jobs"]
    assert jobs["checks"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in workflow("ci.yml")["True"]
    assert jobs["build"]["needs"] == "checks"
    commands = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    for one in (
        "python -m build",
        "twine check --strict",
        "check-wheel-contents",
        "fedsel_flwr-${TAG#v}-py3-none-any.whl",
    ):
        assert one in commands


def test_one_variable_fills_in_the_address_of_the_repository(tmp_path: Path) -> None:
    (command,) = [one.text for one in blocks(ROOT / "docs" / "releasing.md") if "REPOSITORY=" in one.text]
    for name in ("pyproject.toml", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"))
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=60)
    address = "https://github.com/OWNER/fedsel-flwr"
    before = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    after = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))
    assert after["project"].pop("urls") == {
        "Homepage": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    assert after == before
    before, after = (yaml.safe_load((folder / "CITATION.cff").read_text("utf-8")) for folder in (ROOT, tmp_path))
    assert (after.pop("repository-code"), after.pop("url")) == (address, address)
    assert after == before


# ---- versions and systems ------------------------------------------------------------------------------------------


def test_flower_is_tried_each_week_and_other_systems_on_each_push() -> None:
    weekly = workflow("flower.yml")
    assert len(weekly["True"]["schedule"][0]["cron"].split()) == 5
    assert weekly["jobs"]["matrix"]["steps"][-1]["run"] == "make flower-matrix"
    jobs = workflow("systems.yml")["jobs"]
    systems = ["ubuntu-latest", "macos-latest", "windows-latest"]
    for name, expected in (("vectorized", systems), ("ray", systems[:2])):
        assert jobs[name]["strategy"]["matrix"] == {"system": expected, "python": ["3.11", "3.13"]}
    tests = [word for word in jobs["vectorized"]["steps"][-1]["run"].split() if word.startswith("tests/")]
    assert len(tests) == 6
    assert all((ROOT / name).exists() for name in tests)
