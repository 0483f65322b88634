"""The page of a comparison in a browser: every chart against the run folders, read independently with pandas."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsel_flwr.cli import main
from fedsel_flwr.report.page import document
from fedsel_flwr.report.page.comparison_page import comparison_document
from fedsel_flwr.report.page.document import write_page
from fedsel_flwr.report.paired import paired_effects
from fedsel_flwr.simulations import compare, load_scenario
from tests.browser import Browser, browser
from tests.report.page.made_facts import made_facts

__all__ = ["browser"]
SELECTORS = ["bsfl", "oort", "random"]
SEEDS = [1, 2, 3]
ROUNDS = 24
WINDOW = 5
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison whose clients fail for two reasons."""
    changes = {
        "rounds": ROUNDS, "engine": "vectorized", "target_rounds": WINDOW, "target_accuracy": 0.5,
        "clients.failure_probability": 0.1, "wireless.max_latency_s": 0.25,
    }  # fmt: skip
    place = tmp_path_factory.mktemp("page") / "study"
    compare(load_scenario("smoke", changes), SELECTORS, seeds=SEEDS, folder=place)
    return place


def table(folder: Path, selector: str, seed: int, name: str) -> pd.DataFrame:
    return pd.read_parquet(folder / f"{selector}-seed{seed}" / f"{name}.parquet")


def of(rows: list[dict[str, Any]], **columns: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in columns.items())]


def test_the_page_draws_everything_without_a_fault(browser: Browser, folder: Path) -> None:
    with browser.open(folder / "report.html") as opened:
        assert opened.faults == []
        assert opened.page.inner_text("#problem") == ""
        assert opened.page.locator("figure").count() == opened.page.locator(".chart svg").count() == 11
        text = opened.page.inner_text("body")
        for line in json.loads((folder / "verdict.json").read_text())["sentence"].splitlines():
            assert line.removeprefix("- ") in text
        # Whatever a reader opens, nothing is requested.
        opened.open_all()
        assert "selectors" in opened.page.locator("pre").last.inner_text()
        opened.page.click("details:has-text('LaTeX') [data-copy]")
        copied = opened.page.evaluate("getSelection().toString()")
        assert copied.strip() == (folder / "comparison.tex").read_text().strip()
        assert opened.faults == []


def test_curves_are_those_of_the_rounds(browser: Browser, folder: Path) -> None:
    with browser.open(folder / "report.html", "#seed=2") as opened:
        for axis, column in (("seconds", "simulated_s"), ("rounds", "round"), ("joules", "total_energy_j")):
            if axis != "seconds":
                opened.choose("axis", axis)
            rows = opened.rows("accuracy")
            for selector in SELECTORS:
                rounds = table(folder, selector, 2, "rounds")
                own = of(rows, selector=selector, axis=axis, seed="2")
                np.testing.assert_allclose([row["x"] for row in own], rounds[column], **CLOSE)
                smooth = rounds["accuracy"].rolling(WINDOW, min_periods=1).mean()
                np.testing.assert_allclose([row["accuracy"] for row in own], smooth, **CLOSE)
            assert len(rows) == len(SELECTORS) * ROUNDS
        opened.choose("axis", "rounds")
        opened.choose("seed", "all")
        own = of(opened.rows("accuracy"), selector="bsfl")
        each = np.stack(
            [table(folder, "bsfl", seed, "rounds")["accuracy"].rolling(WINDOW, min_periods=1).mean() for seed in SEEDS]
        )
        np.testing.assert_allclose([row["accuracy"] for row in own], each.mean(axis=0), **CLOSE)
        np.testing.assert_allclose([row["high"] for row in own], (each.mean(0) + each.std(0, ddof=1)), **CLOSE)


def test_ratios_are_those_of_the_verdict(browser: Browser, folder: Path) -> None:
    found = json.loads((folder / "verdict.json").read_text())
    runs = pd.read_csv(folder / "runs.csv").pivot(index="seed", columns="selector", values="time_to_target_s")
    assert np.isfinite(runs).all().all(), "the target is too high for this test"
    with browser.open(folder / "report.html") as opened:
        rows = opened.rows("ratios")
        for one in found["selectors"]:
            (mean,) = of(rows, kind="mean", selector=one["selector"])
            for name, key in (("ratio", "estimate"), ("low", "low"), ("high", "high")):
                assert mean[name] == pytest.approx(one["time"][key], rel=1e-5)
            assert (mean["p"], mean["verdict"]) == (pytest.approx(one["p"], rel=1e-5), one["word"])
            assert mean["note"] == ("*" if one["p"] <= 0.05 else "")
            own = of(rows, kind="seed", selector=one["selector"])
            assert [row["seed"] for row in own] == [str(seed) for seed in runs.index]
            np.testing.assert_allclose([row["ratio"] for row in own], runs[one["selector"]] / runs["random"], **CLOSE)
        (band,) = of(rows, kind="band")
        # t with 2 (3 - 1) degrees of freedom
        width = 2.7764451 * np.log(runs["random"]).std() * math.sqrt(2 / 3)
        np.testing.assert_allclose([band["low"], band["high"]], np.exp([-width, width]), **CLOSE)
        opened.choose("measure", "seconds_per_round")
        (mean,) = of(opened.rows("ratios"), kind="mean", selector="oort")
        (own,) = [one for one in found["selectors"] if one["selector"] == "oort"]
        assert mean["ratio"] == pytest.approx(own["seconds_per_round"]["estimate"], rel=1e-5)
        targets = {(row["target"], row["selector"]): row["ratio"] for row in opened.rows("targets")}
        for target, effects in found["profile"].items():
            for effect in effects:
                expected = effect["estimate"]
                assert targets[float(target), effect["selector"]] == (expected and pytest.approx(expected, rel=1e-5))
        # The same ratios as texts, also of the targets that some runs do not reach.
        cells = opened.page.locator("[aria-label^='Time ratio to random by target'] td").all_inner_texts()
        shown = iter(cells)
        for selector in ("bsfl", "oort"):
            for effects in found["profile"].values():
                (own,) = [one for one in effects if one["selector"] == selector]
                text = next(shown)
                if min(own["reached"], own["reference_reached"]) < own["pairs"]:
                    assert text == f"{own['reached']} of {own['pairs']} (against {own['reference_reached']})"
                else:
                    assert text == f"{own['estimate']:.2f} ({own['low']:.2f}-{own['high']:.2f})"
        assert len(cells) == 2 * len(found["profile"])


def test_a_target_that_was_never_reached_is_said_in_words() -> None:
    facts = made_facts(["random", "a", "b"], 2, 30)
    assert facts.verdict is not None
    never = {1: math.inf, 2: math.inf}
    times = {
        0.7: {"random": {1: 7.0, 2: 8.0}, "a": {1: 5.0, 2: 6.0}, "b": {1: 5.0, 2: 9.0}},
        0.8: {"random": {1: 9.0, 2: 9.5}, "a": never, "b": {1: 9.0, 2: math.inf}},
        0.9: {"random": never, "a": never, "b": never},
    }
    profile = {target: paired_effects(own, "random", "time_to_target_s") for target, own in times.items()}
    page = comparison_document(replace(facts, verdict=replace(facts.verdict, profile=profile)))
    assert page.facts["unreached"] == [
        "No run of a reaches 80 %. 80 % is reached on 2 of 2 seeds by random; on 1 of 2 seeds by b.",
        "No run of a, b, random reaches 90 %.",
    ]


def test_a_table_has_rows_of_all_selectors(browser: Browser, tmp_path: Path) -> None:
    selectors = [f"selector-{i}" for i in range(8)]
    path = write_page({"": comparison_document(made_facts(selectors, 2, 150))}, tmp_path / "report.html")
    with browser.open(path) as opened:
        opened.page.click("#chart-accuracy summary")
        opened.page.wait_for_selector("#chart-accuracy td")
        lines = [line.split("\t") for line in opened.page.locator("#chart-accuracy tbody tr").all_inner_texts()]
        head = opened.page.locator("#chart-accuracy thead th").all_inner_texts()
        every = len(opened.rows("accuracy"))
        assert every >= 8 * 150
        assert len(lines) == math.ceil(every / math.ceil(every / 500))
        assert {line[head.index("selector")] for line in lines} == set(selectors)
        assert f"{len(lines)} of {every} rows" in opened.page.inner_text("#chart-accuracy details")


def test_choices_are_those_of_the_clients(browser: Browser, folder: Path) -> None:
    clients = {selector: table(folder, selector, 3, "clients") for selector in SELECTORS}
    latency = pd.concat(clients.values()).groupby("client")["latency_s"].mean()
    with browser.open(folder / "report.html", "#seed=3&selector=oort") as opened:
        counts = clients["oort"]["client"].value_counts()
        points = opened.rows("selections")
        assert {int(row["client"]): row["selections"] for row in points} == {
            client: counts.get(client, 0) for client in latency.index
        }
        for row in points:
            assert row["latency_s"] == pytest.approx(latency[int(row["client"])], rel=1e-5)
        tenths = opened.rows("tenths")
        for selector in SELECTORS:
            times = clients[selector]["client"].value_counts().reindex(latency.index, fill_value=0)
            ranked = latency.sort_values().index
            # Ten or fewer clients: each one is a tenth.
            own = of(tenths, selector=selector)
            np.testing.assert_allclose([row["latency_s"] for row in own], latency[ranked], **CLOSE)
            np.testing.assert_allclose([row["selections_per_client"] for row in own], times[ranked], **CLOSE)
        order = {client: place for place, client in enumerate(latency.sort_values().index)}
        cells = opened.rows("map")
        assert sum(row["selections"] for row in cells) == len(clients["oort"])
        found = {
            (place, number)
            for row in cells
            for place in range(row["place"], row["place_end"])
            for number in range(row["round"], row["round_end"])
        }
        assert found == {(order[row.client], row.round) for row in clients["oort"].itertuples()}


def test_a_tooltip_of_the_map_names_whole_groups(browser: Browser, folder: Path) -> None:
    with browser.open(folder / "report.html", "#seed=3") as opened:
        opened.page.hover("#chart-map .mark-rect.role-mark > path >> nth=0")
        opened.page.wait_for_selector("#vg-tooltip-element.visible")
        lines = opened.page.locator("#vg-tooltip-element tr").all_inner_texts()
        shown = {line.split("\t")[0].rstrip(":"): line.split("\t")[1].strip() for line in lines}
        (row,) = [
            row
            for row in opened.rows("map")
            if (str(row["place"] + 1), str(row["round"])) == (shown["from the client in place"], shown["first round"])
        ]
        # The last round and the last client belong to the group.
        assert shown["last round"] == str(row["round_end"] - 1)
        assert shown["to the client in place"] == str(row["place_end"])
        assert shown["selections"] == f"{row['selections']:.3g}"


def test_fairness_failures_and_parts(browser: Browser, folder: Path) -> None:
    runs = pd.read_csv(folder / "runs.csv")
    with browser.open(folder / "report.html", "#selector=random") as opened:
        for chart, figure in (("jain", "jain"), ("worst-tenth", "worst_tenth")):
            for row in opened.rows(chart):
                own = runs[runs["selector"] == row["selector"]][figure]
                np.testing.assert_allclose([row["value"], row["high"]], [own.mean(), own.mean() + own.std()], **CLOSE)
        failed = pd.concat(table(folder, "random", seed, "clients") for seed in SEEDS)
        failed = failed[~failed["completed"] & ~failed["spare"]]
        reasons = opened.page.locator("[aria-label^='Failed clients of a run'] tr")
        head, *lines = [reasons.nth(i).locator("th, td").all_inner_texts() for i in range(reasons.count())]
        for selector, *cells in lines:
            every = pd.concat(table(folder, selector, seed, "clients") for seed in SEEDS)
            kinds = (
                every[~every["completed"] & ~every["spare"]]["problem"].str.split("; ").str[-1].str.split(":").str[0]
            )
            assert dict(zip(head[1:], cells, strict=True)) == {
                reason: f"{(kinds == reason).sum() / len(SEEDS):.1f}" for reason in head[1:]
            }
        rows = opened.rows("failures")
        for reason, own in failed["problem"].str.split("; ").str[-1].str.split(":").str[0].value_counts().items():
            per_round = sum(
                row["clients_per_round"] * (row["round_end"] - row["round"]) for row in of(rows, reason=reason)
            )
            assert per_round == pytest.approx(own / len(SEEDS), rel=1e-4)
        assert len({row["reason"] for row in rows}) >= 2
        parts = {(row["selector"], row["part"]): row["seconds"] for row in opened.rows("parts")}
        for selector in SELECTORS:
            means = []
            for seed in SEEDS:
                done, rounds = table(folder, selector, seed, "clients"), table(folder, selector, seed, "rounds")
                done = done[done["completed"]]
                own = [done[f"{part}_s"].mean() for part in ("download", "compute", "upload")]
                probes = rounds["probe_s"].mean()
                all_clients = table(folder, selector, seed, "clients")
                lost = (rounds["round_s"] - rounds["probe_s"]).to_numpy() - [
                    done[done["round"] == number]["latency_s"].max() if (done["round"] == number).any() else 0.0
                    for number in rounds["round"]
                ]
                failures = all_clients[~all_clients["completed"]].groupby("round").size()
                # Only a round with a failed client lasts longer than its slowest usable update.
                assert (lost[~rounds["round"].isin(failures.index)] < 1e-9).all()
                means.append([*own, rounds["round_s"].mean() - probes - sum(own) - lost.mean(), lost.mean(), probes])
            named = ("download", "compute", "upload", "waiting", "failures", "probes")
            np.testing.assert_allclose([parts[selector, part] for part in named], np.mean(means, axis=0), **CLOSE)
            theta = np.mean([table(folder, selector, seed, "regret")["theta"] for seed in SEEDS], axis=0)
            own = [row["theta"] for row in of(opened.rows("regret"), selector=selector)]
            np.testing.assert_allclose(own, theta, **CLOSE)


def test_menus_hide_select_and_remember(browser: Browser, folder: Path) -> None:
    with browser.open(folder / "report.html") as opened:
        page = opened.page
        opened.choose("seed", "3")
        opened.choose("axis", "joules")
        page.evaluate("delete document.documentElement.dataset.drawn")
        page.uncheck("input[value=oort]")
        opened.wait()
        assert {row["selector"] for row in opened.rows("accuracy")} == {"bsfl", "random"}
        assert "energy (J)" in page.inner_html("#chart-accuracy .chart")
        address = page.evaluate("location.hash")
        assert opened.faults == []
    with browser.open(folder / "report.html", address) as opened:
        assert {(row["selector"], row["seed"], row["axis"]) for row in opened.rows("accuracy")} == {
            ("bsfl", "3", "joules"), ("random", "3", "joules")
        }  # fmt: skip
        assert not opened.page.is_checked("input[value=oort]")
        assert opened.page.input_value("select[name=seed]") == "3"
        # A link to a section keeps the view, and a wrong value in an address is no fault.
        opened.page.click("nav a >> nth=2")
        assert opened.page.input_value("select[name=seed]") == "3"
    with browser.open(folder / "report.html", "#seed=99&axis=%3Cb%3E&hide=nobody") as opened:
        assert opened.page.input_value("select[name=seed]") == "all"
        assert opened.faults == []


def test_a_menu_exchanges_the_scenario(browser: Browser, tmp_path_factory: pytest.TempPathFactory, fedsel: Any) -> None:
    place = tmp_path_factory.mktemp("two")
    for number in (3, 5):
        changes = {"rounds": 8, "engine": "vectorized", "target_rounds": 2, "clients_per_round": number}
        compare(load_scenario("smoke", changes), ["bsfl", "random"], seeds=[4, 5], folder=place / f"of-{number}")
    # A selector and a seed that only the second scenario has.
    compare(load_scenario("smoke", changes), ["oort"], seeds=[4, 5, 6], folder=place / "more")
    folders, out = [place / name for name in ("of-3", "of-5", "more")], place / "out"
    names = ["smoke clients_per_round=3", "smoke clients_per_round=5"]
    printed = fedsel("report", *folders, "--out", out)
    assert [f"scenario {name}\n" in printed for name in names] == [True, True]
    assert {path.name for path in out.iterdir()} == {"smoke-1", "smoke-2", "report.html"}
    with browser.open(out / "report.html", "#seed=5&axis=rounds") as opened:
        page = opened.page
        assert page.locator("select[name=scenario] option").all_inner_texts() == names
        assert {row["selector"] for row in opened.rows("jain")} == {"bsfl", "random"}
        opened.choose("scenario", names[1])
        assert {row["selector"] for row in opened.rows("jain")} == {"bsfl", "oort", "random"}
        # The other menus keep their values, and there is one element of each name.
        assert page.input_value("select[name=seed]") == "5"
        assert page.locator("#chart-jain").count() == page.locator("h1").count() == 1
        rounds = pd.read_parquet(place / "more" / "oort-seed5" / "rounds.parquet")
        own = of(opened.rows("accuracy"), selector="oort")
        np.testing.assert_allclose([row["x"] for row in own], rounds["round"], **CLOSE)
        np.testing.assert_allclose(
            [row["accuracy"] for row in own], rounds["accuracy"].rolling(2, min_periods=1).mean(), **CLOSE
        )
        opened.choose("seed", "6")
        with page.expect_download() as download:
            page.click("#chart-jain [data-save=csv]")
        assert set(pd.read_csv(download.value.path())["seed"]) == {6}
        address = page.evaluate("location.hash")
        opened.choose("scenario", names[0])
        # Seed 6 is not in the first scenario.
        assert page.input_value("select[name=seed]") == "all"
        page.click("#chart-jain summary")
        page.wait_for_selector("#chart-jain td")
        assert opened.faults == []
    with browser.open(out / "report.html", address) as opened:
        assert opened.page.input_value("select[name=scenario]") == names[1]
        assert {row["seed"] for row in opened.rows("jain")} == {"6"}
        # Pooled runs keep their regret, and their commands name where they are.
        assert len(opened.rows("regret")) == 8
        commands = opened.page.locator("pre", has_text="fedsel run").text_content().splitlines()
        assert all((out / line.removeprefix("fedsel run ")).is_file() for line in commands)
        assert len(commands) == 2 * 2 + 3
        assert opened.faults == []


def test_the_page_can_be_used_with_the_keyboard(browser: Browser, folder: Path) -> None:
    with browser.open(folder / "report.html") as opened:
        page = opened.page
        page.focus("select[name=seed]")
        page.evaluate("delete document.documentElement.dataset.drawn")
        page.keyboard.press("ArrowDown")
        opened.wait()
        assert page.evaluate("window.fedsel.state.seed") == "1"
        page.focus("#chart-jain summary")
        page.keyboard.press("Enter")
        page.wait_for_selector("#chart-jain td")


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1200, False)])
def test_axe_finds_nothing_serious(browser: Browser, folder: Path, width: int, dark: bool) -> None:
    with browser.open(folder / "report.html", width=width, height=800, dark=dark) as opened:
        opened.open_all()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.violations() == []


def test_without_the_packages_the_command_says_how_to_get_the_page(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document, "PACKAGES", ("altair", "no_such_package"))
    assert main(["report", str(folder), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "no report.html was written, because no_such_package is not installed" in told.err
    assert "pip install 'fedsel-flwr[report]'" in told.err
    assert (tmp_path / "comparison.png").exists()
    assert not (tmp_path / "report.html").exists()


def test_a_command_of_the_page_repeats_its_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedsel: Any
) -> None:
    command = "fedsel run bsfl-seed2/scenario.toml"
    assert f"{command}\n" in (folder / "report.html").read_text()
    monkeypatch.chdir(folder)
    fedsel(*command.split()[1:], "--quiet", "--runs-dir", tmp_path)
    (rounds,) = tmp_path.rglob("rounds.parquet")
    assert rounds.read_bytes() == (folder / "bsfl-seed2" / "rounds.parquet").read_bytes()
