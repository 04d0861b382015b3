"""The stock grpc.health.v1 service with Triptych's three names.

`liveness`: this process turns. `readiness`: it accepts work; never depends on another service. `generate`, also the
empty name: a token could be made now, end to end.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

LIVENESS = "liveness"
READINESS = "readiness"
GENERATE = "generate"
WHOLE_SERVER = ""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """What this process says of itself. All names start NOT_SERVING; Watch streams see every change."""

    SERVICE_NAME = health.SERVICE_NAME

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._now: dict[str, bool] = {}
        self._generating: list[str] = [GENERATE, WHOLE_SERVER]

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the servicer."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def also_generates(self, service: str) -> None:
        """Answers for a gRPC service of another contract as for `generate`: its clients ask by its name."""
        self._generating.append(service)

    async def set_live(self, serving: bool) -> None:
        """Sets `liveness`; the first call also makes the other names known."""
        for name in (READINESS, *self._generating):
            if name not in self._now:
                await self._set(name, False)
        await self._set(LIVENESS, serving)

    async def set_ready(self, serving: bool) -> None:
        """Sets `readiness`."""
        await self._set(READINESS, serving)

    async def set_generate(self, serving: bool) -> None:
        """Sets `generate`, the empty name, and those of `also_generates`."""
        for name in self._generating:
            await self._set(name, serving)

    def is_serving(self, name: str) -> bool:
        """What was last set."""
        return self._now.get(name, False)

    async def _set(self, name: str, serving: bool) -> None:
        if self._now.get(name) == serving:
            return
        self._now[name] = serving
        await self._servicer.set(name, _SERVING if serving else _NOT_SERVING)
