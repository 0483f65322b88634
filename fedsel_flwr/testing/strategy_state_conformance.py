"""Checks of every strategy's state: identities, the history, the selector's reports, and resuming."""

from __future__ import annotations

import math
import warnings

from fedsel_flwr.errors import StateError
from fedsel_flwr.testing.harness import StrategyHarness
from fedsel_flwr.testing.random_rounds import promise


def check_identity(harness: StrategyHarness) -> None:
    """Check that a client that reconnects under a new node id keeps its id and its row."""
    run, rows = harness.full_run, dict[str, set[int]]()
    for seen, choice in zip(run.rounds, run.choices(), strict=True):
        recorded = sorted((row.client_id for row in run.rows(seen.number)), key=lambda one: (len(one), one))
        promise(
            recorded == choice,
            f"a client keeps its id when it reconnects; in round {seen.number} {choice} were asked, the history names "
            f"{recorded}",
        )
        for row in run.rows(seen.number):
            rows.setdefault(row.client_id, set()).add(row.client)
    # A strategy that evicts absent clients may give a returning client another row.
    if run.strategy.roster.evict_after is None:
        moved = {one: sorted(had) for one, had in rows.items() if len(had) > 1}
        promise(not moved, f"a client keeps its row when it reconnects; rows by id: {moved}")


def check_history(harness: StrategyHarness) -> None:
    """Check that the history has each round once, and one row for each client that was asked."""
    run = harness.full_run
    records = run.strategy.history.rounds
    played = [seen.number for seen in run.rounds if not seen.ended]
    promise(
        [record.round for record in records] == played,
        f"the history has every round once: {len(played)} rounds were played, it has {len(records)}",
    )
    for seen in run.rounds:
        rows = run.rows(seen.number)
        promise(
            len(rows) == len(seen.asked) and len({row.client for row in rows}) == len(rows),
            f"the history has a row for each client that was asked; round {seen.number} asked {len(seen.asked)}, "
            f"it has {len(rows)}",
        )
    for record in records:
        rows = run.rows(record.round)
        counts = (len(rows), sum(row.completed for row in rows), sum(row.kept for row in rows))
        recorded = (record.num_selected, record.num_completed, record.num_kept)
        promise(
            recorded == counts,
            f"the history's counts are those of its rows; round {record.round}: {recorded}, {counts}",
        )


def check_latencies(harness: StrategyHarness) -> None:
    """Check that latencies lie between 0 and ``max_latency``, and that the simulated time never falls.

    A failed client has the latency ``max_latency``.
    """
    run, longest, before = harness.full_run, harness.plan.max_latency, 0.0
    for row in run.strategy.history.clients:
        where = f"client {row.client_id} in round {row.round}: {row.latency_s}"
        good = math.isfinite(row.latency_s) and 0.0 <= row.latency_s <= longest
        promise(good, f"latencies lie between 0 and max_latency = {longest:g} s; {where}")
        promise(
            row.completed or row.latency_s == longest, f"a failed client holds max_latency = {longest:g} s; {where}"
        )
    for record in run.strategy.history.rounds:
        promise(
            math.isfinite(record.simulated_s) and record.simulated_s >= before,
            f"the simulated time is finite and never falls; round {record.round}: {before} s, {record.simulated_s} s",
        )
        before = record.simulated_s


def check_failures_are_named(harness: StrategyHarness) -> None:
    """Check that an unusable update is a failure with a named problem, and that a healthy client has no problem."""
    run, virtual = harness.full_run, harness.clock_is_virtual
    for seen in run.rounds:
        faults = {run.fleet.id_of(node): fault for node, fault in seen.broken.items()}
        for row in run.rows(seen.number):
            fault, who = faults.get(row.client_id), f"round {seen.number}, client {row.client_id}"
            lost = fault is not None and (fault.loses == "always" or (virtual and fault.loses != "never"))
            what = "was healthy" if fault is None else fault.name
            promise(
                row.completed != lost,
                f"the history names the clients that failed; {who} {what}: completed is {row.completed}",
            )
            if lost or (fault is not None and fault.named):
                promise(bool(row.problem), f"every failure is named in the history; {who} {what}: no problem")
            elif fault is None and virtual:
                promise(not row.problem, f"a healthy client has no problem; {who}: {row.problem}")


def check_selector_observes(harness: StrategyHarness) -> None:
    """Check that the selector observes every round once, with the history's row for each client that was asked.

    A broken client that lacks a required column has failed for the selector, even if its update is usable.
    """
    run = harness.full_run
    required, longest = bool(run.strategy.selector.requires), harness.plan.max_latency
    for seen in run.rounds:
        promise(
            len(seen.reports) == (0 if seen.ended else 1),
            f"the selector observes every round once; round {seen.number}: {len(seen.reports)} times",
        )
        for report in seen.reports:
            columns = (report.clients.tolist(), report.completed.tolist(), report.latency.tolist())
            observed = {client: (completed, latency) for client, completed, latency in zip(*columns, strict=True)}
            wanted = {row.client: (row.completed, row.latency_s) for row in run.rows(seen.number)}
            broken = {run.fleet.id_of(node) for node in seen.broken} if required else set[str]()
            for row in run.rows(seen.number):
                if row.client_id in broken and observed.get(row.client) == (False, longest):
                    wanted[row.client] = (False, longest)
            odd = {
                client: (observed.get(client), wanted.get(client))
                for client in observed.keys() | wanted.keys()
                if observed.get(client) != wanted.get(client)
            }
            promise(
                not odd and len(report.clients) == len(wanted),
                f"the selector observes what the history says; round {seen.number}: client: (observed, history) {odd}",
            )


def check_same_seed(harness: StrategyHarness) -> None:
    """Check that the same seed gives the same selections, for any node ids and any order of replies."""
    if not harness.clock_is_virtual:
        _left_out("check_same_seed")
        return
    first, second = harness.full_run.choices(), harness.second_run().choices()
    number = next((i for i, pair in enumerate(zip(first, second, strict=False), 1) if pair[0] != pair[1]), None)
    promise(
        number is None and len(first) == len(second),
        f"the same seed gives the same selections; from round {number} on they differ. Give the selector a seed in "
        "make_strategy. Selections must not depend on node ids, on the order of replies or on a global generator",
    )


def check_save_and_load(harness: StrategyHarness) -> None:
    """Check that a strategy, saved, loaded and continued, makes the choices of one that never stopped."""
    if not harness.clock_is_virtual:
        _left_out("check_save_and_load")
        return
    # After a third of the rounds, so that there are faults before and after the save.
    interrupted = harness.interrupted_run(harness.plan.num_rounds // 3)
    played = interrupted.fleet.round
    try:
        rest = harness.resumed_run(interrupted, interrupted.strategy.state_dict())
    except StateError as error:
        raise AssertionError(f"broken promise: a strategy takes its own state: {error}") from error
    if rest.error is not None:
        what = f"{type(rest.error).__name__}: {rest.error}"
        raise AssertionError(f"broken promise: save, load, continue equals never stopping, but: {what}") from rest.error
    straight = harness.full_run.choices()[played:]
    number = next((i for i, (a, b) in enumerate(zip(straight, rest.choices(), strict=True), 1) if a != b), None)
    promise(
        number is None,
        f"save, load, continue equals never stopping; the choices differ from round {played + (number or 0)} on, after "
        f"{played} rounds before the save",
    )
    records = len(rest.strategy.history.rounds)
    whole = len(harness.full_run.strategy.history.rounds)
    promise(records == whole, f"a loaded history continues: {records} rounds at the end, expected {whole}")


def _left_out(check: str) -> None:
    warnings.warn(
        f"{check} was left out: with clock='server' choices may follow from the machine's speed. Check the strategy "
        "with clock='virtual' as well",
        stacklevel=4,
    )
