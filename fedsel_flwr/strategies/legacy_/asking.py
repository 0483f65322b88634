"""Questions to many clients at once, with a bounded wait (legacy API)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from flwr.common import Code, EvaluateIns, GetPropertiesIns, Parameters, Scalar
from flwr.server.client_proxy import ClientProxy

from fedsel_flwr.strategies.core import Introduction
from fedsel_flwr.strategies.replies import MetricKeys

logger = logging.getLogger("fedsel_flwr")
MAX_PARALLEL = 32
Answer = TypeVar("Answer")


def ask_all(
    clients: Iterable[ClientProxy], question: Callable[[ClientProxy], Answer], timeout: float
) -> tuple[dict[str, Answer], list[str]]:
    """Put a question to clients, at most 32 at a time.

    Args:
        clients: Whom to ask.
        question: Asks one client; must not raise.
        timeout: Longest wait for all of them, seconds.

    Returns:
        Connection -> answer, and the connections that were asked and did not answer in time.
    """
    executor = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="fedsel-ask")
    futures = {client.cid: executor.submit(question, client) for client in clients}
    done, _ = wait(futures.values(), timeout=timeout)
    executor.shutdown(wait=False, cancel_futures=True)
    missed = [cid for cid, future in futures.items() if future not in done and not future.cancelled()]
    return {cid: future.result() for cid, future in futures.items() if future in done}, missed


def introduce(client: ClientProxy, keys: MetricKeys, timeout: float) -> Introduction:
    """Ask a client who it is; one that answers with an error, twice, introduces itself with nothing."""
    for attempt in (1, 2):
        try:
            answer = client.get_properties(GetPropertiesIns(config={}), timeout, None)
            if answer.status.code == Code.OK:
                properties = answer.properties
                return Introduction(
                    client_id=properties.get(keys.client_id),
                    num_examples=properties.get(keys.num_examples),
                    energy_score=properties.get(keys.energy_score),
                )
            return Introduction()  # the client has no get_properties
        except Exception as error:  # a client that fails is data
            if attempt == 2:
                logger.warning(
                    "roll call: client %s answered with %r; its connection serves as its id", client.cid, error
                )
    return Introduction()


def probe(
    client: ClientProxy, parameters: Parameters, config: dict[str, Scalar], timeout: float
) -> dict[str, object] | None:
    """Have a client evaluate the current model; None if it fails.

    The metrics of ``evaluate`` count; ``loss`` and ``local_accuracy`` fall back on the result's loss and ``accuracy``.
    """
    try:
        answer = client.evaluate(EvaluateIns(parameters, dict(config)), timeout, None)
        if answer.status.code != Code.OK:
            raise ValueError(f"{answer.status.code.name}: {answer.status.message}")
        metrics: dict[str, object] = dict(answer.metrics or {})
    except Exception as error:  # a client that fails is data
        logger.warning("probe: client %s answered with %r", client.cid, error)
        return None
    return {"loss": answer.loss, "local_accuracy": metrics.get("accuracy")} | metrics
