"""The roll call in both of Flower's APIs: who is asked, how many at once, and who does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.superlink import grid as superlink

from fedsel_flwr.rounds.roll_call import NO_PROPERTIES, RollCall
from fedsel_flwr.selectors import CSUCBQ
from fedsel_flwr.strategies.wrapping import legacy_transport as legacy
from fedsel_flwr.strategies.wrapping.grids import FIRST_WINDOW, WINDOW, is_simulation
from fedsel_flwr.strategies.wrapping.message_transport import MessageTransport
from fedsel_flwr.strategies.wrapping.waiting import Startup
from tests.strategies import deployed
from tests.strategies.deployed import Deployment, Node, everybody, lines
from tests.strategies.helpers import FakeProxy, all_in, chosen, fleet, within
from tests.strategies.message.helpers import FakeGrid, FakeNode

NO_QUERY = "roll call: the ClientApp has no query function. Flower reports this as an error, but it is harmless"


def fair() -> CSUCBQ:
    return CSUCBQ(clients_per_round=100, max_latency=9.0, seed=0)


def nodes(api: str, count: int = 20, **options: Any) -> dict[int, Node]:
    return {100 + k: Node(api, {"name": f"part-{k:02d}"}, **options) for k in range(count)}


@pytest.mark.parametrize(
    ("options", "selector"),
    [
        ({"clock": "virtual"}, everybody), ({"grid": deployed.InMemoryGrid}, everybody), ({}, fair),
        ({"identity": "node"}, fair),
    ],
)  # fmt: skip
def test_of_nodes_whose_app_knows_no_query_one_is_asked(options: dict[str, Any], selector: Any, aloud: Any) -> None:
    """Flower prints 40 lines for each that is asked. One line says what follows, and nothing is wrong with anybody."""
    world = Deployment("message", selector(), nodes("message"), **options).play(2)
    assert sum(world.asked("query")) == 1
    (line,) = lines(aloud, "roll call")
    assert line.startswith(f"{NO_QUERY}. ")
    assert [len(chosen) for chosen in world.chosen()] == [20, 20]
    assert not [record for record in aloud.records if record.name == "fedsel_flwr" and "errors" in record.getMessage()]
    world.come(7, Node("message", {"name": "late"}))  # newcomers with that app are not asked either
    assert len(world.play(1).chosen()[-1]) == 21
    assert sum(world.asked("query")) == 1


def test_who_wants_claims_has_everybody_asked(aloud: Any) -> None:
    """One client that says it cannot answer must not make strangers of the others."""
    honest = {k: Node("message", {}, says={"client_id": f"client-{k}"}) for k in range(10, 13)}
    world = Deployment("message", everybody(), {5: Node("message", {}), **honest}, identity="claim").play(1)
    assert world.chosen() == [["5", "client-10", "client-11", "client-12"]]
    silent = Deployment("message", everybody(), nodes("message", 4), identity="claim").play(1)
    assert sum(silent.asked("query")) == 4
    assert lines(aloud, "roll call") == [NO_QUERY]


@pytest.mark.parametrize(("averaging", "asked"), [(None, 0), ("fedpdp", 0), ("fedavg-absent", 4)])
def test_nobody_is_asked_where_the_server_knows_all_that_is_read(api: str, averaging: Any, asked: int) -> None:
    crowd = nodes(api, 4, says={"client_id": "x", "num_examples": 12})
    assert sum(Deployment(api, everybody(), crowd, averaging=averaging).play(2).asked("query")) == asked


def test_the_numbers_of_examples_are_asked_for_where_the_selector_reads_them(api: str) -> None:
    crowd = {k: Node(api, {"name": f"part-{k}"}, says={"client_id": "x", "num_examples": 10 * k}) for k in (1, 2, 3)}
    world = Deployment(api, selector := fair(), crowd).play(1)
    assert world.asked("query") == [1, 1, 1]
    assert world.strategy.roster.ids == ["part-1", "part-2", "part-3"]
    assert selector.state_dict()["size"].tolist() == [10.0, 20.0, 30.0]


class Told:
    """Answers from a table; who is not in it does not answer."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said, self.batches = said, list[list[str]]()

    def __call__(self, asked: list[str]) -> tuple[dict[str, Any], list[str]]:
        self.batches.append(asked)
        return {n: self.said[n] for n in asked if n in self.said}, [n for n in asked if n not in self.said]


def test_a_first_one_that_does_not_answer_or_errs_keeps_nobody_from_being_asked() -> None:
    hang = Told({"c": {"client_id": "c"}, "d": NO_PROPERTIES})
    assert RollCall().call("abcd", 1, hang, one_first=True) == {"c": {"client_id": "c"}, "d": {}}
    assert hang.batches == [["a"], ["b"], ["c", "d"]]
    errs = Told({"a": None, "b": {"client_id": "b"}, "c": {}, "d": {}})
    assert RollCall().call("abcd", 1, errs, one_first=True) == {"a": {}, "b": {"client_id": "b"}, "c": {}, "d": {}}
    assert errs.batches == [["a"], ["b"], ["c", "d"], ["a"]]


def test_where_the_first_one_hangs_the_second_one_may_say_that_nobody_can() -> None:
    """A simulation whose processes take long to start must not be loud for that; who hung takes part later."""
    calls, said = RollCall(), Told(dict.fromkeys("bcd", NO_PROPERTIES))
    assert calls.call("abcd", 1, said, one_first=True) == {"b": {}, "c": {}, "d": {}}
    assert said.batches == [["a"], ["b"]]
    assert calls.call("a", 2, said, one_first=True) == {"a": {}}


def test_once_somebody_has_answered_a_liar_silences_nobody() -> None:
    calls, first = RollCall(), Told({"a": {"client_id": "a"}})
    calls.call("a", 1, first, one_first=True)
    later = Told({"b": NO_PROPERTIES, "c": {"client_id": "c"}})
    assert calls.call("bc", 2, later, one_first=True) == {"b": {}, "c": {"client_id": "c"}}
    assert later.batches == [["b", "c"]]


def test_one_alone_is_asked_once() -> None:
    calls, lone = RollCall(), Told({"a": NO_PROPERTIES, "b": NO_PROPERTIES})
    assert calls.call("a", 1, lone, one_first=True) == {"a": {}}
    assert calls.call("b", 2, lone, one_first=True) == {"b": {}}
    assert lone.batches == [["a"]]
    assert calls.call([], 3, lone, one_first=True) == {}


class Clumsy(FakeProxy):
    """Raises or hangs when it is asked, as often as ``turns`` says; then it answers."""

    def __init__(self, cid: str, client_id: str, *turns: str, seconds: float = 0.6) -> None:
        super().__init__(cid, client_id, number=1, on_properties=self._turn)
        self.turns, self.seconds = turns, seconds

    def _turn(self, proxy: FakeProxy) -> None:
        turn = self.turns[self.asked - 1] if self.asked <= len(self.turns) else ""
        if turn == "raises":
            raise ConnectionError("try again")
        if turn == "hangs":
            time.sleep(self.seconds)


def test_one_failed_question_is_asked_again_at_once() -> None:
    strategy, _ = all_in([Clumsy("31337", "a", "raises")])
    assert chosen(strategy) == [["a"]]


@pytest.mark.parametrize("turns", [("hangs",), ("raises", "hangs")])
def test_a_client_that_does_not_answer_in_time_is_left_out_and_asked_again(turns: Any, caplog: Any) -> None:
    """It may yet say who it is: its connection does not become its id."""
    slow = Clumsy("slow-node", "slow", *turns, seconds=1.5)
    with within(0.0, 1.4):
        strategy, federation = all_in([FakeProxy("a", "a"), slow], roll_call_timeout=0.2)
    assert chosen(strategy) == [["a"]]
    assert "slow-node" in caplog.text
    federation.play(1)
    assert (chosen(strategy)[-1], slow.asked) == (["a"], len(turns))  # it has not answered yet
    time.sleep(1.5)
    federation.play(1)
    assert (chosen(strategy)[-1], slow.asked) == (["a", "slow"], len(turns) + 1)


def test_many_that_never_answer_do_not_keep_the_others_out() -> None:
    """However many questions are asked at the same time, those that hang must not use up every place for ever."""
    mute = [Clumsy(str(k), f"mute-{k}", "hangs", seconds=1.0) for k in range(40)]
    honest = [FakeProxy(f"z-{k}", f"honest-{k}", number=k) for k in range(3)]
    strategy, federation = all_in([*mute, *honest], roll_call_timeout=0.15)
    federation.play(2)
    assert chosen(strategy)[-1] == ["honest-0", "honest-1", "honest-2"]


MANY = 3 * WINDOW


class InMemoryGrid(FakeGrid):
    """A grid with the name of Flower's own, which counts what is on its way; answers come at the second look."""

    unanswered = True

    def __init__(self, nodes: dict[int, FakeNode]) -> None:
        super().__init__(nodes)
        self.pending: set[str] = set()
        self.sizes: list[int] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(super().push_messages(messages))
        self.pending |= set(ids)
        if self.unanswered:
            assert len(self.pending) <= FIRST_WINDOW
        self.sizes.append(len(self.pending))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        assert set(message_ids) == self.pending
        arrived = list(super().pull_messages(message_ids))
        self.pending -= {reply.metadata.reply_to_message_id for reply in arrived}
        self.unanswered = self.unanswered and not arrived
        return arrived

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("all of them at once")


class Deaf(FakeNode):
    """Never answers."""

    def handle(self, message: Message) -> None:
        return None


class Gate:
    """Counts the questions that are being answered at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.lock = seconds, threading.Lock()
        self.now = self.most = self.most_before_an_answer = self.answered = 0

    def __call__(self, proxy: FakeProxy) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if not self.answered:
                self.most_before_an_answer = self.now
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
            self.answered += 1


def introduced(api: str, clients: list[Any], simulated: bool, seconds: float = 20.0) -> tuple[Any, ...]:
    """What clients say, those that were missed, and how many questions were in flight: until an answer, and at most."""
    if api == "message":
        nodes = {int(one.cid): Deaf(one) if one.on_properties is deaf else FakeNode(one) for one in clients}
        grid: Any = (InMemoryGrid if simulated else FakeGrid)(nodes)
        said, missed = MessageTransport(grid, ArrayRecord([]), timeout=seconds).introduce([one.cid for one in clients])
        sizes = grid.sizes if simulated else [len(batch) for batch in grid.sent]
        return said, missed, sizes[0], max(sizes)
    proxies: dict[str, Any] = {one.cid: one for one in clients}
    gate = Gate(0.1)
    for one in proxies.values():
        one.grid = InMemoryGrid({}) if simulated else object()
        one.on_properties = one.on_properties or gate
    said, missed = legacy.LegacyTransport(proxies, SimpleNamespace(), timeout=seconds).introduce([*proxies])  # type: ignore[arg-type]
    return said, missed, gate.most_before_an_answer, gate.most


def deaf(proxy: FakeProxy) -> None:
    """Does not answer in time."""
    time.sleep(1.2)


def test_the_grid_of_flowers_simulation_is_known_by_its_name() -> None:
    assert is_simulation(object.__new__(superlink.InMemoryGrid))
    assert not is_simulation(FakeGrid())
    assert not is_simulation(None)


@pytest.mark.parametrize(
    ("api", "simulated", "count", "first", "most"),
    [
        ("message", True, MANY, FIRST_WINDOW, [WINDOW]),
        ("message", False, MANY, MANY, [MANY]),
        ("legacy", True, MANY, FIRST_WINDOW, range(legacy.MAX_PARALLEL // 2, WINDOW + 1)),
        ("legacy", False, 2 * legacy.MAX_PARALLEL, legacy.MAX_PARALLEL, range(2, legacy.MAX_PARALLEL + 1)),
    ],
)
def test_all_are_asked_in_simulations_few_at_once(api: str, simulated: bool, count: int, first: int, most: Any) -> None:
    said, missed, before_an_answer, at_once = introduced(api, fleet(count, cid=str), simulated)
    facts = {cid: (one["client_id"], one["num_examples"]) for cid, one in said.items()}
    assert facts == {str(k): (k, 10 + 3 * k) for k in range(count)}
    assert missed == []
    # Threads begin one by one, and on a busy machine an answer may be there before the last of them.
    assert before_an_answer == first if api == "message" else 1 < before_an_answer <= first
    assert at_once in most


class Starting(deployed.SuperLink):
    """The grid of a simulation whose actors have started only some time after the first message."""

    starts_s, first = 1.2, 0.0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.first = self.first or time.monotonic()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages(message_ids) if time.monotonic() >= self.first + self.starts_s else []


Starting.__name__ = "InMemoryGrid"


def test_the_start_of_a_simulations_actors_is_no_time_of_the_roll_call(api: str) -> None:
    """The clock starts with the first answer."""
    apps = {100 + k: Node(api, says={"client_id": k}) for k in range(10)}
    world = Deployment(
        api, everybody(), apps, Starting, 10.0, clock="virtual", roll_call_timeout=0.6, wait_timeout=10.0,
    ).play(1)  # fmt: skip
    assert world.chosen() == [[str(k) for k in range(10)]]


def test_a_start_is_waited_for_no_longer_than_wait_timeout(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    startup, start = Startup(0.4), time.monotonic()
    if api == "message":
        grid = InMemoryGrid({100: Deaf(FakeProxy("100", 0))})
        transport: Any = MessageTransport(grid, ArrayRecord([]), timeout=0.3, startup=startup)
    else:
        monkeypatch.setattr(Starting, "starts_s", 60.0)
        monkeypatch.setattr(Starting, "pull_interval", 0.02)
        grid = Starting(nodes("legacy", 1))  # type: ignore[assignment]
        proxies = {"100": GridClientProxy(100, grid, 7)}
        transport = legacy.LegacyTransport(proxies, SimpleNamespace(), timeout=0.3, startup=startup)  # type: ignore[arg-type]
    assert transport.introduce(["100"]) == ({}, ["100"])
    assert 0.7 <= time.monotonic() - start < 5.0
    assert startup.first_s is None


def test_where_nobody_answers_the_window_opens_and_those_never_asked_are_not_missed(monkeypatch: Any) -> None:
    monkeypatch.setattr(InMemoryGrid, "unanswered", False)  # no limit before the first answer in this test
    clients = fleet(2 * WINDOW, cid=str)
    for one in clients:
        one.on_properties = deaf
    with within(0.6, 2.0):
        said, missed, first, most = introduced("message", clients, simulated=True, seconds=0.6)
    assert (said, missed) == ({}, [str(k) for k in range(WINDOW)])
    assert (first, most) == (FIRST_WINDOW, WINDOW)
