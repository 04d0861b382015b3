"""kill -9 in the middle of hundreds of streams: every client gets its full, right answer, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest

from loadtest.parts import Held
from tests.chaos.fleet import Fleet, Load, running
from tests.chaos.stubs import SCHEDULER_FLAGS, load_on, stub_fleet

MB = 1 << 20


async def kill_for(fleet: Fleet, rng: random.Random, duration_s: float, every_s: float) -> list[str]:
    """SIGKILL to a random executor or scheduler, again and again; which."""
    killed: list[str] = []
    ends_s = time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        await asyncio.sleep(every_s)
        killed.append(rng.choice(fleet.engines))
        fleet.signal(killed[-1], signal.SIGKILL)
    return killed


async def survive(fleet: Fleet, load: Load, *, duration_s: float, every_s: float, seed: int) -> None:
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        await asyncio.sleep(min(5.0, duration_s / 4))
        before = Held.by(fleet.processes["frontend"].pid)
        killed = await kill_for(fleet, random.Random(seed), duration_s, every_s)
        load.stopping = True
        await streams
        assert load.wrong == [], f"killed: {killed}"
        assert load.whole >= load.clients
        await fleet.settled()
        after = Held.by(fleet.processes["frontend"].pid)
        assert after.descriptors <= before.descriptors + 10, (before, after)
        assert after.rss_bytes <= before.rss_bytes + 48 * MB, (before, after)
        print(f"{load.whole} streams whole, {len(killed)} kills, {load.refused} calls refused while no engine served")


@pytest.mark.timeout(240)
async def test_X3_G1_streams_outlive_kills_of_either_of_two_replicas(tiny: Path, tmp_path: Path) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=2, step_ms=20)
    load = load_on(fleet, 40, (50, 300))
    await survive(fleet, load, duration_s=12, every_s=3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_P2_a_rolling_restart_of_everything_behind_the_frontend_loses_nothing(tiny: Path, tmp_path: Path) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=2, step_ms=20)
    fleet.scheduler_flags = [*SCHEDULER_FLAGS, "--drain-s", "3"]  # longer streams go on at the other scheduler
    load = load_on(fleet, 60, (100, 900))
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        for name in fleet.engines:
            await asyncio.sleep(2)
            old = fleet.processes[name]
            fleet.signal(name, signal.SIGTERM)
            await asyncio.to_thread(old.wait, 30)
            assert name.startswith("executor") or old.returncode == 0
            await fleet.wait_generate()
        load.stopping = True
        await streams
        assert load.wrong == [] and load.refused == 0
        assert load.whole >= load.clients
        assert all(fleet.starts[name] == 2 for name in fleet.engines)
        await fleet.settled()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["executor", "scheduler"])
async def test_X3_streams_outlive_frozen_parts(tiny: Path, tmp_path: Path, kind: str) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=2, step_ms=20)
    load = load_on(fleet, 60, (100, 900))
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        for n in (0, 1, 0):
            await asyncio.sleep(2)
            fleet.signal(f"{kind}-{n}", signal.SIGSTOP)
            await asyncio.sleep(12)
            fleet.signal(f"{kind}-{n}", signal.SIGCONT)
            await asyncio.sleep(3)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.whole >= load.clients
        await fleet.settled()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("replicas", [1, 2])
async def test_X3_200_streams_outlive_two_minutes_of_kills(tiny: Path, tmp_path: Path, replicas: int) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=replicas, step_ms=60)
    load = load_on(fleet, 200, (100, 600))
    await survive(fleet, load, duration_s=120, every_s=3, seed=2)
