"""Why there is no answer: Flower's errors in plain words, the same in both APIs.

Flower's simulation on Ray after the death of an actor: known by what comes in place of the clients' answers.

What Flower's SuperLink says of its nodes.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Error, Message

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ErrorCode
from fedsel_flwr.rounds.roll_call import Registration
from fedsel_flwr.rounds.untrusted import without_middle

EXPIRED = "message unavailable: it expired, or its SuperNode was removed"
REASONS = {
    ErrorCode.MESSAGE_UNAVAILABLE: EXPIRED,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "reply unavailable: it expired before it was fetched",
    ErrorCode.NODE_UNAVAILABLE: "node unavailable: its SuperNode stopped reporting",
}
"""What the SuperLink says in place of a client."""
IN_TEXTS = (
    ("Reply Message Unavailable", ErrorCode.REPLY_MESSAGE_UNAVAILABLE),
    ("Message Unavailable", ErrorCode.MESSAGE_UNAVAILABLE),
    ("Node Unavailable", ErrorCode.NODE_UNAVAILABLE),
)
"""The same in the texts of the legacy API's exceptions, which carry no code."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ACTOR = "ray::"
CAUSED = "The above exception was the direct cause of the following exception"
BEFORE = 2000
"""So many characters before that are searched for what was raised first."""
PLACE = re.compile(r'^  File "([^"\n]+)", line (\d+), in ', re.MULTILINE)
TRACEBACK = "Traceback (most recent call last)"
RAISED = re.compile(r"<class '(?:[\w.<>]+\.)?(\w+)'>:<'(.*)'>", re.DOTALL)
"""A SuperNode's words for what its client raised: its class and its text."""
CARRIED = re.compile(r"^Message contains an Error \(reason: (.*)\)\. It originated during client-side exec", re.DOTALL)
"""How the legacy API's proxy carries the reason of an error."""
NO_REPLY = "Expected one Message but got: 0"
"""What the legacy API's proxy raises where nothing came."""

NOT_REACHED = "not reached: the SuperLink did not take the message"
"""What is said of a client whose message was rejected, so that no answer can come."""

NO_QUERY = "No query function registered"
"""What a ClientApp raises when it is asked something and registered no function for that."""


def no_answer(timeout: float | None) -> str:
    """What is said of a client of whom nothing came.

    >>> no_answer(30.0), no_answer(None)
    ('no answer within 30 s', 'no answer')
    """
    return "no answer" if timeout is None else f"no answer within {timeout:g} s"


def reason_of(error: Error) -> str:
    """What a message's error means."""
    reason = _cause(error.reason) or f"error code {error.code}, without a reason"
    if "objects are unavailable" in reason:  # a reply that was not uploaded to its end has the code of an expired one
        return f"exception: {reason}"
    return REASONS.get(error.code, f"exception: {reason}")


def _cause(reason: str | None) -> str:
    """What was raised, as a traceback's last line has it (Ray's has colours), or a SuperNode's words."""
    if found := _under_ray(reason or ""):
        return found
    text = without_middle(reason or "")
    lines = [line.strip() for line in COLOURS.sub("", text).splitlines() if line.strip()]
    if TRACEBACK in text and lines:
        return lines[-1]
    raised = RAISED.search(text)
    return f"{raised[1]}: {raised[2]}" if raised else text


def _under_ray(reason: str) -> str:
    """What a client raised in an actor of Ray, with file and line; empty if the text is not Ray's."""
    end = reason.find(CAUSED)
    if end < 0 or ACTOR not in reason:
        return ""
    own = COLOURS.sub("", reason[max(0, end - BEFORE) : end])
    lines = own.splitlines()
    traced = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1)
    said = next((line for line in lines[traced + 1 :] if line.strip()), "")
    places = PLACE.findall(own)
    return f"{said} ({places[-1][0].rpartition('/')[2]}, line {places[-1][1]})" if said and places else said


def has_no_query(error: Error) -> bool:
    """Whether an error says that the client's app registered no query function, in Flower's own words."""
    return error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION and NO_QUERY in without_middle(error.reason or "")


class NotReached(RunError):
    """The SuperLink did not take a message."""

    def __init__(self) -> None:
        super().__init__(NOT_REACHED)


def check_answered(raised: BaseException) -> None:
    """Tell no answer from an answer that is an error.

    Raises:
        TimeoutError: What the legacy API's proxy raised says that nothing came.
        NotReached: The client was never asked.
    """
    if isinstance(raised, NotReached):
        raise raised
    if NO_REPLY in str(raised):
        raise TimeoutError(str(raised)) from None


def reason_in(raised: BaseException | None, timeout: float | None, elapsed_s: float | None) -> str:
    """What an exception of the legacy API's proxy means.

    Args:
        raised: What ``fit`` raised; None if it never ended.
        timeout: The round's timeout, seconds; messages of the legacy API expire with it. None if there is none.
        elapsed_s: Seconds until it was raised; None if unknown.

    >>> reason_in(ValueError("Expected one Message but got: 0"), 30.0, 30.5)
    'no answer within 30 s'
    >>> reason_in(ValueError("the battery is empty"), 30.0, 0.5)
    'exception: ValueError: the battery is empty'
    """
    text = str(raised)
    if isinstance(raised, NotReached):
        return NOT_REACHED
    if raised is None or NO_REPLY in text:
        return no_answer(timeout)
    code = next((code for phrase, code in IN_TEXTS if phrase in text), None)
    if not isinstance(raised, ValueError) or code is None:
        carried = CARRIED.search(text)
        return f"exception: {_cause(carried[1]) if carried else f'{type(raised).__name__}: {_cause(text)}'}"
    if code != ErrorCode.NODE_UNAVAILABLE and timeout is not None and (elapsed_s or 0.0) >= timeout:
        return no_answer(timeout)
    return REASONS[code]


def accepted(pushed: Iterable[str]) -> set[str]:
    """The ids of the messages that a SuperLink took; one that it rejects has the id "", and is never answered.

    >>> accepted(["a", ""])
    {'a'}
    """
    return {message_id for message_id in pushed if message_id}


def rejected(sent: Sequence[Message], pushed: Sequence[str]) -> list[Message]:
    """The messages that a SuperLink did not take.

    Args:
        sent: What was pushed.
        pushed: The ids that came back, in that order; a grid may leave out those that were rejected.
    """
    if len(pushed) == len(sent):
        return [message for message, message_id in zip(sent, pushed, strict=True) if not message_id]
    there = accepted(pushed)
    return [message for message in sent if message.metadata.message_id not in there]


DEAD = re.compile(r"ray\.exceptions\.\w*Actor\w*Error.{,400}?actor_id: ([0-9a-f]+)", re.DOTALL)
"""An actor that will not be started again is named by its id; of others Ray says that they are unavailable."""
LONGEST = 2_000
"""So much of an error is read."""


class DeadActors:
    """Counts the messages that were lost to each actor that is dead for good.

    Flower puts an actor that died back into its pool. It refuses every message at once, while the others work, and so
    is free for the next one: most messages of every later round are lost to it. An actor has one message at a time; a
    second one that is lost to the same actor was given to it after its death.
    """

    def __init__(self) -> None:
        self._lost: Counter[str] = Counter()

    def check(self, errors: Iterable[str], round: int, way_back: str) -> None:
        """Take in what a round's clients failed with.

        Only where Ray runs in this process: the errors of a deployment are what its clients write.

        Args:
            errors: The texts.
            round: The absolute round.
            way_back: How a run that ends here can be gone on with, in words.

        Raises:
            RunError: A dead actor was given another message.
        """
        if not _ray_runs_here():
            return
        met = [found[1] for error in errors if (found := DEAD.search(error[:LONGEST]))]
        self._lost.update(met)
        if any(self._lost[actor] > 1 for actor in met):
            raise RunError(
                f"an actor of Ray has died (was it killed, or memory short?), and Flower's simulation still hands it "
                f"messages: {len(met)} of round {round} were lost that way, as most of every later round would be. "
                f"Round {round} does not count. {way_back}. Where memory is short, let fewer clients train at one time"
            )


def _ray_runs_here() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def registrations(grid: object) -> Mapping[str, Registration] | None:
    """Name and public key of every node, in one call.

    Args:
        grid: Flower's grid; None where a transport has none.

    Returns:
        Node id -> registration; None where the grid tells ids alone, as that of old versions of Flower does.
    """
    get_nodes = getattr(grid, "get_nodes", None)
    if get_nodes is None:
        return None
    return {
        str(info.node_id): Registration(getattr(info, "name", "") or "", getattr(info, "public_key", b"") or b"")
        for info in get_nodes()
    }
