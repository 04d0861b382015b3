"""A cluster with mutual TLS on all three hops and tokens at its front door."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import yaml

from tests.support.certificates import SERVER, Authority, Files
from tests.support.cluster import Cluster, free_port

NAMES = {name: f"spiffe://test/{name}" for name in ("client", "frontend", "scheduler", "executor")}
TOKEN = (("authorization", "Bearer acme-token"),)


@dataclass
class Secured:
    """The cluster, who signs its certificates, and where they are. `trusted` is what all of them trust."""

    cluster: Cluster
    authority: Authority
    trusted: Path
    files: dict[str, Files]

    def credentials(self, name: str = "client", authority: Authority | None = None) -> grpc.ChannelCredentials:
        """Of a client with the certificate of `name`."""
        files = self.files[name]
        trusted = self.trusted if authority is None else authority.ca
        return grpc.ssl_channel_credentials(trusted.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())

    def channel(self) -> grpc.aio.Channel:
        """To the frontend."""
        return grpc.aio.secure_channel(self.cluster.address, self.credentials())


def issue(authority: Authority, files: dict[str, Files]) -> None:
    """A certificate for each name, in its files, or in new ones."""
    for name, uri in NAMES.items():
        files[name] = authority.issue(name, uri, SERVER, "localhost", "127.0.0.1", files=files.get(name))


def peer_flags(trusted: Path, files: Files) -> list[str]:
    """Of a service that dials another."""
    return ["--peer-ca", str(trusted), "--peer-cert", str(files.cert), "--peer-key", str(files.key)]


def listener_flags(trusted: Path, files: Files) -> list[str]:
    """Of a service with mutual TLS."""
    return [
        *("--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-client-ca", str(trusted)),
        *("--health-port", str(free_port())),
    ]


@contextmanager
def running_secured(model: Path, folder: Path) -> Iterator[Secured]:
    """Started; each internal service takes calls of the one before it alone."""
    authority = Authority(folder)
    trusted = folder / "trusted.pem"
    trusted.write_bytes(authority.ca.read_bytes())
    files: dict[str, Files] = {}
    issue(authority, files)
    tokens = folder / "tokens.yaml"
    tokens.write_text(yaml.safe_dump([{"sha256": hashlib.sha256(b"acme-token").hexdigest(), "tenant": "acme"}]))
    flags = {name: listener_flags(trusted, files[name]) for name in ("frontend", "scheduler", "executor")}
    flags["frontend"] += [*peer_flags(trusted, files["frontend"]), "--auth", "tokens", "--auth-tokens", str(tokens)]
    flags["scheduler"] += [*peer_flags(trusted, files["scheduler"]), "--tls-client-names", NAMES["frontend"]]
    flags["executor"] += ["--tls-client-names", NAMES["scheduler"]]
    cluster = Cluster(model, folder, flags)
    try:
        cluster.start()
        yield Secured(cluster, authority, trusted, files)
    finally:
        cluster.stop()
