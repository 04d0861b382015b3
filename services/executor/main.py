"""The executor's process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from triptych.executor.v1 import executor_pb2_grpc

from services.common import checkpoint, collector, config, logs
from services.common.server import Server
from services.common.startup import Startup
from services.executor import architecture, memory
from services.executor.config import ExecutorConfig
from services.executor.executor import Executor
from services.executor.loader import weight_files
from services.executor.server import SERVICE_NAME, ExecutorServicer

_SWITCH_INTERVAL_S = 0.0005
"""The event loop waits this long for the step thread's GIL, at most, where it holds it; Python's default is ten times
that, which every result would pay."""

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Runs until SIGTERM; returns the exit status. Raises StartError where it cannot serve."""
    startup = Startup()
    startup.done("imports")
    settings = config.load(ExecutorConfig, argv)
    logs.setup("executor", settings.log_level)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    asyncio.run(_serve(settings, startup))
    return 0


async def _serve(settings: ExecutorConfig, startup: Startup) -> None:
    path = checkpoint.find(settings.model, revision=settings.revision, offline=settings.offline, weights=True)
    architecture.read(path)
    weight_files(path)
    threads = memory.compute_threads(settings.threads)
    executor = Executor(path, threads=threads.count, kv_memory_bytes=settings.kv_memory_bytes)
    log.info("compute threads: %d, since %s", threads.count, threads.reason)
    server = Server(settings.host, settings.port)
    servicer = ExecutorServicer(executor, server.health, startup)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
    await server.start([SERVICE_NAME])
    # Before any weight is loaded: a scheduler must reach it to have them loaded.
    await server.health.set_ready(True)
    startup.done("configuration")
    collector.settle(collect=False)
    log.info("serving executor on %s:%d", settings.host, server.port)
    await server.run(servicer.drain, drain_s=settings.drain_s)
    await servicer.close()
