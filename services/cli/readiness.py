"""How far a starting engine is, asked of the health services of its three processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.health import GENERATE, LIVENESS, READINESS
from services.common.server import channel_options

POLL_S = 0.1
REMIND_S = 5.0

# What is waited for, in order: (service, health name, what happens until it serves).
STAGES = (
    ("executor", READINESS, "the executor's process starts"),
    ("scheduler", LIVENESS, "the scheduler's process starts"),
    ("frontend", LIVENESS, "the frontend's process starts"),
    ("scheduler", GENERATE, "the executor loads the weights and warms up"),
    ("frontend", GENERATE, "the frontend attaches to the scheduler"),
)


async def wait_ready(
    addresses: Mapping[str, str],
    say: Callable[[str], None],
    over: Callable[[str], None] = lambda stage: None,
) -> None:
    """Returns when the frontend's `generate` serves; `say` gets each stage, and a reminder while one lasts.

    `over` gets each stage when it has come to its end.
    """
    started_s = time.monotonic()
    options = channel_options(max_reconnect_ms=int(POLL_S * 1000))
    channels = {name: grpc.aio.insecure_channel(address, options=options) for name, address in addresses.items()}
    try:
        for service, name, text in STAGES:
            said_s = 0.0
            while not await _serves(channels[service], name):
                now_s = time.monotonic()
                if now_s - said_s >= REMIND_S:
                    say(f"{text} ({now_s - started_s:.0f} s)")
                    said_s = now_s
                await asyncio.sleep(POLL_S)
            over(text)
    finally:
        for channel in channels.values():
            await channel.close()


async def _serves(channel: grpc.aio.Channel, name: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2, wait_for_ready=False)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
