"""Late clients, buffered rounds and the two clocks: what clients report, what the server times itself, and "auto"."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.report.run_folder import CLIENTS, ROUNDS, load_optional, read_history, read_journal, write_history
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.records import ClientRecord
from fedsel_flwr.rounds.replies import Reply, read_reply
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.selectors import Random, create
from fedsel_flwr.strategies import BSFL, CSUCB, CSUCBQ, SelectionStrategy
from fedsel_flwr.strategies.wrapping import grids
from tests.strategies.deployed import Deployment, Node, SuperLink
from tests.strategies.either_api import make, play
from tests.strategies.helpers import FakeProxy, fedavg, fleet


def _read(metrics: dict[str, float], observed: float | None, **settings: Any) -> Any:
    reply = Reply(arrays=[], num_examples=1, metrics=metrics, observed_s=observed)
    return read_reply(reply, Settings(**{"clock": "server", **settings}), client_id="7")


@pytest.mark.parametrize(
    ("claim", "slack", "expected"),
    [
        *[(claim, None, 2.0) for claim in (-1.0, -1e300, float("-inf"), float("nan"), 1e9)],  # no liar is better off
        (0.0, None, 1.8), (1.9, None, 1.9), (1.5, None, 1.8), (0.0, 0.5, 1.5), (0.0, 9.0, 0.0), (2.0, 0.0, 2.0),
    ],
)  # fmt: skip
def test_a_report_gains_no_more_than_the_slack(claim: float, slack: float | None, expected: float) -> None:
    """By default a tenth of the observed 2 s; what cannot be true earns the observed time."""
    result = _read({"latency_s": claim}, 2.0, clock_slack=slack)
    odd = not 0 <= claim <= 2
    assert (result.latency_s, result.completed) == (pytest.approx(expected), True)
    assert result.latency_source == ("observed" if odd else "reported" if claim == expected else "clipped")
    assert [one.split(":")[0] for one in result.problems] == ["latency"] * (result.latency_source != "reported")


@pytest.mark.parametrize(
    ("clock", "observed", "usable"),
    [
        ("server", 2.5, True), ("server", 2.0, True), ("server", 1.999, False), ("server", None, True),
        ("virtual", 1.0, True),
    ],
)  # fmt: skip
def test_nobody_computes_longer_than_the_server_waited(clock: Any, observed: float | None, usable: bool) -> None:
    result = _read({"compute_s": 2.0, "latency_s": 1.0}, observed, clock=clock)
    assert result.completed
    assert (result.values["compute"] == 2.0) == usable
    assert ("compute_s" in result.faulty_keys) != usable
    assert any(text.startswith("compute: ") for text in result.problems) != usable


def test_computing_and_transfer_are_told_apart(api: str) -> None:
    """What the client reports is computing, the rest of the round trip is transfer; nothing reported, nothing known."""
    delay = 0.3
    told = {"apart": {"compute_s": 0.125}, "silent": {}, "liar": {"compute_s": 300.0}, "own": {"compute_s": 0.125}}
    takes = {"delay": delay if api == "legacy" else 0.0, "latency": delay}
    proxies = [FakeProxy(name, name, number=k, extra=told[name], **takes) for k, name in enumerate(told)]
    for proxy in proxies[:3]:
        proxy.fault = "latency-missing"
    options: dict[str, Any] = {"clients_per_round": 4, "max_latency": 30.0, "clock": "server", "identity": "claim"}
    history = play(api, "CSUCB", proxies, 2, ready=dict.fromkeys(range(4), delay), seed=0, **options).strategy.history
    (first,) = [row for row in history.clients if row.client_id == "apart" and row.round == 1]
    assert (first.latency_source, first.transfer_s) == ("first", first.first_s - 0.125)
    assert first.latency_s <= delay < first.first_s
    rows = {row.client_id: row for row in history.clients if row.round == 2}  # each had its first time before
    assert all(row.completed for row in rows.values())
    apart = rows["apart"]
    assert (apart.latency_source, apart.compute_s) == ("observed", 0.125)
    assert apart.transfer_s == apart.latency_s - 0.125 > delay - 0.126
    for name in ("silent", "liar", "own"):  # a latency of the client's own was not observed
        assert math.isnan(rows[name].transfer_s), name
    liar = rows["liar"]
    assert math.isnan(liar.compute_s)
    assert liar.problem == f"compute: 300 s cannot be used, the server only waited {liar.latency_s:.6g} s"
    assert history.problem_counts()["compute"] == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.5),
        ({"latency_source": "reported"}, math.nan),
        ({"latency_source": "clipped"}, math.nan),
        ({"latency_source": "max_latency", "completed": False}, math.nan),
        ({"compute_s": math.nan}, math.nan),
        ({"compute_s": 9.0}, 0.0),  # latency_s was cut at max_latency
    ],
)
def test_the_transfer_of_a_record(changes: dict[str, Any], expected: float) -> None:
    row = ClientRecord(
        round=1, client_id="a", client=0, completed=True, problem="", latency_s=2.0, energy_j=1.0, download_s=math.nan,
        compute_s=0.5, upload_s=math.nan, train_loss=1.0, num_examples=3, latency_source="observed",
    )  # fmt: skip
    assert replace(row, **changes).transfer_s == pytest.approx(expected, nan_ok=True)


NEW = {"num_timeouts", "timed_out"}


def _play(api: str, timeout: float = 0.2, **options: Any) -> Any:
    """Four clients: an honest one, one that raises, one that says that it took too long, one that never answers."""
    proxies = fleet(4, "c")
    proxies[1].fault, proxies[3].fault = "raises", "straggler" if api == "legacy" else None
    proxies[2].latency = 99.0
    options = {"identity": "claim", "min_available": 4, **options}
    selector = Random(clients_per_round=4, seed=0)
    return play(api, selector, proxies, timeout=timeout, ready={3: 30.0}, **options).strategy


@pytest.mark.parametrize("clock", ["virtual", "server"])
def test_no_answer_in_time_is_a_timeout_and_an_exception_is_none(api: str, clock: str, aloud: Any) -> None:
    strategy = _play(api, clock=clock)
    (record,) = strategy.history.rounds
    rows = {row.client_id: row for row in strategy.history.clients}
    assert rows["c3"].problem == "no answer within 0.2 s"
    assert [client for client, row in rows.items() if row.timed_out] == ["c3"]
    late = clock == "virtual"  # the server's clock does not believe 99 s
    assert (record.num_selected, record.num_timeouts, record.num_completed) == (4, 1, 1 if late else 2)
    (told,) = [one.fedsel for one in aloud.records if hasattr(one, "fedsel")]
    assert (told["timeouts"], told["late"], told["failures"]) == (1, int(late), "exception:1")


def test_a_deadline_that_nobody_kept_is_a_timeout_on_the_servers_clock() -> None:
    strategy = _play("message", clock="server", round_deadline_s=0.3, timeout=5.0)
    (row,) = [row for row in strategy.history.clients if row.client_id == "c3"]
    assert row.problem == "late: no answer within round_deadline_s = 0.3 s"
    assert (row.timed_out, strategy.history.rounds[0].num_timeouts) == (True, 1)


def _old(value: Any) -> Any:
    """A state as a version wrote it that did not count timeouts."""
    return {key: _old(one) for key, one in value.items() if key not in NEW} if isinstance(value, dict) else value


def _told(history: History) -> list[Any]:
    return [(row.client_id, row.completed, row.problem, row.timed_out) for row in history.clients]


def test_histories_of_versions_that_did_not_count_them_can_be_read(tmp_path: Path) -> None:
    history = _play("legacy").history
    expected = [(*row[:3], False) for row in _told(history)]
    state = history.state_dict()
    loaded = History()
    loaded.load_state_dict({kind: [_old(one) for one in records] for kind, records in state.items()})
    assert (_told(loaded), loaded.rounds[0].num_timeouts) == (expected, 0)
    with pytest.raises(StateError, match=r"the history does not fit: .* 'problem'"):
        loaded.load_state_dict(state | {"clients": [{"round": 1}]})

    line = {"round": asdict(history.rounds[0]), "clients": [_old(asdict(row)) for row in history.clients]}
    (tmp_path / "journal.jsonl").write_text(json.dumps(_old(line)) + "\n")
    assert (_told(read_journal(tmp_path)), read_journal(tmp_path).rounds[0].num_timeouts) == (expected, 0)

    write_history(tmp_path, history)
    assert _told(read_history(tmp_path)) == _told(history)
    parquet = load_optional("pyarrow.parquet")
    for name in (ROUNDS, CLIENTS):
        table = parquet.read_table(tmp_path / name)
        parquet.write_table(table.drop_columns(sorted(NEW & {*table.schema.names})), tmp_path / name)
    assert _told(read_history(tmp_path)) == expected
    parquet.write_table(parquet.read_table(tmp_path / CLIENTS).drop_columns(["problem"]), tmp_path / CLIENTS)
    with pytest.raises(ParameterError, match="expected the columns of ClientRecord"):
        read_history(tmp_path)


@pytest.mark.parametrize(
    ("strategy", "parameter"), [(BSFL, "min_latency"), (CSUCB, "max_latency"), (CSUCBQ, "max_latency")]
)
def test_a_number_is_needed_on_the_virtual_clock_alone(strategy: Any, parameter: str) -> None:
    for api in ("legacy", "message"):
        made = make(api, strategy.__name__, clients_per_round=2, clock="server")
        assert (getattr(made.selector, parameter), made.core.settings.max_latency) == ("auto", 60.0)
    assert inspect.signature(strategy).parameters[parameter].default is None
    for params in ({}, {parameter: None}, {"clock": "virtual"}):
        with pytest.raises(ParameterError, match=rf'{strategy.__name__} needs {parameter} on the virtual .*"auto"'):
            strategy(clients_per_round=2, **params)
    assert getattr(strategy(clients_per_round=2, **{parameter: "auto"}).selector, parameter) == "auto"
    assert getattr(strategy(clients_per_round=2, clock="server", **{parameter: 7}).selector, parameter) == 7.0
    with pytest.raises(ParameterError, match=f"{parameter} must be a finite number above 0, got 0"):
        strategy(clients_per_round=2, clock="server", **{parameter: 0})


@pytest.mark.parametrize(
    ("strategy", "given", "expected"),
    [
        *[(cls, {"clock": "server", "longest_wait": 30}, 30.0) for cls in (CSUCB, CSUCBQ)],
        *[(cls, {"max_latency": 5.0}, 5.0) for cls in (CSUCB, CSUCBQ)],
        *[(cls, {"max_latency": "auto"}, 60.0) for cls in (CSUCB, CSUCBQ)],
        *[(cls, {"clock": "server", "longest_wait": 0}, "longest_wait must be a finite") for cls in (CSUCB, CSUCBQ)],
        *[(cls, {"max_latency": 5.0, "longest_wait": 30}, "max_latency is 30") for cls in (CSUCB, CSUCBQ)],
        (BSFL, {"clock": "server", "max_latency": 30.0}, 30.0),
    ],
)
def test_how_long_a_client_may_take_is_the_strategys(strategy: Any, given: dict[str, Any], expected: Any) -> None:
    """Auto scales rewards only."""
    if isinstance(expected, str):
        with pytest.raises(ParameterError, match=expected):
            strategy(clients_per_round=2, **given)
        return
    assert strategy(clients_per_round=2, **given).core.settings.max_latency == expected
    for options, own in ({"max_latency": 30.0}, 30.0), ({}, 60.0):
        selector = create("cs-ucb", clients_per_round=2, max_latency="auto")
        assert SelectionStrategy(selector, **options).core.settings.max_latency == own
    assert "longest_wait" not in inspect.signature(BSFL).parameters


def test_a_least_latency_above_the_longest_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    BSFL(clients_per_round=2, min_latency=100.0, max_latency=5.0, base=fedavg())
    assert "min_latency is 100 s, but max_latency is only 5 s" in caplog.text


# ---- buffered rounds of a deployment: a slow node holds nobody up, and nothing counts twice --------------------------


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "POLL_S", 0.01)


def deployment(seconds: list[list[float]], m: int = 2, **options: Any) -> Deployment:
    """Nodes that take so many seconds for each training; a list's last number counts for all later ones."""
    nodes = {2 + k: Node("message", {"name": f"site-{k}"}, works={"train": own}) for k, own in enumerate(seconds)}
    given = {"concurrency": len(seconds), **options}
    return Deployment("message", Random(clients_per_round=m, seed=1), nodes, grid=SuperLink, timeout=9.0, **given)


def test_steps_go_on_while_a_slow_node_works() -> None:
    """Three nodes take .02 s, one .6 s: it arrives once, with the steps that it missed, and its update counts."""
    played = deployment([[0.02], [0.02], [0.02], [0.6]]).play(30)
    history = played.strategy.history
    slow = [row for row in history.clients if row.client_id == "site-3"]
    assert all(row.completed for row in history.clients)
    assert len(history.rounds) == 30
    assert {record.num_selected for record in history.rounds} == {2}
    assert slow
    assert slow[0].staleness >= 5
    assert slow[0].first_s >= 0.6
    # Every answer counts once; at most three are still at work at the end.
    assert 0 <= sum(played.asked("train")) - len(history.clients) <= 3
    times = [record.simulated_s for record in history.rounds]
    assert times == sorted(times)


def test_answers_beyond_the_buffer_stay_for_the_next_step() -> None:
    """All four answer at once, two a step: none is asked again before its answer was used."""
    history = deployment([[0.0]] * 4).play(4).strategy.history
    assert [record.num_selected for record in history.rounds] == [2] * 4
    assert [row.staleness for row in history.clients] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert set(Counter(row.client_id for row in history.clients).values()) == {2}


def test_a_node_that_hangs_is_a_failure_after_max_latency() -> None:
    played = deployment([[0.01], [0.01], [0.01], [float("inf")]], m=1, concurrency=4, max_latency=0.3).play(60)
    (row,) = [row for row in played.strategy.history.clients if row.client_id == "site-3"]
    assert (row.completed, row.timed_out, row.problem) == (False, True, "no answer within 0.3 s")
    assert row.staleness > 3
    assert all(row.completed for row in played.strategy.history.clients if row.client_id != "site-3")


def test_an_error_frees_its_place() -> None:
    played = deployment([[0.01]] * 3, m=1, concurrency=3)
    played.grid.nodes[3].fails = True
    history = played.play(9).strategy.history
    assert len(history.rounds) == 9
    assert {row.client_id for row in history.clients if not row.completed} == {"site-1"}


def test_only_free_nodes_evaluate() -> None:
    played = deployment([[0.01], [0.01], [0.01], [0.5]], evaluating=1.0).play(3)
    (first, *_) = [row.round for row in played.strategy.history.clients if row.client_id == "site-3"] or [99]
    assert first > 3
    assert played.grid.nodes[5].asked("evaluate") == 0
    assert all(played.grid.nodes[node].asked("evaluate") for node in (2, 3, 4))


def test_in_a_second_run_the_clients_of_the_first_are_free() -> None:
    """The replies to the first run never come. Two clients were at work at its end, and are asked again."""
    history = deployment([[0.02]] * 4).play(6).play(6).strategy.history
    assert [record.round for record in history.rounds] == [*range(1, 13)]
    assert {record.num_selected for record in history.rounds} == {2}
    assert {row.client_id for row in history.clients if row.round > 6} == {f"site-{k}" for k in range(4)}
    assert max(row.staleness for row in history.clients if row.round == 7) == 0
