"""Failure reasons: the meaning of Flower's errors and missing replies, in the same words in both APIs.

The legacy API raises exceptions, and only their text has the reason. Messages carry an error with a code. Both become
one line in the history. :class:`DeadActors` detects in these lines that a simulation on Ray cannot continue.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable

from flwr.app import Error

from fedsel_flwr.errors import RunError
from fedsel_flwr.flower import ErrorCode
from fedsel_flwr.rounds.untrusted import without_middle

REASONS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "message unavailable: it expired, or its SuperNode was removed",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "reply unavailable: it expired before it was fetched",
    ErrorCode.NODE_UNAVAILABLE: "node unavailable: its SuperNode stopped reporting",
}
"""Code of an error that the SuperLink sends in place of a client's reply -> its meaning."""
CODE_PHRASES = (
    # The longer phrase comes first, because it contains the shorter one.
    ("Reply Message Unavailable", ErrorCode.REPLY_MESSAGE_UNAVAILABLE),
    ("Message Unavailable", ErrorCode.MESSAGE_UNAVAILABLE),
    ("Node Unavailable", ErrorCode.NODE_UNAVAILABLE),
)
"""Phrases in the legacy API's exceptions, which have no code, for these errors."""
NO_REPLY = "Expected one Message but got: 0"
"""Error of the legacy API's proxy if no reply came."""
NOT_REACHED = "not reached: the SuperLink did not take the message"
"""Reason for a client whose message was rejected, so that no reply can come."""
NO_QUERY = "No query function registered"
"""Error of a ClientApp that gets a QUERY message but has no function for it."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
TRACEBACK = "Traceback (most recent call last)"
CLIENT_RAISED = re.compile(r"<class '(?:[\w.<>]+\.)?(\w+)'>:<'(.*)'>", re.DOTALL)
"""A SuperNode's text for an error of its client: the error's class and text."""
PROXY_ERROR = re.compile(
    r"^Message contains an Error \(reason: (.*)\)\. It originated during client-side exec", re.DOTALL
)
"""Text in which the legacy API's proxy wraps the reason of an error."""
RAY_ACTOR = "ray::"
RAY_CAUSE = "The above exception was the direct cause of the following exception"
CAUSE_LENGTH = 2000
"""Number of characters before Ray's sentence that are searched for the client's error."""
CODE_LINE = re.compile(r'^  File "([^"\n]+)", line (\d+), in ', re.MULTILINE)
DEAD_ACTOR = re.compile(r"ray\.exceptions\.\w*Actor\w*Error.{,400}?actor_id: ([0-9a-f]+)", re.DOTALL)
"""Ray's error that names a dead actor by its id. Actors that Ray restarts are only called unavailable."""
MAX_READ = 2_000
"""Number of characters of an error that are searched for a dead actor."""


def no_answer(timeout: float | None) -> str:
    """Return the reason for a client without an answer.

    >>> no_answer(30.0), no_answer(None)
    ('no answer within 30 s', 'no answer')
    """
    return "no answer" if timeout is None else f"no answer within {timeout:g} s"


def reason_of(error: Error) -> str:
    """Return the meaning of a message's error."""
    reason = _cause(error.reason) or f"error code {error.code}, without a reason"
    # A reply with an interrupted upload has the same code as an expired one. Only the texts differ.
    if "objects are unavailable" in reason:
        return f"exception: {reason}"
    return REASONS.get(error.code, f"exception: {reason}")


def reason_in(raised: BaseException | None, timeout: float | None, elapsed_s: float | None) -> str:
    """Return the meaning of an exception of the legacy API's proxy.

    Args:
        raised: The exception of ``fit``; None if ``fit`` never ended.
        timeout: The round's timeout, seconds; None if there is none. Messages of the legacy API expire with it.
        elapsed_s: Seconds until the exception; None if unknown.

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
    code = next((code for phrase, code in CODE_PHRASES if phrase in text), None)
    # Flower's proxy raises a ValueError for these codes. In another exception the phrase is a client's own text.
    if not isinstance(raised, ValueError) or code is None:
        wrapped = PROXY_ERROR.search(text)
        return f"exception: {_cause(wrapped[1]) if wrapped else f'{type(raised).__name__}: {_cause(text)}'}"
    # A message that expires with the timeout belongs to a straggler, and was not lost.
    if code != ErrorCode.NODE_UNAVAILABLE and timeout is not None and (elapsed_s or 0.0) >= timeout:
        return no_answer(timeout)
    return REASONS[code]


def has_no_query(error: Error) -> bool:
    """Return whether an error means that the client's app registered no query function."""
    return error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION and NO_QUERY in without_middle(error.reason or "")


class NotReached(RunError):
    """The SuperLink did not accept a message."""


def check_answered(raised: BaseException) -> None:
    """Distinguish a missing answer from an answer that is an error.

    Raises:
        TimeoutError: The exception of the legacy API's proxy means that no answer came.
        NotReached: The client was never asked.
    """
    if isinstance(raised, NotReached):
        raise raised
    if NO_REPLY in str(raised):
        raise TimeoutError(str(raised)) from None


class DeadActors:
    """Counts the lost messages of each Ray actor that is permanently dead.

    Flower puts a dead actor back into its pool. The dead actor refuses every message at once, while the others work. So
    it is free again for the next message, and most messages of every later round are lost. An actor has one message at
    a time. If a second message is lost at the same actor, Flower sent it after the actor's death.
    """

    def __init__(self) -> None:
        self._lost: Counter[str] = Counter()
        # Actor -> where its first message was lost.
        self._died: dict[str, str] = {}

    def check(self, errors: Iterable[str], round: int, resume_hint: str, *, probe: bool = False) -> None:
        """Count the dead actors among the failures of a round or a probe.

        Args:
            errors: The texts of the errors.
            round: The absolute round.
            resume_hint: A sentence for the message: how to resume a run that ends here.
            probe: Whether the messages were those of the probe before the round.

        Raises:
            RunError: A dead actor got another message.
        """
        # In a deployment the clients write these texts, so a client could end the run with them. Never import Ray for
        # this, because a deployed server may not have it.
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        found = [match[1] for error in errors if (match := DEAD_ACTOR.search(error[:MAX_READ]))]
        self._lost.update(found)
        where = f"the probe before round {round}" if probe else f"round {round}"
        for actor in found:
            self._died.setdefault(actor, where)
        if again := [actor for actor in found if self._lost[actor] > 1]:
            raise RunError(
                f"a Ray actor has died in {self._died[again[0]]} (was it killed, or did memory run out?), but Flower's "
                f"simulation still sends it messages. Messages lost in {where}: {len(found)}. Later rounds would lose "
                f"most of theirs. Round {round} does not count. {resume_hint}. If memory ran out, let fewer clients "
                f"{'work' if probe else 'train'} at one time"
            )


def _cause(reason: str | None) -> str:
    """Return the error itself: a traceback's last line, or a SuperNode's text."""
    if found := _raised_in_ray(reason or ""):
        return found
    text = without_middle(reason or "")
    # Ray colours its tracebacks for a terminal.
    lines = [line.strip() for line in COLOURS.sub("", text).splitlines() if line.strip()]
    if TRACEBACK in text and lines:
        return lines[-1]
    raised = CLIENT_RAISED.search(text)
    return f"{raised[1]}: {raised[2]}" if raised else text


def _raised_in_ray(reason: str) -> str:
    """Return a client's error in an actor of Ray, with file and line; empty if the text is not Ray's."""
    end = reason.find(RAY_CAUSE)
    if end < 0 or RAY_ACTOR not in reason:
        return ""
    own = COLOURS.sub("", reason[max(0, end - CAUSE_LENGTH) : end])
    lines = own.splitlines()
    # A traceback's code is indented. The first unindented line after it names the exception.
    traced = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1)
    raised = next((line for line in lines[traced + 1 :] if line.strip()), "")
    places = CODE_LINE.findall(own)
    return f"{raised} ({places[-1][0].rpartition('/')[2]}, line {places[-1][1]})" if raised and places else raised
