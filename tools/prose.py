"""Plain English, counted: ``make prose``.

    python tools/prose.py                   listed words, and sentences past 25 words, of each kind of text
    python tools/prose.py PATH...           each finding in these files or folders
    python tools/prose.py --against COMMIT  the counts before and after

Kinds: the README, the other pages, the first lines of docstrings, the rest of the docstrings, and messages. A message
is any other string of four words or more in the package: errors, logs, help. Code is one word in a sentence,
and so is an equation.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 25
"""Words that no sentence may pass."""
KINDS = ("README", "pages", "first lines", "docstrings", "messages")
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "examples")
LISTED = {
    r"anew": "again",
    r"beside": "compared with, next to, during",
    r"but for": "except",
    r"so many": "this many",
    r"of (?:one's|its|his|her|their|your|our) own": "own",
    r"go(?:es|ing)? on|went on": "continue",
    r"(?:is|are|was|were|be|been|being) told": "learns, receives",
    r"in peace": "excluded",
    r"made for": "depends on the sentence",
    r"the print": "the paper",
    r"newcomers?": "new client",
    r"nobody|everybody|somebody": "no client, all clients, a client",
    r"(?:of|to|by|with|from|for) whom": "name the subject",
    r"says so|said so|say so": "prints it, reports it, is documented",
    r"for good": "permanently",
    r"(?:not|cannot be|never) given": "missing, not set",
    r"where (?:there|it|they|this|that|no|none|nothing) (?:is|are|was|has|have|can|does|did)": "if, when",
}
"""What the pages do not say, and what they say instead."""
OPENINGS = r"(?:Who|Whom|What|Where|Wherever|Whoever)\b"
"""Words that open no docstring."""

_LISTED = re.compile(rf"\b(?:{'|'.join(LISTED)})\b", re.IGNORECASE)
_END = re.compile(
    r"(?<![ (]e\.g)(?<![ (]i\.e)(?<!et al)(?<!\bvs)(?<!\b[Ee]q)[.!?][\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z\d<])"
)


@dataclass(frozen=True)
class Block:
    """A paragraph, a list's item, a table's cell or a message: text that a sentence does not leave."""

    kind: str
    path: str
    line: int
    text: str

    def sentences(self) -> Iterator[str]:
        text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", self.text)  # a link is its words
        text = re.sub(r":\w+:``?[^`]*``?|``.+?``|`[^`]*`|\$(?! )[^$]+(?<! )\$(?!\w)", "<code>", text)
        for sentence in _END.split(" ".join(text.split())):
            if sentence.strip():
                yield sentence.strip()

    def findings(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong and the sentence."""
        for number, sentence in enumerate(self.sentences()):
            words = len(re.findall(r"<code>|[^\W_][\w'.,/%·+-]*", sentence))
            if words > LONGEST:
                yield f"{words} words", sentence
            if sentence.count(";") > 1:
                yield "two semicolons", sentence
            for match in _LISTED.finditer(sentence):
                yield match[0].lower(), sentence
            if self.kind == "first lines" and number == 0 and re.match(OPENINGS, sentence):
                yield "opening", sentence


def pages(root: Path) -> Iterator[Block]:
    """Yield the blocks of the Markdown pages; those under ``docs/results`` are written by a program."""
    files = [
        file for page in PAGES for file in ([root / page] if page.endswith(".md") else (root / page).rglob("*.md"))
    ]
    for file in sorted(file for file in files if file.exists() and file.parent.name != "results"):
        path = file.relative_to(root).as_posix()
        yield from _markdown(file.read_text(), path, "README" if path == "README.md" else "pages")


def _markdown(text: str, path: str, kind: str) -> Iterator[Block]:
    unread = re.compile(r"<!--.*?-->|^\$\$$.*?^\$\$$", re.DOTALL | re.MULTILINE)
    text = unread.sub(lambda match: "\n" * match[0].count("\n"), text)
    fenced, start, lines = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = re.sub(r"^[\s>]+", "", line)
        if line.startswith("```"):
            fenced = not fenced
        opens = re.match(r"#+ |[-*] |\d+\. |\||```|$|:?\s|\$\$", line)
        if (opens or fenced) and lines:
            yield Block(kind, path, start, " ".join(lines))
            lines = []
        if fenced or line.startswith("```"):
            continue
        if line.startswith("|"):
            yield from (Block(kind, path, number, cell) for cell in re.split(r"(?<!\\)\|", line) if cell.strip(" -:"))
        elif line.startswith("#"):
            yield Block(kind, path, number, line.lstrip("# "))
        elif line:
            start = start if lines else number
            lines.append(re.sub(r"^(?:[-*]|\d+\.) ", "", line))


def package(root: Path) -> Iterator[Block]:
    """Yield the blocks of the package's docstrings and messages."""
    for file in sorted((root / "fedsel_flwr").rglob("*.py")):
        path, tree = file.relative_to(root).as_posix(), ast.parse(file.read_text())
        read = set[ast.AST]()  # strings that are part of another text
        for node in ast.walk(tree):  # a parent comes before its children
            if isinstance(node, ast.Expr):
                read.add(node.value)
                if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                    yield from _docstring(node.value.value, path, node.lineno)
            elif isinstance(node, ast.JoinedStr):
                read.update(ast.walk(node))
                parts = [str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values]
                yield from _message("".join(parts), path, node.lineno)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in read:
                yield from _message(node.value, path, node.lineno)


def _message(text: str, path: str, line: int) -> Iterator[Block]:
    if len(text.split()) >= 4:
        yield from (Block("messages", path, line, part) for part in text.splitlines() if part.strip())


def _docstring(text: str, path: str, line: int) -> Iterator[Block]:
    kind, start, lines = "first lines", line, list[str]()
    doctest = False
    for number, raw in enumerate([*text.splitlines(), ""], line):
        one = raw.strip()
        doctest = bool(one) and (doctest or one.startswith(">>>"))
        cells = re.split(r"\s{2,}", one)
        entry = re.match(r"(?:[*\w.,` |\[\]]+: )(?=\S)", one) if kind == "docstrings" else None
        opens = (
            not one or doctest or len(cells) > 1 or entry or one.endswith("::") or re.match(r"[-*] |\d+\. |\w+:$", one)
        )
        if opens and lines:
            yield Block(kind, path, start, " ".join(lines))
            lines = []
        if number > line and not one:
            kind = "docstrings"
        if doctest or not one or re.fullmatch(r"\w+:|=+", one):
            continue
        if len(cells) > 1:
            yield from (Block(kind, path, number, cell) for cell in cells)
        else:
            start = start if lines else number
            lines.append(one[entry.end() :] if entry else re.sub(r"^[-*] ", "", one))


def blocks(root: Path = ROOT) -> list[Block]:
    """Return all text of a checkout."""
    return [*pages(root), *package(root)]


def counts(root: Path = ROOT) -> dict[str, tuple[int, int, int]]:
    """Return kind -> (sentences, those that are too long, listed words and openings)."""
    table = {kind: [0, 0, 0] for kind in KINDS}
    for block in blocks(root):
        row, found = table[block.kind], [what for what, _ in block.findings()]
        long = sum(what.endswith(" words") or what == "two semicolons" for what in found)
        row[0], row[1], row[2] = row[0] + len(list(block.sentences())), row[1] + long, row[2] + len(found) - long
    return {kind: (row[0], row[1], row[2]) for kind, row in table.items()}


def _print(title: str, table: dict[str, tuple[int, int, int]]) -> None:
    print(f"{title:12} {'sentences':>9} {'too long':>9} {'share':>6} {'listed':>7}")
    for kind, (sentences, long, listed) in table.items():
        print(f"{kind:12} {sentences:9,} {long:9,} {long / max(sentences, 1):6.1%} {listed:7,}")


def main() -> int:
    """Print the counts, or the findings in some files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--against", metavar="COMMIT")
    options = parser.parse_args()
    if options.paths:
        wanted = tuple(Path(path).resolve().relative_to(ROOT).as_posix() for path in options.paths)
        for block in blocks():
            if any(block.path == path or block.path.startswith(f"{path}/") for path in wanted):
                for what, sentence in block.findings():
                    print(f"{block.path}:{block.line}: {what}: {sentence}")
        return 0
    if options.against:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", options.against], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                tar.extractall(folder, filter="data")
            _print(options.against[:12], counts(Path(folder)))
    _print("now", counts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
