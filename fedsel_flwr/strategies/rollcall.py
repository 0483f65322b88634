"""Asking newly connected clients who they are (legacy API)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from flwr.common import Code, GetPropertiesIns
from flwr.server.client_proxy import ClientProxy

from fedsel_flwr.strategies.core import Introduction
from fedsel_flwr.strategies.replies import MetricKeys

logger = logging.getLogger("fedsel_flwr")
MAX_PARALLEL = 32


def call_roll(clients: Iterable[ClientProxy], keys: MetricKeys, timeout: float) -> dict[str, Introduction]:
    """Ask each client for its properties.

    Args:
        clients: Proxies of clients not enrolled yet.
        keys: The names under which they answer.
        timeout: Longest wait, seconds.

    Returns:
        Connection -> what it said. A client that answers with an error, twice, introduces itself with nothing; one
        that does not answer in time is missing, and is asked again next round.
    """
    executor = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="roll-call")
    futures = {client.cid: executor.submit(_ask, client, keys, timeout) for client in clients}
    done, _ = wait(futures.values(), timeout=timeout)
    executor.shutdown(wait=False, cancel_futures=True)
    for cid in (cid for cid, future in futures.items() if future not in done):
        logger.warning("roll call: client %s did not answer within %g s and is left out of this round", cid, timeout)
    return {cid: future.result() for cid, future in futures.items() if future in done}


def _ask(client: ClientProxy, keys: MetricKeys, timeout: float) -> Introduction:
    for attempt in (1, 2):
        try:
            answer = client.get_properties(GetPropertiesIns(config={}), timeout, None)
            if answer.status.code == Code.OK:
                properties = answer.properties
                return Introduction(
                    client_id=properties.get(keys.client_id), num_examples=properties.get(keys.num_examples)
                )
            return Introduction()  # the client has no get_properties
        except Exception as error:  # a client that fails is data
            if attempt == 2:
                logger.warning(
                    "roll call: client %s answered with %r; its connection serves as its id", client.cid, error
                )
    return Introduction()
