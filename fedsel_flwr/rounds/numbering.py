"""Which absolute round the server means: Flower counts from 1 in every run, the selector goes on."""

from __future__ import annotations

from fedsel_flwr.errors import RunError


class Numbering:
    """Keeps the server's rounds and the selector's together.

    The first round of a run fixes the offset, which is 0, or the rounds that a loaded selector has seen where the
    server counts from 1 again.

    A run that goes on from a checkpoint begins after the rounds it has done: Flower's round 0 is the last of these.

    >>> numbering = Numbering()
    >>> numbering.check(server_round=1, seen=40), numbering.absolute(1)
    (None, 41)
    >>> numbering.begin_run(done=50)
    >>> numbering.absolute(0)
    50
    """

    def __init__(self) -> None:
        self._offset: int | None = None  # absolute round - the server's; None before a run's first
        self._done = 0

    def begin_run(self, done: int = 0) -> None:
        """A run begins: the server may count from 1 again.

        Args:
            done: The rounds that were done before, where the server is known to count from 1.
        """
        self._offset, self._done = None, done

    def absolute(self, server_round: int) -> int:
        """The absolute number of a round that the server counts."""
        return server_round + (self._done if self._offset is None else self._offset)

    def check(self, server_round: int, seen: int) -> None:
        """Take in the server's number of the round about to be chosen.

        Args:
            server_round: The server's number.
            seen: How many rounds the selector has seen.

        Raises:
            RunError: The two have not gone on together.
        """
        offset = seen + 1 - server_round
        if self._offset is None and offset in (0, seen):
            self._offset = offset
        if offset != self._offset:
            allowed = {1, seen + 1} if self._offset is None else {seen + 1 - self._offset}
            expected = " or ".join(map(str, sorted(allowed)))
            raise RunError(
                f"the server begins round {server_round}, but the selector has seen {seen} rounds, so that round "
                f"{expected} was expected: use a strategy for one run at a time, and do not call select yourself"
            )
