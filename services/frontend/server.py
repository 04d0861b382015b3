"""The frontend as a whole: its parts put together, its health, its drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import grpc
from triptych.inference.v1 import inference_pb2_grpc

from services.common.errors import StartError, unavailable
from services.common.peer import Peer
from services.common.server import Server, is_loopback
from services.common.startup import Startup
from services.common.telemetry import ending
from services.common.telemetry.calls import CallInterceptor
from services.common.telemetry.metrics import open_metrics
from services.common.telemetry.tracing import open_tracer
from services.frontend import request_spans, served_model, service
from services.frontend.auth.admission import admission
from services.frontend.calls import Calls
from services.frontend.config import FrontendConfig
from services.frontend.engine_client import HEARTBEAT_LIMIT_S
from services.frontend.fleet import Fleet
from services.frontend.fleet_admin import FleetAdmin
from services.frontend.generation_metrics import FrontendMetrics
from services.frontend.grammar_check import GrammarCheck
from services.frontend.quotas import Quotas
from services.frontend.request_log import RequestLog
from services.frontend.service import InferenceService

log = logging.getLogger(__name__)


class Frontend:
    """One frontend process's worth of state. Raises StartError where it cannot be."""

    def __init__(
        self,
        config: FrontendConfig,
        startup: Startup | None = None,
        *,
        shares_port: bool = False,
        metrics_listener: socket.socket | None = None,
    ) -> None:
        """`metrics_listener` is where metrics are told, instead of the configured port."""
        self._config = config
        self._startup = startup or Startup()
        self.model = served_model.load(
            config.model,
            config.served_model_name,
            config.served_model_alias,
            revision=config.revision,
            offline=config.offline,
            template_budget=config.template_budget(),
            tool_call_format=config.tool_call_format,
            reasoning_format=config.reasoning_format,
        )
        self._tracer = open_tracer(config)
        self._tracing = request_spans.tracing(self._tracer) if self._tracer is not None else None
        self.engine = Fleet(
            self._engine_peers(),
            self.model.tokenizer_hash,
            failover_s=config.failover_s,
            tells_clock_offset=self._tracer is not None,
        )
        self.grammars = GrammarCheck(self.model.folder, sorted(self.model.eos_ids), config.grammar_budget())
        self.calls = Calls(config.max_calls)
        self._requests = RequestLog(self.model.name, is_on=config.log_requests)
        self.metrics = open_metrics(config)
        self._metrics_listener = metrics_listener
        self._measured = None if self.metrics is None else FrontendMetrics(self.metrics, self.model.name)
        self.quotas = Quotas(config.quota())
        self.server = Server(
            config.host,
            config.port,
            max_message_bytes=config.max_message_bytes,
            shares_port=shares_port,
            connection_age=config.connection_age(),
            interceptors=self._interceptors(),
            access=config.access(admission(config, self.quotas)),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceService(
                self.model, self.engine, self.calls, self.grammars, config.limits(), self.quotas, self._requests
            ),
            self.server.grpc,
        )
        self._services = [service.NAME]
        self._admin: FleetAdmin | None = None
        if config.vllm_adapter:
            self._add_vllm_adapter()
        self._watch: asyncio.Task[None] | None = None

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Tracing first: what is measured inside it has the trace as its example."""
        measuring = None if self._measured is None else self._measured.calls
        tellers = [one for one in (self._tracing, measuring) if one is not None]
        return [CallInterceptor((request_spans.OWN, request_spans.ADAPTER), tellers)] if tellers else []

    def _engine_peers(self) -> list[Peer]:
        config = self._config
        return [Peer(target, config.peer_tls()) for target in (config.engine, *config.more_engines)]

    def _add_vllm_adapter(self) -> None:
        try:
            from services.frontend.adapters import vllm
        except ModuleNotFoundError as error:
            raise StartError(
                f"vllm_adapter is on, and needs its extra: pip install 'triptych[vllm-adapter]' ({error.name} is not "
                "installed)"
            ) from error
        self._admin = FleetAdmin(self._engine_peers())
        adapter = vllm.VllmEngineService(
            self.model,
            self.engine,
            self._admin,
            self.calls,
            self.grammars,
            self._config.limits(),
            self.quotas,
            self._requests,
        )
        vllm.add_to_server(adapter, self.server.grpc)
        self.server.health.also_generates(vllm.NAME)
        self._services.append(vllm.NAME)

    async def start(self) -> None:
        """Listens, begins to attach to the engine, and is ready; `generate` follows the engine."""
        if self.metrics is not None and self._measured is not None:
            read = self._measured.reader(self.calls, self.engine)
            self.metrics.start(read, model=self.model.name, listener=self._metrics_listener)
        if self._config.auth == "off" and not is_loopback(self._config.host):
            log.warning("auth is off and %s is no loopback: whoever reaches the port is served", self._config.host)
        await self.server.start(self._services)
        await self.engine.start()
        self._watch = asyncio.create_task(self._watch_engine())
        await self.server.health.set_ready(True)
        log.info("serving %s on %s:%d", self._config.service, self._config.host, self.server.port)
        if fault := self.model.chat.fault:
            log.warning("the chat template of %s has an error, %s; Chat is refused", self.model.name, fault)

    async def run(self) -> None:
        """Serves until it is told to end."""
        try:
            self.model.templates.warm()
            await self.server.run(self.drain, drain_s=self._config.drain_s)
        finally:
            await self._end()

    async def drain(self) -> None:
        """Refuses new calls and waits for the running ones; cancelled, it ends them with UNAVAILABLE."""
        self.calls.close()
        self.engine.drain()
        await self._stop_watching()
        await self.server.health.set_ready(False)
        await self.server.health.set_generate(False)
        try:
            await self.calls.idle()
        except asyncio.CancelledError:
            self.engine.fail_all(unavailable("DRAINING", "this frontend was shut down before the answer was done"))
            raise

    async def close(self) -> None:
        """Stops at once, for a frontend that does not `run`."""
        await self.server.stop()
        await self._end()

    async def _end(self) -> None:
        await self._stop_watching()
        if self._admin is not None:
            await self._admin.close()
        await self.engine.close()
        await self.model.templates.close()
        await self.grammars.close()
        if self._tracing is not None:
            self._tracing.close()
        await ending.close(self._tracer, self.metrics)

    async def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})  # a cancellation of who waits here stays that
            self._watch = None

    async def _watch_engine(self) -> None:
        """Keeps `generate` true to the engine; sleeps until it may have changed."""
        while True:
            self.engine.changed.clear()
            can = self.engine.can_generate()
            if can:
                self._startup.ready("waiting for the engine", log)
            await self.server.health.set_generate(can)
            left_s = max(HEARTBEAT_LIMIT_S - self.engine.silent_s(), 0.01) if can else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):  # wait_for of Python 3.11 may swallow a cancellation
                    await self.engine.changed.wait()
