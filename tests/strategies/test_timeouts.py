"""Clients of whom no answer comes in time are counted apart from those that fail, in both of Flower's APIs."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedsel_flwr.errors import ParameterError, StateError
from fedsel_flwr.report.run_folder import CLIENTS, ROUNDS, load_optional, read_history, read_journal, write_history
from fedsel_flwr.rounds.history import History
from fedsel_flwr.selectors import Random
from fedsel_flwr.strategies import SelectionStrategy as LegacyStrategy
from fedsel_flwr.strategies.message import SelectionStrategy as MessageStrategy
from tests.strategies.helpers import FakeProxy, Federation, fedavg
from tests.strategies.message.helpers import FakeGrid, FakeNode, node_id, play

NEW = {"num_timeouts", "timed_out"}


def _play(api: str, rounds: int = 1, timeout: float = 0.2, **options: Any) -> Any:
    """Four clients: an honest one, one that raises, one that says that it took too long, one that never answers."""
    options = {"identity": "claim", "max_latency": 9.0, "min_available": 4, **options}
    faults = [None, "raises", None, "straggler"]
    proxies = [FakeProxy(f"n{k}", f"c{k}", number=k, fault=fault) for k, fault in enumerate(faults)]
    proxies[2].latency = 99.0
    selector = Random(clients_per_round=4, seed=0)
    if api == "legacy":
        strategy: Any = LegacyStrategy(selector, fedavg(), **options)
        Federation(strategy, proxies, timeout=timeout).play(rounds)
        return strategy
    strategy = MessageStrategy(selector, **options)
    proxies[3].fault = None
    nodes = {node_id(k): FakeNode(proxies[k], ready=30.0 if k == 3 else 0.0) for k in range(4)}
    play(strategy, FakeGrid(nodes), rounds, timeout=timeout)
    return strategy


@pytest.mark.parametrize("api", ["legacy", "message"])
@pytest.mark.parametrize("clock", ["virtual", "server"])
def test_no_answer_in_time_is_a_timeout_and_an_exception_is_none(
    api: str, clock: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="fedsel_flwr"):
        strategy = _play(api, clock=clock)
    (record,) = strategy.history.rounds
    rows = {row.client_id: row for row in strategy.history.clients}
    assert rows["c3"].problem == "no answer within 0.2 s"
    assert [client for client, row in rows.items() if row.timed_out] == ["c3"]
    late = clock == "virtual"  # the server's clock does not believe 99 s
    assert (record.num_selected, record.num_timeouts, record.num_completed) == (4, 1, 1 if late else 2)
    (told,) = [one.fedsel for one in caplog.records if hasattr(one, "fedsel")]
    assert (told["timeouts"], told["late"], told["failures"]) == (1, int(late), "exception:1")


def test_a_deadline_that_nobody_kept_is_a_timeout_on_the_servers_clock_and_late_in_a_simulation() -> None:
    strategy = _play("message", clock="server", round_deadline_s=0.3, timeout=5.0)
    rows = {row.client_id: row for row in strategy.history.clients}
    assert rows["c3"].problem == "late: no answer within round_deadline_s = 0.3 s"
    assert (rows["c3"].timed_out, strategy.history.rounds[0].num_timeouts) == (True, 1)


def _old(value: Any) -> Any:
    """A state as a version wrote it that did not count timeouts."""
    return {key: _old(one) for key, one in value.items() if key not in NEW} if isinstance(value, dict) else value


def _told(history: History) -> list[Any]:
    return [(row.client_id, row.completed, row.problem, row.timed_out) for row in history.clients]


def test_histories_of_versions_that_did_not_count_them_can_be_read(tmp_path: Path) -> None:
    history = _play("legacy", rounds=1).history
    expected = [(*row[:3], False) for row in _told(history)]
    state = history.state_dict()
    assert _old(state)["rounds"].keys() == state["rounds"].keys() - NEW
    loaded = History()
    loaded.load_state_dict(_old(state))
    assert (_told(loaded), loaded.rounds[0].num_timeouts) == (expected, 0)
    with pytest.raises(StateError, match=r"missing \['problem'\]"):
        loaded.load_state_dict(state | {"clients": {k: v for k, v in state["clients"].items() if k != "problem"}})

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
    with pytest.raises(ParameterError, match="does not hold the columns of ClientRecord"):
        read_history(tmp_path)
