"""Where a run takes place: what Ray gets, what a client takes of it, and which cluster.

A Ray cluster that runs already: its address, and whether Ray answers there.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass

from fedsel_flwr.checks import real, whole
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


@dataclass(frozen=True)
class Where:
    """What Ray is given, and each of its clients.

    Args:
        num_cpus: Cores that Ray gets; None: every core of this machine. The clients at work at one time are
            ``num_cpus / client_cpus``.
        num_gpus: GPUs that Ray gets; None: every one, if ``client_gpus`` asks for any.
        client_cpus: Cores that a client takes, above 0; half a core lets two clients share one.
        client_gpus: GPUs that a client takes; None: an equal share of ``num_gpus``, none where that is None or 0.
        ray_address: HOST:PORT of a cluster's head, "auto" or "local"; None takes the environment variable RAY_ADDRESS.

    Raises:
        ParameterError: A number is out of range.
    """

    num_cpus: int | None = None
    num_gpus: int | None = None
    client_cpus: float = 1
    client_gpus: float | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.num_cpus is not None:
            whole("num_cpus", self.num_cpus, 1)
        if self.num_gpus is not None:
            whole("num_gpus", self.num_gpus, 0)
        if not isinstance(self.ray_address, str | None):
            raise ParameterError(f"ray_address must be HOST:PORT, auto or local, got {self.ray_address!r:.80}")
        real("client_cpus", self.client_cpus, above=0.0)
        share = 0.0 if self.client_gpus is None else real("client_gpus", self.client_gpus, at_least=0.0)
        if share > 1 and share % 1:
            raise ParameterError(f"client_gpus must be whole, or a fraction of one GPU, got {self.client_gpus}")

    @property
    def address(self) -> str | None:
        """The cluster that is to be joined; None where Ray is started on this machine."""
        return cluster_address(self.ray_address)

    @property
    def cpus(self) -> int:
        """Cores that Ray gets on this machine."""
        return self.num_cpus or os.cpu_count() or 1

    @property
    def asked(self) -> list[str]:
        """What is not as it is by default: the names of arguments that only Ray can follow."""
        return [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]

    def gpus(self) -> int:
        """GPUs that Ray gets on this machine."""
        return self.num_gpus if self.num_gpus is not None else gpus_here() if self.client_gpus else 0

    def gpus_per_client(self) -> float:
        """GPUs that a client takes: what was asked for, or an equal share of Ray's.

        A share below one GPU is 1/n, as a client's share must lie on one GPU.

        >>> Where(num_cpus=6, num_gpus=4).gpus_per_client(), Where(num_cpus=2, num_gpus=4).gpus_per_client()
        (0.5, 2.0)
        """
        if self.client_gpus is not None:
            return float(self.client_gpus)
        if not self.num_gpus:
            return 0.0
        clients = max(1, int(self.cpus / self.client_cpus))
        if self.num_gpus >= clients:
            return float(self.num_gpus // clients)
        return math.floor(10_000 / math.ceil(clients / self.num_gpus)) / 10_000  # Ray counts ten-thousandths

    def client_resources(self) -> dict[str, float]:
        """What Flower gives each actor. One that dies is started again, else its pool keeps handing out the dead.

        Its message is given to it once more; without that it would refuse every message until it has started.
        """
        share = self.gpus_per_client()
        return {"num_cpus": self.client_cpus, "num_gpus": share, "max_restarts": -1, "max_task_retries": 1}

    def check(self) -> None:
        """Refuse what there is no room for, before anything starts.

        Raises:
            ParameterError: More GPUs than there are, a client larger than Ray, or a number beside a cluster's address.
            RunError: There is no Ray at the address.
        """
        if self.address is not None:
            for name in ("num_cpus", "num_gpus"):
                if (value := getattr(self, name)) is not None:
                    raise ParameterError(
                        f"{name} = {value} is given, but the cluster at {self.source} = {self.address!r} has what it "
                        f"was started with: leave {name} out, or unset {self.source}"
                    )
            check_cluster(self.address, self.source)
            return
        if self.gpus() > 0 or self.gpus_per_client() > 0:
            there, asked = gpus_here(), max(self.gpus(), math.ceil(self.gpus_per_client()))
            if asked > there:
                name = "num_gpus" if self.num_gpus else "client_gpus"
                raise ParameterError(
                    f"{name} = {getattr(self, name)} asks for a GPU that is not there: torch sees {there} on this "
                    f"machine; leave {name} out to train on the CPU"
                )
        if not (fit := clients_that_fit(self.cpus, self.gpus(), self)):
            raise ParameterError(
                f"no client fits: Ray gets {self.cpus} cores and {self.gpus()} GPUs, a client takes "
                f"{self.client_cpus:g} and {self.gpus_per_client():g}; give Ray more or a client less"
            )
        if fit < flowers_count(self.cpus, self.gpus(), self):
            share = 1 / math.ceil(1 / self.gpus_per_client())
            raise ParameterError(
                f"client_gpus = {self.client_gpus} leaves a rest on each GPU, and Flower would wait for clients that "
                f"find no room: give 1/n, such as {share:.4g}"
            )

    def check_nodes(self, nodes: list[dict[str, float]]) -> None:
        """Refuse a cluster without room for a client; ``nodes`` are the machines' resources, as Ray names them.

        Raises:
            RunError: No machine has room.
        """
        rooms = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
        if not any(clients_that_fit(cpus, gpus, self) for cpus, gpus in rooms):
            raise RunError(
                f"no client fits on any machine of the cluster: a client takes {self.client_cpus:g} cores and "
                f"{self.gpus_per_client():g} GPUs, the machines have {rooms} (cores, GPUs); make client_cpus or "
                "client_gpus less"
            )

    @property
    def source(self) -> str:
        """What named the cluster."""
        return "RAY_ADDRESS" if self.ray_address is None else "ray_address"


_DEFAULTS = {name: field.default for name, field in Where.__dataclass_fields__.items()}


def gpus_here() -> int:
    """How many GPUs torch sees on this machine."""
    import torch

    return torch.cuda.device_count()


def flowers_count(cpus: int, gpus: int, where: Where) -> int:
    """How many actors Flower starts on a machine."""
    share = where.gpus_per_client()
    count = int(cpus / where.client_cpus)
    return min(count, int(gpus / share)) if share else count


def clients_that_fit(cpus: int, gpus: int, where: Where) -> int:
    """How many actors Ray finds room for on a machine, each with its share of GPU on one GPU."""
    share = where.gpus_per_client()
    count = int(cpus / where.client_cpus)
    if not share:
        return count
    return min(count, int(gpus / share) if share >= 1 else gpus * int(1 / share))


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use here; raises :class:`ParameterError`."""
    if device == "cpu":
        return
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as error:  # torch has many
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ParameterError(
            f"device = {device!r} cannot be used on this machine: {said}; use 'cpu', or leave device out"
        ) from error
