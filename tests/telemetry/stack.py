"""A frontend before a real scheduler and a stub executor, in one process, with their spans sent to a sink."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from loadtest.otlp_sink import OtlpSink, SpanSeen
from loadtest.stub_executor import StubExecutor
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from services.scheduler.server import SchedulerServer
from tests.frontend.harness import attached
from tests.support.attached import scheduler_for
from tests.telemetry.edges import has_ended

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER}-01"),)
NOT_SAMPLED = (("traceparent", f"00-{TRACE_ID}-{CALLER}-00"),)


@dataclass(frozen=True)
class Stack:
    channel: grpc.aio.Channel
    frontend: Frontend
    scheduler: SchedulerServer
    executor: StubExecutor
    sink: OtlpSink

    async def trace(self, *names: str, trace_id: str | None = None) -> list[SpanSeen]:
        """The SERVER span of a generation and the parts named, once they have come."""
        return await self.sink.until(has_ended(*names), trace_id=trace_id)


@asynccontextmanager
async def traced(
    model: Path,
    sink: OtlpSink,
    executor: StubExecutor | None = None,
    *,
    scheduler: Mapping[str, Any] | None = None,
    **frontend: Any,
) -> AsyncIterator[Stack]:
    """`scheduler` and the other arguments are settings beyond the collector's URL."""
    told = {"otlp_endpoint": sink.endpoint}
    async with (
        executor or StubExecutor(step_s=0.002) as stub,
        scheduler_for(stub, model, **(told | dict(scheduler or {}))) as server,
    ):
        address = f"127.0.0.1:{server.server.port}"
        front = Frontend(FrontendConfig(port=0, engine=address, model=str(model), **(told | frontend)))
        await front.start()
        try:
            await attached(front)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front.server.port}") as channel:
                yield Stack(channel, front, server, stub, sink)
        finally:
            await front.close()
