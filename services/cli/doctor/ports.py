"""The ports that the services would listen on."""

from __future__ import annotations

from collections.abc import Mapping

from services.cli import up_plan
from services.cli.doctor.findings import Finding, Section
from services.common.config import Resolved, ServiceConfig
from services.common.errors import StartError
from services.common.server import free_port


def section(resolved: Mapping[str, Resolved[ServiceConfig]]) -> Section:
    """A fault where `triptych up` could not listen; the inner ports only it may exchange for free ones."""
    return Section("Ports", tuple(_port(name, one) for name, one in resolved.items()))


def _port(name: str, resolved: Resolved[ServiceConfig]) -> Finding:
    config = resolved.config
    where = f"{config.host}:{config.port}" if config.port else f"{config.host}, a free port"
    facts = {"host": config.host, "port": config.port}
    try:
        up_plan.port_of(resolved)
    except StartError as error:
        return Finding(name, str(error), "fault", facts | {"free": False})
    try:
        free_port(config.host, config.port)
    except OSError as error:
        text = f"{where}: {error.strerror}; `triptych up` takes a free one, `triptych {name}` needs another --port"
        return Finding(name, text, "note", facts | {"free": False})
    return Finding(name, f"{where} is free" if config.port else where, facts=facts | {"free": True})
