"""What any strategy must remember: who is who, what happened, and all of it in another process."""

from __future__ import annotations

import math
import warnings

from fedsel_flwr.errors import StateError
from fedsel_flwr.testing.trial import Trial
from fedsel_flwr.testing.worlds import promise


def check_identity(trial: Trial) -> None:
    """A client that reconnects under a new node id is the same client: its id and its row stay."""
    course, rows = trial.course, dict[str, set[int]]()
    for seen, choice in zip(course.rounds, course.choices(), strict=True):
        told = sorted((row.client_id for row in course.rows(seen.number)), key=lambda one: (len(one), one))
        promise(
            told == choice,
            f"a client keeps its id when it reconnects; in round {seen.number} {choice} were asked, the history names "
            f"{told}",
        )
        for row in course.rows(seen.number):
            rows.setdefault(row.client_id, set()).add(row.client)
    if course.strategy.roster.evict_after is None:
        moved = {one: sorted(had) for one, had in rows.items() if len(had) > 1}
        promise(not moved, f"a client keeps its row when it reconnects; rows by id: {moved}")


def check_history(trial: Trial) -> None:
    """The history has each round once, and one row for each client that was asked."""
    course = trial.course
    records = course.strategy.history.rounds
    played = [seen.number for seen in course.rounds if not seen.ended]
    promise(
        [record.round for record in records] == played,
        f"the history has every round once: {len(played)} rounds were played, it has {len(records)}",
    )
    for seen in course.rounds:
        rows = course.rows(seen.number)
        promise(
            len(rows) == len(seen.asked) and len({row.client for row in rows}) == len(rows),
            f"the history has a row for each client that was asked; round {seen.number} asked {len(seen.asked)}, "
            f"it has {len(rows)}",
        )
    for record in records:
        rows = course.rows(record.round)
        counts = (len(rows), sum(row.completed for row in rows), sum(row.kept for row in rows))
        told = (record.num_selected, record.num_completed, record.num_kept)
        promise(told == counts, f"the history's counts are those of its rows; round {record.round}: {told}, {counts}")


def check_times(trial: Trial) -> None:
    """Latencies are finite and at most ``max_latency``, which failed clients hold; the simulated time never falls."""
    course, longest, before = trial.course, trial.plan.max_latency, 0.0
    for row in course.strategy.history.clients:
        said = f"client {row.client_id} in round {row.round}: {row.latency_s}"
        good = math.isfinite(row.latency_s) and 0.0 <= row.latency_s <= longest
        promise(good, f"latencies lie between 0 and max_latency = {longest:g} s; {said}")
        promise(row.completed or row.latency_s == longest, f"who fails counts max_latency = {longest:g} s; {said}")
    for record in course.strategy.history.rounds:
        promise(
            math.isfinite(record.simulated_s) and record.simulated_s >= before,
            f"the simulated time is finite and never falls; round {record.round}: {before} s, {record.simulated_s} s",
        )
        before = record.simulated_s


def check_failures_are_named(trial: Trial) -> None:
    """Whose update cannot be used is not completed, and its row says why; a healthy client's row is spotless."""
    course, virtual = trial.course, trial.clock_is_virtual
    for seen in course.rounds:
        faults = {course.fleet.id_of(node): fault for node, fault in seen.broken.items()}
        for row in course.rows(seen.number):
            fault, who = faults.get(row.client_id), f"round {seen.number}, client {row.client_id}"
            lost = fault is not None and (fault.loses == "always" or (virtual and fault.loses != "never"))
            what = "was healthy" if fault is None else fault.name
            promise(row.completed != lost, f"the history says who failed; {who} {what}: completed is {row.completed}")
            if lost or (fault is not None and fault.named):
                promise(bool(row.problem), f"every failure is named in the history; {who} {what}: no problem")
            elif fault is None and virtual:
                promise(not row.problem, f"a healthy client has no problem; {who}: {row.problem}")


def check_selector_observes(trial: Trial) -> None:
    """The selector observes every round once: a row for each client that was asked, as in the history.

    A broken client that lacks what the selector requires has failed for the selector, whatever its update is worth.
    """
    course = trial.course
    required, longest = bool(course.strategy.selector.requires), trial.plan.max_latency
    for seen in course.rounds:
        promise(
            len(seen.reports) == (0 if seen.ended else 1),
            f"the selector observes every round once; round {seen.number}: {len(seen.reports)} times",
        )
        for report in seen.reports:
            told = {
                k: (bool(c), float(s)) for k, c, s in zip(report.clients, report.completed, report.latency, strict=True)
            }
            wanted = {row.client: (row.completed, row.latency_s) for row in course.rows(seen.number)}
            broken = {course.fleet.id_of(node) for node in seen.broken} if required else set[str]()
            lacking = {row.client: (False, longest) for row in course.rows(seen.number) if row.client_id in broken}
            odd = {k: (told.get(k), wanted.get(k)) for k in told.keys() | wanted.keys() if told.get(k) != wanted.get(k)}
            odd = {k: pair for k, pair in odd.items() if k not in lacking or pair[0] != lacking[k]}
            promise(
                not odd and len(report.clients) == len(wanted),
                f"the selector observes what the history says; round {seen.number}: client: (observed, history) {odd}",
            )


def check_same_seed(trial: Trial) -> None:
    """Two strategies with the same seed choose the same, whatever connections are called and whoever answers first."""
    if not trial.clock_is_virtual:
        _left_out("check_same_seed")
        return
    first, second = trial.course.choices(), trial.other_course().choices()
    number = next((i for i, pair in enumerate(zip(first, second, strict=False), 1) if pair[0] != pair[1]), None)
    promise(
        number is None and len(first) == len(second),
        f"the same seed gives the same choices, from round {number} on they differ: give the selector a seed in "
        "make_strategy; choices must not depend on node ids, on the order of answers or on a global generator",
    )


def check_save_and_load(trial: Trial) -> None:
    """``state_dict``, ``load_state_dict`` into a new strategy, and on: the choices are those of never stopping."""
    if not trial.clock_is_virtual:
        _left_out("check_save_and_load")
        return
    cut = trial.cut(trial.plan.num_rounds // 3)
    played = cut.fleet.round
    try:
        rest = trial.continued(cut, cut.strategy.state_dict())
    except StateError as error:
        raise AssertionError(f"broken promise: a strategy takes its own state: {error}") from error
    if rest.error is not None:
        what = f"{type(rest.error).__name__}: {rest.error}"
        raise AssertionError(f"broken promise: save, load, continue equals never stopping, but: {what}") from rest.error
    straight = trial.course.choices()[played:]
    number = next((i for i, (a, b) in enumerate(zip(straight, rest.choices(), strict=True), 1) if a != b), None)
    promise(
        number is None,
        f"save, load, continue equals never stopping; the choices differ from round {played + (number or 0)} on, after "
        f"{played} rounds before the save",
    )
    records = len(rest.strategy.history.rounds)
    whole = len(trial.course.strategy.history.rounds)
    promise(records == whole, f"a loaded history goes on: {records} rounds at the end, expected {whole}")


def _left_out(check: str) -> None:
    warnings.warn(
        f"{check} was left out: with clock='server' choices may follow from the machine's speed; check the strategy "
        "with clock='virtual' as well",
        stacklevel=4,
    )
