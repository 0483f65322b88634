"""By what clients are known, and how many are admitted, in both APIs: names, keys, node ids, claims, limits."""

from __future__ import annotations

import hashlib
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.common import Code, GetPropertiesRes, Status

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors import CSUCB
from fedsel_flwr.strategies.wrapping.grids import registrations
from tests.strategies.deployed import Deployment, InMemoryGrid, Node, everybody, key, lines
from tests.strategies.either_api import Server, selection
from tests.strategies.helpers import FakeProxy, all_in, chosen, fleet, row_of

HOW = pytest.mark.parametrize("how", ["name", "claim"])


def named(api: str, count: int, **options: Any) -> dict[int, Node]:
    return {900 - k: Node(api, {"name": f"part-{k}", "public_key": key("k")}, **options) for k in range(count)}


def known(api: str, how: str, name: str) -> Node:
    """A node that is registered with a name, or says it."""
    return Node(api, {"name": name}) if how == "name" else Node(api, says={"client_id": name})


def test_in_a_deployment_registered_names_are_the_ids_and_nobody_is_asked(api: str, aloud: Any) -> None:
    """Nor does what clients say count: the reports of all claim to be "victim", which is no problem of theirs."""
    reports = {"client_id": 7}
    world = Deployment(api, everybody(), named(api, 3, says={"client_id": "victim"}, reports=reports)).play(2)
    assert world.chosen() == [["part-0", "part-1", "part-2"]] * 2
    assert world.problems() == {""}
    assert (sum(world.asked("query")), world.grid.looked_up) == (0, 1)
    said = 'identity "name": a client is known by the name its SuperNode is registered with'
    assert lines(aloud, "identity") == [said]
    world.come(5, Node(api, {"name": "late"}))  # the server is asked again only when somebody is new
    assert world.play(2).chosen()[-2:] == [["late", "part-0", "part-1", "part-2"]] * 2
    assert world.grid.looked_up == 2


@HOW
def test_a_restarted_node_has_its_row_and_its_statistics(api: str, how: str) -> None:
    """Its node id is a new one."""
    selector = CSUCB(clients_per_round=2, max_latency=9.0, seed=0)
    nodes = {900: known(api, how, "part-0"), 899: known(api, how, "part-1")}
    world = Deployment(api, selector, nodes, identity=how).play(3)
    world.go(900)
    assert world.play(1).chosen()[-1] == ["part-1"]
    world.come(17, known(api, how, "part-0"))
    assert world.play(2).chosen()[-1] == ["part-0", "part-1"]
    assert world.strategy.roster.ids == ["part-0", "part-1"]
    assert selector.state_dict()["plays"].tolist() == [5, 6]


@HOW
@pytest.mark.parametrize("others", [[], [5]])
def test_the_second_node_of_an_id_is_refused_until_one_is_gone(api: str, how: str, others: Any, caplog: Any) -> None:
    """One that is killed and started again has a new node id while the server still lists the old one."""
    first, second = known(api, how, "twin"), known(api, how, "twin")
    world = Deployment(api, everybody(), {1: first, **{k: known(api, how, f"o{k}") for k in others}}, identity=how)
    world.play(1).come(2, second)
    assert world.play(2).chosen()[-1] == [*(f"o{k}" for k in others), "twin"]
    assert second.asked("train") == 0
    assert [*world.strategy.roster.refused] == ["2"]
    assert len([line for line in lines(caplog, "") if "'twin'" in line]) == 1
    world.go(1)
    assert world.play(1).chosen()[-1] == [*(f"o{k}" for k in others), "twin"]
    assert second.asked("train") == 1


def test_nodes_without_a_name_are_known_by_their_node_ids(api: str, aloud: Any) -> None:
    nodes = {31: Node(api, {"public_key": key("a")}), 32: Node(api, {"name": "part-0"}), 33: Node(api, {})}
    world = Deployment(api, everybody(), nodes).play(2)
    assert world.chosen() == [["31", "33", "part-0"]] * 2
    (line,) = lines(aloud, "identity")
    assert line.endswith("; 2 of 3 lack it and are known by their node ids")
    world.go(31)
    world.come(44, Node(api, {"name": "31"}))  # a name that is another node's number does not take its row
    assert world.play(1).chosen()[-1] == ["33", "part-0"]
    assert "client id '31' belongs to node 31" in world.strategy.roster.refused["44"]


def test_the_same_key_is_the_same_client(api: str) -> None:
    nodes = {1: Node(api, {"public_key": key("a")}), 2: Node(api, {"public_key": key("b"), "name": "b"})}
    world = Deployment(api, everybody(), nodes, identity="key").play(1)
    ids = {letter: hashlib.sha256(key(letter)).hexdigest()[:16] for letter in "abc"}
    assert world.chosen()[-1] == sorted([ids["a"], ids["b"]])
    world.go(1)
    world.come(3, Node(api, {"public_key": key("a")}))
    world.come(4, Node(api, {"public_key": key("c")}))
    assert world.play(1).chosen()[-1] == sorted(ids.values())
    assert len(world.strategy.roster.ids) == 3


def test_node_ids_when_they_are_asked_for(api: str) -> None:
    world = Deployment(api, everybody(), named(api, 2, says={"client_id": "x"}), identity="node").play(1)
    assert world.chosen() == [["899", "900"]]
    assert (sum(world.asked("query")), world.grid.looked_up) == (0, 0)


class Old(FakeProxy):
    """Knows no get_properties."""

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, "no"), {"client_id": "liar"})


RAISES = partial(FakeProxy, on_properties=Mock(side_effect=ValueError("Message contains an Error")))


@pytest.mark.parametrize("kind", [Old, RAISES], ids=["knows none", "raises in it"])
def test_who_cannot_say_it_takes_part_under_its_connection(kind: Any, caplog: Any) -> None:
    strategy, federation = all_in([kind("31337", "a"), FakeProxy("b", "b")])
    federation.play(2)
    assert chosen(strategy) == [["31337", "b"]] * 3
    assert any("31337" in one.getMessage() for one in caplog.records if one.levelname == "WARNING")


def _claiming(api: str, name: str, claim: str, **options: Any) -> Node:
    return Node(api, {"name": name} if name else {}, says={"client_id": claim}, **options)


@pytest.mark.parametrize("thief", ["", "part-9"])
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("options", [{"identity": "claim"}, {"clock": "virtual", "missing_columns": "random"}])
def test_no_claim_takes_a_registered_nodes_row(api: str, thief: str, away: bool, options: Any, caplog: Any) -> None:
    """Neither while it is connected nor while it is away; and it comes back to its row and its statistics."""
    selector = CSUCB(clients_per_round=5, max_latency=9.0, seed=0)
    nodes = {500: _claiming(api, "part-0", "alice"), 501: _claiming(api, "part-1", "bob")}
    world = Deployment(api, selector, nodes, **options).play(2)
    if away:
        world.go(500)
    impostor = world.come(3, _claiming(api, thief, "alice"))
    world.play(2)
    assert impostor.asked("train") == 0
    assert world.chosen()[-1] == (["bob"] if away else ["alice", "bob"])
    who = "the SuperNode registered as 'part-9'" if thief else "node 3"
    assert lines(caplog, who) == [f"{who} refused: client id 'alice' belongs to the SuperNode registered as 'part-0'"]
    if away:
        world.come(77, _claiming(api, "part-0", "alice"))
    world.play(1)
    assert world.chosen()[-1] == ["alice", "bob"]
    assert selector.state_dict()["plays"].tolist() == ([3, 5] if away else [5, 5])


def test_of_two_that_claim_one_id_at_once_the_registered_one_has_it(api: str) -> None:
    nodes = {1: _claiming(api, "", "alice"), 2: _claiming(api, "part-0", "alice")}
    world = Deployment(api, everybody(), nodes, identity="claim").play(2)
    assert world.asked("train") == [0, 2]
    assert world.chosen() == [["alice"]] * 2


def test_under_names_an_impostor_is_nobody_but_itself(api: str) -> None:
    """Of a connected client, of one that is away, and in what it reports."""
    selector = CSUCB(clients_per_round=5, max_latency=9.0, seed=0)
    world = Deployment(api, selector, named(api, 2)).play(2)
    world.go(900)
    world.come(3, Node(api, {"name": "thief"}, says={"client_id": "part-0"}, reports={"client_id": 0}, fails=True))
    world.come(4, Node(api, {}, says={"client_id": "part-1"}, fails=True))
    assert world.play(1).chosen()[-1] == ["4", "part-1", "thief"]
    world.come(900, Node(api, {"name": "part-0"}))
    assert world.play(1).chosen()[-1] == ["4", "part-0", "part-1", "thief"]
    rows = {one: row for row, one in enumerate(world.strategy.roster.ids)}
    state = selector.state_dict()
    assert state["plays"][[rows["part-0"], rows["part-1"]]].tolist() == [3, 4]
    assert (state["mean"][[rows["part-0"], rows["part-1"]]] > 0.5).all()  # theirs, not the failures of the others
    assert (state["mean"][[rows["thief"], rows["4"]]] == 0.0).all()


def test_the_clients_of_flowers_simulation_are_believed(api: str, aloud: Any) -> None:
    """On the server's clock too: they are ours. The grid is not asked about them."""
    nodes = {k + 50: Node(api, {"public_key": key("s")}, says={"client_id": k}) for k in range(3)}
    world = Deployment(api, everybody(), nodes, grid=InMemoryGrid).play(2)
    assert world.chosen() == [["0", "1", "2"]] * 2
    assert world.grid.looked_up == 0
    assert lines(aloud, "identity") == ['identity "claim": a client is known by the client_id that it reports']


@pytest.mark.parametrize(("identity", "level"), [(None, "INFO"), ("name", "WARNING"), ("key", "WARNING")])
def test_without_a_grid_node_ids_serve_and_the_log_says_so_once(identity: Any, level: str, aloud: Any) -> None:
    strategy, federation = all_in([FakeProxy("12", "a"), FakeProxy("13", "b")], clock="server", identity=identity)
    federation.manager.register(FakeProxy("14", "c"))
    federation.play(1)
    assert chosen(strategy) == [["12", "13"], ["12", "13", "14"]]
    (record,) = [one for one in aloud.records if one.getMessage().startswith("identity")]
    assert record.levelname == level
    assert record.getMessage().endswith("are known by their node ids")


def test_an_old_flower_tells_node_ids_alone() -> None:
    assert registrations(SimpleNamespace(get_node_ids=lambda: [1])) is None
    assert registrations(None) is None
    told = registrations(SimpleNamespace(get_nodes=lambda: [SimpleNamespace(node_id=1)]))
    assert told is not None
    assert (told["1"].name, told["1"].public_key) == ("", b"")


def test_a_node_of_which_the_server_does_not_know_yet_waits_for_a_round(api: str) -> None:
    """It came after the list was made: it must not be bound to a row under another identity for good."""
    world = Deployment(api, everybody(), named(api, 2))
    whole = world.grid.get_nodes
    vars(world.grid)["get_nodes"] = lambda: [info for info in whole() if info.node_id != 900]
    assert world.play(1).chosen()[-1] == ["part-1"]
    del vars(world.grid)["get_nodes"]
    assert world.play(1).chosen()[-1] == ["part-0", "part-1"]


def _fair(api: str, nodes: dict[int, Node], fairness: dict[str, float], **options: Any) -> Deployment:
    return Deployment(api, "CSUCBQ", nodes, clients_per_round=2, fairness=fairness, **options)


def test_parameters_by_client_are_keyed_by_names(api: str) -> None:
    """A nameless stranger does not end a run whose clients have values."""
    world = _fair(api, {**named(api, 2), 3: Node(api, {})}, {"part-0": 0.4, "part-1": 0.5})
    assert world.play(1).chosen() == [["part-0", "part-1"]]
    assert world.strategy.roster.refused == {"3": "client '3' refused: no entry in fairness"}


def test_what_clients_are_known_by_is_said_where_a_parameter_does_not_cover_them(api: str) -> None:
    claims = {"says": {"client_id": "alice"}}
    cases: list[tuple[Any, Any, list[str]]] = [
        (named(api, 2, **claims), {}, ["none for client 'part-", "the name its SuperNode is registered", "identity="]),
        ({31: Node(api, {}, **claims)}, {}, ["known by its node id"]),
        ({31: _claiming(api, "part-0", "carol")}, {"identity": "claim"}, ["known by the client_id that it reports"]),
    ]
    for nodes, options, said in cases:
        with pytest.raises(ParameterError, match=r"fairness has 2 entries but none for client") as error:
            _fair(api, nodes, {"alice": 0.4, "bob": 0.5}, **options).play(1)
        assert all(text in str(error.value) for text in said)


# ---- how many are admitted -------------------------------------------------------------------------------------------


def test_max_clients_refuses_the_rest_and_says_so(api: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = selection(api, 100, max_clients=4, min_available=1)
    Server(api, strategy, fleet(6)).play(3)
    assert chosen(strategy) == [["0", "1", "2", "3"]] * 3
    for client_id in ("'4'", "'5'"):
        assert sum(client_id in text for text in caplog.messages) == 1
    assert strategy.selector.num_clients == 4


def test_max_new_per_round_admits_a_few_at_a_time_and_does_not_hold_back_known_clients(api: str) -> None:
    strategy, proxies = selection(api, 100, max_new_per_round=2, min_available=1), fleet(3)
    server = Server(api, strategy, proxies).play(1)
    assert chosen(strategy)[-1] == ["0", "1", "2"]  # the first roll call is not limited
    for proxy in proxies:
        server.disconnect(proxy)
    for k in range(8):
        server.connect(FakeProxy(f"again-{k}", k, number=k))
    server.play(4)
    assert [len(cohort) for cohort in chosen(strategy)] == [3, 5, 7, 8, 8]


def test_a_row_is_evicted_only_after_more_than_evict_after_rounds_away(api: str) -> None:
    proxies, selector = fleet(3, prefix="c", latency=1.0), CSUCB(clients_per_round=10, max_latency=5.0, seed=0)
    strategy = selection(api, selector, max_latency=5.0, min_available=1, max_clients=3, evict_after=2)
    server = Server(api, strategy, proxies).play(2)
    server.disconnect(proxies[1])  # last seen in round 2
    server.play(1)
    newcomer = FakeProxy("new", "new", latency=3.0)
    server.connect(newcomer)
    server.play(1)  # round 4: too early, but the newcomer stays
    assert chosen(strategy)[-1] == ["c0", "c2"]
    server.play(1)  # round 5: c1 was last seen 3 rounds ago
    assert chosen(strategy)[-1] == ["c0", "new", "c2"]
    assert row_of(strategy, "new") == 1
    state = strategy.selector.state_dict()
    assert state["plays"].tolist() == [5, 1, 5]
    assert state["mean"][1] == pytest.approx(0.4)  # nothing of c1 is left
    server.disconnect(newcomer)
    server.connect(proxies[1])
    server.play(1)
    assert chosen(strategy)[5:] == [["c0", "c2"]]  # c1 is a newcomer, and full: new was seen a round ago
