"""The executor's process."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from triptych.executor.v1 import executor_pb2_grpc

from services.common import checkpoint, collector, config, logs
from services.common.errors import StartError
from services.common.peer_names import PeerNames
from services.common.server import Server
from services.common.startup import Startup
from services.common.telemetry import ending
from services.common.telemetry.metrics import open_metrics
from services.common.telemetry.tracing import open_tracer
from services.executor import architecture, devices, loader, memory
from services.executor.config import ExecutorConfig
from services.executor.device import Device
from services.executor.device_executor import DeviceExecutor
from services.executor.executor import Executor
from services.executor.loader import weight_files
from services.executor.ranks import joined
from services.executor.ranks.device_leading import LeadingDeviceExecutor
from services.executor.ranks.division import Shard
from services.executor.ranks.joining import JoiningPeers
from services.executor.ranks.leader import LeadingExecutor
from services.executor.ranks.peers import ChildPeers, Peers
from services.executor.server import SERVICE_NAME, ExecutorServicer
from services.executor.step_spans import StepSpans

_SWITCH_INTERVAL_S = 0.0005
"""The event loop waits this long for the step thread's GIL, at most, where it holds it; Python's default is ten times
that, which every result would pay."""

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Runs until SIGTERM; returns the exit status. Raises StartError where it cannot serve."""
    startup = Startup()
    startup.done("imports")
    settings = config.load(ExecutorConfig, argv)
    logs.setup("executor", settings.log_level, settings.log_format)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    path = checkpoint.find(settings.model, revision=settings.revision, offline=settings.offline, weights=True)
    architecture.read(path)
    weight_files(path)
    chosen = _devices(settings)
    if settings.tp_rank:
        joined.run(path, settings, _threads(settings), chosen.own)
        return 0
    executor = _executor(path, settings, chosen)
    try:
        asyncio.run(_serve(executor, settings, startup))
    finally:
        executor.close()
    return 0


@dataclass(frozen=True)
class _Devices:
    """Where this process computes."""

    own: Device | None = None
    """None: on the CPU"""
    of_children: Sequence[str] = ()
    """by rank, where this one starts the others on devices too"""


def _executor(path: Path, settings: ExecutorConfig, chosen: _Devices) -> Executor:
    ranks, device = settings.tp_size, chosen.own
    threads = _threads(settings)
    if device is not None and ranks == 1:
        return DeviceExecutor(
            path,
            device=device,
            threads=threads.count,
            kv_memory_bytes=settings.kv_memory_bytes,
            attention_backend=settings.attention_backend,
            graph_sizes=settings.graph_sizes,
            compile_mode=settings.compile,
        )
    if ranks == 1:
        return Executor(
            path,
            threads=threads.count,
            kv_memory_bytes=settings.kv_memory_bytes,
            attention_backend=settings.attention_backend,
        )
    loader.divided(path, torch.float32, Shard(0, ranks, 0))  # refuses what cannot be
    peers = _peers(path, settings, threads.count, chosen)
    try:
        if device is not None:
            return LeadingDeviceExecutor(
                path,
                peers=peers,
                device=device,
                threads=threads.count,
                kv_memory_bytes=settings.kv_memory_bytes,
                graph_sizes=settings.graph_sizes,
                compile_mode=settings.compile,
            )
        return LeadingExecutor(path, peers=peers, threads=threads.count, kv_memory_bytes=settings.kv_memory_bytes)
    except StartError:
        peers.close()
        raise


def _devices(settings: ExecutorConfig) -> _Devices:
    """Raises StartError for options that are not served with one another."""
    device, names = (
        devices.choose_for_ranks(settings.device, settings.tp_size, settings.kernels)
        if settings.ranks_here > 1
        else (devices.choose(settings.device, settings.kernels), ())
    )
    if settings.tp_size > 1 and settings.attention_backend is not None:
        raise StartError("--attention-backend is not served with --tp-size yet; leave it unset")
    if device is None and settings.graph_sizes:
        raise StartError(
            f"--cuda-graph-sizes is {settings.cuda_graph_sizes}, but the device is the CPU; leave it unset"
        )
    if device is None and settings.compile == "on":
        raise StartError("--compile is on, but the device is the CPU, where nothing is compiled; leave it unset")
    return _Devices(device, names)


def _peers(path: Path, settings: ExecutorConfig, threads: int, chosen: _Devices) -> Peers:
    size, timeout_s = settings.tp_size, settings.rank_timeout_s
    if settings.tp_rendezvous is not None:
        address = settings.tp_rendezvous
        return JoiningPeers(path, size=size, address=address, timeout_s=timeout_s, device=chosen.own)
    return ChildPeers(
        path,
        size=size,
        threads=threads,
        timeout_s=timeout_s,
        log_level=settings.log_level,
        log_format=settings.log_format,
        device=chosen.own,
        on_devices=[
            {
                "device": name,
                "kernels": str(settings.kernels or ""),
                "compile_mode": settings.compile,
                "kv_memory_bytes": settings.kv_memory_bytes,
            }
            for name in chosen.of_children
        ],
    )


def _threads(settings: ExecutorConfig) -> memory.Threads:
    threads = memory.compute_threads(settings.threads, ranks=settings.ranks_here)
    log.info("compute threads: %d, since %s", threads.count, threads.reason)
    return threads


async def _serve(executor: Executor, settings: ExecutorConfig, startup: Startup) -> None:
    names = PeerNames(settings.tls_client_names)
    admit = names.admit if settings.tls_client_ca is not None else None
    server = Server(settings.host, settings.port, access=settings.access(admit))
    tracer = open_tracer(settings)
    spans = StepSpans(tracer) if tracer is not None else None
    servicer = ExecutorServicer(executor, server.health, startup, spans)
    metrics = open_metrics(settings)
    if metrics is not None:
        metrics.start(servicer.tallies.readings, model=Path(settings.model).name)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
    await server.start([SERVICE_NAME])
    # Before any weight is loaded: a scheduler must reach it to have them loaded.
    await server.health.set_ready(True)
    startup.done("configuration")
    collector.settle(collect=False)
    log.info("serving executor on %s:%d", settings.host, server.port)
    serving = asyncio.create_task(server.run(servicer.drain, drain_s=settings.drain_s))
    lost = asyncio.create_task(_lost(executor))
    await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        serving.cancel()
        await servicer.lose(lost.result())
        await server.stop()
    lost.cancel()
    await servicer.close()
    await ending.close(tracer, metrics)
    if lost.done() and not lost.cancelled():
        what = "its device" if executor.tp_size == 1 else "its ranks"
        raise StartError(f"{lost.result()}; the executor ends with {what}, start it again")


async def _lost(executor: Executor) -> str:
    """Why the executor's ranks or its device are lost, once they are."""
    # Shielded: what waits here is cancelled, and the future is others' to read.
    return await asyncio.shield(asyncio.wrap_future(executor.lost))
