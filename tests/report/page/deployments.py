"""Journals of deployments made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsel_flwr.rounds.records import ClientRecord, RoundEntry, RoundRecord, encode_entry
from tests.report.made import client

MAX_LATENCY = 60.0


def failed(name: str, problem: str = "exception: ValueError", **own: Any) -> ClientRecord:
    return client(name, MAX_LATENCY, completed=False, problem=problem, latency_source="max_latency", **own)


def entries(*rounds: tuple[float, Sequence[ClientRecord]], probe_s: float = 0.0, **own: Any) -> list[RoundEntry]:
    found, total = [], 0.0
    for number, (seconds, rows) in enumerate(rounds, start=1):
        total += seconds
        record = RoundRecord(
            round=number, num_available=9, num_selected=len(rows), num_completed=sum(row.completed for row in rows),
            num_spares=sum(row.spare for row in rows), round_s=seconds, simulated_s=total, energy_j=math.nan,
            total_energy_j=math.nan, probe_s=probe_s, **own,
        )  # fmt: skip
        found.append(RoundEntry(record, [ClientRecord(**{**vars(row), "round": number}) for row in rows]))
    return found


def write(folder: Path, given: Sequence[RoundEntry], end: bytes = b"") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_bytes(b"".join(map(encode_entry, given)) + end)
    return folder
