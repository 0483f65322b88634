"""The private and deprecated names of Flower on which ``fedsel_flwr/flower.py`` relies, and what each is for.

:data:`ENTRIES` has the names, each with what depends on it and with our plan for its end. Flower has announced the end
of none of them; the removal of ``run_simulation`` is proposed (flwr's pull request 7119). ``fedsel doctor`` looks for
each in the installed Flower (:func:`missing`), and ``make flower-matrix`` runs what needs them with several versions.

This file imports Flower in functions only, so that ``fedsel doctor`` also works with a Flower that lacks a name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

NEWEST_TESTED = "1.42"
"""The newest release of Flower with which all tests have run."""
_MISSING = object()


@dataclass(frozen=True)
class Entry:
    """A name of Flower, and what we expect of it.

    Attributes:
        name: Module and name.
        lost: What does not work without it.
        plan: What replaces it if Flower removes it.
        members: Members that it must have, each with the parameters that we use; the member "" is the name itself.
        since: First version of Flower that has it.
    """

    name: str
    lost: str
    plan: str
    members: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: tuple[int, ...] = (1, 22)


ENTRIES = (
    Entry(
        "flwr.simulation.run_simulation",
        "fedsel run, compare and simulate do not run on Ray; the vectorized engine does not need it",
        "Start the app of simulations.on_flower.app, as `flwr run` does. Only the vectorized engine then accepts a "
        "strategy or a selector as an object.",
        {"": ("server_app", "client_app", "num_supernodes", "backend_config")},
    ),
    Entry(
        "flwr.server.compat.start_grid",
        "scenarios do not run on Ray in the legacy API; set api = 'message'",
        "Run scenarios in the Message API only.",
        {"": ("grid", "server", "config")},
    ),
    Entry(
        "flwr.simulation.ray_transport.ray_actor.ClientAppActor",
        "Ray reports at the end of a run that an actor died, and nothing else changes",
        "Leave it out.",
        {"terminate": ()},
    ),
    Entry(
        "flwr.supercore.task_identity.TaskIdentity",
        "fedsel_flwr.testing.check_strategy makes no messages",
        "Run the fleet of the conformance suite in a simulation.",
        dict.fromkeys(("task_id", "run_id", "node_id", "_task_id", "_run_id", "_node_id"), ()),
        since=(1, 38),
    ),
    Entry(
        "flwr.server.client_proxy.ClientProxy",
        "fedsel_flwr.strategies cannot be imported",
        "Remove it together with the legacy API, which flwr 1.42 calls deprecated.",
        {name: ("ins", "timeout", "group_id") for name in ("get_properties", "get_parameters", "fit", "evaluate")},
    ),
    Entry(
        "flwr.server.criterion.Criterion",
        "fedsel_flwr.strategies cannot be imported",
        "Remove it together with the legacy API.",
        {"select": ("client",)},
    ),
    Entry(
        "flwr.common.serde.recorddict_to_proto",
        "keep_arrivals cannot write the replies of a round",
        "Write the arrays and metrics of a reply in the form of a checkpoint.",
        {"": ("recorddict",)},
    ),
    Entry(
        "flwr.common.serde.recorddict_from_proto",
        "keep_arrivals cannot read the replies of a round",
        "Read the arrays and metrics of a reply in the form of a checkpoint.",
        {"": ("recorddict_proto",)},
    ),
    Entry(
        "flwr.proto.recorddict_pb2.RecordDict",
        "keep_arrivals cannot read the replies of a round",
        "Read the arrays and metrics of a reply in the form of a checkpoint.",
        {"FromString": ()},
    ),
    Entry(
        "flwr.common.constant.ErrorCode",
        "fedsel_flwr.strategies cannot be imported",
        "Write its numbers out.",
        dict.fromkeys(
            ("CLIENT_APP_RAISED_EXCEPTION", "MESSAGE_UNAVAILABLE", "NODE_UNAVAILABLE", "REPLY_MESSAGE_UNAVAILABLE"), ()
        ),
    ),
)  # fmt: skip


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; empty if it has none.

    >>> release("1.43.0.dev20261026")
    (1, 43)
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def installed_version() -> str:
    """Return the version of the installed Flower, its nightly included; empty if there is none."""
    return version_of("flwr") or version_of("flwr-nightly")


def newer(version: str) -> str:
    """Return a sentence about a Flower that is newer than the newest tested; empty if it is not."""
    if release(version) <= release(NEWEST_TESTED):
        return ""
    return f"flwr {version} is newer than the newest tested, {NEWEST_TESTED}"


def warn_if_newer(version: str) -> None:
    """Warn the importer of the calling module of a Flower that is newer than the newest tested."""
    if text := newer(version):
        warnings.warn(f"{text}; `fedsel doctor` checks what this package uses", stacklevel=3)


def missing(version: str) -> Iterator[str]:
    """Yield what the installed Flower lacks of :data:`ENTRIES`, each with what does not work without it.

    Args:
        version: Its version.
    """
    for entry in ENTRIES:
        if release(version) >= entry.since and (fault := _fault(entry)):
            yield f"{fault}: {entry.lost}"


def _fault(entry: Entry) -> str:
    """Return what is wrong with a name; empty if nothing is, or if Flower's extra ``simulation`` is not installed."""
    module, _, name = entry.name.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        return f"{entry.name} cannot be imported ({error})" if (error.name or "").split(".")[0] == "flwr" else ""
    if found is None:
        return f"{entry.name} is missing"
    for member, parameters in entry.members.items():
        called = inspect.getattr_static(found, member, _MISSING) if member else found
        if called is _MISSING:
            return f"{entry.name}.{member} is missing"
        if lacks := [one for one in parameters if one not in inspect.signature(called).parameters]:
            return f"{entry.name}{f'.{member}' * bool(member)} has no parameter {' or '.join(lacks)}"
    return ""
