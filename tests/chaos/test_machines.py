"""What happens to machines: clocks that are set, disks that are full, descriptors that run out, readers that stop."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections import Counter
from pathlib import Path

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.parts import Held
from tests.chaos.fleet import Fleet, running
from tests.chaos.stubs import ids_of, load_on, stub_fleet
from tests.support.calls import by_ids, generate, greedy

MB = 1 << 20
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
"""Of Debian's libfaketime."""


class Clock:
    """The wall clock of a fleet's processes; their monotonic clocks run on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.environment = {
            "LD_PRELOAD": str(FAKETIME[0]),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        self.set("+0")

    def set(self, offset: str) -> None:
        """Such as -2h; read again with each look at the clock."""
        self._file.write_text(offset + "\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_steps_of_the_clock_end_no_stream_and_no_process(tiny: Path, tmp_path: Path) -> None:
    assert FAKETIME, "libfaketime is missing; `make test-tools` installs it"
    clock = Clock(tmp_path / "clock")
    fleet = stub_fleet(tiny, tmp_path, replicas=2, step_ms=20)
    fleet.environment = clock.environment
    load = load_on(fleet, 40, (50, 300))
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        for offset in ("+1h", "-3h", "+2h", "-1h"):
            await asyncio.sleep(3)
            clock.set(offset)
        async with grpc.aio.insecure_channel(fleet.address) as channel:  # a deadline of a set clock is of seconds still
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await generate(channel, by_ids([5, 6], greedy(max_tokens=1000, ignore_eos=True)), timeout_s=1.0)
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(3)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.refused == 0 and load.whole >= load.clients
        await fleet.settled()
        assert all(count == 1 for count in fleet.starts.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_scheduler_that_starts_again_after_the_clock_was_set_back_gets_its_executor(
    tiny: Path, tmp_path: Path
) -> None:
    """Epochs are numbered by the clock, and the executor takes none that is older than the one it has."""
    assert FAKETIME, "libfaketime is missing; `make test-tools` installs it"
    clock = Clock(tmp_path / "clock")
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=20)
    fleet.environment = clock.environment
    load = load_on(fleet, 20, (50, 150))
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        await asyncio.sleep(2)
        clock.set("-2h")
        fleet.signal("scheduler-0", signal.SIGKILL)
        await fleet.wait_generate(False, 15)
        await fleet.wait_generate(True, 30)
        await asyncio.sleep(2)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.whole >= load.clients
        await fleet.settled()


@pytest.mark.timeout(120)
async def test_full_disks_under_the_logs_and_the_recording_cost_no_stream(tiny: Path, tmp_path: Path) -> None:
    """/dev/full takes what is opened, and refuses what is written: No space left on device."""
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=5)
    fleet.log_to = Path("/dev/full")
    fleet.scheduler_flags = [*fleet.scheduler_flags, "--record", "/dev/full", "--log-level", "debug"]
    fleet.frontend_flags = ["--log-level", "debug", "--log-format", "json"]
    load = load_on(fleet, 20, (20, 60))
    async with running(fleet):
        streams = asyncio.create_task(load.run())
        await asyncio.sleep(2)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.refused == 0 and load.whole >= load.clients
        await fleet.settled()
        for name in ("liveness", "readiness", "generate"):
            assert await fleet.healthy("frontend", name)
        assert all(count == 1 for count in fleet.starts.values())


@pytest.mark.timeout(120)
async def test_a_frontend_without_descriptors_left_takes_nobody_new_and_then_again(tiny: Path, tmp_path: Path) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=1, step_ms=20)
    async with running(fleet), grpc.aio.insecure_channel(fleet.address) as early:
        pid = fleet.processes["frontend"].pid
        running_call = asyncio.create_task(
            generate(early, by_ids([7], greedy(max_tokens=300, ignore_eos=True, seed=0)))
        )
        await asyncio.sleep(0.5)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (Held.by(pid).descriptors + 4, 4096))
        connections = []
        for _ in range(40):
            _, writer = await asyncio.open_connection("127.0.0.1", fleet.ports["frontend"])
            connections.append(writer)
        await asyncio.sleep(1.0)
        answer = await running_call
        assert answer.ids == list(ids_of([7], 0, 300)), "who was there is served on"
        for writer in connections:
            writer.transport.abort()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
        await asyncio.wait_for(_served(fleet), 30)
        await fleet.settled()


async def _served(fleet: Fleet) -> None:
    """A new connection gets an answer."""
    while True:
        try:
            async with grpc.aio.insecure_channel(fleet.address) as channel:
                await generate(channel, by_ids([8], greedy(max_tokens=4, ignore_eos=True)), timeout_s=5)
                return
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_clients_that_stop_reading_hold_up_nobody_while_executors_die(tiny: Path, tmp_path: Path) -> None:
    fleet = stub_fleet(tiny, tmp_path, replicas=2, step_ms=20)
    fleet.frontend_flags = ["--slow-reader-s", "2", "--max-unread-tokens", "20000"]
    load = load_on(fleet, 30, (50, 200))
    ends: Counter[str] = Counter()

    async def never_reads(number: int) -> None:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(fleet.address, options=options) as channel:
            sampling = generation_pb2.Sampling(temperature=0.0)
            asked = inference_pb2.Options(
                sampling=sampling, max_tokens=900, ignore_eos=True, logprobs=20, raw_bytes=True, seed=number
            )
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(by_ids([9, number], asked), timeout=120)
            await call.read()
            await asyncio.sleep(30)
            try:
                while await call.read() is not grpc.aio.EOF:
                    pass
                ends["whole"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1

    async with running(fleet):
        streams = asyncio.create_task(load.run())
        await asyncio.sleep(2)
        before = Held.by(fleet.processes["frontend"].pid)
        slow = [asyncio.create_task(never_reads(number)) for number in range(20)]
        for name in ("executor-0", "executor-1", "executor-0"):
            await asyncio.sleep(5)
            fleet.signal(name, signal.SIGKILL)
        await asyncio.gather(*slow)
        load.stopping = True
        await streams
        assert load.wrong == [] and load.whole >= load.clients
        assert set(ends) <= {"whole", "RESOURCE_EXHAUSTED"} and sum(ends.values()) == 20, ends
        assert ends["RESOURCE_EXHAUSTED"] > 0
        await fleet.settled()
        assert Held.by(fleet.processes["frontend"].pid).rss_bytes < before.rss_bytes + 128 * MB
