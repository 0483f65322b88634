"""Advice on fleets with known answers: the ceiling, the words, the recommended selector, and the command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr import report
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.report.advice import SelectorAdvice, _conclude, advise
from fedsel_flwr.report.choices import Fleet
from fedsel_flwr.report.components import Interval
from fedsel_flwr.report.latencies import SELECTORS, Latencies
from fedsel_flwr.theory import sorted_groups
from tests.report.synthetic import fleet, history, latencies


def true_seconds(own: Fleet, m: int) -> tuple[float, float]:
    """Mean seconds per round of random selection and of sorted groups, from draws of the true fleet."""
    number = own.log_means.size
    drawn = np.random.default_rng(0).standard_normal((4000, number))
    seconds = np.minimum(np.exp(own.log_means + own.noise * drawn), own.max_latency)
    best = np.mean([seconds[:, group].max(axis=1).mean() for group in sorted_groups(own.log_means, m)])
    cohorts = np.random.default_rng(1).permuted(np.tile(np.arange(number), (4000, 1)), axis=1)[:, :m]
    return float(np.take_along_axis(seconds, cohorts, axis=1).max(axis=1).mean()), float(best)


def check_ceiling(own: Fleet, rows: Latencies, is_large: bool = True) -> None:
    """The true values come from draws of the true fleet, not from the code under test."""
    found, (usual, best) = advise(rows, rounds=20), true_seconds(own, 10)
    assert found.random_s.estimate == pytest.approx(usual, rel=0.1)
    assert found.sorted_s.estimate == pytest.approx(best, rel=0.1)
    if is_large:
        assert found.ceiling.estimate == pytest.approx(1 - best / usual, rel=0.1)


@pytest.mark.parametrize("selector", ["random", "cs-ucb"])
@pytest.mark.parametrize(("spread", "noise", "limit"), [(0.8, 0.4, 25.0), (0.4, 0.2, math.inf), (1.2, 0.1, 60.0)])
def test_ceiling_within_a_tenth(selector: str, spread: float, noise: float, limit: float) -> None:
    auto = {"max_latency": "auto", "exploration": 0.1} if selector == "cs-ucb" else {}
    own = fleet(100, spread, noise, limit)
    check_ceiling(own, history(own, selector, 10, 100, **auto))


@pytest.mark.parametrize(
    ("spread", "noise", "rounds", "limit"),
    [(0.1, 0.4, 40, math.inf), (0.5, 0.4, 40, math.inf), (0.5, 0.4, 200, 12.6), (0.5, 0.4, 200, 20.6)],
    ids=["2 rows each, spread 0.1", "2 rows each, spread 0.5", "36 % cut", "13 % cut"],
)
def test_sparse_and_cut_off_histories(spread: float, noise: float, rounds: int, limit: float) -> None:
    """Two rows for each of 200 clients, or many cut-off rows: the residuals say little about the noise's shape."""
    own = fleet(200, spread, noise, limit)
    # Round-robin selection gives every client the same number of rows. With two rows each, chance in the rows changes a
    # small ceiling by more than a tenth.
    check_ceiling(own, history(own, "round-robin", 10, rounds, seed=3), is_large=spread > 0.3)


def test_a_selector_saves_what_it_saves_on_the_true_fleet() -> None:
    own = fleet(100, 0.6, 0.2)
    found = advise(history(own, "random", 10, 100), rounds=100)
    rounds = history(own, "bsfl", 10, 100, seed=7, min_latency="auto").seconds.reshape(100, 10).max(axis=1)
    usual = history(own, "random", 10, 400, seed=8).seconds.reshape(400, 10).max(axis=1).mean()
    bsfl = found.selectors[0]
    assert (bsfl.selector, bsfl.word, found.preferred, found.word) == ("bsfl", "gain", "bsfl", "gain")
    assert bsfl.final.estimate == pytest.approx(1 - rounds.mean() / usual, abs=0.04)
    assert 0.3 < bsfl.ceiling_share < 1.0
    assert sorted(bsfl.saving) == [50, 100]
    assert found.sentence.startswith("Try bsfl: it saves ")
    fedcs = next(one for one in found.selectors if one.selector == "fedcs")
    assert fedcs.final.estimate > bsfl.final.estimate
    assert (fedcs.even, bsfl.even) == (False, True)
    assert fedcs.jain < 0.8 * found.random_jain


def test_without_spread_no_selector_gains() -> None:
    found = advise(history(fleet(100, 1e-9, 0.3), "random", 10, 200), rounds=300)
    assert (found.word, found.preferred) == ("no gain", None)
    # FedCS alone keeps the clients that were fastest by chance, and may save 5.3 %; it is never recommended.
    assert all(one.word == "no gain" for one in found.selectors if one.selector != "fedcs")
    assert found.sentence.startswith("No gain: no selector that may be recommended saves 5 % or more")
    assert found.ceiling.high < 0.1
    assert "no gain" not in " ".join(advise(history(fleet(100, 0.5, 0.3), "random", 5, 40), rounds=50).lines()).lower()


def test_a_short_history_gives_wide_intervals() -> None:
    own = fleet(30, 0.3, 0.8)
    short, long = (advise(history(own, "random", 3, rounds), rounds=20) for rounds in (12, 400))
    width = [one.ceiling.high - one.ceiling.low for one in (short, long)]
    assert width[0] > 2 * width[1]


def of(name: str, low: float, high: float, even: bool = True, probes: bool = False) -> SelectorAdvice:
    word = "no gain" if high < 0.05 else "gain" if low >= 0.05 else "not settled"
    saving = {9: Interval(estimate=(low + high) / 2, low=low, high=high)}
    given = {"even": even, "probes": probes, "word": word}
    return SelectorAdvice(selector=name, saving=saving, ceiling_share=1.0, jain=0.5, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "preferred", "word", "begins"),
    [
        ([of("a", 0.1, 0.2), of("b", 0.2, 0.3)], "b", "gain", "Try b: it saves 25 % (20 to 30 %) of random"),
        ([of("a", 0.1, 0.2), of("b", 0.4, 0.5, even=False)], "a", "gain", "Try a: .* b saves more, 45 % .* fast clie"),
        ([of("a", 0.1, 0.2), of("b", 0.2, 0.3, probes=True)], "a", "gain", "Try a"),
        ([of("a", -0.1, 0.04), of("b", 0.4, 0.5, even=False)], None, "gain", "The largest saving is that of b: 45 %"),
        ([of("a", 0.1, 0.2, probes=True)], None, "gain", "The largest saving .* does not contain the time of pr"),
        ([of("a", 0.1, 0.2)], "a", "gain", "Try a: [^:]*$"),
        ([of("a", -0.1, 0.04), of("b", 0.01, 0.04)], None, "no gain", "No gain: .* In seconds per round, random is as"),
        ([of("a", -0.1, 0.04), of("b", -0.1, 0.2)], None, "not settled", "Not settled: the saving of b over 9 round"),
        ([of("a", -0.1, 0.04), of("b", -0.1, 0.3, even=False)], None, "no gain", "No gain"),
        ([of("a", 0.01, 0.41)], None, "not settled", "Probably a: it saves 21 % .* A longer history, or a "),
        ([of("a", 0.1, 0.2), of("fedcs", 0.5, 0.6, even=False)], "a", "gain", "Try a: .* Do not use fedcs with this"),
        ([of("a", 0.0, 0.04), of("fedcs", 0.5, 0.6, even=False)], None, "no gain", "No gain: .* Do not use fedcs"),
        ([of("a", 0.0, 0.04), of("fedcs", -0.14, 0.34, even=False)], None, "no gain", "No gain: [^:]*$"),
    ],
)  # fmt: skip
def test_words(found: list[SelectorAdvice], preferred: str | None, word: str, begins: str) -> None:
    name, told, sentence = _conclude(found, 9, 0.5)
    assert (name, told) == (preferred, word)
    assert re.match(begins.replace("(", r"\(").replace(")", r"\)"), sentence), sentence
    assert ("no gain" in sentence.lower()) == (word == "no gain")


def test_nothing_to_choose() -> None:
    rows = history(fleet(10, 0.5, 0.2), "random", 3, 20)
    with pytest.raises(ParameterError, match=r"a round selects 10 of 10 clients.*--clients-per-round"):
        advise(replace(rows, clients_per_round=10))
    with pytest.raises(ParameterError, match="rounds"):
        advise(rows, rounds=0)
    with pytest.raises(ParameterError, match="at least two clients need two measured rows"):
        advise(latencies([0, 1, 2], [1, 2, 3]))


def test_identical_latencies_are_a_fleet_without_gain() -> None:
    found = advise(latencies([0, 0, 1, 1, 2, 2], [5.0] * 6), rounds=5)
    assert (found.word, found.spread.estimate) == ("no gain", 0.0)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = history(fleet(60, 0.6, 0.2), "random", 6, 60)
    path = tmp_path / "history.csv"
    lines = [f"phone-{k},{seconds:.3f}" for k, seconds in zip(rows.client, rows.seconds, strict=True)]
    path.write_text("\n".join(["client,seconds", *lines]) + "\n")
    return path


def test_the_command(table: Path, fedsel: Any, refused: Any) -> None:
    text = fedsel("advise", table, "--rounds", 60)
    assert "60 clients, 3 per round; 360 latencies measured, 0 cut off\nOnly the 60 clients with a row count" in text
    assert "No latency counts as cut off (set --max-latency)." in text
    assert all(f"\n{name}" in text for name in SELECTORS)
    facts = json.loads(fedsel("advise", table, "--rounds", 60, "--json"))
    assert (facts["clients_per_round"], facts["max_latency"]) == (3, None)
    assert facts["spread"]["estimate"] == pytest.approx(0.6, rel=0.1)
    assert [one["selector"] for one in facts["selectors"]] == list(SELECTORS)
    assert list(facts["selectors"][0]["saving"]) == ["50", "60"]
    assert facts == report.advise(table, rounds=60).facts()
    text = fedsel("advise", table, "--clients-per-round", 6, "--max-latency", 15, "--rounds", 4, "--seed", 3)
    assert "60 clients, 6 per round;" in text
    assert "cut off at 15 s" in text
    text = fedsel("advise", table, "--clients", 100, "--rounds", 4)
    assert "100 clients, 5 per round;" in text
    assert "Only the" not in text
    assert "has rows of 60 clients, but --clients is 59. Give the number" in refused("advise", table, "--clients", 59)
