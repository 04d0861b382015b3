"""AdminService: what operators and gateways ask of a scheduler. No call holds up a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.common import audit, log_level
from services.common.contract import Door
from services.common.health import Health
from services.scheduler.clock import now_ns
from services.scheduler.engine import Engine

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

OPEN_QUESTIONS = ("GetLoad", "GetStats")
"""Of every peer that may attach: they tell numbers alone, and change nothing."""

_DOOR = Door(
    {
        "triptych.engine.v1.DrainRequest": frozenset({"grace_ms"}),
        "triptych.engine.v1.FlushPrefixCacheRequest": frozenset(),
        "triptych.engine.v1.GetLoadRequest": frozenset(),
        "triptych.engine.v1.GetStatsRequest": frozenset(),
        "triptych.engine.v1.SetLogLevelRequest": log_level.SERVED,
        "triptych.engine.v1.SubscribeKvEventsRequest": frozenset({"from_sequence"}),
    }
)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Tells of load and counters, flushes the prefix cache and tells of it, sets log levels, drains."""

    def __init__(self, engine: Engine, health: Health) -> None:
        self._engine = engine
        self._health = health

    async def Drain(  # noqa: N802
        self, request: admin_pb2.DrainRequest, context: Any
    ) -> admin_pb2.DrainResponse:
        """Refuses what is new from now on; the process goes on until SIGTERM."""
        _DOOR.check(request)
        grace_s = request.grace_ms / 1000 if request.HasField("grace_ms") else None
        told: dict[str, object] = {"grace_s": grace_s}
        with audit.told("Drain", context, told):
            await self._health.set_ready(False)
            told["moved_requests"] = moved = await self._engine.drain_within(grace_s)
            return admin_pb2.DrainResponse(moved_requests=moved)

    async def SetLogLevel(  # noqa: N802
        self, request: admin_pb2.SetLogLevelRequest, context: Any
    ) -> admin_pb2.SetLogLevelResponse:
        """Of this process, and of its executor."""
        _DOOR.check(request)
        with audit.told("SetLogLevel", context, log_level.fields(request)):
            return await log_level.set_all(request, "scheduler", {"executor": self._engine.set_executor_log_level})

    async def GetLoad(  # noqa: N802
        self, request: admin_pb2.GetLoadRequest, context: Any
    ) -> admin_pb2.GetLoadResponse:
        """What every Attach stream has in its heartbeats."""
        _DOOR.check(request)
        return admin_pb2.GetLoadResponse(heartbeat=self._engine.heartbeat())

    async def GetStats(  # noqa: N802
        self, request: admin_pb2.GetStatsRequest, context: Any
    ) -> admin_pb2.GetStatsResponse:
        """Counters since the start, and the requests there are now."""
        _DOOR.check(request)
        return self._engine.stats()

    async def FlushPrefixCache(  # noqa: N802
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Any
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Forgets all cached blocks: one pass over their names, between two steps."""
        _DOOR.check(request)
        told: dict[str, object] = {}
        with audit.told("FlushPrefixCache", context, told):
            told["flushed_blocks"] = flushed = self._engine.flush_prefix_cache()
            return admin_pb2.FlushPrefixCacheResponse(flushed_blocks=flushed)

    async def SubscribeKvEvents(  # noqa: N802
        self, request: admin_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[admin_pb2.SubscribeKvEventsResponse]:
        """What is cached and every change to it, or the changes from a number on."""
        _DOOR.check(request)
        with audit.told("SubscribeKvEvents", context, {}):
            async for message in self._kv_events(request):
                yield message

    async def _kv_events(
        self, request: admin_pb2.SubscribeKvEventsRequest
    ) -> AsyncIterator[admin_pb2.SubscribeKvEventsResponse]:
        log = self._engine.kv_events
        if request.HasField("from_sequence"):
            sequence = request.from_sequence
        else:
            sequence = log.sequence + 1
            for message in log.snapshot(self._engine.cached_blocks(), log.sequence, now_ns()):
                yield message
                await asyncio.sleep(0)  # a step may be due
        async for message in log.follow(sequence):
            yield message
