"""The adapter's GetLoads and FlushCache, before a real scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from loadtest.stub_executor import StubExecutor
from tests.frontend.harness import Served, fields_at_fault, serving
from tests.support.vllm_calls import by_ids, failure, generate, stub
from tests.support.vllm_stack import until, with_scheduler

PROMPT = list(range(40))


async def test_loads_tell_what_runs_and_what_the_cache_found(text_model: Path) -> None:
    executor = StubExecutor()
    async with with_scheduler(text_model, executor) as channel:

        async def load(**request: Any) -> pb.SchedulerLoad:
            answer = await stub(channel).GetLoads(pb.GetLoadsRequest(**request))
            assert answer.dp_rank_count == 1 and answer.version == f"triptych {version('triptych')}"
            (load,) = answer.loads
            return load

        idle = await load(dp_rank=0, include=["core"])
        assert (idle.num_total_reqs, idle.num_used_tokens, idle.token_usage, idle.cache_hit_rate) == (0, 0, 0, 0)
        assert idle.max_total_num_tokens > 0
        for _ in range(2):
            await generate(channel, by_ids(PROMPT, max_tokens=1))
        # 40 tokens asked for twice, of which the second time 2 blocks of 16 are found.
        assert (await load()).cache_hit_rate == pytest.approx(32 / 80)
        executor.hold()
        call = asyncio.create_task(generate(channel, by_ids(PROMPT, max_tokens=5)))
        busy = await until(load, lambda load: load.num_running_reqs > 0)
        assert busy.num_total_reqs == 1 and busy.num_used_tokens > 0 and 0 < busy.token_usage < 1
        executor.release()
        await call


@pytest.fixture
async def served(text_model: Path) -> AsyncIterator[Served]:
    async with serving(text_model, vllm_adapter=True) as served:
        yield served


@pytest.mark.parametrize(
    ("request_", "field"),
    [(pb.GetLoadsRequest(dp_rank=1), "dp_rank"), (pb.GetLoadsRequest(include=["core", "lora"]), "include[1]")],
)
async def test_loads_of_a_rank_or_a_section_that_is_not_there_are_refused(
    served: Served, request_: pb.GetLoadsRequest, field: str
) -> None:
    error = await failure(stub(served.channel).GetLoads(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == [field]


async def test_a_flush_forgets_at_once_only_where_nothing_runs_and_else_waits(text_model: Path) -> None:
    executor = StubExecutor()
    async with with_scheduler(text_model, executor) as channel:

        async def cached() -> int:
            return int((await generate(channel, by_ids(PROMPT, max_tokens=1))).complete.cached_tokens)

        async def flush(timeout_s: float) -> common_pb2.FlushCacheResponse:
            request = common_pb2.FlushCacheRequest(timeout_s=timeout_s)
            answer: common_pb2.FlushCacheResponse = await stub(channel).FlushCache(request)
            return answer

        assert [await cached(), await cached()] == [0, 32]
        flushed = await flush(0)
        assert flushed.success and "2 blocks" in flushed.message
        assert [await cached(), await cached()] == [0, 32]
        executor.hold()
        call = asyncio.create_task(generate(channel, by_ids([1, 2, 3], max_tokens=3)))
        await until(lambda: stub(channel).GetLoads(pb.GetLoadsRequest()), lambda told: told.loads[0].num_total_reqs > 0)
        for timeout_s in (0.0, 0.2):
            refused = await flush(timeout_s)
            assert not refused.success and "1 requests are in flight" in refused.message
        waiting = asyncio.create_task(flush(30))
        executor.release()
        assert (await waiting).success and (await call).ids
        assert await cached() == 0


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf"), 1e9])
async def test_a_flush_waits_for_a_time_that_is_one(served: Served, timeout_s: float) -> None:
    error = await failure(stub(served.channel).FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and fields_at_fault(error) == ["timeout_s"]
