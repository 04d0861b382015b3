"""`triptych up` with TLS: what fits together, and where health is told to a supervisor that has no certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.common.config import ServiceConfig
from services.common.errors import StartError
from services.common.server import free_port

_DIALS = (("frontend", "scheduler"), ("scheduler", "executor"))


def is_secured(frontend: ServiceConfig) -> bool:
    """Its clients need TLS or a token."""
    return frontend.tls_cert is not None or frontend.model_dump()["auth"] != "off"


def refuse(configs: Mapping[str, ServiceConfig], *, prompt: bool, gateway: bool) -> None:
    """Raises StartError for services that could not talk to one another, or be talked to as it was asked."""
    for client, server in _DIALS:
        _refuse_pair(client, configs[client].model_dump(), server, configs[server])
    if not is_secured(configs["frontend"]):
        return
    if prompt:
        raise StartError(
            "--prompt asks without TLS and token; leave it out, and ask with `triptych chat --tls-ca FILE`"
        )
    if gateway:
        raise StartError("--gateway dials the frontend without TLS and token; leave frontend.tls_cert and auth unset")


def _refuse_pair(client: str, dials: Mapping[str, Any], server: str, listens: ServiceConfig) -> None:
    has_tls, trusts = listens.tls_cert is not None, dials["peer_ca"] is not None
    if has_tls and not trusts:
        raise StartError(f"{server}.tls_cert is set, but {client}.peer_ca is not; set it to the CA of that certificate")
    if trusts and not has_tls:
        raise StartError(f"{client}.peer_ca is set, but {server}.tls_cert is not; set it with {server}.tls_key")
    if listens.tls_client_ca is not None and dials["peer_cert"] is None:
        raise StartError(f"{server}.tls_client_ca is set, but {client}.peer_cert is not; set it with {client}.peer_key")


def client_flags(server: ServiceConfig) -> str:
    """What a command needs to reach it, for people."""
    if server.tls_cert is None:
        return ""
    own = " --tls-cert FILE --tls-key FILE" if server.tls_client_ca is not None else ""
    return f" --tls-ca FILE{own}"


def probe_port(config: ServiceConfig, flags: list[str], port: int) -> int:
    """Where health is told in plain text: a port of its own where `port` speaks TLS, which is added to the flags."""
    if config.health_port is not None:
        return config.health_port
    if config.tls_cert is None:
        return port
    chosen = free_port(config.host, 0)
    flags += ["--health-port", str(chosen)]
    return chosen
