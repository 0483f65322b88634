"""Deliberately broken strategies: each function breaks one promise of a sound one, in either API."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

from tests.testing.strategies_under_test import ARRAYS, BASES

CONFIGURE = {"legacy": "configure_fit", "message": "configure_train"}
AGGREGATE = {"legacy": "aggregate_fit", "message": "aggregate_train"}
Break = Callable[[Any, str], None]
"""Breaks a strategy of an API."""


def _after(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    vars(owner)[name] = lambda *args, **kwargs: change(original(*args, **kwargs))


def _model(api: str, arrays: Any) -> Any:
    if api == "legacy":
        return ndarrays_to_parameters(arrays)
    return ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)})


def _changed(api: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
    """Changes the model that an aggregation returns."""

    def changed(result: Any) -> Any:
        model, metrics = result
        if model is None:
            return result
        arrays = parameters_to_ndarrays(model) if api == "legacy" else model.to_numpy_ndarrays()
        return _model(api, [change(np.array(array)) for array in arrays]), metrics

    return changed


def _last_rows(strategy: Any) -> list[Any]:
    history = strategy.history
    return [row for row in history.clients if row.round == history.rounds[-1].round]


def _rewritten(strategy: Any, api: str, rewrite: Callable[[Any], Any]) -> None:
    """Rewrites the history's rows after each round; None drops a row."""

    def change(result: Any) -> Any:
        rows = [rewrite(row) for row in strategy.history.clients]
        strategy.history.clients[:] = [row for row in rows if row is not None]
        return result

    _after(strategy, AGGREGATE[api], change)


def lets_failures_out(strategy: Any, api: str) -> None:
    def change(result: Any) -> Any:
        if not all(row.completed for row in _last_rows(strategy)):
            raise ValueError("a client failed")
        return result

    _after(strategy, AGGREGATE[api], change)


def asks_the_absent(strategy: Any, api: str) -> None:
    remembered: list[Any] = []

    def change(out: list[Any]) -> list[Any]:
        remembered.append(out[-1])
        if api == "legacy":
            return [*out, remembered[0]]
        kind = out[0].metadata.message_type
        return [*out, Message(content=out[0].content, dst_node_id=99, message_type=kind)]

    _after(strategy, CONFIGURE[api], change)


def asks_twice(strategy: Any, api: str) -> None:
    _after(strategy, CONFIGURE[api], lambda out: [*out, *copy.copy(out[:1])])


def asks_too_few(strategy: Any, api: str) -> None:
    _after(strategy, CONFIGURE[api], lambda out: out[:-1])


def _renamed(strategy: Any, rename: Callable[[str], str]) -> None:
    enroll = strategy.roster.register
    vars(strategy.roster)["register"] = lambda claims, *more: enroll(
        {node: rename(claim) if claim in strategy.roster.ids else claim for node, claim in claims.items()}, *more
    )


def admits_impostors(strategy: Any, api: str) -> None:
    _renamed(strategy, lambda claim: "100" if claim == "0" else claim)


def forgets_who_reconnects(strategy: Any, api: str) -> None:
    _renamed(strategy, lambda claim: claim if claim == "0" else str(100 + len(strategy.roster.ids)))


def loses_train_config(strategy: Any, api: str) -> None:
    def change(out: list[Any]) -> list[Any]:
        if api == "legacy":
            return [(client, replace(ins, config={})) for client, ins in out]
        for message in out:
            message.content["config"].clear()
        return out

    _after(strategy, CONFIGURE[api], change)


def changes_evaluation_config(strategy: Any, api: str) -> None:
    def change(out: list[Any]) -> list[Any]:
        if api == "legacy":
            return [(client, replace(ins, config={**ins.config, "more": 1})) for client, ins in out]
        for message in out:
            message.content["config"]["more"] = 1
        return out

    _after(strategy, "configure_evaluate", change)


def poisons_the_model(strategy: Any, api: str) -> None:
    _after(strategy, AGGREGATE[api], _changed(api, lambda array: array * np.float32("nan")))


def flattens_the_model(strategy: Any, api: str) -> None:
    _after(strategy, AGGREGATE[api], _changed(api, np.ravel))


def improves_the_model(strategy: Any, api: str) -> None:
    _after(strategy, AGGREGATE[api], _changed(api, lambda array: array * np.float32(1.5)))


def drops_rows(strategy: Any, api: str) -> None:
    _rewritten(strategy, api, lambda row: row if row.completed else None)


def hushes_failures_up(strategy: Any, api: str) -> None:
    _rewritten(strategy, api, lambda row: replace(row, problem=""))


def waits_for_ever(strategy: Any, api: str) -> None:
    _rewritten(strategy, api, lambda row: row if row.completed else replace(row, latency_s=float("inf")))


def drops_survivors(strategy: Any, api: str) -> None:
    def change(outcome: Any) -> Any:
        outcome.columns["kept"] = np.arange(len(outcome.usable)) != 1
        return outcome

    _after(strategy.core, "collect", change)


def _less(examples: int) -> int:
    return examples - 1 if 1 < examples < 1000 else examples


def changes_weights(strategy: Any, api: str) -> None:
    aggregate = getattr(strategy, AGGREGATE[api])

    def changed(number: int, replies: Any, *failures: Any) -> Any:
        if api == "legacy":
            less = [(client, replace(res, num_examples=_less(res.num_examples))) for client, res in replies]
            return aggregate(number, less, *failures)
        messages = list(replies)
        for message in messages:
            if message.has_content():
                metrics = message.content["metrics"]
                metrics["num-examples"] = _less(metrics["num-examples"])
        return aggregate(number, messages)

    vars(strategy)[AGGREGATE[api]] = changed


def aggregates_by_itself(strategy: Any, api: str) -> None:
    aggregate, theirs = getattr(strategy, AGGREGATE[api]), strategy.base

    def changed(*args: Any) -> Any:
        strategy.base = BASES[api]["FedAvg"]()
        try:
            return aggregate(*args)
        finally:
            strategy.base = theirs

    vars(strategy)[AGGREGATE[api]] = changed


def hides_failures(strategy: Any, api: str) -> None:
    aggregate = getattr(strategy, AGGREGATE[api])
    if api == "legacy":
        vars(strategy)[AGGREGATE[api]] = lambda number, results, failures: aggregate(number, results, [])
    else:
        vars(strategy)[AGGREGATE[api]] = lambda number, replies: aggregate(
            number, [reply for reply in replies if reply.has_content()]
        )


def drifts(strategy: Any, api: str) -> None:
    def change(result: Any) -> Any:
        return result if result[0] is not None else (_model(api, [array + 1 for array in ARRAYS]), result[1])

    _after(strategy, AGGREGATE[api], change)


def tells_half(strategy: Any, api: str) -> None:
    reporter = strategy.core.parts.reporter
    _after(reporter, "report", lambda report: replace(report, latency=report.latency / 2))


def tells_nothing_of_lost_rounds(strategy: Any, api: str) -> None:
    collect = strategy.core.collect

    def changed(*args: Any) -> Any:
        outcome, observe = collect(*args), strategy.selector.observe
        if not outcome.usable:
            vars(strategy.selector)["observe"] = lambda report: vars(strategy.selector).update(observe=observe)
        return outcome

    vars(strategy.core)["collect"] = changed


def forgets_what_was_learned(strategy: Any, api: str) -> None:
    load = strategy.load_state_dict

    def changed(state: dict[str, Any]) -> None:
        selector = {k: v * 0.0 if np.asarray(v).dtype.kind == "f" else v for k, v in state["selector"].items()}
        load({**state, "selector": selector})

    vars(strategy)["load_state_dict"] = changed


def skips_the_roster(strategy: Any, api: str) -> None:
    load, fresh = strategy.load_state_dict, strategy.state_dict()["roster"]
    vars(strategy)["load_state_dict"] = lambda state: load({**state, "roster": fresh})


BROKEN: dict[Break, str] = {
    lets_failures_out: "no client breaks a round; in round 1 .*ValueError: a client failed",
    asks_the_absent: "only connected clients are asked",
    admits_impostors: "a second connection with a connected client's id is refused",
    asks_twice: "a client is asked once a round",
    asks_too_few: "the right number is asked; in round 1 3 of 10 available clients were, expected 4",
    drops_rows: "the history has a row for each client that was asked; round 1 asked 4, it has 3",
    forgets_who_reconnects: "a client keeps its id when it reconnects",
    loses_train_config: "the base's train config reaches every client; in round 1 ",
    changes_evaluation_config: "the base's evaluation configs pass through; in round 1 ",
    poisons_the_model: "the model holds finite numbers only; after round 1 ",
    flattens_the_model: "the model keeps its shapes",
    hushes_failures_up: "every failure is named in the history; round 1, client .* raises an exception",
    waits_for_ever: "latencies lie between 0 and max_latency = 5 s; .* inf",
    drops_survivors: "every usable update is kept",
    changes_weights: "the base receives updates as they were sent; in round 1 ",
    aggregates_by_itself: "the base aggregates every round with enough updates; in round 1 it was not asked",
    improves_the_model: "the new model is the base's; in round 1 ",
    hides_failures: "the base receives every failure; in round 1 it received 0 of 1",
    drifts: "with too few usable updates the model stays; in round 24 ",
    tells_half: "the selector observes what the history says; round 1:",
    tells_nothing_of_lost_rounds: "the selector observes every round once; round 24: 0 times",
    forgets_what_was_learned: "save, load, continue equals never stopping; the choices differ from round ",
    skips_the_roster: "save, load, continue equals never stopping",
}
"""How it is broken -> the promise that is named."""
