"""BibTeX entries: their form, and agreement with the selectors' docstrings and with CITATION.cff."""

from __future__ import annotations

import re
from functools import partial

import pytest

import fedsel_flwr
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random, names
from fedsel_flwr.selectors.registry import citations, describe, package_entry, papers, selector_class
from tests.processes import ROOT

PAPERS = papers()
ENTRIES = {**PAPERS, "this package": package_entry()}
NEEDED = {
    "article": {"author", "title", "journal", "volume", "year"},
    "inproceedings": {"author", "title", "booktitle", "year"},
    "misc": {"author", "title", "year"},
    "software": {"author", "title", "version"},
}


def fields_of(entry: str) -> dict[str, str]:
    """Fields of an entry, with its kind and key; a form that BibTeX does not read fails."""
    head = re.match(r"@(\w+)\{([\w-]+),\n", entry)
    assert head, entry
    assert entry.endswith("\n}")
    assert entry.isascii()
    fields = {"kind": head[1], "key": head[2]}
    for name, value in re.findall(r"^  (\w+) += \{(.*?)\},$", entry, re.MULTILINE | re.DOTALL):
        assert name not in fields, name
        depth = [value[: i + 1].count("{") - value[: i + 1].count("}") for i in range(len(value))]
        assert min(depth) >= 0, value
        assert depth[-1] == 0, value
        fields[name] = " ".join(value.split())
    assert entry.count(" = ") == len(fields) - 2
    return fields


def plain(text: str) -> str:
    """Letters and digits alone, to compare titles."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


CITING = [name for name in names() if selector_class(name).citations]
"""A selector that is somebody's own has no paper."""


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_one_that_bibtex_reads(name: str) -> None:
    fields = fields_of(ENTRIES[name])
    assert NEEDED[fields["kind"]] <= fields.keys()
    people = fields["author"].split(" and ")
    assert all(re.fullmatch(r"\{.+\}|[^,]+, [^,]+", person) for person in people), people
    if name in PAPERS:
        assert fields.keys() & {"doi", "eprint", "url"}
        assert re.fullmatch(r"20\d\d", fields["year"])
    assert re.fullmatch(r"\d+--\d+", fields.get("pages", "1--2"))
    assert re.fullmatch(r"10\.\d{4,5}/\S+", fields.get("doi", "10.1000/x"))
    assert re.fullmatch(r"\d{4}\.\d{5}", fields.get("eprint", "2012.00001"))
    assert fields.get("archiveprefix") == ("arXiv" if "eprint" in fields else None)


def test_no_two_entries_have_one_key() -> None:
    text = (ROOT / "fedsel_flwr" / "selectors" / "papers.bib").read_text("utf-8")
    assert re.findall(r"^@\w+\{([\w-]+)", text, re.MULTILINE) == list(PAPERS)
    assert {key for name in CITING for key in selector_class(name).citations} == PAPERS.keys()


def test_every_paper_is_cited_by_a_selector_whose_docstring_has_its_title() -> None:
    said = {name: plain(describe(name)["paper"]) for name in CITING}
    for name, entry in PAPERS.items():
        citing = [one for one in CITING if entry in citations(one)]
        assert any(plain(fields_of(entry)["title"]) in said[one] for one in citing), name


@pytest.mark.parametrize("name", CITING)
def test_a_docstring_and_its_entries_name_the_same_authors(name: str) -> None:
    said = describe(name)["paper"]
    for entry in citations(name):
        fields = fields_of(entry)
        first = fields["author"].split(" and ")[0].partition(",")[0].strip("{}")
        assert first == "Anonymous" or first in said, f"{first} is not in: {said}"
    years = re.findall(r"\b20[12]\d\b", said)
    assert not years or fields_of(citations(name)[0])["year"] in years or "Ben Ami" in said


def test_the_entry_of_this_package_has_the_facts_of_citation_cff() -> None:
    yaml = pytest.importorskip("yaml", reason="comes with Flower")
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    fields = fields_of(package_entry())
    assert plain(fields["title"]) == plain(facts["title"])
    assert fields["author"] == " and ".join(
        f"{{{one['name']}}}" if "name" in one else f"{one['family-names']}, {one['given-names']}"
        for one in facts["authors"]
    )
    assert fields["version"] == str(facts["version"]) == fedsel_flwr.__version__
    for fact, field in (("repository-code", "url"), ("doi", "doi")):
        assert fields.get(field) == facts.get(fact), f"{fact} of CITATION.cff belongs into the entry too"


class Unpublished(Random):
    """Chooses at random."""

    citations = ()


class Published(Random):
    """Chooses at random."""

    citations = "@misc{me, title = {Mine}}"  # type: ignore[assignment]


def test_a_selector_of_an_author(monkeypatch: pytest.MonkeyPatch) -> None:
    one = partial(citations, f"{__file__}:Unpublished")
    with pytest.raises(ParameterError, match=r"names no paper\. Set Unpublished\.citations to a tuple of BibTeX"):
        one()
    assert citations(f"{__file__}:Published") == ("@misc{me, title = {Mine}}",)
