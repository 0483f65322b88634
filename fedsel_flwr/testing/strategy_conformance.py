"""Checks of the promises of every strategy that wraps a selector, in either of Flower's APIs, one check per promise.

The strategy runs with a fleet in this process, through Flower's own types. Clients are healthy, slow or offline. They
raise exceptions, send NaN, other shapes or other types, misreport their latency, and reconnect under new node ids. A
check takes a :class:`~fedsel_flwr.testing.harness.StrategyHarness`. It raises :class:`AssertionError` with the broken
promise.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from fedsel_flwr.errors import StateError
from fedsel_flwr.testing.fleet import IMPOSTOR, Model, ObservedRound
from fedsel_flwr.testing.harness import ObservedRun, StrategyFactory, StrategyHarness
from fedsel_flwr.testing.random_rounds import promise

logger = logging.getLogger("fedsel_flwr")
PLAIN = (None, "fedpdp", "mean")
"""Averaging schemes under which the base's model is the new global model."""
Check = Callable[[StrategyHarness], None]


def in_each_round(check: Callable[[ObservedRun, ObservedRound, StrategyHarness], None]) -> Check:
    """Return a check that makes this check in each round of the full run."""

    @wraps(check)
    def in_all_rounds(harness: StrategyHarness) -> None:
        for seen in harness.full_run.rounds:
            check(harness.full_run, seen, harness)

    return in_all_rounds


def with_virtual_clock(check: Check) -> Check:
    """Return a check that is left out with a warning if the clock is the server's."""

    @wraps(check)
    def on_virtual_clock(harness: StrategyHarness) -> None:
        if harness.clock_is_virtual:
            return check(harness)
        warnings.warn(
            f"{check.__name__} was left out: with clock='server' choices may follow from the machine's speed. Check "
            "the strategy with clock='virtual' as well",
            stacklevel=3,
        )

    return on_virtual_clock


def check_columns_are_reported(harness: StrategyHarness) -> None:
    """Check that the clients report the columns without which the selector learns nothing."""
    run = harness.full_run
    needed = sorted((run.strategy.core.parts.missing_columns.needed | run.strategy.selector.asks) - {"latency"})
    if harness.plan.reported is None and needed:
        logger.warning(
            "check_strategy: %s reads %s. The clients of this check report what is asked, but an unchanged client does "
            "not. Name the metrics of your clients: check_strategy(..., reported={...})",
            run.strategy.selector.name, ", ".join(needed),
        )  # fmt: skip
    unreported = run.error is not None and "missing_columns=" in str(run.error)
    promise(not unreported, f"the clients report what the selector reads; {run.error}")


def check_no_client_breaks_a_round(harness: StrategyHarness) -> None:
    """Check that no client causes an exception of the strategy, whatever it sends or does not send."""
    run = harness.full_run
    if run.error is not None:
        who = {run.fleet.id_of(node): fault.name for node, fault in run.fleet.now.broken.items()}
        raise AssertionError(
            f"broken promise: no client breaks a round; in round {run.fleet.round} ({_shortened(who)}) it raised "
            f"{type(run.error).__name__}: {run.error}"
        ) from run.error


@in_each_round
def check_only_connected_are_asked(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that only connected clients are asked to train."""
    absent = sorted(set(seen.asked) - seen.connected.keys())
    promise(not absent, f"only connected clients are asked; {seen.where} nodes {absent} were not")


@in_each_round
def check_impostor(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that a second connection that claims a connected client's id is never asked."""
    admitted = any(seen.connected.get(node) == IMPOSTOR for node in seen.asked)
    promise(not admitted, f"a second connection with a connected client's id is refused; {seen.where} it was asked")


def check_asked_once(harness: StrategyHarness) -> None:
    """Check that no client is asked to train twice in a round, even with several connections."""
    for number, choice in enumerate(harness.full_run.choices(), 1):
        twice = sorted({one for one in choice if choice.count(one) > 1})
        promise(not twice, f"a client is asked once a round; in round {number} clients {twice} were asked more often")


@in_each_round
def check_cohort_size(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that the cohort size is the selector's ``expected_count`` for the available clients.

    A round in which the base configures no client has none.
    """
    played = [one for one in run.strategy.history.rounds if one.round == seen.number]
    for record in played if seen.base_configs != {} else []:
        available, here = record.num_available, len(set(seen.connected.values()) - {IMPOSTOR})
        promise(available <= here, f"no more clients are available than are connected, {here}, not {available}")
        warmup = seen.number <= run.strategy.core.settings.warmup_rounds
        # Counts from before the round, for every number of available clients. Only the history shows afterwards
        # which clients a cool-down or the availability excluded.
        expected = available if warmup else seen.expected[available]
        promise(
            expected in (None, len(seen.asked)),
            f"the right number is asked; {seen.where} {len(seen.asked)} of {available} available clients "
            f"were, expected {expected}",
        )
        idle = available and not seen.asked and expected not in (None, 0)
        promise(not idle, "clients are asked if clients are available")


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


def check_identity(harness: StrategyHarness) -> None:
    """Check that a client that reconnects under a new node id keeps its id and its row."""
    run, rows = harness.full_run, dict[str, set[int]]()
    for seen, choice in zip(run.rounds, run.choices(), strict=True):
        recorded = sorted((row.client_id for row in run.rows(seen.number)), key=lambda one: (len(one), one))
        promise(
            recorded == choice,
            f"a client keeps its id when it reconnects; {seen.where} {choice} were asked, the history names {recorded}",
        )
        for row in run.rows(seen.number):
            rows.setdefault(row.client_id, set()).add(row.client)
    # A strategy that evicts absent clients may give a returning client another row.
    if run.strategy.roster.evict_after is None:
        moved = {one: sorted(had) for one, had in rows.items() if len(had) > 1}
        promise(not moved, f"a client keeps its row when it reconnects; rows by id: {moved}")


@in_each_round
def check_train_configs(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that every client that is asked gets its own train config of the base.

    A client without its own config gets that of another one, which must then be the same for all.
    """
    made = seen.base_configs or {}
    promise(not seen.asked or bool(made), "the base configures every round in which clients are asked")
    promise(made.keys() <= {*seen.asked}, f"the base sees the chosen clients only; {seen.where} others too")
    for node in seen.asked:
        config, wanted = seen.configs.get(node, {}), made.get(node) or next(iter(made.values()))
        lost = {key: value for key, value in wanted.items() if config.get(key) != value}
        promise(not lost, f"the base's train config reaches every client; {seen.where} {lost} was lost")


@in_each_round
def check_evaluation_configs(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that the base's evaluation configs reach exactly the clients that the base names, unchanged."""
    promise(
        seen.evaluated == seen.base_evaluated,
        f"the base's evaluation configs pass through; {seen.where} it configured "
        f"{_shortened(seen.base_evaluated)}, clients received {_shortened(seen.evaluated)}",
    )


@in_each_round
def check_model_is_finite(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that the model keeps the initial model's shapes and contains only finite numbers."""
    shapes = [array.shape for array in harness.plan.arrays]
    now = [array.shape for array in seen.after]
    promise(now == shapes, f"the model keeps its shapes {shapes}; after round {seen.number} it has {now}")
    finite = all(np.isfinite(array).all() for array in seen.after)
    promise(finite, f"the model holds finite numbers only; after round {seen.number} it does not")


@in_each_round
def check_failures_are_named(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that an unusable update is a failure with a named problem, and that a healthy client has no problem."""
    faults = {run.fleet.id_of(node): fault for node, fault in seen.broken.items()}
    for row in run.rows(seen.number):
        fault, who = faults.get(row.client_id), f"round {seen.number}, client {row.client_id}"
        lost = fault is not None and (fault.loses == "always" or (harness.clock_is_virtual and fault.loses != "never"))
        what = "was healthy" if fault is None else fault.name
        promise(
            row.completed != lost,
            f"the history names the clients that failed; {who} {what}: completed is {row.completed}",
        )
        if lost or (fault is not None and fault.named):
            promise(bool(row.problem), f"every failure is named in the history; {who} {what}: no problem")
        elif fault is None and harness.clock_is_virtual:
            promise(not row.problem, f"a healthy client has no problem; {who}: {row.problem}")


def check_latencies(harness: StrategyHarness) -> None:
    """Check that latencies lie between 0 and ``max_latency``, and that the simulated time never falls.

    A failed client has the latency ``max_latency``.
    """
    run, longest, before = harness.full_run, harness.plan.max_latency, 0.0
    for row in run.strategy.history.clients:
        where = f"client {row.client_id} in round {row.round}: {row.latency_s}"
        good = math.isfinite(row.latency_s) and 0.0 <= row.latency_s <= longest
        promise(good, f"latencies lie between 0 and max_latency = {longest:g} s; {where}")
        longest_if_failed = row.completed or row.latency_s == longest
        promise(longest_if_failed, f"a failed client holds max_latency = {longest:g} s; {where}")
    for record in run.strategy.history.rounds:
        promise(
            math.isfinite(record.simulated_s) and record.simulated_s >= before,
            f"the simulated time is finite and never falls; round {record.round}: {before} s, {record.simulated_s} s",
        )
        before = record.simulated_s


@in_each_round
def check_base_gets_kept_updates(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that the base receives exactly the kept updates of the history, as the clients sent them.

    Without FedCA's filter every usable update is kept.
    """
    settings = run.strategy.core.settings
    kept = {row.client_id for row in run.rows(seen.number) if row.kept}
    usable = {row.client_id for row in run.rows(seen.number) if row.completed}
    # FedCA's filter drops usable updates on purpose.
    promise(
        kept <= usable if settings.filter is not None else kept == usable,
        f"every usable update is kept unless a filter drops it, and no other; {seen.where} clients "
        f"{sorted(usable, key=int)} had one, those of {sorted(kept, key=int)} were kept",
    )
    given = [] if seen.given is None else [run.fleet.id_of(one.node) for one in seen.given]
    promise(
        seen.given is None or sorted(given) == sorted(kept),
        f"the base receives the kept updates, each once; {seen.where} clients {sorted(kept, key=int)} "
        f"were kept, it received those of {sorted(given, key=int)}",
    )
    for one in seen.given or ():
        sent = seen.sent[one.node]
        whole = not isinstance(sent.arrays, bytes) and _same(one.arrays, sent.arrays)
        # Averaging schemes change the weights on purpose, on copies.
        if settings.averaging is None:
            whole = whole and one.num_examples == sent.num_examples
        who = run.fleet.id_of(one.node)
        promise(whole, f"the base receives updates as they were sent; {seen.where} client {who}'s was changed")


@in_each_round
def check_base_aggregates(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that the new model is the base's model if there are enough usable updates."""
    if not _enough(run, seen):
        return
    called = seen.given is not None
    promise(called, f"the base aggregates every round with enough updates; {seen.where} it was not asked")
    if run.strategy.core.settings.averaging in PLAIN:
        made = seen.before if seen.base_model is None else seen.base_model
        promise(_same(seen.after, made), f"the new model is the base's; {seen.where} it is not")


@in_each_round
def check_base_gets_failures(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that a base that aggregates receives a failure for every lost update.

    In the Message API this excludes clients that never answer, because Flower reports nothing about them.
    """
    if seen.given is None:
        return
    lost = {row.client_id for row in run.rows(seen.number) if not row.completed}
    if not harness.legacy:
        quiet = {run.fleet.id_of(n) for n, fault in seen.broken.items() if fault.name == "never answers"}
        lost -= quiet
    given, failed = seen.failures, len(lost)
    promise(given == failed, f"the base receives every failure; {seen.where} it received {given} of {failed}")


@in_each_round
def check_model_stays(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that the model stays with too few usable updates, or if the selector only measures."""
    if not _enough(run, seen):
        same = _same(seen.before, seen.after)
        promise(same, f"with too few usable updates the model stays; {seen.where} it changed")


def _enough(run: ObservedRun, seen: ObservedRound) -> bool:
    """Return whether the base must aggregate: enough clients completed, an update was kept, and the round trains."""
    rows = run.rows(seen.number)
    least = int(run.strategy.core.settings.min_completed)
    return not seen.keeps_model and sum(row.completed for row in rows) >= least and any(row.kept for row in rows)


def _same(one: Model, other: Model) -> bool:
    """Return whether two models are equal bit for bit."""
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def _shortened(facts: object) -> str:
    text = str(facts or "no fault")
    return text if len(text) <= 200 else f"{text[:200]} ..."


@in_each_round
def check_selector_observes(run: ObservedRun, seen: ObservedRound, harness: StrategyHarness) -> None:
    """Check that the selector observes every round once, with the history's row for each client that was asked.

    A broken client that lacks a required column has failed for the selector, even if its update is usable.
    """
    required, longest = bool(run.strategy.selector.requires), harness.plan.max_latency
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


@with_virtual_clock
def check_same_seed(harness: StrategyHarness) -> None:
    """Check that the same seed gives the same selections, for any node ids and any order of replies."""
    first, second = harness.full_run.choices(), harness.second_run().choices()
    number = next((i for i, pair in enumerate(zip(first, second, strict=False), 1) if pair[0] != pair[1]), None)
    promise(
        number is None and len(first) == len(second),
        f"the same seed gives the same selections; from round {number} on they differ. Give the selector a seed in "
        "make_strategy. Selections must not depend on node ids, on the order of replies or on a global generator",
    )


@with_virtual_clock
def check_save_and_load(harness: StrategyHarness) -> None:
    """Check that a strategy, saved, loaded and continued, makes the choices of one that never stopped."""
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


def check_buffered_rounds(harness: StrategyHarness) -> None:
    """Check that buffered rounds ask only clients that are not at work, and use each answer once.

    The history has the answers of the earlier rounds too, with the number of rounds since each was asked.
    """
    run, core = harness.full_run, harness.full_run.strategy.core
    sent: dict[str, int] = {}
    for number, choice in enumerate(run.choices(), 1):
        again = sorted({*choice} & sent.keys())
        promise(not again, f"clients at work are not asked; in round {number} clients {again} were")
        sent |= dict.fromkeys(choice, number)
        promise(
            len(sent) <= core.settings.concurrency,
            f"at most {core.settings.concurrency} clients are at work; in round {number} {len(sent)} were",
        )
        for row in (row for row in run.strategy.history.clients if row.round == number):
            asked = sent.pop(row.client_id, None)
            promise(
                asked is not None and row.staleness == number - asked,
                f"an answer counts once, with its staleness; in round {number} client {row.client_id} was asked in "
                f"round {asked}, and has the staleness {row.staleness}",
            )
    promise(len(sent) == core.at_work, f"{len(sent)} clients are still at work, not {core.at_work}")


STRATEGY_CHECKS: tuple[Check, ...] = tuple(
    check for name, check in dict(globals()).items() if name.startswith("check_") and check is not check_buffered_rounds
)
"""All checks above but the last one, in the order of running. Later checks rely on earlier ones."""
WHOLE_ROUNDS = (
    check_cohort_size, check_history, check_identity, check_failures_are_named, check_base_gets_kept_updates,
    check_base_gets_failures, check_save_and_load,
)  # fmt: skip
"""Checks of rounds that wait for all of their clients. In buffered rounds, :func:`check_buffered_rounds` replaces them.
"""


def check_strategy(
    make_strategy: StrategyFactory,
    arrays: Sequence[Any],
    *,
    num_clients: int | None = None,
    metrics: Mapping[str, float] | None = None,
    reported: Collection[str] | None = None,
) -> None:
    """Run a strategy with a fleet of simulated clients, and run all checks on it.

    It needs Flower, but neither Ray nor torch. It takes a second or two, and five with fifty clients a round. So set a
    small ``clients_per_round``. Clients have the ids 0, 1, 2, ... and train by adding random numbers to the received
    model. On the server's clock the two checks that compare choices are left out with a warning. With ``concurrency``,
    one check of buffered rounds replaces those of rounds that wait for all of their clients.

    Args:
        make_strategy: Returns a new strategy at each call, with a seed, in either of Flower's APIs. This is a
            :class:`~fedsel_flwr.strategies.SelectionStrategy` around your selector and base, or a paper's strategy.
        arrays: The initial model, a list of NumPy arrays, which may be small. If the base has initial parameters, they
            must be the same.
        num_clients: Clients of the fleet, for parameters that are set by client. None takes 12 or more.
        metrics: Further metrics that every client reports, for a base that reads them.
        reported: The names of all metrics that your clients report, after training and in an evaluation. A selector
            that would learn nothing from these clients then breaks a promise. If None: the clients report everything
            that the selector asks for.

    Raises:
        AssertionError: A promise is broken. The message names it.
        ParameterError: An argument is unusable.

    >>> import numpy as np
    >>> from fedsel_flwr.strategies import CSUCB
    >>> check_strategy(lambda: CSUCB(clients_per_round=3, max_latency=5.0, seed=1), arrays=[np.zeros((3, 2))])
    """
    harness = StrategyHarness(make_strategy, arrays, num_clients, metrics, reported)
    own = [check for check in STRATEGY_CHECKS if not harness.buffered or check not in WHOLE_ROUNDS]
    for check in own + [check_buffered_rounds] * harness.buffered:
        check(harness)
