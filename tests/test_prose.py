"""What `make prose` counts: the rules on a text made for each, and what the repository has reached."""

from __future__ import annotations

import pytest

from tests import prose

REACHED = {kind: (0, 0) for kind in prose.KINDS} | {"pages": (2, 0)}
"""Kind of text -> how many sentences may be too long, and how many listed words there may be. docs/errors.md quotes two
errors of other libraries."""
PAGE = """\
# A title

The run goes on after one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen.
The [link](to-a-page.md#of-ten-words) and `code of many words` count as words do. It is
told; of two; semicolons.

```sh
echo newcomer newcomer
```

| anew | fine |
| --- | --- |
"""
MODULE = '''
def f(x):
    """Who is asked.

    Args:
        x: Made for nobody.

    >>> "so many"
    """
    raise ValueError(f"the {x} was made anew, although it stands beside {x}. Good.")
'''


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    root = tmp_path_factory.mktemp("repository")
    (root / "README.md").write_text(PAGE)
    (root / "fedsel_flwr").mkdir()
    (root / "fedsel_flwr" / "room.py").write_text(MODULE)
    return [(block.kind, block.line, what) for block in prose.blocks(root) for what, _ in block.findings()]


def test_each_rule_finds_its_sentence(findings: list[tuple[str, int, str]]) -> None:
    assert findings == [
        ("README", 3, "goes on"),
        ("README", 3, "two semicolons"),
        ("README", 3, "is told"),
        ("README", 11, "anew"),
        ("first lines", 3, "opening"),
        ("docstrings", 6, "made for"),
        ("docstrings", 6, "nobody"),
        ("messages", 10, "anew"),
        ("messages", 10, "beside"),
    ]


def test_a_sentence_past_25_words_is_found() -> None:
    words = " ".join(["word"] * 25)
    assert list(prose.Block("pages", "a.md", 1, f"W{words}. W{words}.").findings()) == []
    assert [what for what, _ in prose.Block("pages", "a.md", 1, f"{words} more.").findings()] == ["26 words"]


def test_what_was_reached_is_held() -> None:
    """`python tests/prose.py PATH...` names the sentences."""
    for kind, (sentences, long, listed) in prose.counts().items():
        assert sentences > 20
        assert long <= REACHED[kind][0], kind
        assert listed <= REACHED[kind][1], kind
