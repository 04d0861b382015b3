"""Real checkpoints under kill -9: what comes is what an undisturbed fleet brings."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2

from loadtest.parts import Held
from tests.chaos.fleet import Fleet, running
from tests.support.calls import Answer, by_ids, generate

MB = 1 << 20
REAL = ["-m", "services.cli.main", "executor"]


@dataclass(frozen=True)
class Asked:
    """A request, the same each time."""

    prompt: tuple[int, ...]
    seed: int
    count: int

    def request(self) -> inference_pb2.GenerateRequest:
        sampling = generation_pb2.Sampling(temperature=0.8 if self.seed else 0.0)
        options = inference_pb2.Options(sampling=sampling, max_tokens=self.count, ignore_eos=True, seed=self.seed)
        return by_ids(list(self.prompt), options)


def drawn(number: int, vocab_size: int, count: tuple[int, int]) -> list[Asked]:
    """Half of them greedy."""
    rng = random.Random(number)
    return [
        Asked(
            tuple(rng.randrange(3, vocab_size) for _ in range(rng.randint(2, 40))),
            rng.choice([0, rng.randrange(1, 2**63)]),
            rng.randint(*count),
        )
        for _ in range(number)
    ]


def real_fleet(model: Path, folder: Path, replicas: int) -> Fleet:
    executor = [*REAL, "--model", str(model), "--threads", "1", "--kv-memory-bytes", str(128 * MB)]
    return Fleet(model, folder, executor, replicas, scheduler_flags=["--max-num-seqs", "256"])


@dataclass
class Callers:
    """Each asks its request again and again until told to stop; answers are compared with `undisturbed`."""

    fleet: Fleet
    asked: Sequence[Asked]
    undisturbed: dict[Asked, list[int]] = field(default_factory=dict)
    whole: int = 0
    wrong: list[str] = field(default_factory=list)
    stopping: bool = False

    async def learn(self) -> None:
        """All of them at once, with nothing in the way."""
        async with grpc.aio.insecure_channel(self.fleet.address) as channel:
            answers = await asyncio.gather(*(generate(channel, one.request()) for one in self.asked))
        self.undisturbed = {one: answer.ids for one, answer in zip(self.asked, answers, strict=True)}

    async def run(self) -> None:
        """Until `stopping`."""
        async with grpc.aio.insecure_channel(self.fleet.address) as channel:
            await asyncio.gather(*(self._caller(channel, one) for one in self.asked))

    async def _caller(self, channel: grpc.aio.Channel, one: Asked) -> None:
        while not self.stopping:
            try:
                answer: Answer = await generate(channel, one.request())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    self.wrong.append(f"{error.code().name}: {error.details()}")
                    return
                await asyncio.sleep(0.3)  # no engine could take it then: the caller is told so, and asks again
                continue
            self.whole += 1
            if answer.ids != self.undisturbed[one] or len(answer.finishes) != 1:
                place = [a == b for a, b in zip(answer.ids, self.undisturbed[one], strict=False)].index(False)
                self.wrong.append(f"{one}: other ids from {place} on, {len(answer.finishes)} finishes")
                return


async def survive(callers: Callers, kills: int, every_s: float, victims: Sequence[str]) -> None:
    fleet, rng = callers.fleet, random.Random(3)
    async with running(fleet):
        await callers.learn()
        await fleet.settled()
        before = Held.by(fleet.processes["frontend"].pid)
        calls = asyncio.create_task(callers.run())
        begun_s = time.monotonic()
        for number in range(kills):
            await asyncio.sleep(max(0.0, begun_s + (number + 1) * every_s - time.monotonic()))
            fleet.signal(rng.choice(victims), signal.SIGKILL)
        await asyncio.sleep(every_s)
        callers.stopping = True
        await calls
        assert callers.wrong == []
        assert callers.whole >= len(callers.asked)
        await fleet.settled()
        after = Held.by(fleet.processes["frontend"].pid)
        assert after.descriptors <= before.descriptors + 10
        assert after.rss_bytes <= before.rss_bytes + 64 * MB


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("replicas", [1, 2])
async def test_X3_200_streams_of_a_tiny_model_outlive_kills_of_its_engines(
    tiny: Path, tmp_path: Path, replicas: int
) -> None:
    """A real executor takes seconds to start, so kills are as far apart as lets one of two replicas come back."""
    fleet = real_fleet(tiny, tmp_path, replicas)
    await survive(Callers(fleet, drawn(200, 512, (100, 300))), 10, 12.0, fleet.engines)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_X3_streams_of_the_embedded_model_outlive_four_kills(tmp_path: Path) -> None:
    from services.executor.embedded import fetch

    fleet = real_fleet(fetch(print), tmp_path, 1)
    await survive(Callers(fleet, drawn(16, 49_000, (100, 200))), 4, 45.0, fleet.engines)
