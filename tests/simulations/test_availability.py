"""Who is there in a round: the draws, the trace files, and what a strategy makes of them in both APIs."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import create
from fedsel_flwr.simulations.worlds.availability import BernoulliAvailability, TraceAvailability, find_trace
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies import helpers as legacy
from tests.strategies.message import helpers as message

pytestmark = pytest.mark.timeout(30)


# ---- Bernoulli ----------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_client_and_round_only() -> None:
    one, other = BernoulliAvailability(0.5, seed=3), BernoulliAvailability(0.5, seed=3)
    cells = [(k, r) for k in range(20) for r in range(1, 21)]
    forward = {cell: one(str(cell[0]), cell[1], 0.0) for cell in cells}
    np.random.default_rng(0).shuffle(cells)
    np.random.seed(5)  # noqa: NPY002 - the global state must not matter
    backward = {(k, r): other(str(k), r, 1e6 * r) for k, r in cells}
    assert forward == backward
    assert forward != {(k, r): BernoulliAvailability(0.5, seed=4)(str(k), r, 0.0) for k, r in cells}


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_frequency_is_the_probability_by_client_and_by_round(probability: float) -> None:
    model = BernoulliAvailability(probability, seed=1)
    drawn = np.array([[model(str(k), r, 0.0) for r in range(1, 201)] for k in range(40)], dtype=float)
    error = math.sqrt(probability * (1 - probability))
    assert abs(drawn.mean() - probability) < 4 * error / math.sqrt(drawn.size)
    assert np.abs(drawn.mean(axis=0) - probability).max() < 4.5 * error / math.sqrt(40)
    assert np.abs(drawn.mean(axis=1) - probability).max() < 4.5 * error / math.sqrt(200)
    centred = drawn - probability
    neighbours = (centred[:, 1:] * centred[:, :-1]).mean() / error**2  # no memory from round to round
    assert abs(neighbours) < 4 / math.sqrt(drawn.size)
    neighbours = (centred[1:] * centred[:-1]).mean() / error**2
    assert abs(neighbours) < 4 / math.sqrt(drawn.size)


def test_probability_one_is_everybody() -> None:
    model = BernoulliAvailability(1.0, seed=1)
    assert all(model(str(k), r, 0.0) for k in range(50) for r in range(1, 20))


@pytest.mark.parametrize(
    "client_id", ["phone-7", "-3", str(2**32), str(2**63 + 5), "9" * 5000, "", "1.0", "1_0", " 1", "+1", "\u0663"]
)
def test_an_id_that_is_no_partition_id_is_named(client_id: str) -> None:
    said = f"a whole number below 2**32, but a client calls itself {client_id!r}"
    with pytest.raises(ParameterError, match=re.escape(said)):
        BernoulliAvailability(0.5, seed=1)(client_id, 1, 0.0)


def test_the_largest_partition_id_can_be_drawn() -> None:
    assert BernoulliAvailability(1.0, seed=1)(str(2**32 - 1), 1, 0.0)


def test_many_at_once_are_the_single_answers() -> None:
    model, ids = BernoulliAvailability(0.5, seed=3), [str(k) for k in (7, 0, 4_000_000_000, 12, 3)]
    for number in range(1, 21):
        together = model.at(ids, number, 2.5)
        assert together.dtype == np.bool_
        assert together.tolist() == [model(client_id, number, 2.5) for client_id in ids]
    assert model.at([], 1, 0.0).shape == (0,)
    with pytest.raises(ParameterError, match="a client calls itself 'phone-7'"):
        model.at(["1", "phone-7"], 1, 0.0)


# ---- traces -------------------------------------------------------------------------------------------------------


def trace(folder: Path, text: str) -> TraceAvailability:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return TraceAvailability(path)


def test_rounds_in_any_order_and_from_then_on(tmp_path: Path) -> None:
    there = trace(tmp_path, "round,client,state\n10,0,up\n1,0,down\n\n3,phone-7,down\n20,0,down\n")
    assert [there("0", r, 0.0) for r in (1, 2, 9, 10, 19, 20, 500)] == [False, False, False, True, True, False, False]
    assert [there("phone-7", r, 0.0) for r in (1, 2, 3, 4)] == [True, True, False, False]  # up before its first row
    assert all(there("unknown", r, 0.0) for r in (1, 100))


def test_many_at_once_are_the_single_answers_of_a_trace(tmp_path: Path) -> None:
    ids = ["2", "unknown", "0", "phone-7"]
    by_round = trace(tmp_path, "round,client,state\n10,0,up\n1,0,down\n3,phone-7,down\n")
    by_second = trace(tmp_path, "second,client,state\n2.5,0,down\n4,0,up\n3,2,down\n")
    answers = set()
    for there in (by_round, by_second):
        for number, seconds in [(1, 0.0), (3, 2.5), (3, 3.0), (9, 3.9), (10, 4.0)]:
            together = there.at(ids, number, seconds)
            assert together.dtype == np.bool_
            assert together.tolist() == [there(client_id, number, seconds) for client_id in ids]
            answers.add(tuple(together.tolist()))
    assert len(answers) == 6
    assert by_round.at([], 1, 0.0).shape == (0,)


def test_seconds_go_by_the_simulated_clock(tmp_path: Path) -> None:
    there = trace(tmp_path, "second, client ,state\n 2.5 , 1 , down \n4,1,up\r\n")
    assert [there("1", 1, s) for s in (0.0, 2.4999, 2.5, 3.9, 4.0, 1e9)] == [True, True, False, False, True, True]
    assert [there("1", r, 0.0) for r in (3, 5)] == [True, True]  # rounds do not matter


def test_seconds_per_round_map_rounds_onto_a_trace(tmp_path: Path) -> None:
    """Away from 4,000 s to 5,999 s: round 3 begins at (3 - 1) x 2,000 s, round 4 at 6,000 s."""
    trace(tmp_path, "second,client,state\n4000,1,down\n5999,1,up\n")
    there = TraceAvailability(tmp_path / "trace.csv", seconds_per_round=2000.0)
    assert [there("1", r, 1e9) for r in range(1, 6)] == [True, True, False, True, True]
    assert [there.at(["0", "1"], r, 4500.0).tolist() for r in (2, 3)] == [[True, True], [True, False]]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf])
def test_seconds_per_round_must_be_seconds(seconds: float, tmp_path: Path) -> None:
    trace(tmp_path, "second,client,state\n")
    with pytest.raises(ParameterError, match="seconds_per_round must be a finite number above 0"):
        TraceAvailability(tmp_path / "trace.csv", seconds_per_round=seconds)


def test_a_trace_by_rounds_has_no_seconds_per_round(tmp_path: Path) -> None:
    trace(tmp_path, "round,client,state\n")
    with pytest.raises(ParameterError, match=r"trace\.csv' counts in rounds.*seconds_per_round"):
        TraceAvailability(tmp_path / "trace.csv", seconds_per_round=2000.0)


def test_a_trace_is_found_here_or_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, data = tmp_path / "here", tmp_path / "data"
    for folder in (here, data):
        folder.mkdir()
    (data / "t.csv").touch()
    monkeypatch.chdir(here)
    monkeypatch.delenv("FEDSEL_DATA", raising=False)
    assert find_trace("t.csv", str(data)) == data / "t.csv"
    monkeypatch.setenv("FEDSEL_DATA", str(data))
    assert find_trace("t.csv", None) == data / "t.csv"
    (here / "t.csv").touch()
    assert find_trace("t.csv", None).resolve() == here / "t.csv"
    assert find_trace(str(data / "t.csv"), None) == data / "t.csv"
    said = r"trace 'u\.csv': it is neither in the working directory nor in the data folder .*data\. .*--data-dir or "
    with pytest.raises(ParameterError, match=said):
        find_trace("u.csv", None)
    with pytest.raises(ParameterError, match=r"nowhere .* does not exist"):
        find_trace("u.csv", str(tmp_path / "nowhere"))


def real_trace(shared_data: Path) -> Path:
    path = shared_data / "phones" / "availability.csv"
    if not path.exists():
        pytest.skip(f"no trace of real phones: {path} is not there; set FEDSEL_DATA to a folder that has it")
    return path


def test_the_trace_of_704_phones_as_it_is(shared_data: Path) -> None:
    """Every phone has a row at second 0, so none is there only for want of one; a week of rounds of 2,000 s."""
    path = real_trace(shared_data)
    tracemalloc.start()
    there = TraceAvailability(path, seconds_per_round=2000.0)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20e6  # about 4 MB
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    first: dict[str, str] = {}
    for second, client, state in rows:
        if float(second) == 0:
            first[client] = state
    assert set(first) == {str(k) for k in range(704)}
    ids = [str(k) for k in range(704)]
    present = np.array([there.at(ids, r, 0.0) for r in range(1, 303)])
    assert present[0].tolist() == [first[client] == "up" for client in ids]
    # what the file's own reading gives at the beginning of round 150, row by row
    state = dict(first)
    for second, client, now in sorted(rows, key=lambda row: float(row[0])):
        if float(second) <= 149 * 2000:
            state[client] = now
    assert present[149].tolist() == [state[client] == "up" for client in ids]
    counts = present.sum(axis=1)
    assert counts.min() > 20
    assert counts.max() < 120
    assert 0.03 < np.median(present.mean(axis=0)) < 0.08  # the median phone is there 5.5 % of the time


def test_a_client_that_is_down_from_the_start(tmp_path: Path) -> None:
    there = trace(tmp_path, "second,client,state\n0,4,down\n")
    assert not there("4", 1, 0.0)


def test_a_file_with_a_byte_order_mark_as_spreadsheets_write_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbfround,client,state\r\n1,0,down\r\n")
    assert not TraceAvailability(path)("0", 1, 0.0)


def test_only_a_header_is_everybody(tmp_path: Path) -> None:
    assert trace(tmp_path, "round,client,state\n")("0", 1, 0.0)


@pytest.mark.parametrize(
    "row",
    ["x,0,down", "1,0", "1,0,down,more", "1,,down", "1,0,Down", "-1,0,down", "nan,0,down", "inf,0,down", "# a comment"],
)
def test_a_wrong_row_is_named_with_its_line(row: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"trace\.csv.*line 4.*'up' or 'down'"):
        trace(tmp_path, f"round,client,state\n1,0,down\n\n{row}\n2,0,up\n")


@pytest.mark.parametrize(
    "text", ["", "\n", "client,round,state\n", "round,client\n", "round,client,state,x\n", "hour,client,state\n"]
)
def test_a_wrong_header_says_what_it_must_be(text: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="first line must be 'round,client,state'"):
        trace(tmp_path, text)


def test_files_that_cannot_be_read_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"cannot read.*nowhere\.csv"):
        TraceAvailability(tmp_path / "nowhere.csv")
    with pytest.raises(ParameterError, match="cannot read"):
        TraceAvailability(tmp_path)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParameterError, match="cannot read"):
        TraceAvailability(tmp_path / "bytes.csv")
    (tmp_path / "huge.csv").write_text("round,client,state\n1," + "0" * 200_000 + ",down\n")
    with pytest.raises(ParameterError, match="cannot read"):
        TraceAvailability(tmp_path / "huge.csv")


# ---- through the strategies ---------------------------------------------------------------------------------------

Seen = list[tuple[str, int, float]]


def _legacy(selector: Any, rounds: int, **options: Any) -> tuple[Any, list[list[str]]]:
    strategy = LegacyStrategy(selector, legacy.fedavg(), max_latency=9.0, **options)
    proxies = legacy.fleet(6)
    legacy.run_rounds(strategy, proxies, rounds)
    return strategy, [[str(p.client_id) for p in proxies if r in p.fit_rounds] for r in range(1, rounds + 1)]


def _message(selector: Any, rounds: int, **options: Any) -> tuple[Any, list[list[str]]]:
    strategy = MessageStrategy(selector, message.fedavg(), max_latency=9.0, **options)
    grid = message.FakeGrid(message.crowd(6))
    message.play(strategy, grid, rounds)
    proxies = [node.proxy for node in grid.nodes.values()]
    return strategy, [[str(p.client_id) for p in proxies if r in p.fit_rounds] for r in range(1, rounds + 1)]


APIS = pytest.mark.parametrize("run", [_legacy, _message], ids=["legacy", "message"])
Run = Callable[..., tuple[Any, list[list[str]]]]


def test_a_client_whose_id_is_no_partition_id_ends_the_run_with_the_reason() -> None:
    model = BernoulliAvailability(0.5, seed=1)
    options: dict[str, Any] = {"availability": model, "max_latency": 9.0, "min_available": 1}
    strategy = LegacyStrategy(create("random", clients_per_round=1, seed=0), legacy.fedavg(), **options)
    with pytest.raises(ParameterError, match=r"a client calls itself 'phone-7'"):
        legacy.run_rounds(strategy, [legacy.FakeProxy("node", "phone-7")], 1)
    strategy = MessageStrategy(create("random", clients_per_round=1, seed=0), message.fedavg(), **options)
    with pytest.raises(ParameterError, match=r"a client calls itself 'phone-0'"):
        message.play(strategy, message.FakeGrid(message.crowd(1, prefix="phone-")), 1)


@APIS
@pytest.mark.parametrize("name", ["random", "cs-ucb", "round-robin"])
def test_an_unavailable_client_is_not_offered(run: Run, name: str) -> None:
    def there(client_id: str, server_round: int, seconds: float) -> bool:
        return (int(client_id) + server_round) % 3 != 0

    params = {"max_latency": 9.0} if name == "cs-ucb" else {}
    strategy, trained = run(create(name, clients_per_round=3, seed=0, **params), 6, availability=there)
    assert [r.num_available for r in strategy.history.rounds] == [4] * 6
    for server_round, cohort in enumerate(trained, start=1):
        assert len(cohort) == 3
        assert all(there(client_id, server_round, 0.0) for client_id in cohort)
    assert {client_id for cohort in trained for client_id in cohort} == set("012345")


@APIS
def test_it_is_asked_with_client_id_absolute_round_and_the_time_at_which_the_round_begins(run: Run) -> None:
    seen: Seen = []
    strategy, _ = run(
        create("random", clients_per_round=2, seed=0), 3, availability=lambda *a: bool(seen.append(a)) or True
    )
    starts = [0.0, *(r.simulated_s for r in strategy.history.rounds)][:3]
    assert set(seen) == {(str(k), r, starts[r - 1]) for k in range(6) for r in (1, 2, 3)}


@APIS
def test_a_round_with_fewer_than_the_cohort_trains_those_there_are(run: Run) -> None:
    _, trained = run(
        create("random", clients_per_round=3, seed=0), 3, availability=lambda c, r, s: r != 2 or c in ("1", "4")
    )
    assert sorted(trained[1]) == ["1", "4"]
    assert [len(cohort) for cohort in trained] == [3, 2, 3]


@APIS
@pytest.mark.parametrize("name", ["random", "cs-ucb", "cs-ucb-q", "bsfl", "local-accuracy"])
def test_a_round_with_nobody_there_is_recorded_and_the_run_goes_on(run: Run, name: str) -> None:
    params = {"cs-ucb": {"max_latency": 9.0}, "cs-ucb-q": {"max_latency": 9.0}, "bsfl": {"min_latency": 0.1}}
    selector = create(name, clients_per_round=3, seed=0, **params.get(name, {}))
    told: list[int] = []
    strategy, trained = run(
        selector, 5, availability=lambda c, r, s: r not in (1, 3, 4), on_round=lambda record: told.append(record.round)
    )
    rounds = strategy.history.rounds
    assert [r.round for r in rounds] == [1, 2, 3, 4, 5]
    assert [r.num_available for r in rounds] == [0, 6, 0, 0, 6]
    assert [r.num_selected for r in rounds] == [0, 3, 0, 0, 3]
    assert [len(cohort) for cohort in trained] == [0, 3, 0, 0, 3]
    for empty in (rounds[0], rounds[2], rounds[3]):
        assert (empty.round_s, empty.energy_j, empty.probe_s, empty.probe_j) == (0.0, 0.0, 0.0, 0.0)
    assert rounds[3].simulated_s == rounds[1].simulated_s > 0
    assert selector.round == 5
    assert told == [1, 2, 3, 4, 5]


@APIS
def test_a_trace_in_seconds_moves_with_the_simulated_clock(run: Run, tmp_path: Path) -> None:
    """Rounds of everybody take 1.125 s (client 5); client 5 is away from 2 s to 4 s."""
    there = trace(tmp_path, "second,client,state\n2,5,down\n4,5,up\n")
    strategy, trained = run(create("random", clients_per_round=6, seed=0), 6, availability=there)
    # starts 0, 1.125 | 2.25 (without 5: 1 s a round), 3.25 | 4.25
    assert [r.round_s for r in strategy.history.rounds] == [1.125, 1.125, 1.0, 1.0, 1.125, 1.125]
    assert ["5" in cohort for cohort in trained] == [True, True, False, False, True, True]


@APIS
def test_the_same_bernoulli_draws_give_the_same_rounds(run: Run) -> None:
    model = BernoulliAvailability(0.6, seed=2)
    strategy, trained = run(create("random", clients_per_round=6, seed=0), 8, availability=model)
    expected = [[str(k) for k in range(6) if model(str(k), r, 0.0)] for r in range(1, 9)]
    assert [sorted(cohort) for cohort in trained] == expected
    assert len({tuple(e) for e in expected}) > 1
    assert [r.num_available for r in strategy.history.rounds] == [len(e) for e in expected]


def test_no_trace_and_a_folder_are_told_apart_from_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"needs availability\.trace, the path of a CSV file"):
        find_trace("", None)
    with pytest.raises(ParameterError, match="is a folder"):
        find_trace(str(tmp_path), None)
