"""Rows of the case table once more, while executors, schedulers and frontends die."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.parts import Held
from tests.chaos.fleet import Fleet, running
from tests.chaos.stubs import ids_of, load_on, stub_fleet
from tests.support.calls import Answer, by_ids
from triptych_client import Client, Retry

SLACK = 3.0
"""Of every time that a row gives."""
STEP_MS = 20


@dataclass
class Callers:
    """Callers that leave at any moment, have little time, or stay; what became of each call is looked at."""

    fleet: Fleet
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stopping: bool = False

    async def run(self, clients: int) -> None:
        """Until `stopping`."""
        ways: list[Callable[[grpc.aio.Channel, random.Random], Awaitable[None]]] = [
            self._leaves,
            self._has_little_time,
            self._stays,
        ]
        async with grpc.aio.insecure_channel(self.fleet.address) as channel:
            await asyncio.gather(*(self._client(channel, random.Random(n), ways[n % 3]) for n in range(clients)))

    async def _client(
        self,
        channel: grpc.aio.Channel,
        rng: random.Random,
        way: Callable[[grpc.aio.Channel, random.Random], Awaitable[None]],
    ) -> None:
        while not self.stopping:
            await way(channel, rng)

    def _call(self, channel: grpc.aio.Channel, prompt: list[int], count: int, timeout_s: float = 60.0):  # type: ignore[no-untyped-def]
        options = inference_pb2.Options(
            sampling=generation_pb2.Sampling(temperature=0.0), max_tokens=count, ignore_eos=True, seed=0
        )
        # One id for all: it is the caller's, and nothing is told apart by it.
        metadata = (("x-request-id", "the same"),)
        return inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            by_ids(prompt, options), timeout=timeout_s, metadata=metadata
        )

    async def _leaves(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        """At once, while it waits, in its prefill, in the middle, as it ends."""
        call = self._call(channel, [rng.randrange(3, 500) for _ in range(rng.choice([2, 400]))], 40)
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.02, 0.3, 40 * STEP_MS / 1000]))
        call.cancel()
        self.ends["left"] += 1
        await asyncio.sleep(0)

    async def _has_little_time(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        """About as much as an answer takes."""
        timeout_s = 40 * STEP_MS / 1000 * rng.uniform(0.7, 1.5)
        await self._kept(channel, [rng.randrange(3, 500)], 40, timeout_s)

    async def _stays(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        await self._kept(channel, [rng.randrange(3, 500) for _ in range(5)], rng.randint(20, 80), 60.0)

    async def _kept(self, channel: grpc.aio.Channel, prompt: list[int], count: int, timeout_s: float) -> None:
        answer, begun_s = Answer(), time.monotonic()
        try:
            async for message in self._call(channel, prompt, count, timeout_s):
                answer.messages.append(message)
        except grpc.aio.AioRpcError as error:
            self.ends[error.code().name] += 1
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                self.wrong.append(f"{error.code().name}: {error.details()}")
            # A deadline is looked at by the client too, also between the last message and the status behind it.
            if answer.finishes and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self.wrong.append(f"two ends: {answer.finishes} and {error.code().name}")
            await asyncio.sleep(0.05)
        else:
            self.ends["whole"] += 1
            if len(answer.finishes) != 1 or answer.ids != list(ids_of(prompt, 0, count)):
                self.wrong.append(f"{len(answer.finishes)} ends, {len(answer.ids)} ids of {count}")
        if answer.ids != list(ids_of(prompt, 0, count))[: len(answer.ids)]:
            self.wrong.append(f"other ids: {answer.ids}")
        if time.monotonic() - begun_s > timeout_s + SLACK:
            self.wrong.append(f"a deadline of {timeout_s} s passed {time.monotonic() - begun_s - timeout_s} s before")


async def _callers_under_kills(tiny: Path, folder: Path, duration_s: float, every_s: float) -> None:
    fleet = stub_fleet(tiny, folder, replicas=2, step_ms=STEP_MS)
    callers, rng = Callers(fleet), random.Random(11)
    async with running(fleet):
        calls = asyncio.create_task(callers.run(45))
        await asyncio.sleep(2)
        before = Held.by(fleet.processes["frontend"].pid)
        ends_s = time.monotonic() + duration_s
        while time.monotonic() < ends_s:
            fleet.signal(rng.choice(fleet.engines), signal.SIGKILL)
            await asyncio.sleep(every_s)
        callers.stopping = True
        await calls
        assert callers.wrong == [], callers.ends
        assert callers.ends["whole"] > 20 and callers.ends["left"] > 20 and callers.ends["DEADLINE_EXCEEDED"] > 5
        await fleet.settled()  # free == total: nothing is left of anybody
        after = Held.by(fleet.processes["frontend"].pid)
        assert after.descriptors <= before.descriptors + 10


@pytest.mark.timeout(180)
async def test_K5_callers_that_leave_or_run_out_of_time_leave_nothing_while_engines_die(
    tiny: Path, tmp_path: Path
) -> None:
    """C1, C2, C3 and G1 too: cancels in every phase, one id for all, deadlines near the median, one end each."""
    await _callers_under_kills(tiny, tmp_path, 6, 2)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_C3_the_same_for_two_minutes(tiny: Path, tmp_path: Path) -> None:
    await _callers_under_kills(tiny, tmp_path, 120, 3)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_X2_faults_of_executors_again_and_again_cost_no_stream(tiny: Path, tmp_path: Path) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=STEP_MS, faults=["--fault-at-step", "100"])
    load = load_on(fleet, 40, (50, 300))
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        await asyncio.sleep(15)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.whole >= load.clients
        await fleet.settled()
        assert fleet.log("scheduler-0").count("lost the executor") >= 3
        assert fleet.starts["executor-0"] == 1, "it proves itself healthy"


@pytest.mark.timeout(180)
async def test_G5_a_frontend_that_dies_or_is_told_to_end_keeps_no_client_waiting(tiny: Path, tmp_path: Path) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=STEP_MS, frontends=2)
    fleet.frontend_flags = ["--drain-s", "1"]

    async def ended(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, float]:
        options = inference_pb2.Options(max_tokens=900, ignore_eos=True)
        try:
            async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(by_ids([5], options), timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), time.monotonic()
        raise AssertionError("it came to its end")

    async with running(fleet):
        for number, grace_s in ((signal.SIGKILL, 0.0), (signal.SIGTERM, 1.0)):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.ports['frontend-1']}") as channel:
                calls = [asyncio.create_task(ended(channel)) for _ in range(20)]
                await asyncio.sleep(1)
                begun_s = time.monotonic()
                fleet.signal("frontend-1", number)
                for code, at_s in await asyncio.gather(*calls):
                    assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                    assert at_s - begun_s < grace_s + SLACK
            await fleet.settled()  # the scheduler has freed all that was its
            await fleet.wait_generate()


async def _rolling_frontends(tiny: Path, folder: Path, rounds: int) -> None:
    """Each in turn is told to end, or dies, while the client package asks both."""
    fleet = stub_fleet(tiny, folder, replicas=1, step_ms=STEP_MS, frontends=2)
    fleet.frontend_flags = ["--drain-s", "1"]
    whole, stopping = Counter[int](), asyncio.Event()

    async def asks(client: Client, number: int) -> None:
        rng = random.Random(number)
        while not stopping.is_set():
            prompt, seed, count = [3 + number, 4], rng.randrange(1, 2**62), rng.randint(40, 150)
            stream = client.generate(prompt, max_tokens=count, ignore_eos=True, temperature=1.0, seed=seed)
            answer = await stream.collect()
            assert list(answer.choices[0].token_ids) == list(ids_of(prompt, seed, count))
            whole[number] += 1

    async with running(fleet), Client(fleet.address, retry=Retry(attempts=12), timeout_s=90) as client:
        callers = [asyncio.create_task(asks(client, number)) for number in range(20)]
        for turn in range(rounds):
            await asyncio.sleep(1.5)
            name = fleet.doors[turn % 2]
            fleet.signal(name, signal.SIGTERM if turn % 4 < 2 else signal.SIGKILL)
            await asyncio.sleep(2)
            await fleet.wait_generate()
        stopping.set()
        await asyncio.gather(*callers)
        assert len(whole) == 20
        assert all(fleet.starts[door] > rounds // 2 for door in fleet.doors)
        await fleet.settled()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_G7_frontends_that_come_and_go_cost_the_client_package_no_stream(tiny: Path, tmp_path: Path) -> None:
    await _rolling_frontends(tiny, tmp_path, 8)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("part", ["scheduler-0", pytest.param("executor-0", marks=pytest.mark.slow)])
async def test_P1_health_is_true_under_load_while_a_part_is_frozen(tiny: Path, tmp_path: Path, part: str) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=STEP_MS)
    load = load_on(fleet, 20, (50, 200))
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        await asyncio.sleep(1)
        fleet.signal(part, signal.SIGSTOP)
        begun_s = time.monotonic()
        await fleet.wait_generate(False, SLACK * 5)
        assert time.monotonic() - begun_s < SLACK * 5
        assert await fleet.healthy("frontend", "liveness") and await fleet.healthy("frontend", "readiness")
        fleet.signal(part, signal.SIGCONT)
        await fleet.wait_generate(True, SLACK * 5)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.whole >= load.clients
        await fleet.settled()
