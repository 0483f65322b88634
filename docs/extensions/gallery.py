"""The selectors' gallery: a page for each selector, written when a build begins, and their first page.

Everything on a page comes from the selector's class, from a file that :mod:`gallery_facts` reads, or from the run that
:mod:`small_world` plays. The pages lie in ``docs/gallery``, which git ignores.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import choice_picture
import gallery_facts as facts
import selector_docstrings as docstrings
import small_world
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util import logging

from fedsel_flwr.errors import FedSelError
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ASKED
from fedsel_flwr.selectors.registry import citations, section, selector_class

HERE = Path(__file__).parent
FOLDER = "gallery"
PUBLIC = "fedsel_flwr.selectors"
"""The module from which users import selectors; the API reference shows them there."""
FAILURES = "When clients fail"
CITATION = "Citation"
DEVIATIONS = "Deviations from the paper"
OPTIONAL = (FAILURES, DEVIATIONS, CITATION)
"""Headings of sections that a page has only if the class says something about them."""
SECTIONS = (
    "Choices over time",
    "Options",
    "Equations",
    "What it reads, and what leaves the client",
    FAILURES,
    "Data protection",
    "Cost of a choice",
    "When not to use it",
    DEVIATIONS,
    "Results",
    CITATION,
)
"""Headings of a page, in order."""
TABLES = ("selectors", "papers/README", "security", "results/selectors", "results/joules")
"""Pages with tables of selectors."""
WORDS = "`Differential privacy <../security.html#differential-privacy>`__ explains the words."
"""Links to sections of the documentation, which are no labels of Sphinx."""
DEADLINES = "`two deadlines <../simulations.html#two-deadlines>`__"
NORM = re.compile(r"\|\|(.+?)\|\|")
TERM = re.compile(r"(?:\[[^\]]+\]|[A-Za-z\d][\w.]*)\^(?:\{[^}]+\}|\w)|(?<![\w-])[A-Za-z]_[A-Za-z\d](?!\w)")
"""Mathematics in the text of a docstring: ||g||, w^{t-1}, [0, 1]^2, u_2."""
logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the gallery before Sphinx looks for pages."""
    app.connect("config-inited", add_style)
    app.connect("builder-inited", write_pages)
    app.connect("doctree-read", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_style(app: Sphinx, config: Any) -> None:
    """Add the colours of the pictures."""
    config.html_static_path = [*config.html_static_path, str(HERE / "gallery.css")]
    app.add_css_file("gallery.css")


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Let the selectors' names in the tables of :data:`TABLES` lead to the pages of the gallery."""
    if app.env.docname not in TABLES:
        return
    names = {name for name in facts.ours() if (Path(app.srcdir) / FOLDER / f"{name}.rst").is_file()}
    for entry in doctree.findall(nodes.entry):
        for literal in list(entry.findall(nodes.literal)):
            if (name := literal.astext()) in names and not isinstance(literal.parent, nodes.reference | pending_xref):
                link = pending_xref(
                    "", refdomain="std", reftype="doc", reftarget=f"/{FOLDER}/{name}", refexplicit=True, refwarn=True
                )
                literal.replace_self(link)
                link += literal


def write_pages(app: Sphinx) -> None:
    """Play the small world with every selector, and write the pages that changed.

    A selector that cannot play, or whose docstring lacks a section, is a warning that names it. All others have pages.
    """
    folder, cache = Path(app.srcdir) / FOLDER, Path(app.outdir).parent / "small-world"
    names = facts.ours()
    pages: dict[str, str] = {}
    runs: dict[str, small_world.Played] = {}
    for name in names:
        try:
            runs[name] = small_world.played(name, cache)
            pages[name] = page(name, runs[name])
        except (docstrings.MissingFact, FedSelError) as error:
            logger.warning("gallery: no page for the selector %r: %s", name, error)
            runs.pop(name, None)
    for fault in facts.equations()[1]:
        logger.warning("gallery: %s", fault)
    pages["index"] = first_page(runs)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.rst"):
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        file = folder / f"{name}.rst"
        if not file.exists() or file.read_text("utf-8") != text:
            file.write_text(text, "utf-8")
    logger.info("gallery: %d selectors", len(runs))


def page(name: str, run: small_world.Played) -> str:
    """Return the page of a selector, in reStructuredText.

    Raises:
        MissingFact: A section would be empty.
    """
    cls = selector_class(name)
    bodies = (
        _choices(name, run),
        _options(name),
        _equations(name),
        _reading(name),
        docstring_text("".join(docstrings.failure_items(cls)).rstrip()),
        _privacy(name),
        _cost(name),
        _when_not(cls),
        _deviations(cls),
        _results(name),
        _citation(name),
    )
    parts = [
        f".. py:currentmodule:: {PUBLIC}",
        f".. _selector-{name}:",
        _heading(name, "="),
        docstring_text(docstrings.idea(cls)),
        _code(f"fedsel compare digits --selectors {name}{',random' if name != 'random' else ',round-robin'}", "sh"),
        _summary(name),
    ]
    for heading, body in zip(SECTIONS, bodies, strict=True):
        if not body.strip() and heading in OPTIONAL:
            continue
        if not body.strip():
            raise docstrings.MissingFact(f'the section "{heading}" is empty')
        parts += [_heading(heading, "-"), body]
    return "\n\n".join(parts) + "\n"


def first_page(runs: dict[str, small_world.Played]) -> str:
    """Return the first page of the gallery: thumbnails, a table, and the small world."""
    grid = "".join(
        f'<li><a href="{name}.html">{choice_picture.thumbnail(run)}<span>{escape(name)}</span></a></li>'
        for name, run in runs.items()
    )
    rows = []
    for name in runs:
        reads = facts.Reads.of(selector_class(name))
        known = facts.cost(name)
        cost = known.seconds.get(1_000_000) if known and known.measured == name else None
        rows.append([
            f":doc:`{name}`",
            ", ".join(f"``{column.name}``" for column in reads.columns) or "nothing",
            facts.secure_aggregation(reads)[0],
            facts.differential_privacy(reads)[0],
            refused(name, 1_000_000) if cost is None else f"{1000 * cost:,.0f}",
        ])  # fmt: skip
    world = small_world.scenario("random")
    text = [
        _heading("Selectors' gallery", "="),
        "Each selector played the same small world. Blue cells show the rounds in which a phone was chosen, and the "
        f"fastest phone is in the first row. Orange cells show chosen phones that {small_world.TOO_LATE} "
        f"({DEADLINES}).",
        _raw(f'<ul class="gallery-grid">{grid}</ul>'),
        _heading("Compare the selectors", "-"),
        '"Reads" lists the columns from which a selector learns. :doc:`/security` explains the words on secure '
        "aggregation and differential privacy. The cost is the server's time for one choice among a million "
        f"clients, with {facts.COHORT} clients a round. Some selectors refuse so many clients. An empty cell means "
        "that this was not measured.",
        _table(["selector", "reads", "secure aggregation", "differential privacy", "cost, ms"], rows, "16 40 16 16 12"),
        ".. _small-world:",
        _heading("The small world", "-"),
        f"The pictures come from one run for each selector: {world.num_clients} phones, {world.clients_per_round} a "
        f"round, {world.rounds} rounds and the seed {world.seed}. All selectors meet the same phones, data and delays. "
        "One seed of one small world shows how a selector chooses. It does not show which selector is better; for this "
        "question, see :doc:`/results/selectors`.",
        "The scenario has the following keys. All other keys have their defaults.",
        ".. literalinclude:: ../extensions/small_world.toml\n   :language: toml",
        ".. toctree::\n   :hidden:\n\n" + "\n".join(f"   {name}" for name in runs),
    ]
    return "\n\n".join(text) + "\n"


# ---- the sections of a page ----------------------------------------------------------------------------------------
def _summary(name: str) -> str:
    cls, reads = selector_class(name), facts.Reads.of(selector_class(name))
    rows = [
        ["class", f":py:class:`{PUBLIC}.{cls.__name__}`"],
        ["paper", docstring_text(section(cls, "References") or "none")],
        ["secure aggregation", facts.secure_aggregation(reads)[0]],
        ["differential privacy", facts.differential_privacy(reads)[0]],
    ]
    if known := facts.card(name):
        rows.insert(2, ["details", f":doc:`/papers/{known}`"])
    return _table([], rows, "25 75")


def _choices(name: str, run: small_world.Played) -> str:
    text = " ".join(small_world.sentences(run))
    return "\n\n".join([
        _raw(f'<div class="gallery-scroll">{choice_picture.picture(name, run, text)}</div>'),
        text,
        f"The run is one seed of the :ref:`small world <small-world>`, with ``{name}`` on its defaults"
        f"{_own_parameters(name)}. The client deadline is :confval:`wireless.max_latency_s`, "
        f"{small_world.scenario(name).wireless.max_latency_s:g} s ({DEADLINES}).",
    ])  # fmt: skip


def _options(name: str) -> str:
    """The keys of a selector: a table from the source of the scenario reference, and how to limit a free cohort."""
    keys = facts.options(name)
    if not keys:
        return "The selector has no options. The scenario sets the number of clients in a round."
    rows = [
        [f":confval:`{key.name.rpartition('.')[2]} <{key.name}>`", *map(_markdown, (key.default, key.meaning))]
        for key in keys
    ]
    parts = [
        f"In a scenario, these keys are in the table ``selectors.{name}``:",
        _table(["key", "default", "meaning"], rows, "30 15 55"),
    ]
    free = f"selectors.{name}.clients_per_round"
    if free in [key.name for key in keys]:
        parts.append(
            "The selector itself decides how many clients it selects. To cap the cohort, that is, to limit it to a "
            "maximum number of clients in a round, set this key:"
        )
        parts.append(_code(f"fedsel show digits --set selector={name} --set {free}=20", "sh"))
    return "\n\n".join(parts)


def _markdown(text: str) -> str:
    """A text of the scenario reference in reStructuredText."""
    return docstring_text(re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text))


def refused(name: str, clients: int) -> str:
    """The cell for a selector that was not measured with so many clients: its limit if it refuses them, else empty."""
    limit = inspect.signature(selector_class(name)).parameters.get("max_clients")
    return f"refused above {limit.default:,}" if limit is not None and limit.default < clients else ""


def _own_parameters(name: str) -> str:
    table = small_world.scenario(name).selectors.get(name)
    return " and ".join(["", *(f"``{key} = {value}``" for key, value in table.items())]) if table else ""


def _equations(name: str) -> str:
    """The equations that the card marks, then the symbols and the lines of code."""
    cls = selector_class(name)
    before, symbols, after = docstrings.explanation(cls)
    # The first paragraphs hold the idea, which opens the page.
    words = "\n\n".join(before).split()
    idea = docstrings.idea(cls).split()
    parts = [" ".join(words[len(idea) :])] if len(words) > len(idea) else []
    if equations := facts.equations()[0][name]:
        parts += [f".. math::\n\n{_indented(tex)}" for tex in equations]
        parts.append(
            "There are K clients, m of them train in a round, and t is the number of the round. A letter in the table "
            "below has the meaning given there."
        )
    if symbols:
        head, *rows = symbols
        cells = ([docstrings.symbols(symbol), *others] for symbol, *others in rows)
        parts.append(_table(head, [list(map(docstring_text, row)) for row in cells], "15 25 60"))
    parts += after
    parts = [part if part.startswith(".. ") else docstring_text(part) for part in parts]
    parts.append(
        "These lines of code compute them. Each line ends with its place in the paper:"
        if symbols else "The choice:"
    )  # fmt: skip
    return "\n\n".join([*parts, _code("\n".join(docstrings.tagged_lines(cls)), "python")])


def _reading(name: str) -> str:
    cls, reads = selector_class(name), facts.Reads.of(selector_class(name))
    parts = []
    if reads.columns:
        parts.append(_columns(reads))
    else:
        parts.append("The selector reads nothing. Nothing leaves the client except what the training sends.")
    # The number of examples comes with the update, in every Flower app.
    own = [column for column in reads.columns if column.source == "reply" and column.name != "num_examples"]
    if keys := [f"``{column.key}``" for column in own]:
        parts.append(
            f"The client's code returns {', '.join(keys)} among its metrics. If your app has other names, pass "
            ":py:class:`~fedsel_flwr.strategies.MetricKeys` as the strategy's option ``metric_keys``."
        )
    needed = ", ".join(f"``{column}``" for column in sorted(reads.requires))
    if needed:
        parts.append(f"A client that does not report {needed} counts as failed.")
    if ends := sorted((reads.needs | reads.asks) & ASKED | reads.requires):
        listed = " or ".join(f"``{column}``" for column in ends)
        parts.append(f"If no client ever reports {listed}, the run ends (``missing_columns``).")
    if reads.validated:
        parts.append("The server needs a validation set.")
    if cls.paper_options:
        options = " and ".join(f"``{key}={value!r}``" for key, value in cls.paper_options.items())
        parts.append(f"The paper sets the following options of the strategy: {options}.")
    if "sketch_size" in inspect.signature(cls).parameters:
        parts.append("``sketch_size`` shortens only what the server stores. The clients still send whole vectors.")
    for option, other in facts.option_reads(name).items():
        learned = dataclasses.replace(other, remembers=other.remembers & (other.needs | other.asks))
        parts += [f"With ``{option}``, the selector learns from these columns:", _columns(learned)]
    return "\n\n".join(parts)


def _columns(reads: facts.Reads) -> str:
    rows = [
        [f"``{column.name}``", docstring_text(column.meaning), reads.measured_by(column), reads.leaves(column)]
        for column in reads.columns
    ]
    return _table(["column", "meaning", "measured by", "leaves the client"], rows, "18 34 22 26")


def _privacy(name: str) -> str:
    reads = facts.Reads.of(selector_class(name))
    secure, private = facts.secure_aggregation(reads), facts.differential_privacy(reads)
    parts = [
        f"**Secure aggregation: {secure[0]}.** {secure[1]} Flower has secure aggregation in its legacy API only. "
        ":doc:`/security` lists every selector.",
        f"**Differential privacy: {private[0]}.** {private[1]} {WORDS}",
    ]
    for option, other in facts.option_reads(name).items():
        word, why = facts.secure_aggregation(other)
        if word != secure[0]:
            parts.append(f"**Secure aggregation with** ``{option}``\\ **: {word}.** {why}")
        word, why = facts.differential_privacy(other)
        if word != private[0]:
            parts.append(f"**Differential privacy with** ``{option}``\\ **: {word}.** {why}")
    return "\n\n".join(parts)


def _cost(name: str) -> str:
    known, newer, parts = facts.cost(name), facts.newer_costs(name), []
    if newer:
        head = ["work", "clients", "clients a round", "seconds"]
        parts.append(_table(head, [[docstring_text(cell) for cell in row] for row in newer]))
        parts.append(
            "These are processor seconds on the server, without training. The numbers come from "
            "``benchmarks/fedcor_divfl.csv``; :doc:`/benchmarks/selection` has the machine."
        )
    elif known is None:
        parts.append(
            "The cost was not measured. The following command measures it:\n\n"
            + _code(f"python benchmarks/selection.py --selectors {name} --folder runs/cost", "sh")
        )
    else:
        if known.measured != name:
            parts.append(f"There is no measurement of ``{name}``. It shares code with :doc:`{known.measured}`:")
        head = ["clients", *(f"{clients:,}" for clients in known.seconds)]
        parts.append(_table(head, [["ms", *(f"{1000 * seconds:,.1f}" for seconds in known.seconds.values())]]))
        parts.append(
            f"This is the server's time for a choice of {facts.COHORT} clients and for its report, without training. "
            f"The server stores {known.state_bytes:,.0f} bytes for each client. The numbers come from "
            "``benchmarks/selection.csv``; :doc:`/benchmarks/selection` has the machine and other cohorts."
        )
    limit = inspect.signature(selector_class(name)).parameters.get("max_clients")
    if limit is not None:
        parts.append(
            f"By default, the selector refuses more than {limit.default:,} clients. To change this limit, set "
            f":confval:`selectors.{name}.max_clients`, the maximum number of clients."
        )
    return "\n\n".join(parts)


def _deviations(cls: type[Selector]) -> str:
    """The deviations, without what the section on failures shows; empty if there is no paper."""
    text = section(cls, "Deviations")
    for item in docstrings.failure_items(cls):
        text = text.replace(item, "")
    if text.rstrip(".") == "none":
        return "None." if cls.citations else ""
    return _sentence_case(docstring_text(text))


def _when_not(cls: type[Selector]) -> str:
    text = _sentence_case(docstring_text(docstrings.required_section(cls, "When not to use")))
    return f"Do not use the selector in one of these cases:\n\n{text}" if text.startswith("* ") else text


def _results(name: str) -> str:
    world, row = facts.results(name)
    if not row:
        return ":doc:`/results/selectors` has no row of this selector."
    return "\n\n".join([
        f"The row in :doc:`/results/selectors`, world {world}. Ratios compare with ``random``:",
        _table([], [[key, docstring_text(value)] for key, value in row[1:] if value != "-"], "40 60"),
    ])  # fmt: skip


def _citation(name: str) -> str:
    if not selector_class(name).citations:
        return ""
    return "\n\n".join([_code(f"fedsel cite {name}", "sh"), _code("\n\n".join(citations(name)), "bibtex")])


# ---- reStructuredText ----------------------------------------------------------------------------------------------
def docstring_text(text: str) -> str:
    """Return a docstring's text for a page: links lead to selectors' pages, mathematics is set, bars are plain bars."""
    pages = {selector_class(name).__name__: name for name in facts.ours()}

    def linked(match: re.Match[str]) -> str:
        name = pages.get(match[1].rpartition(".")[2].lstrip("~"))
        return f":doc:`{name}`" if name else match[0]

    text = re.sub(r":class:`([^`]+)`", linked, text)
    parts = re.split(r"(``.+?``|`[^`]+`)", text, flags=re.DOTALL)
    # A bar in the text would begin a substitution.
    return "".join(part if part.startswith("`") else re.sub(r"(?<!\\)\|", r"\\|", _mathematics(part)) for part in parts)


def _mathematics(text: str) -> str:
    text = NORM.sub(lambda match: rf":math:`\lVert {match[1]} \rVert`", text)
    parts = re.split(r"(`[^`]+`)", text)
    text = "".join(part if part.startswith("`") else TERM.sub(r":math:`\g<0>`", part) for part in parts)
    # r_k(t): a role ends only before a blank or punctuation. The escaped blank is not shown.
    return re.sub(r"(:math:`[^`]+`)(?=[\w(])", r"\1\\ ", text)


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _heading(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}"


def _indented(text: str, by: int = 3) -> str:
    return "\n".join(f"{' ' * by}{line}" if line else "" for line in text.splitlines())


def _raw(text: str) -> str:
    return f".. raw:: html\n\n{_indented(text)}"


def _code(text: str, language: str) -> str:
    return f".. code-block:: {language}\n\n{_indented(text)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], widths: str = "") -> str:
    options = [f"   :widths: {widths}"] if widths else []
    options += ["   :header-rows: 1"] if head else ["   :stub-columns: 1"]
    lines = []
    for row in [head, *rows] if head else rows:
        for number, cell in enumerate(row):
            # "Y. J. Cho" would begin a list.
            text = re.sub(r"^(\w+[.)] )", r"\\\1", _flat(cell))
            lines.append(f"   {'*' if number == 0 else ' '} - {text}")
    return "\n".join([".. list-table::", *options, "", *lines])
