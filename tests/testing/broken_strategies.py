"""Deliberately broken strategies: each function breaks one promise of a sound one, in either API."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

from tests.testing.strategies_under_test import ARRAYS, BASES

CONFIGURE = {"legacy": "configure_fit", "message": "configure_train"}
AGGREGATE = {"legacy": "aggregate_fit", "message": "aggregate_train"}
EVALUATE = {"legacy": "configure_evaluate", "message": "configure_evaluate"}
Break = Callable[[Any, str], None]
"""Breaks a strategy of an API."""
BROKEN: dict[Break, str] = {}
"""How it is broken -> the promise that is named."""


def breaks(promise: str) -> Callable[[Break], Break]:
    """Put a function into the table."""

    def noted(broken: Break) -> Break:
        BROKEN[broken] = promise
        return broken

    return noted


def breaks_after(names: dict[str, str], promise: str) -> Callable[[Callable[[str, Any], Any]], Break]:
    """Put a function into the table that changes what a method returns: ``change(api, returned)``."""

    def noted(change: Callable[[str, Any], Any]) -> Break:
        def broken(strategy: Any, api: str) -> None:
            _after(strategy, names[api], partial(change, api))

        broken.__name__ = change.__name__
        return breaks(promise)(broken)

    return noted


def _after(owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    vars(owner)[name] = lambda *args, **kwargs: change(original(*args, **kwargs))


def _model(api: str, arrays: Any) -> Any:
    if api == "legacy":
        return ndarrays_to_parameters(arrays)
    return ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)})


def _changed(api: str, result: Any, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """What an aggregation returned, with another model."""
    model, metrics = result
    if model is None:
        return result
    arrays = parameters_to_ndarrays(model) if api == "legacy" else model.to_numpy_ndarrays()
    return _model(api, [change(np.array(array)) for array in arrays]), metrics


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


@breaks("no client breaks a round; in round 1 .*ValueError: a client failed")
def lets_failures_out(strategy: Any, api: str) -> None:
    def change(result: Any) -> Any:
        if not all(row.completed for row in _last_rows(strategy)):
            raise ValueError("a client failed")
        return result

    _after(strategy, AGGREGATE[api], change)


@breaks("only connected clients are asked")
def asks_the_absent(strategy: Any, api: str) -> None:
    remembered: list[Any] = []

    def change(out: list[Any]) -> list[Any]:
        remembered.append(out[-1])
        if api == "legacy":
            return [*out, remembered[0]]
        return [*out, Message(content=out[0].content, dst_node_id=99, message_type=out[0].metadata.message_type)]

    _after(strategy, CONFIGURE[api], change)


@breaks_after(CONFIGURE, "a client is asked once a round")
def asks_twice(api: str, out: list[Any]) -> list[Any]:
    return [*out, *copy.copy(out[:1])]


@breaks_after(CONFIGURE, "the right number is asked; in round 1 3 of 10 available clients were, expected 4")
def asks_too_few(api: str, out: list[Any]) -> list[Any]:
    return out[:-1]


def _renamed(strategy: Any, rename: Callable[[str], str]) -> None:
    enroll = strategy.roster.register
    vars(strategy.roster)["register"] = lambda claims, *more: enroll(
        {node: rename(claim) if claim in strategy.roster.ids else claim for node, claim in claims.items()}, *more
    )


@breaks("a second connection with a connected client's id is refused")
def admits_impostors(strategy: Any, api: str) -> None:
    _renamed(strategy, lambda claim: "100" if claim == "0" else claim)


@breaks("a client keeps its id when it reconnects")
def forgets_who_reconnects(strategy: Any, api: str) -> None:
    _renamed(strategy, lambda claim: claim if claim == "0" else str(100 + len(strategy.roster.ids)))


def _with_configs(api: str, out: list[Any], config: Callable[[Any], dict[str, Any]]) -> list[Any]:
    if api == "legacy":
        return [(client, replace(ins, config=config(ins.config))) for client, ins in out]
    for message in out:
        message.content["config"] = ConfigRecord(config(message.content["config"]))
    return out


@breaks_after(CONFIGURE, "the base's train config reaches every client; in round 1 ")
def loses_train_config(api: str, out: list[Any]) -> list[Any]:
    return _with_configs(api, out, lambda config: {})


@breaks("the base's train config reaches every client; in round 1 ")
def gives_every_client_the_config_of_the_first(strategy: Any, api: str) -> None:
    def personal(out: Any) -> list[Any]:
        if api == "legacy":
            return [(client, replace(ins, config={**ins.config, "you": client.cid})) for client, ins in out]
        messages = list(out)
        for message in messages:
            own = {**message.content["config"], "you": str(message.metadata.dst_node_id)}
            message.content = RecordDict({**message.content, "config": ConfigRecord(own)})
        return messages

    def of_the_first(out: list[Any]) -> list[Any]:
        first = (out[0][1].config if api == "legacy" else dict(out[0].content["config"])) if out else {}
        return _with_configs(api, out, lambda config: first)

    _after(strategy.base, CONFIGURE[api], personal)
    _after(strategy, CONFIGURE[api], of_the_first)


@breaks_after(EVALUATE, "the base's evaluation configs pass through; in round 1 ")
def changes_evaluation_config(api: str, out: list[Any]) -> list[Any]:
    return _with_configs(api, out, lambda config: {**config, "more": 1})


@breaks_after(AGGREGATE, "the model holds finite numbers only; after round 1 ")
def poisons_the_model(api: str, result: Any) -> Any:
    return _changed(api, result, lambda array: array * np.float32("nan"))


@breaks_after(AGGREGATE, "the model keeps its shapes")
def flattens_the_model(api: str, result: Any) -> Any:
    return _changed(api, result, np.ravel)


@breaks_after(AGGREGATE, "the new model is the base's; in round 1 ")
def improves_the_model(api: str, result: Any) -> Any:
    return _changed(api, result, lambda array: array * np.float32(1.5))


@breaks("the history has a row for each client that was asked; round 1 asked 4, it has 3")
def drops_rows(strategy: Any, api: str) -> None:
    _rewritten(strategy, api, lambda row: row if row.completed else None)


@breaks("every failure is named in the history; round 1, client .* raises an exception")
def hushes_failures_up(strategy: Any, api: str) -> None:
    _rewritten(strategy, api, lambda row: replace(row, problem=""))


@breaks("latencies lie between 0 and max_latency = 5 s; .* inf")
def waits_for_ever(strategy: Any, api: str) -> None:
    _rewritten(strategy, api, lambda row: row if row.completed else replace(row, latency_s=float("inf")))


@breaks("every usable update is kept")
def drops_survivors(strategy: Any, api: str) -> None:
    def change(outcome: Any) -> Any:
        outcome.columns["kept"] = np.arange(len(outcome.usable)) != 1
        return outcome

    _after(strategy.core, "collect", change)


def _less(examples: int) -> int:
    return examples - 1 if 1 < examples < 1000 else examples


@breaks("the base receives updates as they were sent; in round 1 ")
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


@breaks("the base aggregates every round with enough updates; in round 1 it was not asked")
def aggregates_by_itself(strategy: Any, api: str) -> None:
    aggregate, theirs = getattr(strategy, AGGREGATE[api]), strategy.base

    def changed(*args: Any) -> Any:
        strategy.base = BASES[api]["FedAvg"]()
        try:
            return aggregate(*args)
        finally:
            strategy.base = theirs

    vars(strategy)[AGGREGATE[api]] = changed


@breaks("the base receives every failure; in round 1 it received 0 of 1")
def hides_failures(strategy: Any, api: str) -> None:
    aggregate = getattr(strategy, AGGREGATE[api])
    if api == "legacy":
        vars(strategy)[AGGREGATE[api]] = lambda number, results, failures: aggregate(number, results, [])
    else:
        vars(strategy)[AGGREGATE[api]] = lambda number, replies: aggregate(
            number, [reply for reply in replies if reply.has_content()]
        )


@breaks_after(AGGREGATE, "with too few usable updates the model stays; in round 24 ")
def drifts(api: str, result: Any) -> Any:
    return result if result[0] is not None else (_model(api, [array + 1 for array in ARRAYS]), result[1])


@breaks("the selector observes what the history says; round 1:")
def tells_half(strategy: Any, api: str) -> None:
    _after(strategy.core.parts.reporter, "report", lambda report: replace(report, latency=report.latency / 2))


@breaks("the selector observes every round once; round 24: 0 times")
def tells_nothing_of_lost_rounds(strategy: Any, api: str) -> None:
    collect = strategy.core.collect

    def changed(*args: Any) -> Any:
        outcome, observe = collect(*args), strategy.selector.observe
        if not outcome.usable:
            vars(strategy.selector)["observe"] = lambda report: vars(strategy.selector).update(observe=observe)
        return outcome

    vars(strategy.core)["collect"] = changed


@breaks("save, load, continue equals never stopping; the choices differ from round ")
def forgets_what_was_learned(strategy: Any, api: str) -> None:
    load = strategy.load_state_dict

    def changed(state: dict[str, Any]) -> None:
        selector = {k: v * 0.0 if np.asarray(v).dtype.kind == "f" else v for k, v in state["selector"].items()}
        load({**state, "selector": selector})

    vars(strategy)["load_state_dict"] = changed


@breaks("save, load, continue equals never stopping")
def skips_the_roster(strategy: Any, api: str) -> None:
    load, fresh = strategy.load_state_dict, strategy.state_dict()["roster"]
    vars(strategy)["load_state_dict"] = lambda state: load({**state, "roster": fresh})
