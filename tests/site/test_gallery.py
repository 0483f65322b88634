"""The selectors' gallery: every selector has a page, its facts are the code's, and its picture agrees with its text."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common import FitRes, ndarrays_to_parameters
from scipy.stats import spearmanr

from fedsel_flwr import selectors
from fedsel_flwr.errors import RunError
from fedsel_flwr.selectors import create, names, registry
from fedsel_flwr.selectors.columns import COLUMNS
from fedsel_flwr.selectors.registry import selector_class
from fedsel_flwr.strategies import Filter
from tests import prose
from tests.processes import ROOT
from tests.strategies import numpy_world as world
from tests.strategies.either_api import Server, base_of, private, selection
from tests.strategies.flower_world import legacy_base, proxies
from tests.strategies.helpers import OK

pytest.importorskip("sphinx", reason="the site needs the extra docs")

import choice_picture
import gallery
import gallery_facts as facts
import selector_docstrings as docstrings
import small_world
from mathml import mathml

from tests.site.scenario_reference import tables

OURS = facts.ours()
TABLES = tables()
Runs = dict[str, small_world.Played]


@pytest.fixture(scope="module")
def pages(runs: Runs) -> dict[str, str]:
    return {name: gallery.page(name, run) for name, run in runs.items()}


def sections(page: str) -> dict[str, str]:
    """Heading -> text of a page in reStructuredText."""
    parts = re.split(r"^([^\n]+)\n-{3,}$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def plain(text: str) -> str:
    """Words without markup, one blank between two of them."""
    text = re.sub(r":[\w:]+:`~?([^`<]+)(?:<[^>]*>)?`", r"\1", text)
    return " ".join(re.sub(r"[`*\\]|^ *(?:\*|-) ", "", text, flags=re.MULTILINE).split())


# ---- pages ---------------------------------------------------------------------------------------------------------
def test_the_gallery_has_the_selectors_of_the_catalogue(pages: dict[str, str]) -> None:
    assert set(names()) >= set(OURS)
    assert len(pages) == len(OURS) >= 22


@pytest.mark.parametrize("name", OURS)
def test_every_section_of_a_page_has_text(name: str, pages: dict[str, str]) -> None:
    found = sections(pages[name])
    fails = docstrings.failures(selector_class(name))
    assert tuple(found) == tuple(one for one in gallery.SECTIONS if fails or one != gallery.FAILURES)
    assert all(len(plain(text)) > 4 for text in found.values()), found
    assert f"\n{name}\n{'=' * len(name)}\n" in pages[name]
    said = plain(pages[name])
    cls = selector_class(name)
    assert " ".join(registry.describe(name)["summary"].replace("`", "").split()).rstrip(".") in said
    for heading, section in (("When not to use it", "When not to use"), ("Deviations from the paper", "Deviations")):
        words = re.findall(r"\w{4,}", re.sub(r":\w+:`[^`]*`", "", registry.section(cls, section)))
        text = plain(found[heading])
        assert words or ":class:" in registry.section(cls, section)
        assert all(word.lower() in text.lower() for word in words)
    for entry in registry.citations(name):
        assert all(f"   {line}\n" in pages[name] for line in entry.splitlines()[:-1] if line)


@pytest.mark.parametrize("name", OURS)
def test_an_idea_has_two_sentences(name: str) -> None:
    idea = docstrings.idea(selector_class(name))
    assert len(list(prose.Block("pages", name, 0, idea).sentences())) == 2


@pytest.mark.parametrize("name", OURS)
def test_equations_are_those_of_the_docstring_and_of_the_code(name: str, pages: dict[str, str]) -> None:
    cls = selector_class(name)
    text = sections(pages[name])["Equations"]
    _, symbols, _ = docstrings.explanation(cls)
    table = [line for line in (cls.__doc__ or "").splitlines() if "``" in line or line.lstrip().startswith("===")]
    assert bool(symbols) == any(line.lstrip().startswith("===") for line in table)
    for row in symbols[1:]:
        cells = map(gallery.docstring_text, (docstrings.symbols(row[0]), *row[1:]))
        assert all(plain(cell).replace("\\", "") in plain(text).replace("\\", "") for cell in cells)
    source = Path(sys.modules[cls.__module__].__file__ or "").read_text()
    shown = [line.strip() for line in text.splitlines() if line.startswith("   ") and "  # " in line]
    own = [line for line in shown if line in source]
    assert own or not symbols
    if name == "bsfl":
        assert {tag for line in own for tag in re.findall(r"\((\d+)\)", line.partition("  # ")[2])} >= set("3") | {"12"}


@pytest.mark.parametrize("name", OURS)
def test_a_selector_with_symbols_shows_the_equations_of_its_card(name: str, pages: dict[str, str]) -> None:
    _, symbols, _ = docstrings.explanation(selector_class(name))
    text = sections(pages[name])["Equations"]
    shown = [tex.strip() for tex in re.findall(r"^\.\. math::\n\n((?:   .*\n)+)", text, re.MULTILINE)]
    assert bool(shown) == bool(symbols)
    assert shown == facts.equations()[name]
    card = (facts.CARDS.parent / f"{facts.card(name)}.md").read_text("utf-8")
    assert all(f"\n$$\n{tex}\n$$\n" in card for tex in shown)
    assert not shown or max(text.find(tex) for tex in shown) < text.find(".. list-table::")
    for tex in [*shown, *re.findall(r":math:`([^`]+)`", text)]:
        assert mathml(tex, as_block=True).startswith("<math")


def test_a_symbol_of_a_docstring_is_an_equation() -> None:
    assert docstrings.symbols("mu-bar_k, tau_max") == r":math:`\bar\mu_k`, :math:`\tau_{\mathrm{max}}`"
    assert docstrings.symbols("U(i), A_t^r, m'") == r":math:`U(i)`, :math:`A_t^r`, :math:`m'`"
    assert docstrings.symbols("Delta l, Credits_t") == r":math:`\Delta l`, :math:`\mathrm{Credits}_t`"
    for text in ("context", "hash length", "``|C|``", "NewProbs", "proxy for F_k(w)"):
        assert docstrings.symbols(text) == text


def test_generated_sentences_are_plain(runs: Runs) -> None:
    """The rules of the pages hold for the text that the gallery itself adds."""
    for name, run in runs.items():
        reads = [facts.Reads.of(selector_class(name)), *facts.option_reads(name).values()]
        added = [*small_world.sentences(run)]
        added += [
            text for one in reads for text in (facts.secure_aggregation(one)[1], facts.differential_privacy(one)[1])
        ]
        for text in [*added, gallery._cost(name), gallery._results(name).partition("\n")[0]]:
            found = [] if text.startswith(".. list") else list(prose.Block("pages", name, 0, text).findings())
            assert not [one for one in found if "list-table" not in one[1]], found


@pytest.mark.parametrize("name", OURS)
def test_options_are_those_of_the_scenario_reference(name: str, pages: dict[str, str]) -> None:
    text = sections(pages[name])["Options"]
    rows = re.findall(r"^   \* - :confval:`\w+ <([^`]+)>`\n     - (.*)\n     - (.*)$", text, re.MULTILINE)
    keys = {key.name: key for key in TABLES[f"selectors.{name}"]}
    assert [row[0] for row in rows] == list(keys)
    for key, default, meaning in rows:
        assert plain(default) == plain(keys[key].default)
        assert plain(meaning) == plain(keys[key].meaning)
    assert ("no options" in text) == (not keys)
    assert ("To cap the cohort" in text) == (name in {"fedcs", "pczfl"})


def test_sections_on_failures_are_parts_of_the_deviations(pages: dict[str, str]) -> None:
    shown = {name: sections(pages[name]).get(gallery.FAILURES, "") for name in OURS}
    for name, text in shown.items():
        deviations = plain(sections(pages[name])["Deviations from the paper"])
        assert all(plain(item) in deviations for item in text.split("\n* "))
        assert bool(text) == bool(re.search(r"\bfail", registry.section(selector_class(name), "Deviations")))
    assert "From the second failure in a row on, the client counts as tried" in plain(shown["oort"])
    assert "pacer" not in shown["oort"]


# ---- facts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OURS)
def test_columns_are_those_that_the_class_declares(name: str, pages: dict[str, str]) -> None:
    cls = selector_class(name)
    text, *options = sections(pages[name])["What it reads, and what leaves the client"].split("\nWith ``")
    assert len(options) == len(facts.option_reads(name))
    for other, more in zip(options, facts.option_reads(name).values(), strict=True):
        assert set(re.findall(r"^   \* - ``(\w+)``", other, re.MULTILINE)) == more.needs | more.asks
        assert ("``energy_score``" in other) == ("one number, when the client connects and with each update" in other)
    assert ("The clients still send whole vectors." in text) == (name == "divfl")
    shown = set(re.findall(r"^   \* - ``(\w+)``", text, re.MULTILINE))
    assert shown == {*cls.needs, *cls.asks, *cls.remembers}
    rows = dict(re.findall(r"^   \* - ``(\w+)``\n.*\n.*\n     - (.*)$", text, re.MULTILINE))
    for column, leaves in rows.items():
        row = COLUMNS[column]
        assert (leaves == "nothing") == (row.source == "clock" or row.shape == "scalar")
        assert ("reply to a probe" in leaves) == (column in cls.asks)
        assert ("vector" in leaves) == (row.source == "reply" and row.shape == "vector")
        assert leaves.startswith("the update") == row.per_update
        if row.source == "reply":
            assert ("with each update" in leaves) == (column in cls.needs)
    assert ("validation set" in text) == any(COLUMNS[column].validated for column in cls.needs)
    assert all(f"``{key}={value!r}``" in text for key, value in cls.paper_options.items())
    assert all(f"``{column}``" in text.rpartition("counts as failed")[0] for column in cls.requires)


def _strategy(name: str, base: Any, weight: float | None = None) -> Any:
    """A selection strategy of the legacy API, with everything that a selector needs."""
    options = {"validation": world.validation(), "learning_rate": world.ETA, "max_latency": world.MAX_LATENCY}
    options |= {"missing_columns": "random"}
    options |= {"filter": Filter()} if name.startswith("fedcm") else {}
    own = {} if weight is None else {"accuracy_weight": weight}
    return selection("legacy", create(name, **world.selector_params(name), **own), base, **options)


def _variants() -> list[tuple[str, float | None]]:
    return [(name, None) for name in OURS] + [(name, 0.5) for name in OURS if facts.option_reads(name)]


@pytest.mark.parametrize(("name", "weight"), _variants())
def test_pages_say_what_strategies_do(
    name: str, weight: float | None, pages: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A round as under secure aggregation, where the sum stands in every reply, and a wrapper for privacy."""
    reads = facts.Reads.of(selector_class(name)) if weight is None else facts.option_reads(name)["accuracy_weight"]
    strategy = _strategy(name, legacy_base(), weight)
    manager = Server("legacy", strategy, proxies()).federation.manager
    instructions = strategy.configure_fit(1, ndarrays_to_parameters([world.initial()]), manager)
    total = ndarrays_to_parameters([world.initial() + 1.0])
    results = [(client, FitRes(OK, total, 10, {"latency_s": 1.0})) for client, _ in instructions]
    word, why = facts.secure_aggregation(reads)
    with pytest.raises(RunError, match="SecAgg") if word == "no" else nullcontext():
        strategy.aggregate_fit(1, results, [])
    caplog.clear()
    _strategy(name, private("legacy", base_of("legacy")), weight)
    warned = any(
        "not covered by the differential-privacy guarantee" in record.getMessage() for record in caplog.records
    )
    covered, reason = facts.differential_privacy(reads)
    assert (covered == "not covered") == warned
    text = sections(pages[name])["Data protection"]
    assert why in text
    assert reason in text
    assert f"{word}.**" in text
    assert f"{covered}.**" in text


def test_the_words_depend_on_what_clients_send() -> None:
    said = {name: facts.secure_aggregation(facts.Reads.of(selector_class(name)))[0] for name in OURS}
    assert {name for name, word in said.items() if word == "not advised"} == {"divfl"}
    private_words = {name: facts.differential_privacy(facts.Reads.of(selector_class(name)))[0] for name in OURS}
    assert {name for name, word in private_words.items() if word == "yes"} == {
        "bsfl", "cs-ucb", "fedcs", "random", "round-robin",
    }  # fmt: skip


def _check_words(page: str, words: str, word_of: Callable[[facts.Reads], tuple[str, str]]) -> dict[str, facts.Reads]:
    """Check that a page's table has each selector at its word; return what the selectors read."""
    rows = re.findall(rf"^\| ({words}) \| ([^|]*) \|", page, re.MULTILINE)
    stated = {word: set(re.findall(r"`([\w-]+)`", cell)) for word, cell in rows}
    reads = {name: facts.Reads.of(selector_class(name)) for name in OURS}
    assert set().union(*stated.values()) == set(OURS)
    for word, listed in stated.items():
        assert listed == {name for name, one in reads.items() if word_of(one)[0] == word}
    return reads


def test_the_page_on_secure_aggregation_lists_every_selector() -> None:
    page = (ROOT / "docs" / "secure-aggregation.md").read_text("utf-8").partition("## Differential privacy")[0]
    reads = _check_words(page, "yes|no|not advised", facts.secure_aggregation)
    points = dict(re.findall(r"^- \*\*(.*?)\*\*(.*?)(?=^- |\Z)", page, re.MULTILINE | re.DOTALL))
    options = re.findall(r"`([\w-]+)`", points["An option can change the answer."])
    assert set(options) == {"accuracy_weight"} | {name for name in OURS if facts.option_reads(name)}
    timed = {name for name, one in reads.items() if "latency" in one.needs and not one.of_updates}
    assert timed == set(re.findall(r"`([\w-]+)`", points["Clients must report their latency."])) & set(OURS)


def test_the_page_on_differential_privacy_lists_every_selector() -> None:
    page = (ROOT / "docs" / "secure-aggregation.md").read_text("utf-8").partition("## Differential privacy")[2]
    _check_words(page, "yes|model only|not covered", facts.differential_privacy)
    changed = re.search(r"With `accuracy_weight`, (.*?) are", page, re.DOTALL)
    assert changed
    assert set(re.findall(r"`([\w-]+)`", changed[1])) == {name for name in OURS if facts.option_reads(name)}
    options = [one for name in OURS for one in facts.option_reads(name).values()]
    assert all(facts.differential_privacy(one)[0] == "not covered" for one in options)


def test_mathematics_of_a_docstring() -> None:
    said = gallery.docstring_text("sum of ||g_i - g_j||, w^{t-1}, [0, 1]^2, u_2(t) and ``x^2``, |S|, min_s")
    assert said == (
        r"sum of :math:`\lVert g_i - g_j \rVert`, :math:`w^{t-1}`, :math:`[0, 1]^2`, :math:`u_2`\ (t) and ``x^2``, "
        r"\|S\|, min_s"
    )


def test_the_table_of_the_papers_agrees() -> None:
    rows = [line.split("|") for line in facts.CARDS.read_text("utf-8").splitlines() if line.startswith("|")]
    head = next(row for row in rows if row[1].strip() == "requirement")
    stated = next(row for row in rows if row[1].strip() == "secure aggregation possible")
    for column, cell in zip(head[2:-1], stated[2:-1], strict=True):
        for name in re.findall(r"`([\w-]+)`", column):
            assert facts.secure_aggregation(facts.Reads.of(selector_class(name)))[0] == cell.strip()


@pytest.mark.parametrize("name", OURS)
def test_costs_are_the_benchmarks(name: str, pages: dict[str, str]) -> None:
    with facts.COSTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    known, text = facts.cost(name), sections(pages[name])["Cost of a choice"]
    measured = {row["selector"] for row in rows}
    assert known is not None
    if newer := facts.newer_costs(name):
        assert all(f"- {cell}\n" in text for row in newer for cell in row)
        assert str(facts.COSTS.name) not in text
        assert f"selectors.{name}.max_clients" in text
        assert name in {"fedcor", "divfl"}
        return
    assert known.measured == (name if name in measured else "power-of-choice")
    assert ("no measurement" in text) == (name not in measured)
    for clients, seconds in known.seconds.items():
        wanted = (known.measured, str(clients), "100", "seen")
        [row] = [row for row in rows if (row["selector"], row["clients"], row["cohort"], row["fleet"]) == wanted]
        assert float(row["selector_s"]) == seconds
        assert f"- {clients:,}\n" in text
        assert f"- {1000 * seconds:,.1f}\n" in text
    assert max(known.seconds) == 1_000_000
    assert "refuses more than" not in text
    assert name not in {"fedcor", "divfl"}


@pytest.mark.parametrize("name", OURS)
def test_a_page_has_the_card_and_the_row_of_the_results(name: str, pages: dict[str, str]) -> None:
    card = facts.card(name)
    assert (ROOT / "docs" / "papers" / f"{card}.md").is_file()
    cls = selector_class(name)
    assert getattr(selectors, cls.__name__) is cls
    assert f":py:class:`fedsel_flwr.selectors.{cls.__name__}`" in pages[name]
    assert f":doc:`/papers/{card}`" in pages[name]
    world_heading, row = facts.results(name)
    assert f"## {world_heading}\n" in facts.RESULTS.read_text("utf-8")
    line = f"| `{name}` | " + " | ".join(cell for _, cell in row[1:]) + " |"
    assert line in facts.RESULTS.read_text("utf-8").splitlines()
    assert dict(row)["verdict"] in sections(pages[name])["Results"]


# ---- the small world -------------------------------------------------------------------------------------------------
def cells(path: str, inset: float) -> set[tuple[int, int]]:
    """Phone and round of each cell that a path of the picture draws."""
    found: set[tuple[int, int]] = set()
    for x, y, across in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", path):
        row = (float(y) - inset - choice_picture.TOP) / choice_picture.ROW
        first = (float(x) - inset - choice_picture.LEFT) / choice_picture.CELL
        count = (float(across) + 2 * inset) / choice_picture.CELL
        assert row.is_integer()
        assert first.is_integer()
        assert count.is_integer()
        found |= {(int(row), int(first) + i) for i in range(int(count))}
    return found


@pytest.mark.parametrize("name", OURS)
def test_the_picture_is_the_run(name: str, runs: Runs, pages: dict[str, str]) -> None:
    run, text = runs[name], sections(pages[name])["Choices over time"]
    # The first of each kind is in the key.
    [_, chosen] = re.findall(r'<path class="chosen" d="([^"]*)"', text)
    [_, failed] = re.findall(r'<path class="failed" d="([^"]*)"', text)
    assert cells(chosen, 0.0) == {(int(i), int(j)) for i, j in np.argwhere(run.completed)}
    assert cells(failed, 1.0) == {(int(i), int(j)) for i, j in np.argwhere(run.chosen & ~run.completed)}
    bars = [re.findall(r"M[\d.]+ [\d.]+h([\d.]+)v", path) for path in re.findall(r'class="bar" d="([^"]*)"', text)]
    for drawn, values in zip(bars, (run.latency, run.examples, run.chosen.sum(axis=1)), strict=True):
        assert np.allclose(np.array(drawn, dtype=float) / choice_picture.BAR, values / values.max(), atol=1e-3)
    assert np.all(np.diff(run.latency) >= 0)


@pytest.mark.parametrize("name", OURS)
def test_the_text_agrees_with_the_picture(name: str, runs: Runs, pages: dict[str, str]) -> None:
    """Every number is counted again in the cells of the picture."""
    text = sections(pages[name])["Choices over time"]
    paths = re.findall(r'<path class="(chosen|failed)" d="([^"]*)"', text)[2:]
    drawn = [one for mark, path in paths for one in cells(path, float(mark == "failed"))]
    phones, rounds = np.array(drawn).T
    times = np.bincount(phones, minlength=30)
    said = plain(text.rpartition("</div>")[2]).replace("\N{MINUS SIGN}", "-")
    total, fast, middle, slow = re.search(
        r"Of all ([\d,]+) choices, the 10 fastest .* got (\d+) %, .* middle (\d+) %, and the 10 slowest phones (\d+) %",
        said,
    ).groups()  # type: ignore[union-attr]
    assert int(total.replace(",", "")) == len(drawn)
    for share, low in ((fast, 0), (middle, 10), (slow, 20)):
        assert abs(int(share) - 100 * np.mean((phones >= low) & (phones < low + 10))) <= 0.5 + 1e-9
    halves = re.search(r"was (\d+) % in rounds 1 to 50, and (\d+) % in rounds 51 to 100", said).groups()  # type: ignore[union-attr]
    for share, part in zip(halves, (rounds < 50, rounds >= 50), strict=True):
        assert abs(int(share) - 100 * np.mean(phones[part] >= 20)) <= 0.5 + 1e-9
    if jain := re.search(r"Jain's index of the numbers of choices is ([\d.]+),", said):
        assert abs(float(jain[1]) - times.sum() ** 2 / (30 * (times**2).sum())) <= 0.005 + 1e-9
        by_size, by_latency = re.search(r"choices is (-?[\d.]+) with .* (-?[\d.]+) with the mean lat", said).groups()  # type: ignore[union-attr]
        assert abs(float(by_size) - spearmanr(times, runs[name].examples)[0]) <= 0.005 + 1e-9
        assert abs(float(by_latency) - spearmanr(times, runs[name].latency)[0]) <= 0.005 + 1e-9
    else:
        assert f"Every phone was chosen {times.min()} or {times.max()} times." in said
    if last := re.search(r"After round (\d+), every phone", said):
        assert int(last[1]) == 1 + max(rounds[phones == phone].min() for phone in range(30))
    else:
        assert f"{small_world.number(int((times == 0).sum())).capitalize()} phone" in said
        assert (times == 0).any()
    assert f"They were chosen {times[28]} and {times[29]} times" in said
    cohorts = np.bincount(rounds, minlength=100)
    assert ("A round had" in said) == (cohorts.min() < cohorts.max())
    assert "A round had" not in said or f"at least {cohorts.min()} and at most {cohorts.max()}" in said


def test_the_first_page_states_the_world(runs: Runs) -> None:
    text = gallery.first_page(runs)
    played = small_world.scenario("random")
    assert f"{played.num_clients} phones, {played.clients_per_round} a round" in " ".join(text.split())
    assert f"the seed {played.seed}." in " ".join(text.split())
    last = dict(re.findall(r"^   \* - :doc:`([\w-]+)`\n(?:     - .*\n){3}     - ?(.*)$", text, re.MULTILINE))
    assert {name: cell for name, cell in last.items() if "refused" in cell} == {
        "divfl": "refused above 1,000", "fedcor": "refused above 100,000",
    }  # fmt: skip
    assert text.count("gallery-thumbnail") == text.count("<li>") == len(OURS)
    for name in OURS:
        assert f'href="{name}.html"' in text
        assert f"   * - :doc:`{name}`\n" in text


def test_a_run_is_played_once_for_the_same_code(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []
    monkeypatch.setattr(small_world, "play", lambda name: played.append(name) or runs[name])
    for _ in range(2):
        again = small_world.played("oort", tmp_path)
        assert np.array_equal(again.chosen, runs["oort"].chosen)
        assert np.array_equal(again.late, runs["oort"].late)
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    small_world.played("oort", tmp_path)
    monkeypatch.setattr(small_world, "source_digest", lambda: "other code")
    small_world.played("oort", tmp_path)
    assert played == ["oort"] * 3
    assert len(list(tmp_path.iterdir())) == 1
