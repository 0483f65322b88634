"""A Flower deployment on one machine: a SuperLink with TLS, and SuperNodes that it knows by their keys.

python deployment.py start --nodes 4     make certificate and keys, start everything
python deployment.py run APP             run a Flower app on it: flwr run APP local --stream
python deployment.py stop                end everything that runs

Each Flower command is printed before it is run. All files are in one folder (--folder): certificates, keys, logs, the
SuperLink's database, and Flower's own folder, by which the deployment's processes are known: FLWR_HOME is in the
environment of each.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

CONNECTION = "local"
"""Flower's name for the SuperLink, in its config.toml."""
DAYS = 30
"""How long the certificates are valid."""
SETTLED_S, REFUSED_S = 10.0, 150.0
"""So long a SuperNode must have run to count as started; so long the SuperLink may refuse one that was killed."""


def make_certificates(folder: Path) -> None:
    """Make a certificate authority and the SuperLink's certificate: ca.crt, server.crt, server.key.

    The authority's key is not kept: nothing else can be signed with it.
    """
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "deployment on one machine")])
    server = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    hosts = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]  # what clients call the server
    )
    now = datetime.datetime.now(datetime.UTC)

    def signed(subject: x509.Name, key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(authority_key, hashes.SHA384())
        )
        return certificate.public_bytes(Encoding.PEM)

    is_authority = x509.BasicConstraints(ca=True, path_length=None)
    (folder / "ca.crt").write_bytes(signed(authority, authority_key.public_key(), is_authority))
    (folder / "server.crt").write_bytes(signed(server, server_key.public_key(), hosts))
    pem = server_key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    _write_secret(folder / "server.key", pem)


def make_key(path: Path) -> None:
    """Make a SuperNode's keys, as ``ssh-keygen -t ecdsa -b 384`` does: path and path.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@dataclass(frozen=True)
class Deployment:
    """A SuperLink and its SuperNodes.

    Args:
        folder: Holds every file of it, as an absolute path.
        port: The SuperLink's port.
    """

    folder: Path
    port: int

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every command: the commands beside this Python are found, and Flower's folder is ours."""
        quiet = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, **quiet, "PATH": path, "FLWR_HOME": str(self.folder / "flwr")}

    def prepare(self) -> None:
        """Make certificates, if there are none, and tell ``flwr`` where the SuperLink is."""
        for name in ("flwr", "keys", "log"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not (self.folder / "ca.crt").exists():
            make_certificates(self.folder)
        text = f'[superlink.{CONNECTION}]\naddress = "{self.address}"\nroot-certificates = "{self.folder / "ca.crt"}"\n'
        (self.folder / "flwr" / "config.toml").write_text(text, encoding="utf-8")

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink and wait until it listens."""
        try:
            socket.create_server(("127.0.0.1", self.port)).close()
        except OSError as error:
            raise SystemExit(f"port {self.port}: {error}; stop what listens there, or give another --port") from error
        certificates = [f"--ssl-{option}={self.folder / file}" for option, file in (
            ("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key"),
        )]  # fmt: skip
        process = self.start(
            "superlink", "flower-superlink", "--host=127.0.0.1", f"--port={self.port}", *certificates,
            "--enable-supernode-auth", f"--database={self.folder / 'state.db'}",
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return process
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the SuperLink does not listen on {self.address}: see {self.folder}/log/superlink")
            time.sleep(0.2)

    def register(self, name: str) -> None:
        """Make a SuperNode's keys, if there are none, and register it under its name, once."""
        key = self.folder / "keys" / name
        if not key.exists():
            make_key(key)
            self.call("flwr", "supernode", "register", f"{key}.pub", CONNECTION, f"--name={name}")

    def start_supernode(self, name: str, config: str = "", *, key: bool = True) -> subprocess.Popen[bytes]:
        """Start a SuperNode.

        Args:
            name: Its name.
            config: Its node config, ``a=1 b='text'``.
            key: Whether it has keys; without them it is a stranger to the SuperLink.
        """
        keys = [f"--auth-supernode-private-key={self.folder / 'keys' / name}"] if key else []
        return self.start(
            name, "flower-supernode", f"--root-certificates={self.folder / 'ca.crt'}", *keys,
            f"--superlink={self.address}", f"--port={free_port()}", *([f"--node-config={config}"] if config else []),
        )  # fmt: skip

    def start(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the background; what it says goes to a file of the folder ``log``."""
        print("$", shlex.join(command), "&", flush=True)
        with (self.folder / "log" / log).open("ab") as out:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def call(self, *command: str) -> None:
        """Run a command to its end; it must succeed."""
        print("$", shlex.join(command), flush=True)
        subprocess.run(command, env=self.environment, check=True)

    def processes(self, kind: str = "") -> list[int]:
        """The ids of the deployment's processes, those that Flower has started included; of one kind of command."""
        mark = f"FLWR_HOME={self.folder / 'flwr'}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                command = (path.parent / "cmdline").read_bytes()
                if mark in path.read_bytes().split(b"\0") and kind.encode() in command:
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid != os.getpid()]

    def stop(self, patience_s: float = 15.0) -> None:
        """End every process of the deployment: asked to at first, killed where it does not.

        The SuperNodes are asked before the SuperLink, which so hears that they go; else it takes them for online, and
        refuses them when they come back within a minute.
        """
        ways = (
            ("flower-supernode", signal.SIGTERM, patience_s),
            ("", signal.SIGTERM, patience_s),
            ("", signal.SIGKILL, 5.0),
        )
        for kind, sign, wait_s in ways:
            deadline = time.monotonic() + wait_s
            for pid in self.processes(kind):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            while self.processes(kind) and time.monotonic() < deadline:
                time.sleep(0.2)


def make_data(folder: Path, number: int) -> Path:
    """Write a SuperNode's own examples of y = x_1 - 2 x_2 + 3 x_3 to a file, once, and return its path."""
    path = folder / "data" / f"node-{number}.npz"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        inputs = np.random.default_rng(number).normal(size=(100, 3))
        np.savez(path, inputs=inputs, targets=inputs @ np.array([[1.0], [-2.0], [3.0]]))
    return path


def start_all(deployment: Deployment, number: int) -> None:
    """Start a SuperLink and SuperNodes, and see that they stay: one that the SuperLink refuses is started again."""
    deployment.prepare()
    deployment.start_superlink()
    config = {f"node-{i}": f"data-path='{make_data(deployment.folder, i)}'" for i in range(number)}
    config["node-0"] += " slow-s=6.0"  # an old machine
    for name in config:
        deployment.register(name)
    nodes = {name: deployment.start_supernode(name, config[name]) for name in config}
    changed, deadline = time.monotonic(), time.monotonic() + REFUSED_S
    while time.monotonic() < changed + SETTLED_S:
        time.sleep(1.0)
        for name in [name for name, process in nodes.items() if process.poll() is not None]:
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} ends as soon as it is started: see {deployment.folder / 'log' / name}")
            time.sleep(5.0)
            nodes[name], changed = deployment.start_supernode(name, config[name]), time.monotonic()
    print(f"started; what each process says is in {deployment.folder / 'log'}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "run", "stop"))
    parser.add_argument("app", nargs="?", default=".", help="run: the app's folder")
    parser.add_argument("--folder", type=Path, default=Path("deployment"), help="where all files go (%(default)s)")
    parser.add_argument("--nodes", type=int, default=4, help="start: how many SuperNodes (%(default)s)")
    parser.add_argument("--port", type=int, default=9443, help="the SuperLink's port (%(default)s)")
    arguments, further = parser.parse_known_args()
    if further and arguments.what != "run":
        parser.error(f"{arguments.what} does not know {' '.join(further)}")
    deployment = Deployment(arguments.folder.resolve(), arguments.port)
    if arguments.what == "start":
        start_all(deployment, arguments.nodes)
    elif arguments.what == "run":
        deployment.call("flwr", "run", arguments.app, CONNECTION, "--stream", *further)
    else:
        deployment.stop()


if __name__ == "__main__":
    main()
