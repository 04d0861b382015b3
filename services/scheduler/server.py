"""The scheduler's process: its gRPC server, the engine behind it, and the pulse that tells how both are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from triptych.engine.v1 import admin_pb2_grpc, engine_pb2, engine_pb2_grpc

from services.common.peer import Peer
from services.common.peer_names import PeerNames
from services.common.server import Server, channel_options
from services.common.startup import Startup
from services.common.telemetry import ending
from services.common.telemetry.metrics import open_metrics
from services.common.telemetry.tracing import open_tracer
from services.scheduler.admin import ADMIN_SERVICE, OPEN_QUESTIONS, AdminServicer
from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import Engine
from services.scheduler.engine_spans import EngineSpans
from services.scheduler.executor_link import RECONNECT_MS, ExecutorLink
from services.scheduler.frontend_stream import FrontendStream
from services.scheduler.identity import Model
from services.scheduler.outbox import pending_limit_bytes
from services.scheduler.recording import Journal

log = logging.getLogger(__name__)

ENGINE_SERVICE = "triptych.engine.v1.EngineService"
BEAT_INTERVAL_S = 1.0


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """EngineService: a stream object for each call."""

    def __init__(self, engine: Engine, max_pending_bytes: int) -> None:
        self._engine = engine
        self._max_pending_bytes = max_pending_bytes

    async def Attach(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """See engine.proto."""
        stream = FrontendStream(self._engine, self._max_pending_bytes)
        # Also when the call is cut while a write to it waits: its requests end now, not when the write does.
        context.add_done_callback(lambda _: stream.close())
        async for message in stream.serve(request_iterator):
            yield message


class SchedulerServer:
    """Everything of one scheduler, started and stopped together."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_pending_bytes: int | None = None,
        startup: Startup | None = None,
    ) -> None:
        """`max_pending_bytes` may wait for a frontend; None: as `config` has it."""
        self._config = config
        self._startup = startup or Startup()
        model = Model.read(config)
        self._links = [
            ExecutorLink(
                Peer(address, config.peer_tls(), channel_options(max_reconnect_ms=RECONNECT_MS)), model.engine_config()
            )
            for address in (config.executor, *config.spare_executors)
        ]
        self._journal = Journal(config.record) if config.record is not None else None
        self._tracer = open_tracer(config)
        spans = EngineSpans(self._tracer) if self._tracer is not None else None
        self.engine = Engine(model, self._links, self._journal, spans)
        self._metrics = open_metrics(config)
        names = PeerNames(config.tls_client_names, config.admin_names, ADMIN_SERVICE, OPEN_QUESTIONS)
        admit = names.admit if config.tls_client_ca is not None else None
        self.server = Server(config.host, config.port, access=config.access(admit))
        if max_pending_bytes is None:
            max_pending_bytes = pending_limit_bytes(config.most_scores_bytes)
        servicer = EngineServicer(self.engine, max_pending_bytes)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, self.server.grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self.engine, self.server.health), self.server.grpc
        )
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Accepts frontends, and turns to the executor. Raises StartError when the port is taken."""
        if self._metrics is not None:
            self._metrics.start(self.engine.readings, model=self.engine.model.name)
        await self.server.start([ENGINE_SERVICE, ADMIN_SERVICE])
        await self.server.health.set_ready(True)
        log.info("serving scheduler on %s:%d", self._config.host, self.server.port)
        self._tasks = [
            asyncio.create_task(self.engine.run(), name="engine"),
            asyncio.create_task(self._pulse(), name="pulse"),
        ]

    async def run(self) -> None:
        """Serves until SIGTERM, then drains. Raises StartError when the executor can never serve this model."""
        serving = asyncio.create_task(self.server.run(self.engine.drain, drain_s=self._config.drain_s))
        try:
            await asyncio.wait([serving, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                return
            await self.server.stop()
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            serving.cancel()
            await self._close()

    async def stop(self) -> None:
        """Cuts everything at once."""
        await self.server.stop()
        await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            await link.close()
        self.engine.close()
        if self._journal is not None:
            self._journal.close()
        await ending.close(self._tracer, self._metrics)

    @property
    def metrics_port(self) -> int | None:
        """Where Prometheus is answered."""
        return None if self._metrics is None else self._metrics.port

    async def _pulse(self) -> None:
        """Heartbeats each second, and with every change of state at once; health follows."""
        health = self.server.health
        while True:
            self.engine.beat()
            if can_generate := self.engine.can_generate:
                self._startup.ready("waiting for the executor", log)
            await health.set_generate(can_generate)
            try:
                async with asyncio.timeout(BEAT_INTERVAL_S):
                    await self.engine.changed.wait()
            except TimeoutError:
                pass
            self.engine.changed.clear()
