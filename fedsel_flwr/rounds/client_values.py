"""Selector parameters that users give by client id and selectors read by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.roster import Roster, canonical_id


class ClientValues(Mapping[int, float]):
    """A number for each client, given by client id, read by row through the roster.

    Args:
        name: The parameter's name, for messages.
        values: An array (accepted only if the client ids are 0..K-1) or a mapping from client id.
        roster: Where rows find their ids.

    Raises:
        ParameterError: ``values`` is neither, or two keys mean the same client.
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
        self._by_id: dict[str, float] = {key: value for key, value in items if key is not None}
        if len(self._by_id) != len(items):
            raise ParameterError(f"{name} must name each client once by its id (an integer or a string)")
        self._roster = roster

    def covers(self, client_id: str) -> bool:
        """Whether there is a number for ``client_id``."""
        return client_id in self._by_id

    def __getitem__(self, row: int) -> float:
        """The number of the client in ``row``."""
        if not 0 <= row < len(self._roster.ids):
            raise KeyError(row)
        return self._by_id[self._roster.ids[row]]

    def __iter__(self) -> Iterator[int]:
        """The rows that have a number."""
        return (row for row, client_id in enumerate(self._roster.ids) if client_id in self._by_id)

    def __len__(self) -> int:
        """How many clients have a number, enrolled or not."""
        return len(self._by_id)

    def values(self) -> list[float]:  # type: ignore[override]
        """Every number, of clients not enrolled yet too."""
        return list(self._by_id.values())
