"""Resources of a run on Ray: cores and GPUs of Ray and of each client, and the cluster to join.

Checks before Ray starts find an address without a server, a missing GPU, and a client that no machine has room for.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, fields

from fedsel_flwr.checks import real, whole
from fedsel_flwr.errors import ParameterError, RunError

VARIABLE = "RAY_ADDRESS"
"""Environment variable of Ray: HOST:PORT of the head, or "auto" for the cluster that this machine belongs to."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds within which the head of a cluster must accept a connection."""


@dataclass(frozen=True)
class RayResources:
    """Resources of Ray and of each client.

    Args:
        num_cpus: Cores for Ray. If None, all cores of this machine. At most ``num_cpus / client_cpus`` clients train at
            the same time.
        num_gpus: GPUs for Ray. If None, all GPUs, provided that ``client_gpus`` is above 0.
        client_cpus: Cores per client, above 0. With half a core, two clients share one.
        client_gpus: GPUs per client. If None, an equal share of ``num_gpus``, or none if that is None or 0.
        ray_address: HOST:PORT of a cluster's head, "auto" or "local". If None, the environment variable RAY_ADDRESS.

    Raises:
        ParameterError: A number is out of range.
    """

    num_cpus: int | None = None
    num_gpus: int | None = None
    client_cpus: float = 1
    client_gpus: float | None = None
    ray_address: str | None = None
    # For plans that are read from files.
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    def __post_init__(self) -> None:
        if self.num_cpus is not None:
            whole("num_cpus", self.num_cpus, 1)
        if self.num_gpus is not None:
            whole("num_gpus", self.num_gpus, 0)
        if not isinstance(self.ray_address, str | None):
            raise ParameterError(f"ray_address must be HOST:PORT, auto or local, got {self.ray_address!r:.80}")
        real("client_cpus", self.client_cpus, above=0.0)
        # Ray requires that a share above one GPU is a whole number.
        share = 0.0 if self.client_gpus is None else real("client_gpus", self.client_gpus, at_least=0.0)
        if share > 1 and share % 1:
            raise ParameterError(f"client_gpus must be whole, or a fraction of one GPU, got {self.client_gpus}")

    @property
    def address(self) -> str | None:
        """Address of the cluster to join; None if Ray is started on this machine."""
        return cluster_address(self.ray_address)

    @property
    def source(self) -> str:
        """Name of the variable or argument that contains the cluster's address."""
        return VARIABLE if self.ray_address is None else "ray_address"

    @property
    def names_cluster(self) -> bool:
        """Whether ``ray_address`` names a cluster. The environment variable does not count."""
        return self.ray_address is not None and self.address is not None

    @property
    def cpus(self) -> int:
        """Number of cores for Ray on this machine."""
        return self.num_cpus or os.cpu_count() or 1

    @property
    def non_default(self) -> list[str]:
        """Names of the arguments that differ from their defaults. Only Ray uses these arguments."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]

    def gpus(self) -> int:
        """Return the number of GPUs for Ray on this machine."""
        # torch, which initialises CUDA, is called only if a client needs a GPU.
        if self.num_gpus is not None:
            return self.num_gpus
        return visible_gpus() if self.client_gpus else 0

    def gpus_per_client(self) -> float:
        """Return the GPUs per client: ``client_gpus``, or an equal share of Ray's GPUs.

        A share below one GPU is 1/n, because a client's share must be on one GPU.

        >>> [RayResources(num_cpus=cores, num_gpus=4).gpus_per_client() for cores in (6, 2)]
        [0.5, 2.0]
        """
        if self.client_gpus is not None:
            return float(self.client_gpus)
        if not self.num_gpus:
            return 0.0
        clients = max(1, int(self.cpus / self.client_cpus))
        if self.num_gpus >= clients:
            return float(self.num_gpus // clients)
        # Rounded down to ten-thousandths, Ray's unit. If rounded up, the last of n clients would find no room.
        return math.floor(10_000 / math.ceil(clients / self.num_gpus)) / 10_000

    def client_resources(self) -> dict[str, float]:
        """Return the resources and options that Flower passes to each of Ray's actors."""
        # max_restarts: Flower puts a dead actor back into its pool and sends it messages, so the actor must restart.
        # max_task_retries: an actor refuses messages while it restarts. With one retry, Ray holds the message back
        # until the actor has started.
        share = self.gpus_per_client()
        return {"num_cpus": self.client_cpus, "num_gpus": share, "max_restarts": -1, "max_task_retries": 1}

    def of_runs(self, device: str) -> RayResources:
        """Return the resources of vectorized runs on a cluster, where each run takes the place of a client.

        Args:
            device: Device on which the runs train. A run on another device than "cpu" gets one GPU, unless
                ``num_gpus`` is set.

        >>> RayResources(num_cpus=4, ray_address="head:6379").of_runs("cuda").client_resources()["num_gpus"]
        1.0
        """
        gpus = int(device != "cpu") if self.num_gpus is None else self.num_gpus
        return RayResources(client_cpus=self.num_cpus or 1, client_gpus=gpus, ray_address=self.ray_address)

    def check(self) -> None:
        """Refuse resources that do not exist, before Ray starts.

        Raises:
            ParameterError: More GPUs are asked for than exist, a client needs more than Ray has, or a number is set
                together with a cluster's address.
            RunError: No Ray answers at the address.
        """
        if self.address is not None:
            for name in ("num_cpus", "num_gpus"):
                if (value := getattr(self, name)) is not None:
                    raise ParameterError(
                        f"{name} = {value} has no effect on the cluster at {self.address!r}. Leave it out."
                    )
            # Checked here, because Ray tries to connect for minutes, and then ends the process.
            try:
                try_connect(self.address)
            except (OSError, OverflowError) as error:
                raise RunError(
                    f"{self.source} = {self.address!r}: no server answers there ({error}). {start_hint(self.source)}"
                ) from error
            return
        if self.gpus() > 0 or self.gpus_per_client() > 0:
            there, asked = visible_gpus(), max(self.gpus(), math.ceil(self.gpus_per_client()))
            if asked > there:
                name = "num_gpus" if self.num_gpus else "client_gpus"
                raise ParameterError(
                    f"{name} = {getattr(self, name)} asks for a GPU that is not there: torch sees {there}."
                )
        if not (fit := actors_that_fit(self.cpus, self.gpus(), self)):
            raise ParameterError(
                f"no client fits: Ray gets {self.cpus} cores and {self.gpus()} GPUs, but a client takes "
                f"{self.client_cpus:g} and {self.gpus_per_client():g}. Give Ray more or a client less."
            )
        if fit < flower_actor_count(self.cpus, self.gpus(), self):
            # Flower counts the rest of a GPU as room for an actor. It then starts too many actors, and waits endlessly.
            share = 1 / math.ceil(1 / self.gpus_per_client())
            raise ParameterError(
                f"client_gpus = {self.client_gpus} leaves a remainder of each GPU. Use 1/n, such as {share:.4g}."
            )

    def check_nodes(self, nodes: list[dict[str, float]], what: str = "client") -> None:
        """Refuse a cluster without room for a client.

        Args:
            nodes: Resources of the machines, by Ray's names.
            what: What takes the place of clients: "client" or "run".

        Raises:
            RunError: No machine has room for a client.
        """
        rooms = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
        if not any(actors_that_fit(cpus, gpus, self) for cpus, gpus in rooms):
            keys = "client_cpus or client_gpus" if what == "client" else "num_cpus or num_gpus"
            raise RunError(
                f"no {what} fits on any machine of the cluster: a {what} takes {self.client_cpus:g} cores and "
                f"{self.gpus_per_client():g} GPUs, the machines have {rooms} (cores, GPUs). Lower {keys}."
            )


def cluster_for_runs(address: str | None) -> RayResources | None:
    """Return the cluster on which runs are tasks with one core each.

    Args:
        address: HOST:PORT of the cluster's head, or "auto". None and "local" mean this machine.

    Returns:
        The resources of each run; None for this machine.

    Raises:
        ParameterError: The address is not HOST:PORT.
        RunError: No cluster replies at the address.
    """
    where = RayResources(ray_address=address)
    if not where.names_cluster:
        return None
    where = where.of_runs("cpu")
    where.check()
    return where


def visible_gpus() -> int:
    """Return the number of GPUs that torch sees on this machine."""
    import torch

    return torch.cuda.device_count()


def flower_actor_count(cpus: int, gpus: int, resources: RayResources) -> int:
    """Return the number of actors that Flower starts on a machine, by Flower's formula."""
    share = resources.gpus_per_client()
    count = int(cpus / resources.client_cpus)
    return min(count, int(gpus / share)) if share else count


def actors_that_fit(cpus: int, gpus: int, resources: RayResources) -> int:
    """Return the number of actors that fit on a machine in Ray, each with its share of a single GPU."""
    count, share = flower_actor_count(cpus, gpus, resources), resources.gpus_per_client()
    return min(count, gpus * int(1 / share)) if 0 < share < 1 else count


def start_hint(source: str) -> str:
    """Return the advice for a missing cluster, as a sentence without a full stop.

    Args:
        source: Name of the variable or argument that contains the address.
    """
    return f"Start one with 'ray start --head' and set {source} to what it prints, or set {source} to local"


def cluster_address(given: str | None = None) -> str | None:
    """Return the address of the cluster to join.

    Args:
        given: An address. If None, the environment variable RAY_ADDRESS.

    Returns:
        The address; None if Ray should start on this machine.

    Raises:
        ParameterError: The address is not HOST:PORT.
    """
    source = VARIABLE if given is None else "ray_address"
    address = (os.environ.get(VARIABLE, "") if given is None else given).strip()
    if address in ("", "local"):
        return None
    host, _, port = address.rpartition(":")
    # ray:// is Ray's client protocol, which Flower's simulation cannot use.
    if address != "auto" and ("://" in address or not host or not port.isdecimal()):
        raise ParameterError(f"{source} must be HOST:PORT of the cluster's head, or auto, got {address!r}.")
    return address


def try_connect(address: str) -> None:
    """Try a connection, and raise :class:`OSError` if no server listens. "auto" is skipped, because Ray resolves it."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
        return


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use on this machine; raise :class:`ParameterError`."""
    if device == "cpu":
        return
    import torch

    # Tried out, because torch has no function for this check. It raises exceptions of many kinds, with long messages.
    try:
        torch.empty(1, device=device)
    except Exception as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ParameterError(
            f"device = {device!r} cannot be used on this machine: {message}. Use 'cpu', or leave device out."
        ) from error
