"""The cards in docs/papers: every file, name and tag that they point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT

CARDS = sorted(path for path in (ROOT / "docs" / "papers").glob("*.md") if path.name != "README.md")
CODE = re.compile(r"`([^`]+)`")


def _rows(card: Path) -> list[tuple[list[Path], list[str]]]:
    """Files and quoted pieces of each row of the table "Equation → code"."""
    table = card.read_text(encoding="utf-8").split("## Equation → code")[1].split("\n## ")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and CODE.search(cells[1]):
            paths = [
                ROOT / (name if name.startswith("tests/") else f"fedsel_flwr/{name}") for name in CODE.findall(cells[1])
            ]
            found.append((paths, CODE.findall(cells[2])))
    return found


def _lacks(text: str, piece: str) -> list[str]:
    """What of a quoted piece, a tag or names, does not stand in the text."""
    if piece.startswith("#"):
        return [] if re.search(re.escape(piece) + r"(?!\d)", text) else [piece]
    return [name for name in re.findall(r"\b(?:[A-Z]\w+\.)?(_?[a-zA-Z]\w{3,})\b", piece) if name not in text]


def _text(path: Path) -> str:
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_every_row_points_at_what_is_there(card: Path) -> None:
    rows = _rows(card)
    assert len(rows) >= 8
    lacking = {
        (path.name, piece): lacks
        for paths, pieces in rows
        for path in paths[:1]
        for piece in pieces
        if (lacks := _lacks("\n".join(map(_text, paths)), piece))
    }
    assert not lacking


def test_a_tag_or_a_name_that_is_not_there_is_found() -> None:
    code = "def _select(self):  # (18)\n    return self._largest(bound)  # (10)"
    assert _lacks(code, "# (18)") == _lacks(code, "CSUCB._select") == []
    assert _lacks(code, "# (1)") == ["# (1)"]
    assert _lacks(code, "CSUCB._observe") == ["_observe"]
