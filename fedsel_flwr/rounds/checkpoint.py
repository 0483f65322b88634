"""One checkpoint on the disk: arrays as safetensors, the rest as JSON, no pickle.

``round-000012.safetensors`` is written first; ``round-000012.json`` beside it holds its digest and makes it valid when
it takes its name. The JSON begins with the digest of all that follows in it, so that a file that was cut off or changed
is known from its own words.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import fedsel_flwr
from fedsel_flwr.errors import StateError
from fedsel_flwr.rounds.disk import sync_folder, write_whole
from fedsel_flwr.rounds.packing import Array, packed, unpacked
from fedsel_flwr.rounds.saving import State

SCHEMA: Final = 1
"""Version of the files; a reader refuses those of a newer one."""
NAME = re.compile(r"round-(\d{6,})\.json")
"""The names of valid checkpoints."""
_FILE = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "checkpoint": (\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that a run needs to go on after a round.

    Attributes:
        round: The absolute round that was finished.
        model: The global model's arrays after it.
        names: Their names.
        state: What :meth:`fedsel_flwr.strategies.wrapping.adapter.Adapter.state_dict` returned.
        base: The base strategy's own state.
        made_for: What the run was made of, which must be the same when it goes on: what -> how, in words.
    """

    round: int
    model: list[Array]
    names: list[str]
    state: State
    base: State = field(default_factory=dict)
    made_for: dict[str, str] = field(default_factory=dict)


def json_path(folder: Path, round: int) -> Path:
    """The file that makes a checkpoint valid."""
    return folder / f"round-{round:06d}.json"


def arrays_path(path: Path) -> Path:
    """The file of the arrays beside it."""
    return path.with_suffix(".safetensors")


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; it is there for good when this returns.

    Raises:
        StateError: The state holds something that cannot be saved.
        OSError: The disk is full, or otherwise refuses; checkpoints that were there are as they were.
    """
    from safetensors.numpy import save

    path = json_path(folder, checkpoint.round)
    parts: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    named = dict(zip(checkpoint.names, checkpoint.model, strict=True))
    for name, tree in (("model", named), ("state", checkpoint.state), ("base", checkpoint.base)):
        parts[name], found = packed(tree, name)
        arrays |= found
    content = save(arrays)
    said = {
        "schema": SCHEMA,
        "written_by": f"fedsel-flwr {fedsel_flwr.__version__}",
        "round": checkpoint.round,
        "made_for": checkpoint.made_for,
        "arrays_sha256": hashlib.sha256(content).hexdigest(),
        **parts,
    }
    text = json.dumps(said).encode("ascii")
    digest = hashlib.sha256(text).hexdigest().encode("ascii")
    write_whole(arrays_path(path), content)
    write_whole(path, b'{"sha256": "%s", "checkpoint": %s}\n' % (digest, text))
    sync_folder(folder)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, checking every byte of it.

    Args:
        path: Its JSON file.

    Raises:
        StateError: It is damaged, newer than this version, or was renamed; says which.
    """
    try:
        return _read(path)
    except StateError:
        raise
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        RecursionError,
    ) as error:  # a file that somebody made by hand
        raise StateError(f"it is no checkpoint: {type(error).__name__}: {error}") from error


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    said = _said(path)
    if said.get("schema") != SCHEMA:
        raise StateError(
            f"it has schema {said.get('schema')!r} ({said.get('written_by')}), but this fedsel-flwr "
            f"{fedsel_flwr.__version__} reads schema {SCHEMA}: go on with the version that wrote it, or a newer one"
        )
    content = _content(arrays_path(path))
    if hashlib.sha256(content).hexdigest() != said["arrays_sha256"]:
        raise StateError(
            f"{arrays_path(path).name} is damaged: its {len(content)} bytes are not those that were written"
        )
    if json_path(path.parent, said["round"]).name != path.name:
        raise StateError(f"it was renamed: it holds round {said['round']}")
    try:
        arrays = load(content)
    except SafetensorError as error:
        raise StateError(f"{arrays_path(path).name} cannot be read: {error}") from error
    model = unpacked(said["model"], arrays)
    return Checkpoint(
        round=said["round"],
        model=list(model.values()),
        names=list(model),
        state=unpacked(said["state"], arrays),
        base=unpacked(said["base"], arrays),
        made_for=said["made_for"],
    )


def _said(path: Path) -> Mapping[str, Any]:
    """The JSON file's content, once its digest is right."""
    text = _content(path)
    match = _FILE.fullmatch(text)
    if match is None or hashlib.sha256(match[2]).hexdigest().encode("ascii") != match[1]:
        raise StateError(f"it is damaged: its {len(text)} bytes are not those that were written")
    said: Mapping[str, Any] = json.loads(match[2])
    return said


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StateError(f"{path.name} is missing") from None
    except OSError as error:
        raise StateError(f"{path.name} cannot be read: {os.strerror(error.errno or 0)}") from error
