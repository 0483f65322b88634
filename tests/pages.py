"""The fenced blocks of README.md and of the pages in docs/, with what the page says about running them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*\Z")
FILE = re.compile(r"`([\w./-]+\.(?:py|toml))`[^`\n]*:\s*\Z")
COMMANDS = ("fedsel", "flwr", "make", "pip", "python", "python3", "ray", "export", "git", "cp", "source", "mkdir")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Path of the page in the repository.
        line: Of its first fence.
        language: What stands behind the fence; empty where nothing does.
        text: What is printed.
        file: The file that the line above names, ``like_this.py``; empty if it names none.
        not_run: Why it does not run, as the comment above says; empty if it runs.
    """

    page: str
    line: int
    language: str
    text: str
    file: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.splitlines()[0]

    def commands(self) -> list[list[str]]:
        """The command lines of a shell block, comments left out, each as its words."""
        joined = self.text.replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        above = text[: match.start()]
        file, not_run = FILE.search(above), NOT_RUN.search(above)
        found.append(
            Block(
                page=page.relative_to(ROOT).as_posix(), line=above.count("\n") + 1, language=match[1].strip(),
                text=match[2], file=file[1] if file else "", not_run=not_run[1] if not_run else "",
            )
        )  # fmt: skip
    return found
