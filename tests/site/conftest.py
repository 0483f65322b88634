"""The built site, which tests of its pages read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ROOT / "docs" / "extensions"
if str(EXTENSIONS) not in sys.path:
    sys.path.append(str(EXTENSIONS))


@pytest.fixture(scope="module")
def site() -> Path:
    folder = Path(os.environ.get("FEDSEL_SITE", ROOT / "docs" / "_build" / "html"))
    if not (folder / "index.html").is_file():
        pytest.fail(f"there is no site in {folder}: build it with make docs")
    return folder
