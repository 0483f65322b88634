"""Mutation checks: small faults put into the code, and which of them a suite of tests notices.

    python tools/mutants.py draw --seed 27 --count 40 > mutants.json
    python tools/mutants.py cover coverage.json      runs the tests once, with a record of the lines that each reaches
    python tools/mutants.py run mutants.json coverage.json --jobs 2 > results.json
    python tools/mutants.py table old.json new.json

``cover`` needs pytest-cov and pytest-xdist. ``run`` gives each mutant the tests that reach its line, quickest first,
and stops at the first failure. A mutant is "killed" if a test fails, "survived" if all pass, "timeout" if the tests did
not end within the limit, and "unreached" if no test reaches its line. Tests in other processes leave no record, so a
line may have more tests than are run.

A mutant changes one expression or deletes one statement. Two thirds of them are in the areas :data:`TWICE`. A mutant
that was drawn on another revision is applied where its line stands now, even if its file has moved.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AREAS = {
    "rounds": ("fedsel_flwr/rounds",),
    "strategies": ("fedsel_flwr/strategies",),
    "simulations": ("fedsel_flwr/simulations",),
    "selectors": ("fedsel_flwr/selectors", "fedsel_flwr/theory", "fedsel_flwr/aggregation.py"),
    "clients": ("fedsel_flwr/clients",),
    "report": ("fedsel_flwr/report", "fedsel_flwr/callbacks", "fedsel_flwr/testing"),
}
"""Area -> its files and folders."""
TWICE = ("rounds", "strategies", "simulations")
"""Areas with twice as many mutants as the others."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}  # fmt: skip
"""Operator -> the one that takes its place."""


@dataclass(frozen=True)
class Mutant:
    """A fault in one file: the text from ``start`` to ``end`` is replaced.

    Attributes:
        area: Its key in :data:`AREAS`.
        path: The file.
        line: Its first line, from 1.
        start: First character of the replaced text in the file.
        before: The replaced text.
        after: The text that takes its place.
        source: The whole first line, by which the place is found again if the file has changed.
    """

    area: str
    path: str
    line: int
    start: int
    before: str
    after: str
    source: str

    def apply(self, root: Path) -> int:
        """Change the file below ``root``; return the line, which may have moved since the mutant was drawn.

        Raises:
            LookupError: The line is not there any more, or several times.
        """
        file, start = self.file(root), self.start
        text = file.read_text()
        if text[start : start + len(self.before)] != self.before or _line(text, start) != self.line:
            if text.count(self.source) != 1 or self.source.count(self.before.partition("\n")[0]) != 1:
                raise LookupError(f"{self.path}: {self.source!r} occurs {text.count(self.source)} times")
            start = text.index(self.before, text.index(self.source))
        file.write_text(text[:start] + self.after + text[start + len(self.before) :])
        return _line(text, start)

    def file(self, root: Path) -> Path:
        """Return the file below ``root``, or the only one that has the line if that file has lost it.

        Raises:
            LookupError: The line is not there any more, or in several files.
        """
        here = root / self.path
        if here.is_file() and self.source in here.read_text():
            return here
        found = [one for one in (root / "fedsel_flwr").rglob("*.py") if self.source in one.read_text()]
        if len(found) != 1:
            raise LookupError(f"{self.path}: {self.source!r} stands in {len(found)} files")
        return found[0]


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw mutants, uniformly over all that are possible in an area."""
    generator = random.Random(seed)
    drawn: list[Mutant] = []
    share = count / (len(AREAS) + len(TWICE))
    for area, places in AREAS.items():
        paths = [ROOT / place for place in places]
        files = sorted({file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))})
        possible = [mutant for file in files for mutant in mutants_of(area, file)]
        drawn += sorted(
            generator.sample(possible, round(share * (2 if area in TWICE else 1))), key=lambda one: (one.path, one.line)
        )
    return drawn


def mutants_of(area: str, file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    text = file.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _executed(ast.parse(text)):
        for changed in _variants(node):
            # Columns count bytes; the package's source is ASCII but for a few comments and messages.
            prefix = text[starts[node.lineno - 1] :].encode()[: node.col_offset].decode()
            segment = ast.get_source_segment(text, node) or ""
            start = starts[node.lineno - 1] + len(prefix)
            after = changed if isinstance(changed, str) else f"({ast.unparse(changed)})"
            source = text.splitlines(keepends=True)[node.lineno - 1]
            yield Mutant(area, str(file.relative_to(ROOT)), node.lineno, start, segment, after, source)


def _executed(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes within functions, without annotations, raised errors, f-strings and log calls."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from _below(statement)
        elif isinstance(node, ast.ClassDef):
            yield from _executed(node)


def _below(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    logs = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert) or logs:
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _below(child)


def _variants(node: ast.expr | ast.stmt) -> Iterator[ast.expr | str]:
    """Yield what may take a node's place."""
    match node:
        case ast.Compare(ops=[op]) | ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            changed = copy.deepcopy(node)
            if isinstance(changed, ast.Compare):
                changed.ops = [SWAPS[type(op)]()]  # type: ignore[list-item]
            else:
                changed.op = SWAPS[type(op)]()  # type: ignore[union-attr, assignment]
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case (
            ast.If(test=ast.Name() | ast.Call() | ast.Attribute() as test)
            | ast.IfExp(test=ast.Name() | ast.Call() as test)
        ):
            changed = copy.deepcopy(node)
            changed.test = ast.UnaryOp(ast.Not(), copy.deepcopy(test))
            yield (
                ast.unparse(changed).replace("\n", "\n" + " " * node.col_offset)
                if isinstance(node, ast.If)
                else changed
            )
        case ast.Expr(value=ast.Call() as call) if not ast.unparse(call.func).startswith("logger."):
            yield "pass"
        case ast.AugAssign():
            yield "pass"


def cover(out: Path, arguments: list[str]) -> None:
    """Run the tests with a record of the lines that each reaches; write test -> its seconds and lines."""
    with tempfile.TemporaryDirectory() as folder:
        data, report = Path(folder, "data"), Path(folder, "times.json")
        plugin = Path(folder, "recorded_times.py")
        plugin.write_text(_PLUGIN)
        settings = Path(folder, "coveragerc")
        places = [place for some in AREAS.values() for place in some]
        include = [f"*/{place}" if place.endswith(".py") else f"*/{place}/*" for place in places]
        settings.write_text("[run]\ninclude =\n    " + "\n    ".join(include) + "\n")
        environment = os.environ | {
            "COVERAGE_FILE": str(data),
            "COVERAGE_CORE": "ctrace",
            "TIMES": str(report),
            "PYTHONPATH": f"{folder}:{ROOT}",
        }
        command = [
            sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "recorded_times", "-p", "no:cacheprovider",
            "--cov", "--cov-context=test", "--cov-report=", f"--cov-config={settings}", *arguments,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        from coverage import CoverageData

        recorded = CoverageData(str(data))
        recorded.read()
        lines: dict[str, dict[str, list[str]]] = {}
        for file in recorded.measured_files():
            inside = str(Path(file).relative_to(ROOT))
            for line, contexts in recorded.contexts_by_lineno(file).items():
                tests = sorted({context.partition("|")[0] for context in contexts} - {""})
                if tests:
                    lines.setdefault(inside, {})[str(line)] = tests
        out.write_text(json.dumps({"seconds": json.loads(report.read_text()), "lines": lines}))


_PLUGIN = """
import json, os
times = {}

def pytest_runtest_logreport(report):
    if not report.passed:
        times[report.nodeid] = None
    elif times.get(report.nodeid, 0.0) is not None:
        times[report.nodeid] = times.get(report.nodeid, 0.0) + report.duration

def pytest_sessionfinish(session):
    # Of several processes, xdist's controller hears of every test.
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        with open(os.environ["TIMES"], "w") as file:
            json.dump({test: seconds for test, seconds in times.items() if seconds is not None}, file)
"""


def run(mutants: list[Mutant], coverage: dict, jobs: int, limit: float) -> list[dict]:
    """Give each mutant the tests that reach its line; return its outcome, with the test that failed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda pair: _outcome(*pair, coverage, Path(folder), limit), enumerate(mutants)))


def _outcome(number: int, mutant: Mutant, coverage: dict, folder: Path, limit: float) -> dict:
    copied = folder / str(number)
    ignored = shutil.ignore_patterns(".git", ".venv*", ".ci-venv*", "runs", "*_cache", "__pycache__")
    shutil.copytree(ROOT, copied, symlinks=True, ignore=ignored)
    found = asdict(mutant) | {"outcome": "gone", "test": "", "tests": 0, "seconds": 0.0}
    try:
        line = mutant.apply(copied)
        here = str(mutant.file(ROOT).relative_to(ROOT))
        reached, seconds = coverage["lines"].get(here, {}).get(str(line), []), coverage["seconds"]
        tests = sorted((test for test in reached if test in seconds), key=lambda test: seconds[test])
        found |= {"tests": len(tests)}
        found |= _try(copied, tests, limit) if tests else {"outcome": "unreached"}
    except LookupError as error:
        found["test"] = str(error)
    finally:
        shutil.rmtree(copied)
    print(number, found["outcome"], mutant.path, mutant.line, found["test"], file=sys.stderr, flush=True)
    return found


def _try(copied: Path, tests: list[str], limit: float) -> dict:
    listed = copied / "tests-to-run.txt"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"@{listed}"]
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=copied, env=os.environ | {"PYTHONPATH": str(copied)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # The whole group: tests start processes of their own.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"outcome": "timeout", "seconds": limit}
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    outcome = {0: "survived", 1: "killed", 2: "killed"}.get(process.returncode, f"status {process.returncode}")
    return {"outcome": outcome, "seconds": time.monotonic() - began, "test": failed[0][:200] if failed else ""}


def table(old: list[dict], new: list[dict]) -> str:
    """Return both suites' outcomes as a Markdown table, with the mutants that only the old suite kills named."""
    lines = ["| mutant | was | becomes | old suite | new suite |", "| --- | --- | --- | --- | --- |"]
    for a, b in zip(old, new, strict=True):
        was, becomes = (" ".join(a[key].split())[:60].replace("|", "\\|") for key in ("before", "after"))
        lines.append(f"| {a['path']}:{a['line']} | `{was}` | `{becomes}` | {a['outcome']} | {b['outcome']} |")
    lost = [a["path"] for a, b in zip(old, new, strict=True) if a["outcome"] == "killed" != b["outcome"]]
    return "\n".join([*lines, "", f"killed before and not now: {', '.join(lost) or 'none'}"])


def _line(text: str, start: int) -> int:
    return text.count("\n", 0, start) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, default=27)
    drawing.add_argument("--count", type=int, default=40)
    covering = commands.add_parser("cover")
    covering.add_argument("out", type=Path)
    covering.add_argument("arguments", nargs="*", help="of pytest")
    running = commands.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument("coverage", type=Path)
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--limit", type=float, default=45.0, help="seconds a mutant")
    comparing = commands.add_parser("table")
    comparing.add_argument("results", type=Path, nargs=2)
    given = parser.parse_args()
    if given.command == "draw":
        print(json.dumps([asdict(one) for one in draw(given.seed, given.count)], indent=1))
    elif given.command == "cover":
        cover(given.out.resolve(), given.arguments)
    elif given.command == "run":
        mutants = [Mutant(**one) for one in json.loads(given.mutants.read_text())]
        print(json.dumps(run(mutants, json.loads(given.coverage.read_text()), given.jobs, given.limit), indent=1))
    else:
        print(table(*(json.loads(path.read_text()) for path in given.results)))


if __name__ == "__main__":
    main()
