"""The apps in examples/ install, and only the job that publishes gets a token."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import ROOT
from tests.processes import run_python

APPS = sorted(path.parent for path in (ROOT / "examples").rglob("pyproject.toml"))
WORKFLOW = ROOT / ".github" / "workflows" / "publish.yml"


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.relative_to(ROOT / "examples").as_posix())
def test_an_app_installs_its_dependencies_and_no_module_of_a_common_name(app: Path, tmp_path: Path) -> None:
    run_python("-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, app)
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    own = app.name.replace("-", "_")  # a module named server_app would be in every other app's way
    assert [name for name in archive.namelist() if not name.startswith(f"{own}/") and ".dist-info/" not in name] == []
    (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    said = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    wanted = tomllib.loads((app / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert len(said) == len(wanted)


def test_only_the_job_that_publishes_gets_a_token() -> None:
    said: dict[Any, Any] = yaml.safe_load(text := WORKFLOW.read_text("utf-8"))
    assert said[True] == {"release": {"types": ["published"]}}
    assert said["permissions"] == {"contents": "read"}
    jobs = said["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert (jobs["build"]["needs"], jobs["checks"]["uses"]) == ("checks", "./.github/workflows/ci.yml")
    publish = jobs["publish"]
    told = (publish["permissions"], publish["environment"], publish["needs"])
    assert told == ({"id-token": "write"}, "pypi", "build")
    uses = [step["uses"].partition("@") for step in publish["steps"]]
    assert [name for name, _, _ in uses] == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    # A tag or a branch can be moved to other code, which would get the token.
    assert re.fullmatch(r"[0-9a-f]{40}", uses[1][2])
    assert "secrets." not in text
