"""The adapter's GetLoads and FlushCache before several engines: all are asked, and none is left out silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from loadtest.stub_executor import StubExecutor
from services.common.errors import RequestError
from services.frontend.config import FrontendConfig
from services.frontend.fleet_admin import FleetAdmin
from services.frontend.server import Frontend
from services.scheduler.server import SchedulerServer
from tests.frontend.harness import attached
from tests.support.attached import scheduler_for
from tests.support.cluster import free_port
from tests.support.vllm_calls import by_ids, failure, generate, stub
from tests.support.vllm_stack import until

PROMPT = list(range(40))  # two whole blocks of 16


@dataclass
class Engines:
    channel: grpc.aio.Channel
    frontend: Frontend
    executors: list[StubExecutor]
    schedulers: list[SchedulerServer]

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{scheduler.server.port}" for scheduler in self.schedulers]

    async def fill(self) -> None:
        """Each engine's cache holds the prompt."""
        for scheduler in self.schedulers:
            front = Frontend(
                FrontendConfig(
                    port=0,
                    engine=f"127.0.0.1:{scheduler.server.port}",
                    model=self.frontend.model.folder.as_posix(),
                    vllm_adapter=True,
                )
            )
            await front.start()
            try:
                await attached(front)
                async with grpc.aio.insecure_channel(f"127.0.0.1:{front.server.port}") as channel:
                    await generate(channel, by_ids(PROMPT, max_tokens=1))
            finally:
                await front.close()

    async def load(self) -> pb.SchedulerLoad:
        (load,) = (await stub(self.channel).GetLoads(pb.GetLoadsRequest())).loads
        return load

    async def flush(self, timeout_s: float = 0) -> common_pb2.FlushCacheResponse:
        request = common_pb2.FlushCacheRequest(timeout_s=timeout_s)
        answer: common_pb2.FlushCacheResponse = await stub(self.channel).FlushCache(request)
        return answer


@asynccontextmanager
async def two_engines(model: Path) -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        executors = [await stack.enter_async_context(StubExecutor()) for _ in range(2)]
        schedulers = [await stack.enter_async_context(scheduler_for(executor, model)) for executor in executors]
        first, second = (f"127.0.0.1:{scheduler.server.port}" for scheduler in schedulers)
        config = FrontendConfig(port=0, engine=first, more_engines=[second], model=str(model), vllm_adapter=True)
        frontend = Frontend(config)
        await frontend.start()
        stack.push_async_callback(frontend.close)
        await attached(frontend)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}"))
        yield Engines(channel, frontend, executors, schedulers)


async def test_a_flush_forgets_what_every_engine_has_cached(text_model: Path) -> None:
    async with two_engines(text_model) as engines:
        await engines.fill()
        assert [len(list(one.engine.cached_blocks())) for one in engines.schedulers] == [2, 2]
        flushed = await engines.flush()
        assert flushed.success and flushed.message == "4 blocks were forgotten"
        assert [len(list(one.engine.cached_blocks())) for one in engines.schedulers] == [0, 0]


async def test_a_flush_waits_until_every_engine_is_idle(text_model: Path) -> None:
    async with two_engines(text_model) as engines:
        for executor in engines.executors:
            executor.hold()
        calls = [asyncio.create_task(generate(engines.channel, by_ids([n] * 9, max_tokens=3))) for n in (3, 4)]
        await until(engines.load, lambda load: load.num_total_reqs == 2)
        assert all(one.engine.heartbeat().running_requests == 1 for one in engines.schedulers)
        refused = await engines.flush()
        assert not refused.success and "2 requests are in flight" in refused.message
        for executor in engines.executors:
            executor.release()
        await asyncio.gather(*calls)
        assert (await engines.flush(20)).success


async def test_loads_are_those_of_all_engines_that_answer(text_model: Path) -> None:
    async with two_engines(text_model) as engines:
        both = await engines.load()
        blocks = [one.engine.core.total_blocks for one in engines.schedulers]
        assert both.max_total_num_tokens == sum(blocks) * 16
        await engines.fill()
        await engines.fill()
        assert (await engines.load()).cache_hit_rate == pytest.approx(2 * 32 / (4 * 40))
        await engines.schedulers[1].stop()
        assert (await engines.load()).max_total_num_tokens == blocks[0] * 16
        error = await failure(stub(engines.channel).FlushCache(common_pb2.FlushCacheRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "did not answer" in (error.details() or "")


async def test_an_engine_that_is_lost_after_the_question_is_told_in_the_answer(text_model: Path) -> None:
    async with two_engines(text_model) as engines:
        await engines.fill()
        admin = FleetAdmin([engines.addresses[0], f"127.0.0.1:{free_port()}"])
        flushed, errors = await admin.flush_prefix_cache()
        assert flushed == 2 and [error.reason for error in errors] == ["NO_ENGINE"]
        with pytest.raises(RequestError, match="did not answer"):
            await admin.all_loads()
        await admin.close()
        nobody = FleetAdmin([f"127.0.0.1:{free_port()}"])
        for question in (nobody.load, nobody.flush_prefix_cache):
            with pytest.raises(RequestError, match="did not answer"):
                await question()
        await nobody.close()
