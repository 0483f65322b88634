"""What any selector must do with columns: declare what it reads, and bear what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from fedsel_flwr.selectors.base import Selector
from fedsel_flwr.selectors.columns import INFORMED, REPORTED
from fedsel_flwr.selectors.report import RoundReport
from fedsel_flwr.testing.worlds import SelectorFactory, fleet, may_lack, promise, promise_finite, report_for, values_for

ALWAYS = frozenset({"clients", "completed", "latency"})
"""What every report has, whatever ``needs`` says."""


class WatchedReport(RoundReport):
    """A report that notes which of its columns are read."""

    def __getattribute__(self, name: str) -> Any:
        noted = object.__getattribute__(self, "__dict__").get("noted")
        if noted is not None and not name.startswith("_"):
            noted.add(name)
        return object.__getattribute__(self, name)


def columns_read(selector: Selector, report: RoundReport) -> set[str]:
    """Let the selector observe the report and return the columns that its ``_observe`` read."""
    watched = WatchedReport(**{field.name: getattr(report, field.name) for field in fields(report)})
    noted: set[str] = set()
    observe: Callable[[RoundReport], None] = selector._observe

    def watch(given: RoundReport) -> None:
        object.__setattr__(given, "noted", noted)  # from here on: what comes before is Selector.observe's own reading
        observe(given)

    vars(selector)["_observe"] = watch
    try:
        selector.observe(watched)
    finally:
        del vars(selector)["_observe"]
    return noted & REPORTED


def check_needs(make: SelectorFactory) -> None:
    """A column in ``needs`` is read, and a column that is read is in ``needs``."""
    selector, read = make(seed=5), set[str]()
    available = np.arange(fleet(selector, 8))
    for number in range(60):
        world = np.random.default_rng([9, number])
        chosen = selector.select(available)
        completed = world.uniform(size=chosen.size) < 0.85
        read |= columns_read(selector, report_for(selector, chosen, completed, world, columns=REPORTED))
        undeclared = sorted(read - selector.needs - ALWAYS)
        promise(not undeclared, f"what is read of a report is in needs: add {', '.join(undeclared)}")
    unread = sorted(selector.needs - read)
    promise(not unread, f"what is in needs is read in some of 60 rounds: leave out {', '.join(unread)}")


def check_missing_values(make: SelectorFactory) -> None:
    """Clients that lack a column which they may lack, and side information that is NaN, leave the state finite."""
    selector = make(seed=5)
    available = np.arange(fleet(selector, 8))
    for number in range(40):
        world = np.random.default_rng([11, number])
        clients = world.permutation(available)[: fleet(selector, 3)]
        told = {name: values_for(name, clients.size, world) for name in sorted(INFORMED)}
        for value in told.values():
            value[world.uniform(size=clients.size) < 0.5] = np.nan
        selector.inform(clients, **told)
        chosen = selector.select(available)
        completed = world.uniform(size=chosen.size) < 0.85
        selector.observe(report_for(selector, chosen, completed, world, missing=0.5, spares=0.2))
        lacking = f"columns that a client may lack ({', '.join(sorted(may_lack(selector))) or 'none here'})"
        promise_finite(selector, f"where {lacking} or side information are NaN")
    promise(selector.select(available).size > 0, "the selector still chooses where values are missing")
