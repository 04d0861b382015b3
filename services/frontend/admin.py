"""AdminService of a frontend: SetLogLevel, on a port of its own, which clients need not reach.

It has the TLS and the auth of the public port, and lets admins in alone; without auth, whoever reaches loopback."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.common import audit, log_level
from services.common.contract import Door
from services.common.errors import unserved
from services.common.server import Access, Server
from services.frontend.auth.admission import admission
from services.frontend.config import FrontendConfig
from services.frontend.quotas import Quota, Quotas

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_DOOR = Door({"triptych.engine.v1.SetLogLevelRequest": log_level.SERVED})

log = logging.getLogger(__name__)


async def _the_schedulers(self: object, request: object, context: object) -> NoReturn:
    """What only an engine can answer."""
    raise unserved(type(request).__name__.removesuffix("Request"), "is the scheduler's to answer; ask on its port")


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`elsewhere`: processes that are set with this one, by name."""

    Drain = FlushPrefixCache = GetLoad = GetStats = SubscribeKvEvents = _the_schedulers  # type: ignore[assignment]

    def __init__(self, elsewhere: Mapping[str, log_level.Elsewhere]) -> None:
        self._elsewhere = elsewhere

    async def SetLogLevel(  # noqa: N802
        self, request: admin_pb2.SetLogLevelRequest, context: Any
    ) -> admin_pb2.SetLogLevelResponse:
        """Of the whole frontend."""
        _DOOR.check(request)
        with audit.told("SetLogLevel", context, log_level.fields(request)):
            return await log_level.set_all(request, "frontend", self._elsewhere)


@contextlib.asynccontextmanager
async def serving(config: FrontendConfig, elsewhere: Mapping[str, log_level.Elsewhere]) -> AsyncIterator[None]:
    """Meanwhile, where a port is configured. Raises StartError where it cannot be had."""
    if config.admin_port is None:
        yield
        return
    access = Access(config.tls(), reflection=config.reflection, admit=admission(config, Quotas(Quota())))
    server = Server(config.admin_host, config.admin_port, access=access)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(elsewhere), server.grpc)
    await server.start([SERVICE])
    log.info("serving SetLogLevel on %s:%d", config.admin_host, server.port)
    try:
        yield
    finally:
        await server.stop()
