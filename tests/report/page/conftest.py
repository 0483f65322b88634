"""What the tests of pages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.page import deployment_tables


@pytest.fixture(autouse=True)
def refused_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal in place of advice, which takes seconds."""

    def refuse(folder: Path) -> Any:
        raise ParameterError(f"{folder} is too short")

    monkeypatch.setattr(deployment_tables, "advise", refuse)
