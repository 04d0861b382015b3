"""Row G4: pings without calls and silence without data end no connection, on any of the three hops."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.calls import by_ids, generate, greedy
from tests.support.cluster import Cluster

COMPRESSION = 10
"""A client pings every second instead of every 10 s, and is silent for 12 s instead of 120 s."""
SILENT_S = 120 / COMPRESSION + 2
PINGING = [
    ("grpc.keepalive_time_ms", 10_000 // COMPRESSION),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
READY = grpc.ChannelConnectivity.READY


async def states_seen(
    address: str, *, watching: bool, credentials: grpc.ChannelCredentials | None = None
) -> set[grpc.ChannelConnectivity]:
    """The states of a pinging connection in a time of silence, with a silent stream open or with no call at all.

    A GOAWAY takes a connection out of READY.
    """
    opened = (
        grpc.aio.insecure_channel(address, options=PINGING)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=PINGING)
    )
    async with opened as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service="liveness")
        await stub.Check(ask)
        watch: Any = stub.Watch(ask) if watching else None
        if watch is not None:
            await watch.read()
        seen = {channel.get_state()}
        end_s = time.monotonic() + SILENT_S
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await channel.wait_for_state_change(channel.get_state())
            except TimeoutError:
                break
            seen.add(channel.get_state())
            await asyncio.sleep(0.01)
        if watch is not None:
            assert not watch.done()
            watch.cancel()
        assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING
        return seen


async def silent(
    *addresses: str, credentials: grpc.ChannelCredentials | None = None
) -> list[set[grpc.ChannelConnectivity]]:
    """All of them at once, each with a silent stream and without any."""
    pairs = [(address, watching) for address in addresses for watching in (False, True)]
    return await asyncio.gather(
        *(states_seen(address, watching=watching, credentials=credentials) for address, watching in pairs)
    )


@pytest.mark.slow
async def test_G4_pings_and_silence_end_no_connection_on_any_hop(tiny_cluster: Cluster) -> None:
    addresses = [f"127.0.0.1:{port}" for port in tiny_cluster.ports.values()]
    assert len(addresses) == 3
    assert await silent(*addresses) == [{READY}] * 6
    # The services' own connections stood through it as well: each was made once.
    assert tiny_cluster.log("frontend").count("attached to engine") == 1
    assert tiny_cluster.log("executor").count(" begins") == 1
    async with grpc.aio.insecure_channel(tiny_cluster.address) as channel:
        assert len((await generate(channel, by_ids([3, 4], greedy(max_tokens=4, ignore_eos=True)))).ids) == 4


@pytest.mark.slow
async def test_G4_a_server_with_stock_options_would_end_such_a_connection() -> None:
    """What the row is about: without our options the same client is sent away, so the test above can fail."""
    server = grpc.aio.server()
    from services.common.health import Health

    health = Health()
    health.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await health.set_live(True)
    try:
        assert await states_seen(f"127.0.0.1:{port}", watching=False) != {READY}
    finally:
        await server.stop(None)
