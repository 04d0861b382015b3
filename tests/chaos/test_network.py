"""Networks that cut connections, swallow what they carry, or are slow, on each hop: streams outlive all of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.chaos.fleet import Fleet, running
from tests.chaos.stubs import ids_of, load_on, stub_fleet
from tests.support.cluster import free_port
from tests.support.tcp_proxy import TcpProxy
from triptych_client import Client, Retry


@asynccontextmanager
async def behind_proxies(fleet: Fleet, kind: str) -> AsyncIterator[list[TcpProxy]]:
    """One before each scheduler, executor or frontend; not started yet are what is behind them."""
    names = fleet.doors if kind == "frontend" else [f"{kind}-{n}" for n in range(fleet.replicas)]
    async with AsyncExitStack() as stack:
        proxies = []
        for name in names:
            target_port = fleet.ports.setdefault(name, free_port())
            proxy = await stack.enter_async_context(TcpProxy(free_port(), target_port))
            fleet.routes[name] = proxy.port
            proxies.append(proxy)
        yield proxies


async def disturbed(
    fleet: Fleet, proxies: list[TcpProxy], duration_s: float, every_s: float, *, clients: int = 40
) -> int:
    """Cuts at random while clients ask; how many connections that were."""
    load, rng = load_on(fleet, clients, (50, 300)), random.Random(5)
    streams = asyncio.create_task(load.run())
    ends_s = time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        await asyncio.sleep(every_s * rng.uniform(0.5, 1.5))
        rng.choice(proxies).cut()
    load.stopping = True
    await streams
    assert load.wrong == [] and load.whole >= clients
    await fleet.settled()
    return sum(proxy.num_cut for proxy in proxies)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["scheduler", pytest.param("executor", marks=pytest.mark.slow)])
async def test_X3_streams_outlive_cut_connections(tiny: Path, tmp_path: Path, kind: str) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=2, step_ms=20)
    async with behind_proxies(fleet, kind) as proxies, running(fleet):
        assert await disturbed(fleet, proxies, 6, 1.0) >= 4
        assert all(count == 1 for count in fleet.starts.values()), "only connections were cut"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["scheduler", "executor"])
async def test_X3_streams_outlive_a_minute_of_cuts_with_one_engine(tiny: Path, tmp_path: Path, kind: str) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=20)
    async with behind_proxies(fleet, kind) as proxies, running(fleet):
        assert await disturbed(fleet, proxies, 60, 3.0) >= 10
        assert all(count == 1 for count in fleet.starts.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["scheduler", "executor"])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_X3_streams_outlive_connections_that_carry_nothing_for_a_while(
    tiny: Path, tmp_path: Path, kind: str, replicas: int
) -> None:
    """No end of a connection is ever seen: only silence tells."""
    fleet = stub_fleet(tiny, tmp_path, replicas=replicas, step_ms=20)
    load = load_on(fleet, 40, (100, 600))
    async with behind_proxies(fleet, kind) as proxies, running(fleet):
        streams = asyncio.create_task(load.run())
        for proxy in proxies * 2:
            await asyncio.sleep(2)
            proxy.swallow()
            if replicas == 1:
                await fleet.wait_generate(False, 15)
            await asyncio.sleep(8)
            assert await fleet.healthy("frontend", "generate") == (replicas > 1)
            proxy.heal()
            await fleet.wait_generate(True, 30)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.whole >= load.clients
        await fleet.settled()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_slow_networks_between_all_parts_lose_nothing(tiny: Path, tmp_path: Path) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=2, step_ms=20)
    load = load_on(fleet, 20, (20, 60))
    async with (
        behind_proxies(fleet, "executor") as executors,
        behind_proxies(fleet, "scheduler") as schedulers,
        behind_proxies(fleet, "frontend") as frontends,
        running(fleet),
    ):
        for proxy in (*executors, *schedulers, *frontends):
            proxy.delay_s, proxy.bytes_per_s = 0.03, 100_000
        streams = asyncio.create_task(load.run())
        await asyncio.sleep(20)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.refused == 0 and load.whole >= load.clients
        await fleet.settled()


@pytest.mark.timeout(240)
async def test_G7_the_client_package_resumes_what_a_cut_connection_broke(tiny: Path, tmp_path: Path) -> None:
    """Between client and frontend nobody but the client can go on: what it had is kept, and nothing comes twice."""
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=20)
    async with behind_proxies(fleet, "frontend") as (proxy,), running(fleet):
        rng = random.Random(7)

        async def one(client: Client, number: int) -> None:
            prompt, seed = [3 + number, 4, 5], 100 + number
            count = rng.randint(100, 200)
            stream = client.generate(prompt, max_tokens=count, ignore_eos=True, temperature=1.0, seed=seed)
            answer = await stream.collect()
            assert list(answer.choices[0].token_ids) == list(ids_of(prompt, seed, count))
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), count)

        async with Client(fleet.address, retry=Retry(attempts=10), timeout_s=120) as client:
            asked = [asyncio.create_task(one(client, number)) for number in range(20)]
            for _ in range(4):
                await asyncio.sleep(0.7)
                proxy.cut()
            await asyncio.gather(*asked)
        assert proxy.num_cut >= 4
        await fleet.settled()
