"""Selector parameters that users give by client id and selectors read by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.identity import canonical_id
from fedsel_flwr.rounds.roster import Roster


class ClientValues(Mapping[int, float]):
    """A number for each enrolled client, given by client id, read by row through the roster.

    As a mapping it holds the rows of the clients that are enrolled and have a number; it grows with the roster.

    Args:
        name: The parameter's name, for messages.
        values: An array (accepted only if the client ids are 0..K-1) or a mapping from client id.
        roster: Where rows find their ids.

    Attributes:
        given: Every number by client id, of clients not enrolled yet too.

    Raises:
        ParameterError: ``values`` is neither, or two keys mean the same client.

    >>> roster = Roster()
    >>> values = ClientValues("fairness", {"a": 0.1, "b": 0.2}, roster)
    >>> _ = roster.enroll({"node-1": "b"}, 1)
    >>> dict(values), values.given
    ({0: 0.2}, {'a': 0.1, 'b': 0.2})
    """

    def __init__(self, name: str, values: npt.ArrayLike | Mapping[object, float], roster: Roster) -> None:
        if isinstance(values, Mapping):
            items = [(canonical_id(key), value) for key, value in values.items()]
        else:
            array = np.asarray(values, dtype=np.float64)
            if array.ndim != 1:
                raise ParameterError(f"{name} must have one number per client, got shape {array.shape}")
            items = [(str(k), float(value)) for k, value in enumerate(array)]
        self.name = name
        self.given: dict[str, float] = {key: value for key, value in items if key is not None}
        if len(self.given) != len(items):
            raise ParameterError(f"{name} must name each client once by its id (an integer or a string)")
        self._roster = roster

    def covers(self, client_id: str) -> bool:
        """Whether there is a number for ``client_id``."""
        return client_id in self.given

    def __getitem__(self, row: int) -> float:
        """The number of the client in ``row``."""
        if not 0 <= row < len(self._roster.ids) or self._roster.ids[row] not in self.given:
            raise KeyError(row)
        return self.given[self._roster.ids[row]]

    def __iter__(self) -> Iterator[int]:
        """The rows that have a number."""
        return (row for row, client_id in enumerate(self._roster.ids) if client_id in self.given)

    def __len__(self) -> int:
        """How many enrolled clients have a number."""
        return sum(client_id in self.given for client_id in self._roster.ids)
