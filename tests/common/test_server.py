"""The server's life: health names, reflection, a port in use, and the drain on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from triptych.inference.v1 import inference_pb2 as pb
from triptych.inference.v1 import inference_pb2_grpc

from services.common.errors import StartError
from services.common.server import Server, channel_options

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "triptych.inference.v1.InferenceService"


class Slow(inference_pb2_grpc.InferenceServiceServicer):
    """Streams until it is told to end."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.ended = asyncio.Event()
        self.running = 0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.running += 1
        try:
            yield pb.GenerateResponse()
            await self.finish.wait()
            yield pb.GenerateResponse(usage=pb.Usage())
        finally:
            self.running -= 1
            self.ended.set()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, Slow, grpc.aio.Channel]]:
    server, slow = Server("127.0.0.1", 0), Slow()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(slow, server.grpc)
    await server.start([NAME])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield server, slow, channel
    await server.stop()


async def _health(channel: grpc.aio.Channel, name: str) -> Any:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_of_thousands_of_calls_at_once_each_is_answered(served: tuple[Server, Slow, grpc.aio.Channel]) -> None:
    """Past 1,000 that wait for the event loop, gRPC left to itself cancels some."""
    _, _, channel = served
    answers = await asyncio.gather(*(_health(channel, "liveness") for _ in range(3000)), return_exceptions=True)
    assert [answer for answer in answers if answer != SERVING] == []


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_frozen_peer_is_noticed_by_keepalive() -> None:
    script = (
        "import asyncio\nfrom services.common.server import Server\nasync def serve():\n"
        "    server = Server('127.0.0.1', 0)\n    await server.start([])\n    print(server.port, flush=True)\n"
        "    await asyncio.sleep(90)\nasyncio.run(serve())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="liveness"))
            assert (await watch.read()).status == SERVING
            process.send_signal(signal.SIGSTOP)
            frozen_s = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await watch.read()
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    # A ping every 10 s, answered within 5 s; three times that is allowed here.
    assert time.monotonic() - frozen_s < 45


async def test_a_started_server_is_live_and_not_ready_before_it_says_so(
    served: tuple[Server, Slow, grpc.aio.Channel],
) -> None:
    server, _, channel = served
    names = ("liveness", "readiness", "generate", "")
    assert [await _health(channel, name) for name in names] == [SERVING, NOT_SERVING, NOT_SERVING, NOT_SERVING]
    await server.health.set_ready(True)
    assert [await _health(channel, name) for name in names] == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]
    await server.health.set_generate(True)
    assert [await _health(channel, name) for name in names] == [SERVING] * 4
    assert server.health.is_serving("generate")


async def test_an_unknown_health_name_is_not_found(served: tuple[Server, Slow, grpc.aio.Channel]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _health(served[2], "triptych")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_sees_every_change(served: tuple[Server, Slow, grpc.aio.Channel]) -> None:
    server, _, channel = served
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="generate"))
    seen = [(await watch.read()).status]
    for serving in (True, False):
        await server.health.set_generate(serving)
        seen.append((await watch.read()).status)
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
    watch.cancel()


async def test_reflection_lists_the_services(served: tuple[Server, Slow, grpc.aio.Channel]) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(served[2]).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names
    call.cancel()


async def test_a_port_in_use_is_a_start_error_that_says_what_to_do(
    served: tuple[Server, Slow, grpc.aio.Channel],
) -> None:
    second = Server("127.0.0.1", served[0].port)
    with pytest.raises(StartError, match=rf"127\.0\.0\.1:{served[0].port}.*--port"):
        await second.start([])


async def _streaming(slow: Slow, channel: grpc.aio.Channel) -> Any:
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest())
    await call.read()
    assert slow.running == 1
    return call


async def test_sigterm_drains_then_stops(served: tuple[Server, Slow, grpc.aio.Channel]) -> None:
    server, slow, channel = served
    await server.health.set_ready(True)
    await server.health.set_generate(True)
    call = await _streaming(slow, channel)
    draining = asyncio.Event()

    async def drain() -> None:
        draining.set()
        await slow.ended.wait()

    running = asyncio.create_task(server.run(drain, drain_s=20))
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(draining.wait(), 5)
    assert [await _health(channel, name) for name in ("liveness", "readiness", "generate")] == [
        SERVING,
        NOT_SERVING,
        NOT_SERVING,
    ]
    assert not running.done()
    slow.finish.set()
    assert (await call.read()).HasField("usage")
    assert await call.code() is grpc.StatusCode.OK
    await asyncio.wait_for(running, 5)


@pytest.mark.parametrize("second_signal", [False, True])
async def test_a_drain_that_does_not_end_is_cut_by_its_bound_or_by_a_second_signal(
    served: tuple[Server, Slow, grpc.aio.Channel], second_signal: bool
) -> None:
    server, slow, channel = served
    call = await _streaming(slow, channel)
    running = asyncio.create_task(server.run(asyncio.Event().wait, drain_s=60 if second_signal else 0.3))
    await asyncio.sleep(0.05)
    began_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    if second_signal:
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(running, 10)
    assert time.monotonic() - began_s < 10
    assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert slow.running == 0


async def test_one_message_limit_holds_both_ways() -> None:
    server, slow = Server("127.0.0.1", 0, max_message_bytes=4096), Slow()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(slow, server.grpc)
    await server.start([NAME])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="a" * 5000)).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop()
