"""The API reference has an entry for each public name in each module from which users import it.

autoapi parses the modules of :data:`MODULES`, the files from which these import their names, and nothing else. If two
modules have the same object, the first shows it, and the entry in the second leads there.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import astroid
import autoapi._mapper
from autoapi._parser import Parser
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment

from fedsel_flwr.strategies.wrapping.adapter import Adapter

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = (
    "fedsel_flwr",
    "fedsel_flwr.strategies",
    "fedsel_flwr.strategies.message",
    "fedsel_flwr.rounds.settings",
    "fedsel_flwr.selectors",
    "fedsel_flwr.selectors.bsfl_solvers",
    "fedsel_flwr.selectors.columns",
    "fedsel_flwr.aggregation",
    "fedsel_flwr.simulations",
    "fedsel_flwr.simulations.worlds.own_data",
    "fedsel_flwr.report",
    "fedsel_flwr.callbacks",
    "fedsel_flwr.clients.telemetry",
    "fedsel_flwr.clients.training",
    "fedsel_flwr.clients.objectives",
    "fedsel_flwr.testing",
    "fedsel_flwr.theory",
    "fedsel_flwr.wireless",
)
"""The modules with a page, in the order of the navigation. The first that has a name shows it."""
ROOMS = re.compile(r"(?:[^\n.]*:\n\n)?^(=+  =+)\n(?:room .*?\n\1\n)?``[a-z_]+`` .*?\n\1\n?", re.MULTILINE | re.DOTALL)
SUBMODULES = re.compile(r"^Submodules\n-+\n\n.. toctree::\n.*?\n\n\n", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"^   (/api/\S*/(\w+))$", re.MULTILINE)
"""An entry of autoapi's navigation, which would show the full name."""
OF_STRATEGIES = ("start", "state_dict", "load_state_dict")
"""Methods that a strategy inherits and that users call. Its page shows them, and all properties."""
PATH = re.compile(r"(?<![\w.])Path\b")
ARRAYS = ("fedsel_flwr.checks.BoolArray", "fedsel_flwr.checks.FloatArray", "fedsel_flwr.checks.IntArray")
"""Our names of NumPy's type of arrays, which signatures show."""


def file_of(module: str) -> Path:
    """Return the file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def sources() -> set[Path]:
    """Return the files that have the public names."""
    files = {file_of(module) for module in MODULES}
    lists = [file for file in files if file.name == "__init__.py"]
    while lists:
        for node in ast.walk(ast.parse(lists.pop().read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fedsel_flwr"):
                file = file_of(str(node.module))
                files.add(file)
                files |= {file_of(str(one.module)) for one in passed_on(file, {alias.name for alias in node.names})}
                if any(alias.name == "*" for alias in node.names):
                    lists.append(file)
    return files


def passed_on(file: Path, names: set[str]) -> list[ast.ImportFrom]:
    """Return the imports from which a module itself has some of its names."""
    own = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    return [
        node for node in own
        if str(node.module).startswith("fedsel_flwr") and names & {alias.name for alias in node.names}
    ]  # fmt: skip


def leave_out(app: Sphinx, config: Config) -> None:
    """Let autoapi parse the files that have the public names only: parsing takes most of its time."""
    needed = sources()
    every = (ROOT / "fedsel_flwr").rglob("*.py")
    config.autoapi_ignore = [str(file) for file in every if file not in needed]


class PublicParser(Parser):  # type: ignore[misc]
    """Parses a module with the imports that only type checkers see: names that the module loads on first use."""

    def parse_module(self, node: astroid.nodes.Module) -> Any:
        """Parse a module, with the imports below ``if TYPE_CHECKING:`` as if they stood outside."""
        for child in list(node.body):
            if isinstance(child, astroid.nodes.If) and child.test.as_string() == "TYPE_CHECKING":
                at = node.body.index(child)
                node.body[at : at + 1] = [one for one in child.body if isinstance(one, astroid.nodes.ImportFrom)]
        return super().parse_module(node)


def forget(app: Sphinx) -> None:
    """Forget the names of the build before, whose environment Sphinx has loaded: autoapi shows all names again."""
    for name in ("shown_names", "shown_elsewhere"):
        app.env.__dict__.pop(name, None)


def made_object(name: str) -> Any:
    """Return the object that has a public name; None if there is none."""
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own, None) if module in MODULES else None


def parameters(signature: inspect.Signature) -> list[tuple[str | None, str | None, str | None, str | None]]:
    """Return a signature as autoapi has it: mark, name, annotation and default of each parameter."""
    shown: list[tuple[str | None, str | None, str | None, str | None]] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and ("*", None, None, None) not in shown:
            shown.append(("*", None, None, None))
        default = None if one.default is one.empty else repr(one.default)
        # autoapi has resolved the names of other annotations.
        shown.append((None, one.name, PATH.sub("pathlib.Path", str(one.annotation)), default))
    return shown


def show_arguments(app: Sphinx, found: Any, name: str) -> None:
    """Show the signature and the docstring that a function takes from a dataclass of its arguments."""
    made = made_object(name)
    signature = getattr(made, "__signature__", None)
    if signature is None:
        return
    shown = [
        mark or f"{own}: {annotation}{'' if default is None else f' = {default}'}"
        for mark, own, annotation, default in parameters(signature)
    ]
    lines = made.__doc__.splitlines()
    # autoapi has called Napoleon with the old docstring.
    app.emit("autodoc-process-docstring", "function", name, None, None, lines)
    found.args, found.docstring = ", ".join(shown), "\n".join(lines)


def skip(app: Sphinx, what: str, name: str, found: Any, skipped: bool, options: list[str]) -> bool | None:
    """Return whether autoapi leaves an object out; None leaves this to autoapi."""
    if what in ("module", "package"):
        # The table of rooms is for readers of the code.
        found.docstring = ROOMS.sub("\n\n", found.docstring)
        return name not in MODULES
    if what in ("class", "exception"):
        # Bases are shown without their modules.
        found.bases = [base if base.startswith("~") else f"~{base}" for base in found.bases]
        init = found.constructor
        if init and init.inherited and not init.obj["inherited_from"]["full_name"].startswith("fedsel_flwr"):
            # Markdown, in Pydantic's classes.
            init.docstring = ""
        if isinstance(made := made_object(name), type) and issubclass(made, Adapter):
            # Those that a strategy takes from its options.
            init.obj = init.obj | {"args": parameters(inspect.signature(made))}
    if what == "function":
        show_arguments(app, found, name)
    if what == "attribute" and found.annotation:
        # The scenario reference states the range of a number.
        found.annotation = re.sub(r"^Annotated\[(\w+), .*\]$", r"\1", found.annotation)
    module, _, own = name.rpartition(".")
    if module not in MODULES:
        holder = made_object(module)
        if found.inherited and isinstance(holder, type) and issubclass(holder, Adapter):
            return not ((what == "property" and own[0] != "_") or own in OF_STRATEGIES)
        # An object that has a page of its own gets one even if its module has none.
        return True if what in ("class", "exception") else None
    if skipped and name != "fedsel_flwr.__version__":
        return None
    origin = found.obj.get("original_path", name)
    shown = shown_names(app.env)
    if shown.setdefault(origin, name) == name:
        return False if skipped else None
    if MODULES.index(module) < MODULES.index(shown[origin].rpartition(".")[0]):
        raise ValueError(f"{shown[origin]} was shown before {name}")
    others: dict[str, dict[str, tuple[str, str]]] = app.env.__dict__.setdefault("shown_elsewhere", {})
    others.setdefault(module, {})[name] = (what, shown[origin])
    return True


def arrange(app: Sphinx, page: str, source: list[str]) -> None:
    """Give each module one place in the navigation, with a short name, and add its names that another module shows."""
    if page == "api":
        rows = "".join(f"{_short(module)} <api/{module.replace('.', '/')}/index>\n" for module in MODULES)
        source[0] += f"\n```{{toctree}}\n:maxdepth: 1\n\n{rows}```\n"
    elif page.startswith("api/"):
        source[0] = ENTRY.sub(r"   \2 <\1>", SUBMODULES.sub("", source[0]))
        module = page.removeprefix("api/").removesuffix("/index").replace("/", ".")
        others = app.env.__dict__.get("shown_elsewhere", {}).get(module, {})
        for name, (what, shown) in sorted(others.items()):
            role = {"function": "func", "data": "data", "exception": "exc"}.get(what, "class")
            source[0] += f"\n.. py:{what}:: {name.rpartition('.')[2]}\n\n   The same as :py:{role}:`{shown}`.\n"


def leave_to_the_first(app: Sphinx, env: BuildEnvironment) -> None:
    """Let a bare name lead to the module that shows the object, not to the one that has it too."""
    objects = env.domains.python_domain.objects
    for names in env.__dict__.get("shown_elsewhere", {}).values():
        for name in names:
            objects[name] = objects[name]._replace(aliased=True)


def break_title(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Let the title of a page break after a dot, and not inside a word."""
    if page.startswith("api/"):
        dots = re.compile(r"(?<=<h1>)[^<]*")
        context["body"] = dots.sub(lambda title: title[0].replace(".", ".<wbr>"), context["body"], count=1)


def _short(module: str) -> str:
    """The name in the navigation. A zero-width space lets a line break after a dot, and not inside a word."""
    return module.removeprefix("fedsel_flwr.").replace(".", ".\N{ZERO WIDTH SPACE}")


def shown_names(env: BuildEnvironment) -> dict[str, str]:
    """Return where each object is defined -> the name under which it is shown."""
    names: dict[str, str] = env.__dict__.setdefault("shown_names", {})
    return names


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element) -> nodes.Element | None:
    """Resolve a reference to a name that is shown elsewhere than where it is defined.

    A name of the package that is not public stays plain text. A name that the package does not define stays unresolved,
    so that Sphinx warns.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target in ARRAYS:
        node["reftarget"] = "numpy.typing.NDArray"
        return app.emit_firstresult("missing-reference", env, node, shown)
    domain, names = env.domains.python_domain, aliases(app)
    for one in (target, f"{node.get('py:module', '')}.{target}", f"{node.get('py:class', '')}.{target}"):
        head, _, member = one.rpartition(".")
        for name in (names.get(one), f"{names[head]}.{member}" if head in names else None):
            if name and (found := domain.objects.get(name)):
                return domain.resolve_xref(env, node["refdoc"], app.builder, found.objtype, name, node, shown)
    return shown if target.rpartition(".")[2] in defined() else None


def aliases(app: Sphinx) -> dict[str, str]:
    """Return each name of a shown object -> the name under which it is shown.

    An object has a name in its module, one in each module that imports it, and its bare name if no other object has it.
    """
    names: dict[str, str] = getattr(app, "public_aliases", {})
    if not names:
        every, bare = app.env.__dict__["autoapi_all_objects"], dict[str, set[str]]()
        for origin, name in shown_names(app.env).items():
            bare.setdefault(name.rpartition(".")[2], set()).add(name)
            while origin:
                names[origin] = name
                origin = every[origin].obj.get("original_path", "") if origin in every else ""
        names |= {short: full.pop() for short, full in bare.items() if len(full) == 1}
        app.__dict__["public_aliases"] = names
    return names


@cache
def defined() -> frozenset[str]:
    """Return the bare names of modules, of what the package defines, and of what ``flower.py`` imports from Flower."""
    names = set[str]()
    for file in (ROOT / "fedsel_flwr").rglob("*.py"):
        names.add(file.stem)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.alias) and file.name == "flower.py":
                names.add(node.name)
    return frozenset(names)


def prepare(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Prepare a docstring for Napoleon and docutils, which would misread three kinds of lines.

    Napoleon takes the first words of an attribute's text for a type, up to a colon. docutils takes a description such
    as "m." for the number of a list's item, and an equation's number at the begin of an item too.
    """
    lines[:] = [re.sub(r"^(\s+\w+: )([A-Za-z]\.)$", r"\1\\\2", line) for line in lines]
    lines[:] = [re.sub(r"^(\s*[*-] )(\(\d+\))", r"\1\\\2", line) for line in lines]
    if what in ("attribute", "data", "property"):
        # An empty comment, without a colon.
        lines[0:0] = ["..", ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    autoapi._mapper.Parser = PublicParser
    app.connect("config-inited", leave_out)
    app.connect("builder-inited", forget, priority=100)
    app.connect("source-read", arrange)
    app.connect("env-updated", leave_to_the_first)
    app.connect("html-page-context", break_title)
    app.connect("autoapi-skip-member", skip)
    app.connect("autodoc-process-docstring", prepare, priority=100)
    app.connect("missing-reference", resolve, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
