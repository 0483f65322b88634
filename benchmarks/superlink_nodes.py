"""Light nodes: they speak Flower's fleet protocol as SuperNodes do, but answer after a drawn delay, without training.

All nodes share one process and one event loop. Each has its own key, its own connections and its own id. A node asks
for a message every 3 s, sends heartbeats, fetches the message's objects, and sends its reply's objects.
Every node writes down what it did with each message (:class:`Work`), so that a history can be compared with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    HEARTBEAT_BASE_MULTIPLIER,
    HEARTBEAT_CALL_TIMEOUT,
    HEARTBEAT_DEFAULT_INTERVAL,
    TIMESTAMP_HEADER,
    ErrorCode,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS,
    PULL_BACKOFF_CAP,
    PULL_INITIAL_BACKOFF,
    PULL_MAX_TIME,
    PULL_MAX_TRIES_PER_OBJECT,
)
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import get_num_workers, inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

Reply = TypeVar("Reply")
POLL_S, CALL_S = 3.0, 30.0
"""Seconds between a SuperNode's requests for a message, and after which it gives up a request and repeats it."""
SIGNATURE_S = 60.0
"""A node signs the time of its request, which the SuperLink accepts for 300 s. To save time, it signs once a minute."""
TOGETHER = get_num_workers(FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS)
"""Objects that a node fetches or sends at the same time, as a SuperNode on this machine."""
LONGEST_PAUSE_S = 20.0
"""Longest pause before a request is repeated."""
LEAVE_WITHIN_S = 1.0
"""Nodes that leave do so within so many seconds after a round has reached the first node."""
VERSIONS = "".join(
    f"{key}: {value}\r\n" for key, value in RuntimeVersionMetadata.from_local_component("SuperNode").as_metadata()
)
FAILURE = "the battery is empty"


class RefusedError(Exception):
    """The SuperLink answered a request with an error."""


@dataclass
class Work:
    """What a node did with a message.

    Attributes:
        node: The node's id.
        round: The round of the message.
        delay_s: The drawn delay, seconds.
        outcome: "received", "sending", "answered", "failed" (answered with an error), "left" or "left while sending"
            (the node left before it had answered), or why the answer was lost.
    """

    node: int
    round: int
    delay_s: float
    outcome: str = "received"


@dataclass(frozen=True)
class Behaviour:
    """How nodes behave.

    Args:
        shortest_s: Shortest delay of an answer, seconds.
        longest_s: Longest delay of an answer, seconds.
        failing: Share of messages that a node answers with an error.
        leaving: Share of nodes that leave in each round; they come back in the next one.
    """

    shortest_s: float = 0.5
    longest_s: float = 2.0
    failing: float = 0.05
    leaving: float = 0.02


class Connection:
    """An HTTP connection that is kept, and opened again where the SuperLink has closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, headers: str, content: bytes) -> tuple[int, bytes]:
        """Send a request; return status and body.

        Raises:
            OSError, EOFError: The connection broke.
        """
        reused = self._ends is not None and not self._ends[0].at_eof()
        if not reused:
            self.close()
            self._ends = await asyncio.open_connection(self._host, self._port)
        assert self._ends is not None
        reader, writer = self._ends
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/protobuf\r\n"
            f"accept: application/protobuf\r\n{headers}content-length: {len(content)}\r\n\r\n"
        )
        try:
            writer.write(head.encode("ascii") + content)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            length = next(int(line[15:]) for line in lines if line.lower().startswith("content-length:"))
            return int(lines[0].split(" ", 2)[1]), await reader.readexactly(length)
        except BaseException:
            self.close()  # the rest of an answer must not be taken for the next one
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._ends is not None:
            self._ends[1].close()
            self._ends = None


class Fleet:
    """Nodes that connect to a SuperLink, and what they did.

    Args:
        address: The SuperLink's HOST:PORT.
        number: Number of nodes.
        behaviour: How they behave.
        seed: Of the draws: delays, failures, and who leaves.

    Attributes:
        works: One entry for each TRAIN message that a node received.
        left: Round and node id of the nodes that were away in it, or in a part of it.
        requests: Number of requests by kind.
        troubles: Number of requests that did not succeed, by kind and reason.
        waits_s: Seconds of each request for a message.
        cpu_s: Processor seconds that the nodes of this process have used.
    """

    def __init__(self, address: str, number: int, behaviour: Behaviour, seed: int = 0) -> None:
        host, _, port = address.rpartition(":")
        self.random, self.behaviour = random.Random(seed), behaviour
        self.nodes = [Node(self, partial(Connection, host, int(port))) for _ in range(number)]
        self.works, self.left = list[Work](), set[tuple[int, int]]()
        self.requests, self.troubles, self.waits_s = Counter[str](), Counter[str](), list[float]()
        self.round = 0
        self._leaving = set[asyncio.Task[None]]()

    async def connect(self) -> None:
        """Register and activate all nodes, 50 at a time, and start them."""
        gate = asyncio.Semaphore(50)

        async def one(node: Node) -> None:
            async with gate:
                await node.register()

        await asyncio.gather(*map(one, self.nodes))
        for node in self.nodes:
            node.start(self.random.uniform(0.0, POLL_S))

    async def disconnect(self) -> None:
        """Stop all nodes, without a word to the SuperLink."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*(node.stop() for node in self.nodes), *self._leaving, return_exceptions=True)

    def begin(self, round: int) -> None:
        """Note that a message of a round has come; at the first one nodes come back, and others leave."""
        if round <= self.round:
            return
        self.round = round
        for node in self.nodes:
            if node.away:
                self._later(node.come_back())
        here = [node for node in self.nodes if not node.away]
        for node in self.random.sample(here, round_half_up(self.behaviour.leaving * len(self.nodes))):
            self._later(node.leave(round, self.random.uniform(0.0, LEAVE_WITHIN_S)))

    def _later(self, task: Any) -> None:
        self._leaving.add(started := asyncio.create_task(task))
        started.add_done_callback(self._leaving.discard)


def round_half_up(number: float) -> int:
    """Return the nearest whole number."""
    return int(number + 0.5)


class Node:
    """A node."""

    def __init__(self, fleet: Fleet, connect: Callable[[], Connection]) -> None:
        self._fleet, self._connect, self._idle = fleet, connect, list[Connection]()
        self._gate = asyncio.Semaphore(TOGETHER)
        private, public = generate_key_pairs()
        self._key, self._public = private, public_key_to_bytes(public)
        self.id, self.away = 0, False
        self._signed, self._headers, self._runs = 0.0, "", set[int]()
        self._tasks: list[asyncio.Task[None]] = []
        self._work: Work | None = None

    @property
    def _proto(self) -> NodeProto:
        return NodeProto(node_id=self.id)

    async def register(self) -> None:
        """Register with the key and say that the node is there."""
        await self._call(
            "register-node",
            fleet_pb2.RegisterNodeFleetRequest(public_key=self._public),
            fleet_pb2.RegisterNodeFleetResponse,
        )
        await self._activate()

    async def _activate(self) -> None:
        request = fleet_pb2.ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        self.id = (await self._call("activate-node", request, fleet_pb2.ActivateNodeResponse)).node_id

    def start(self, after_s: float = 0.0) -> None:
        """Start to ask for messages and to send heartbeats."""
        self._tasks = [asyncio.create_task(self._live(after_s)), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        """Stop whatever the node does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def leave(self, round: int, after_s: float) -> None:
        """Leave after some seconds, with a word to the SuperLink, as a SuperNode that gets SIGTERM."""
        await asyncio.sleep(after_s)
        self.away = True
        self._fleet.left |= {(round, self.id), (self._fleet.round, self.id)}
        await self.stop()
        if self._work is not None:
            cut = self._work.outcome == "sending"
            self._work.outcome, self._work = "left while sending" if cut else "left", None
        with contextlib.suppress(RefusedError):
            request = fleet_pb2.DeactivateNodeRequest(node_id=self.id)
            await self._call("deactivate-node", request, fleet_pb2.DeactivateNodeResponse)

    async def come_back(self) -> None:
        """Come back with the same key, and so with the same id."""
        self._fleet.left.add((self._fleet.round, self.id))
        with contextlib.suppress(RefusedError):
            await self._activate()
        self.away = False
        self.start()

    async def _beat(self) -> None:
        """Send heartbeats, as often as a SuperNode does."""
        request = heartbeat_pb2.SendNodeHeartbeatRequest(
            node=self._proto, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        while True:
            await asyncio.sleep(HEARTBEAT_DEFAULT_INTERVAL * (HEARTBEAT_BASE_MULTIPLIER + random.uniform(-0.1, 0.1)))
            with contextlib.suppress(RefusedError):
                await self._call(
                    "send-node-heartbeat", request, heartbeat_pb2.SendNodeHeartbeatResponse, HEARTBEAT_CALL_TIMEOUT
                )

    async def _live(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            began = time.monotonic()
            try:
                request = fleet_pb2.PullMessagesRequest(node=self._proto)
                pulled = await self._call("pull-messages", request, fleet_pb2.PullMessagesResponse)
            except RefusedError:
                pulled = fleet_pb2.PullMessagesResponse()  # a SuperNode would end; this one asks again
            self._fleet.waits_s.append(time.monotonic() - began)
            if not pulled.messages_list:
                await asyncio.sleep(POLL_S)
                continue
            await self._handle(message_from_proto(pulled.messages_list[0]), pulled.message_object_trees[0])

    async def _handle(self, message: Message, tree: Any) -> None:
        """Fetch a message's content, wait, and answer."""
        data, fleet = message.metadata, self._fleet
        behaviour, training = fleet.behaviour, data.message_type.startswith("train")
        work = Work(self.id, 0, fleet.random.uniform(behaviour.shortest_s, behaviour.longest_s))
        fails = fleet.random.random() < behaviour.failing
        try:
            content = await self._fetch(data, tree)
            if not training:
                work.delay_s, fails = 0.0, False
            else:
                (config,) = content.config_records.values()
                work.round = int(config["server-round"])
                self._work = work
                fleet.works.append(work)
                fleet.begin(work.round)
        except RefusedError as error:
            fleet.troubles[f"message not received: {error}"] += 1
            return
        await asyncio.sleep(work.delay_s)
        work.outcome = "sending"
        try:
            await self._send(
                reply_of(message, content, work, fails) if training else Message(RecordDict(), reply_to=message)
            )
            work.outcome = "failed" if fails else "answered"
        except RefusedError as error:
            work.outcome = f"answer not sent: {error}"
        self._work = None

    async def _fetch(self, data: Any, tree: Any) -> RecordDict:
        if data.run_id not in self._runs:
            run = await self._call(
                "get-run", run_pb2.GetRunRequest(node=self._proto, run_id=data.run_id), run_pb2.GetRunResponse
            )
            request = fab_pb2.GetFabRequest(node=self._proto, hash_str=run.run.fab_hash, run_id=data.run_id)
            await self._call("get-fab", request, fab_pb2.GetFabResponse)
            self._runs.add(data.run_id)
        names = list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree)))
        fetched = await asyncio.gather(*(self._fetch_object(data.run_id, one) for one in names))
        request = message_pb2.ConfirmMessageReceivedRequest(
            node=self._proto, run_id=data.run_id, message_object_id=data.message_id
        )
        await self._call("confirm-message-received", request, message_pb2.ConfirmMessageReceivedResponse)
        whole: Any = inflate_object_from_contents(data.message_id, dict(zip(names, fetched, strict=True)))
        return whole.content

    async def _fetch_object(self, run: int, name: str) -> bytes:
        """Fetch an object, which the ServerApp may not have sent yet, with the pauses of a SuperNode."""
        request = message_pb2.PullObjectRequest(node=self._proto, run_id=run, object_id=name)
        deadline, pause_s = time.monotonic() + PULL_MAX_TIME, PULL_INITIAL_BACKOFF
        for _ in range(PULL_MAX_TRIES_PER_OBJECT):
            async with self._gate:
                pulled = await self._call("pull-object", request, message_pb2.PullObjectResponse)
            if pulled.object_available:
                content: bytes = pulled.object_content
                return content
            if not pulled.object_found or time.monotonic() > deadline:
                break
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2.0 * pause_s, PULL_BACKOFF_CAP)
        raise RefusedError("pull-object: the object is not there")

    async def _send(self, reply: Message) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        request = fleet_pb2.PushMessagesRequest(
            node=self._proto, messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)], clientapp_runtime_list=[0.0],
        )  # fmt: skip
        taken = await self._call("push-messages", request, fleet_pb2.PushMessagesResponse)
        run, session = reply.metadata.run_id, taken.session_id
        contents = {one: objects[one].deflate() for one in taken.objects_to_push}
        await asyncio.gather(*(self._send_object(run, session, *item) for item in contents.items()))

    async def _send_object(self, run: int, session: str, name: str, content: bytes) -> None:
        request = message_pb2.PushObjectRequest(
            node=self._proto, run_id=run, session_id=session, object_id=name, object_content=content
        )
        async with self._gate:
            pushed = await self._call("push-object", request, message_pb2.PushObjectResponse)
        if not pushed.stored:
            raise RefusedError("push-object: the object was not stored")

    async def _call(self, kind: str, request: Any, reply: Callable[[], Reply], timeout_s: float = CALL_S) -> Reply:
        """Send a request until the SuperLink has answered, as a SuperNode does.

        Raises:
            RefusedError: The SuperLink answered with an error.
        """
        content, tries = request.SerializeToString(deterministic=True), 0
        while True:
            self._fleet.requests[kind] += 1
            tries += 1
            connection = self._idle.pop() if self._idle else self._connect()
            try:
                async with asyncio.timeout(timeout_s):
                    status, body = await connection.post(f"/v1/fleet/{kind}", self._signed_headers(), content)
                self._idle.append(connection)
                if status == 200:
                    parsed: Any = reply()
                    parsed.ParseFromString(body)
                    return parsed
                reason = f"HTTP {status} {body[:100].decode(errors='replace')}".strip()
            except TimeoutError:
                reason = f"no answer within {timeout_s:g} s"
            except (OSError, EOFError) as error:
                if tries == 1:
                    continue  # the SuperLink closes a connection that rests for 5 s; the request may cross that
                reason = type(error).__name__
            self._fleet.troubles[f"{kind}: {reason}"] += 1
            if reason.startswith("HTTP") and status not in (502, 503, 504):
                raise RefusedError(f"{kind}: {reason}")
            if kind == "send-node-heartbeat":
                raise RefusedError(reason)  # the next heartbeat comes in its time
            await asyncio.sleep(random.uniform(0.0, min(LONGEST_PAUSE_S, 2.0 ** (tries - 1))))

    def _signed_headers(self) -> str:
        if time.monotonic() - self._signed > SIGNATURE_S or not self._headers:
            self._signed, moment = time.monotonic(), now().isoformat()
            signature = sign_message(self._key, moment.encode("ascii"))
            self._headers = (
                f"{VERSIONS}{FLEET_HTTP_PUBLIC_KEY_HEADER}: {b64encode(self._public).decode()}\r\n"
                f"{TIMESTAMP_HEADER}: {moment}\r\n"
                f"{FLEET_HTTP_SIGNATURE_HEADER}: {b64encode(signature).decode()}\r\n"
            )
        return self._headers


def reply_of(message: Message, content: RecordDict, work: Work, fails: bool) -> Message:
    """Return a node's answer: a model of its own with the metrics that selectors read, or an error."""
    if fails:
        return Message(
            Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"<class 'RuntimeError'>:<'{FAILURE}'>"), reply_to=message
        )
    (model,) = content.array_records.values()
    shift = np.float32(work.node % 1000 / 1000)
    arrays = ArrayRecord({name: Array(array.numpy() + shift) for name, array in model.items()})
    told = {"num-examples": 1 + work.node % 100, "compute_s": work.delay_s, "energy_j": 2.0 * work.delay_s}
    metrics = MetricRecord({**told, "train_loss": 1.0})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
