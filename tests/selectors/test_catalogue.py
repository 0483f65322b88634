"""The list of our selectors, and BibTeX entries: their form, their keys, and agreement with CITATION.cff."""

from __future__ import annotations

import re
from functools import partial

import pytest

import fedsel_flwr
from fedsel_flwr import selectors
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import Random, catalogue, create, names
from fedsel_flwr.selectors.registry import citations, example, package_entry, papers, selector_class
from tests.processes import ROOT

CITING = [name for name in names() if selector_class(name).citations]
"""A selector that is somebody's own has no paper."""
ENTRIES = {*papers().values(), package_entry(), *(entry for name in CITING for entry in citations(name))}
NEEDED = {
    "article": {"author", "title", "journal", "volume", "year"},
    "inproceedings": {"author", "title", "booktitle", "year"},
    "misc": {"author", "title", "year"},
    "software": {"author", "title", "version"},
}


def fields_of(entry: str) -> dict[str, str]:
    """Fields of an entry, with its kind; a form that BibTeX does not read fails."""
    head = re.match(r"@(\w+)\{[\w-]+,\n", entry)
    assert head, f"citations must be keys of papers.bib or BibTeX entries, got {entry!r}"
    assert entry.isascii()
    assert entry.endswith("\n}")
    assert entry.count("{") == entry.count("}")
    found = re.findall(r"^  (\w+) += \{(.*?)\},$", entry, re.MULTILINE | re.DOTALL)
    assert entry.count(" = ") == len(dict(found)) == len(found)
    return {"kind": head[1], **{name: " ".join(value.split()) for name, value in found}}


def plain(text: str) -> str:
    """Letters and digits alone, to compare titles."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


@pytest.mark.parametrize("entry", sorted(ENTRIES), ids=lambda entry: entry.splitlines()[0].strip("@,"))
def test_an_entry_is_one_that_bibtex_reads(entry: str) -> None:
    fields = fields_of(entry)
    assert NEEDED[fields["kind"]] <= fields.keys()
    assert all(re.fullmatch(r"\{.+\}|[^,]+, [^,]+", person) for person in fields["author"].split(" and "))
    assert fields["kind"] == "software" or fields.keys() & {"doi", "eprint", "url"}


def test_no_two_entries_have_one_key_and_each_is_cited() -> None:
    text = (ROOT / "fedsel_flwr" / "selectors" / "papers.bib").read_text("utf-8")
    assert re.findall(r"^@\w+\{([\w-]+)", text, re.MULTILINE) == list(papers())
    assert papers().keys() <= {key for name in CITING for key in selector_class(name).citations}


def test_the_entry_of_this_package_has_the_facts_of_citation_cff() -> None:
    yaml = pytest.importorskip("yaml", reason="comes with Flower")
    facts, fields = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8")), fields_of(package_entry())
    assert plain(fields["title"]) == plain(facts["title"])
    assert fields["author"] == " and ".join(f"{{{one['name']}}}" for one in facts["authors"])
    assert fields["version"] == str(facts["version"]) == fedsel_flwr.__version__


class Unpublished(Random):
    """Chooses at random."""

    citations = ()


class Published(Random):
    """Chooses at random."""

    citations = "@misc{me, title = {Mine}}"  # type: ignore[assignment]


def test_a_selector_of_an_author() -> None:
    one = partial(citations, f"{__file__}:Unpublished")
    with pytest.raises(ParameterError, match=r"names no paper\. Set Unpublished\.citations to a tuple of BibTeX"):
        one()
    assert citations(f"{__file__}:Published") == ("@misc{me, title = {Mine}}",)


def test_every_class_of_the_catalogue_is_exported_and_has_a_name() -> None:
    ours = {key: cls for key, cls in vars(catalogue).items() if isinstance(cls, type)}
    assert {cls.name: getattr(selectors, key) for key, cls in ours.items()} == {
        name: selector_class(name) for name in names()
    }


def test_examples_are_of_our_selectors_and_are_all_that_they_need() -> None:
    assert catalogue.EXAMPLES.keys() <= set(names())
    for name in names():
        create(name, clients_per_round=1, **example(name))
