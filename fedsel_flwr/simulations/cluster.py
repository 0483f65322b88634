"""A Ray cluster that runs already: its address, and whether Ray answers there."""

from __future__ import annotations

import os
import socket

from fedsel_flwr.errors import ParameterError, RunError

VARIABLE = "RAY_ADDRESS"
"""Ray's own variable: HOST:PORT of the head, or "auto" for the cluster that this machine is part of."""
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
"""A head that starts at this moment answers within it; what is not Ray never does."""
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def start(source: str = VARIABLE) -> str:
    """What to do where there is no cluster.

    Args:
        source: What named the cluster: the variable, or an argument.
    """
    return f"start one with 'ray start --head' and set {source} to what it prints, or leave {source} unset"


def cluster_address(given: str | None = None) -> str | None:
    """The cluster that is to be joined.

    Args:
        given: An address; None takes RAY_ADDRESS.

    Returns:
        The address; None where Ray is to be started on this machine.

    Raises:
        ParameterError: The address is no HOST:PORT.
    """
    source = VARIABLE if given is None else "ray_address"
    address = (os.environ.get(VARIABLE, "") if given is None else given).strip()
    if address in ("", "local"):
        return None
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdecimal()):
        raise ParameterError(
            f"{source} must be HOST:PORT of the cluster's head, as 'ray start' prints it, or auto, got {address!r}; "
            "start the server on a machine of the cluster"
        )
    return address


def check_cluster(address: str, source: str = VARIABLE) -> None:
    """Refuse an address where nobody listens, or something that is not Ray.

    Ray itself would try for minutes, and then end the process.

    Args:
        address: Of :func:`cluster_address`.
        source: What named it.

    Raises:
        RunError: Says which.
    """
    if address == "auto":
        return
    try:
        knock(address)
    except (OSError, OverflowError) as error:
        raise RunError(f"{source} = {address!r}: nobody answers there ({error}); {start(source)}") from error
    if said := _not_ray(address):
        raise RunError(f"{source} = {address!r}: what listens there is not the head of Ray ({said}); {start(source)}")


def knock(address: str) -> None:
    """Open a connection and close it; raises :class:`OSError` if nobody listens."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
        return


def _not_ray(address: str) -> str:
    """Why what listens is not Ray; empty if it is, or if it cannot be asked because Ray uses TLS or tokens."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return ""
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(_ALIVE, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            status = error.code()
            if status == grpc.StatusCode.UNAVAILABLE:
                return "it does not speak gRPC"
            if status == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {ANSWER_TIMEOUT_S:g} s"
            if status == grpc.StatusCode.UNIMPLEMENTED:
                return "it does not know Ray's question whether it is alive"
    return ""
