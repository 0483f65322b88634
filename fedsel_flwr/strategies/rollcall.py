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


class RollCall:
    """Asks each connection once for its properties, and again later those that did not answer.

    Args:
        keys: The names under which clients answer.
        timeout: Longest wait, seconds.
    """

    def __init__(self, keys: MetricKeys, timeout: float) -> None:
        self._keys, self._timeout = keys, timeout
        self._in_vain: dict[str, int] = {}  # connection -> how often it did not answer
        self._not_before: dict[str, int] = {}  # connection -> round in which it is asked again

    def call(self, clients: Iterable[ClientProxy], round: int) -> dict[str, Introduction]:
        """Ask clients who they are; those that hung before come last, and ever more rarely.

        Args:
            clients: Proxies of clients not enrolled yet.
            round: The round about to be chosen.

        Returns:
            Connection -> what it said. A client that answers with an error, twice, introduces itself with nothing;
            one that does not answer in time is missing.
        """
        due = [client for client in clients if self._not_before.get(client.cid, 0) <= round]
        due.sort(key=lambda client: self._in_vain.get(client.cid, 0))
        executor = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="roll-call")
        futures = {client.cid: executor.submit(_ask, client, self._keys, self._timeout) for client in due}
        done, _ = wait(futures.values(), timeout=self._timeout)
        executor.shutdown(wait=False, cancel_futures=True)
        for cid, future in futures.items():
            if future not in done and not future.cancelled():
                self._in_vain[cid] = self._in_vain.get(cid, 0) + 1
                self._not_before[cid] = round + 2 ** min(self._in_vain[cid] - 1, 30)
                logger.warning(
                    "roll call: client %s did not answer within %g s and is left out of this round", cid, self._timeout
                )
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
