"""A Ray cluster that runs already: the environment variable RAY_ADDRESS names it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from fedsel_flwr.errors import ParameterError, RunError

VARIABLE = "RAY_ADDRESS"
"""Ray's own variable: HOST:PORT of the head, or "auto" for the cluster that this machine is part of."""
CONNECT_TIMEOUT_S = 5.0
START = f"start one with 'ray start --head' and set {VARIABLE} to what it prints, or unset {VARIABLE}"


def cluster_address() -> str | None:
    """The cluster that is to be joined.

    Returns:
        The address; None where Ray is to be started on this machine.

    Raises:
        ParameterError: The address is no HOST:PORT.
    """
    address = os.environ.get(VARIABLE, "").strip()
    if address in ("", "local"):
        return None
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdecimal()):
        raise ParameterError(
            f"{VARIABLE} must be HOST:PORT of the cluster's head, as 'ray start' prints it, or auto, got {address!r}; "
            "start the server on a machine of the cluster"
        )
    return address


def check_cluster(num_cpus: int | None = None) -> None:
    """Refuse an address where nobody listens, and a number of cores beside one; where there is none, do nothing.

    Args:
        num_cpus: Cores that the caller asks for.

    Raises:
        ParameterError: The address is no HOST:PORT, or ``num_cpus`` is given beside it.
        RunError: Nobody answers there.
    """
    address = cluster_address()
    if address is None:
        return
    if num_cpus is not None:
        raise ParameterError(
            f"num_cpus = {num_cpus} is given, but the cluster at {VARIABLE} = {address!r} has the cores that it was "
            f"started with: leave num_cpus out, or unset {VARIABLE}"
        )
    _knock(address)


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Connect to a cluster; a connection that there is already serves, and is kept.

    At the end the connection is closed, if Flower has not done so. The cluster goes on.

    Args:
        address: Of :func:`cluster_address`.

    Raises:
        RunError: Ray refuses the connection.
    """
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    path = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"))))  # as Flower does where it connects
    try:
        ray.init(
            address=address, runtime_env={"env_vars": {"PYTHONPATH": path}}, logging_level=logging.ERROR,
            log_to_driver=False,
        )  # fmt: skip
    except Exception as error:  # Ray has many
        raise RunError(f"{VARIABLE} = {address!r}: {' '.join(str(error).split())}; {START}") from error
    try:
        yield
    finally:
        if ray.is_initialized():
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise if nobody listens at the address: Ray itself would try for minutes, and then end the process."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            return
    except (OSError, OverflowError) as error:
        raise RunError(f"{VARIABLE} = {address!r}: nobody answers there ({error}); {START}") from error


def _ray() -> Any:
    import ray

    return ray
