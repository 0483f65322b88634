"""The one reader of CSV files: plain files are read, and everything else is named with file, line and cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.csv_files import parse_csv, read_csv


@pytest.mark.parametrize(
    "text",
    [
        "client,seconds\na,2.5\n\nb,4\n",
        "client,seconds\r\na, 2.5\r\n\r\nb,+4.0e0",
        'client,"seconds"\n"a","2.5"\n\nb ,4.\n',
        "client,seconds\ra,02.5\r\rb,4\r",
    ],
)
def test_files_as_programs_write_them(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("\ufeff" + text, encoding="utf-8", newline="")
    file = read_csv(tmp_path / "f.csv")
    assert file.columns == ("client", "seconds")
    found = [(line.number, line.cells["client"], line.real("seconds")) for line in file.lines]
    assert found == [(2, "a", 2.5), (4, "b", 4.0)]


def test_lines_are_counted_in_the_file() -> None:
    """A quoted cell may contain commas and line breaks; a separator of lines of other alphabets is a character."""
    text = 'client,seconds\n"a\nb",1\n"c,d",2\n"e\u2028f",x\n'
    lines = parse_csv(text, "f.csv").lines
    assert [(line.number, line.cells["client"]) for line in (next(lines), next(lines))] == [(2, "a\nb"), (4, "c,d")]
    with pytest.raises(ParameterError, match=r"^f\.csv, line 5, column 'seconds': expected a number, got 'x'"):
        next(lines).real("seconds")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1\n", "line 2: expected 2 cells, got 1, without a cell for 'b'"),
        ("a,b\n1,2\n1,053.99,2\n", "line 3: expected 2 cells, got 3, with the surplus cell '2'. Write numbers with a"),
        ("a,b\n0,17,5\n", "line 2: expected 2 cells, got 3"),
        ("a,b,a\n1,2,3\n", "line 1: two columns are called 'a'. Remove or rename one"),
        ("a, a \n1,2\n", "line 1: two columns are called 'a'"),
        ("a,,\n1,,\n", "line 1: two columns are called ''"),
        ("a;b\n1;2\n", "line 1: the cells are separated by ';', not by commas, in 'a;b'. Save the file with commas"),
        ("a\tb\n1\t2\n", r"line 1: the cells are separated by '\\t'"),
        ('a,b\n"1,2\n3,4\n', "line 2: unexpected end of data. Correct the line"),
        ('a,b\n1,2\n"1"0,2\n', "line 3: "),
        ("a,b\n1," + "9" * 140_000 + "\n", "line 2: field larger than field limit"),
    ],
)
def test_what_is_no_table_is_named(text: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said) as error:
        list(parse_csv(text, "f.csv").lines)
    assert "f.csv" in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "cell",
    ["0,17", "1,053.99", "1.053,99", "1 053.99", "1\u00a0053", "1'053", "1_000", "0x10", "\u0661\u0662", "nan", "-inf",
     "1e400", "", "5 s", "12.5.3", "--1", "=1+1", "9" * 5000],
)  # fmt: skip
def test_what_is_no_plain_number_is_named(cell: str) -> None:
    """Python's float() takes underscores and other digits; a comma may mean tenths or thousands."""
    (line,) = parse_csv(f'a,b\nx,"{cell}"\n', "f.csv").lines
    said = r"^f\.csv, line 2, column 'b': expected a number.*, got .*\. Write num"
    with pytest.raises(ParameterError, match=said) as error:
        line.real("b")
    assert len(str(error.value)) < 300


def test_limits_are_named() -> None:
    (line,) = parse_csv("a,b\n-1,2\n", "f.csv").lines
    assert (line.real("a"), line.real("b", above=1.0, at_least=2.0, most=2.0)) == (-1.0, 2.0)
    for limits, said in (
        ({"above": 2.0}, "a number above 2, got '2'. Correct the cell. Cure."),
        ({"at_least": 3.0, "most": 4.0}, "a number of at least 3, got '2'"),
        ({"at_least": 0.0, "most": 1.0}, "a number of at least 0 and of at most 1, got '2'"),
    ):
        with pytest.raises(ParameterError, match=said):
            line.real("b", **limits, cure="Cure.")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))
    for path in (tmp_path / "f.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(ParameterError, match=r"^cannot read the trace: .*Give a CSV file in UTF-8"):
            read_csv(path, "the trace")
    assert list(parse_csv("", "f.csv").lines) == []
    assert parse_csv("", "f.csv").heading == "an empty file"
