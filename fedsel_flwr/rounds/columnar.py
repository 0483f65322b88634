"""The history's records as columns, and back: how a state holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import numpy as np

from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds import saving
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

Record = TypeVar("Record", ClientRecord, RoundRecord)
TYPES: dict[str, type[np.generic]] = {"int": np.int64, "float": np.float64, "bool": np.bool_}


def in_columns(rounds: Sequence[RoundRecord], clients: Sequence[ClientRecord]) -> saving.State:
    """Rounds and clients, a column a field."""
    return {"rounds": _columns(RoundRecord, rounds), "clients": _columns(ClientRecord, clients)}


def of_columns(state: Any) -> tuple[list[RoundRecord], list[ClientRecord]]:
    """The records in a state of :func:`in_columns`; raises :class:`StateError` if it is none."""
    saving.expect_keys(state, ("rounds", "clients"))
    rounds = _records("rounds", RoundRecord, state["rounds"])
    return rounds, _records("clients", ClientRecord, state["clients"])


def _columns(kind: type[Record], records: Sequence[Record]) -> saving.State:
    columns: saving.State = {}
    for one in fields(kind):
        values = [getattr(record, one.name) for record in records]
        columns[one.name] = values if one.type == "str" else np.array(values, dtype=TYPES[str(one.type)])
    return columns


def _records(name: str, kind: type[Record], columns: Any) -> list[Record]:
    newer = {one.name for one in fields(kind) if one.default is not MISSING}  # an older version's records lack some
    if isinstance(columns, Mapping):
        newer -= set(columns)
    known = [one for one in fields(kind) if one.name not in newer]
    saving.expect_keys(columns, [one.name for one in known])
    loaded: dict[str, list[Any]] = {}
    for one in known:
        value, where = columns[one.name], f"{name}.{one.name}"
        if one.type == "str":
            loaded[one.name] = saving.texts(where, value)
        else:
            loaded[one.name] = saving.array(where, value, TYPES[str(one.type)]).tolist()
    lengths = {len(values) for values in loaded.values()}
    if len(lengths) > 1:
        raise StateError(f"the columns of {name} must be of one length, got {sorted(lengths)}")
    return [kind(**dict(zip(loaded, row, strict=True))) for row in zip(*loaded.values(), strict=True)]
