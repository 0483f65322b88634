"""The report of a deployment: of a strategy that is still running, on the terminal, and in a browser."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.report.advice import advise
from fedsel_flwr.report.page import deployment_page, deployment_tables
from fedsel_flwr.report.page.deployment_page import deployment_document, deployment_lines, shown_text
from fedsel_flwr.report.page.deployment_tables import read_deployment
from fedsel_flwr.report.page.document import missing_packages, write_page
from fedsel_flwr.rounds.records import decode_entry
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy
from tests.browser import Browser, browser
from tests.report.page.deployments import client, entries, failed, write
from tests.strategies.helpers import fedavg, fleet, run_rounds

__all__ = ["browser"]
HOSTILE = [
    "<script>document.title = 'taken'</script>",
    '"><img src=x onerror="document.title=\'taken\'">',
    "two\nlines\x1b[31m\u202e",
    '=HYPERLINK("x"),\'\ud800é',
    "x" * 500 + "1",
    "x" * 499 + "21",
    "{{ 7 * 7 }}",
    "constructor",
    "__proto__",
    "a$&b",
]


def hostile(folder: Path) -> Path:
    """A deployment whose clients have hostile ids and problems; each is slower than the one before it."""
    rows = [client(name, 1.0 + place, compute_s=0.5) for place, name in enumerate(HOSTILE)]
    rows[0] = failed(HOSTILE[0], f"exception: {HOSTILE[1]}")
    given = [(60.0, rows)] + [(float(len(rows[:n])), rows[1:n]) for n in range(3, len(rows) + 1)] * 3
    return write(folder, entries(*given, accuracy=0.5))


# ---- a strategy that is still running --------------------------------------------------------------------------------


def test_a_report_while_the_run_continues_and_after_it(tmp_path: Path) -> None:
    folder, journal = tmp_path / "run", tmp_path / "run" / "journal.jsonl"
    during = []

    def report(record: Any) -> None:
        if record.round == 4:
            # The next round's line, half written.
            with journal.open("ab") as file:
                file.write(journal.read_bytes().splitlines(keepends=True)[0][:-30])
            names = sorted(path.name for path in folder.iterdir())
            assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 0
            during.append(read_deployment(folder))
            assert sorted(path.name for path in folder.iterdir()) == names

    clients = fleet(6, latency=lambda round: 1.0 + round)
    clients[2].fault = "exception"
    base = fedavg(evaluate_fn=lambda number, model, config: (1.0, {"accuracy": 0.1 * number}))
    strategy = SelectionStrategy(
        Random(clients_per_round=3, seed=1), base,
        checkpoint_dir=folder, total_rounds=6, max_latency=30.0, on_round=report,
    )  # fmt: skip
    run_rounds(strategy, clients, 6)
    after = read_deployment(folder)
    assert (during[0].last_round, after.last_round, after.rounds) == (4, 6, 6)
    assert after.checkpoint is not None
    assert after.checkpoint.round == 6
    assert during[0].checkpoint is not None
    assert during[0].checkpoint.round in (3, 4)
    # The journal is the strategy's own, so reporting has changed nothing.
    lines = journal.read_bytes().splitlines(keepends=True)
    # As texts, because NaN differs from itself.
    assert list(map(repr, (decode_entry(line).round for line in lines))) == list(map(repr, strategy.history.rounds))
    counts = strategy.history.selection_counts(6)
    assert {int(one.client_id): one.selections for one in after.clients} == dict(enumerate(counts.tolist()))
    broken = next(one for one in after.clients if one.client_id == "2")
    assert (broken.failures, broken.last_seen, broken.slowest) == (counts[2], None, counts[2])
    assert after.accuracy["accuracy"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    # In a round with client 2 the others wait for it until max_latency = 30 s; in the others all are equally slow.
    rows = [row for row in strategy.history.clients if row.client_id == "2"]
    assert after.waiting.beyond_second_s == pytest.approx(sum(30 - (1 + row.round) for row in rows) / 6)


# ---- the terminal ----------------------------------------------------------------------------------------------------


def test_the_command_prints_text_and_writes_only_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real advice, which takes seconds; it is computed once."""
    monkeypatch.setattr(deployment_tables, "advise", functools.cache(advise))
    rows = [client(f"site-{k}", 2.0 + k) for k in range(6)]
    given = [(max(rows[k % 6].latency_s, rows[(k + 1) % 6].latency_s), [rows[k % 6], rows[(k + 1) % 6]])
             for k in range(24)]  # fmt: skip
    folder = write(tmp_path / "run", entries(*given))
    assert main(["report", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert sorted(path.name for path in folder.iterdir()) == ["journal.jsonl", *["report.html"] * (not err)]
    text = " ".join(out.split())
    # The pairs (0, 1) to (4, 5) differ by 1 s, the pair (5, 0) by 5 s; the median is in the middle. 5 / 32 is 16 %.
    assert f"costs {10 / 12:.2f} s per round beyond the median client (16 % of all seconds), and {10 / 6:.2f} s" in text
    assert "site-5 8 12.0 24.0 7.00 7.00 0 of 8 33 % 24 (0 ago) 24 (0 ago)" in text
    assert "newest checkpoint none in this folder" in text
    found = read_deployment(folder)
    assert found.advice is not None
    assert " ".join(found.advice.sentence.split()) in text
    # Rounds of 3, 4, 5, 6, 7 and 7 s, four times.
    assert "24 rounds: median 5.50 s, mean 5.33 s, 95 % take at most 7.00 s; 128.0 s in total" in text
    assert "mean round: 5.33 s in the first quarter of the rounds, 5.33 s in the last" in text


def test_json_has_the_figures_of_the_text_and_writes_nothing(tmp_path: Path, fedsel: Any) -> None:
    folder = hostile(tmp_path / "run")
    out = fedsel("report", folder, "--json")
    facts = json.loads(out)
    assert out.isascii()
    assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]
    assert {one["client_id"] for one in facts["clients"]} == set(HOSTILE)
    found = read_deployment(folder)
    assert facts["waiting"] == pytest.approx(vars(found.waiting))
    assert facts["clients"][0]["beyond_median_s"] == found.clients[0].beyond_median_s
    assert (facts["advice"], facts["refusal"]) == (None, f"{folder} is too short")


def test_hostile_texts_stay_on_their_line_and_are_cut(tmp_path: Path) -> None:
    lines = deployment_lines(read_deployment(hostile(tmp_path / "run")))
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 250
    table = [line for line in lines if line.startswith(("<script>", '"><img', "two\\nlines", "xxx"))]
    assert len(table) == 5
    assert {line.split()[0][-2:] for line in table if line.startswith("xxx")} == {"x1", "21"}
    assert shown_text("\x1b[31m\u202eab", 48) == "\\x1b[31m\\u202eab"
    assert [shown_text("x" * n, 16) for n in (16, 17)] == ["x" * 16, "x" * 9 + "..." + "x" * 4]


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedsel: Any
) -> None:
    folder = hostile(tmp_path / "run")
    monkeypatch.setattr(deployment_page, "missing_packages", list)
    monkeypatch.setattr(deployment_page, "write_page", Mock(side_effect=PermissionError(13, "Permission denied")))
    said = fedsel("report", folder, status=2)
    assert said.startswith("deployment in ")
    assert f"fedsel: error: report.html cannot be written to {str(folder)!r}: Permission denied. Choose" in said


def test_without_the_extra_the_text_is_printed_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hostile(tmp_path / "run")
    monkeypatch.setattr("fedsel_flwr.report.page.document.PACKAGES", ("nosuch_package",))
    assert main(["report", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "slowest in" in out
    assert "nosuch_package" in err
    assert "pip install 'fedsel-flwr[report]'" in err
    assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]


# ---- the browser -----------------------------------------------------------------------------------------------------


def page_of(folder: Path) -> Path:
    if missing := missing_packages():
        pytest.skip(f"{', '.join(missing)} not installed")
    return write_page(deployment_document(read_deployment(folder)), folder / "report.html")


def test_the_clients_of_the_charts(browser: Browser, tmp_path: Path) -> None:
    """All rows of the charts are compared with the tables in test_drawing."""
    rows = [client(f"site-{k}", 2.0 + k, compute_s=1.0 + k) for k in range(5)]
    given = [
        (60.0 if k == 4 else 6.0, [rows[0], failed("site-4") if k == 4 else rows[4], rows[k % 4]]) for k in range(9)
    ]
    with browser.open(page_of(write(tmp_path / "run", entries(*given, accuracy=0.25)))) as opened:
        assert opened.faults == []
        clients = {row["client"]: row for row in opened.rows("clients")}
        assert [clients["site-4"][name] for name in ("place", "failures", "last_seen")] == [1, 1, 9]
        table = opened.page.locator("section#waiting > .table tbody tr")
        assert table.count() == 5
        assert table.nth(0).inner_text().split()[:2] == ["site-4", "9"]
        slowest = {row["round"]: [row[name] for name in ("client", "outcome", "measured_s", "problem")]
                   for row in opened.rows("slowest")}  # fmt: skip
        assert slowest[4] == ["site-4", "usable update", 6, ""]
        assert slowest[5] == ["site-4", "failed", 2, "exception: ValueError"]


def test_hostile_ids_are_texts_on_the_page(browser: Browser, tmp_path: Path) -> None:
    folder = hostile(tmp_path / "<i>run")
    with browser.open(page_of(folder), dark=True) as opened:
        assert opened.faults == []
        assert opened.page.title() == "Deployment <i>run"
        assert opened.page.locator("img, i").count() == 0
        cells = opened.page.locator("section#waiting > .table tbody th").all_inner_texts()
        assert cells == [shown_text(one.client_id, 48) for one in read_deployment(folder).clients]
        assert len({row["client"] for row in opened.rows("clients")}) == len(HOSTILE)
        # Every chart is drawn, also with ids that are names of JavaScript's properties.
        drawn = opened.page.locator("#chart-clients .role-axis-label text").all_text_contents()
        assert {"constructor", "__proto__", "a$&b"} <= {*drawn}
        views = opened.page.evaluate("Object.keys(window.fedsel.views).length")
        assert views == opened.page.locator("figure").count() == 5
        # A tooltip shows the id as text too.
        opened.page.hover("#chart-clients .mark-rect path >> nth=0")
        opened.page.wait_for_selector("#vg-tooltip-element.visible")
        assert opened.page.locator("#vg-tooltip-element script, #vg-tooltip-element img").count() == 0
        assert opened.faults == []


def test_of_many_clients_the_costliest_200_are_in_the_table_and_all_in_the_csv(
    browser: Browser, tmp_path: Path
) -> None:
    rows = [client(f"site-{k:03d}", 1.0 + k / 100) for k in range(300)]
    given = [(rows[k].latency_s, [rows[0], rows[k]]) for k in range(1, 300)]
    with browser.open(page_of(write(tmp_path / "run", entries(*given)))) as opened:
        assert opened.page.locator("section#waiting > .table tbody tr").count() == 200
        assert "The 200 costliest of 300 clients" in opened.page.inner_text("section#waiting")
        assert opened.page.locator("#chart-clients .mark-rect.role-mark > path").count() == 20
        with opened.page.expect_download() as saved:
            opened.page.click("#chart-clients [data-save=csv]")
        lines = Path(saved.value.path()).read_text().splitlines()
        assert (len(lines), lines[1].split(",")[:3]) == (301, ["1", "site-299", "1"])
        assert math.isclose(float(lines[1].split(",")[3]), 299 / 200)


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_axe_finds_nothing(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    with browser.open(page_of(hostile(tmp_path / "run")), width=width, dark=dark) as opened:
        opened.open_all()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.violations() == []
