"""An error in one step, seen from outside: the step is done again, or its request ends alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from triptych.engine.v1 import engine_pb2

from tests.executor.hooks import Hooked
from tests.executor.mini_scheduler import Rig, serve
from tests.support.calls import Answer, by_ids, generate, greedy
from tests.support.checkpoints import reference_ids
from tests.support.cluster import Cluster, free_port

PROMPTS = [[3, 4, 5, 6], [7, 8, 9], [10, 11]]


@pytest.fixture(scope="module")
def hooked() -> Hooked:
    return Hooked()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor(tiny: Path, hooked: Hooked) -> AsyncIterator[Rig]:
    """In this process, so that a fault can be put into its model; the scheduler loads it."""
    async with serve(tiny, make=hooked) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny: Path, executor: Rig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    ports = {"executor": executor.port, "scheduler": free_port(), "frontend": free_port()}
    cluster = Cluster(tiny, tmp_path_factory.mktemp("logs"), ports=ports)
    try:
        for name in ("scheduler", "frontend"):
            cluster.start_one(name)
        await asyncio.to_thread(cluster.wait_generate, True, timeout_s=120)
        yield cluster
    finally:
        await asyncio.to_thread(cluster.stop)


async def idle(beats: AsyncIterator[engine_pb2.Heartbeat]) -> engine_pb2.Heartbeat:
    async with asyncio.timeout(30):
        async for beat in beats:
            if beat.state == engine_pb2.ENGINE_STATE_SERVING and not beat.running_requests + beat.waiting_requests:
                return beat
    raise AssertionError("the stream of heartbeats ended")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), torch.OutOfMemoryError("out of memory")])
async def test_X2_a_step_that_fails_is_done_again_by_the_same_process(
    cluster: Cluster, executor: Rig, hooked: Hooked, tiny: Path, error: Exception
) -> None:
    async with cluster.heartbeats() as beats, grpc.aio.insecure_channel(cluster.address) as channel:
        before = await idle(beats)
        calls = [generate(channel, by_ids(p, greedy(max_tokens=300, ignore_eos=True))) for p in PROMPTS]
        running = asyncio.gather(*calls)
        await asyncio.sleep(0.2)
        hooked.fail_once(error)
        answers: list[Answer] = await running
        assert hooked.before is None, "the step that was to fail was never done"
        assert [answer.ids for answer in answers] == reference_ids(tiny, PROMPTS, 300, ignore_eos=True)
        after = await idle(beats)
        assert after.free_blocks == before.free_blocks, "blocks of the lost epoch are still held"
        assert executor.health.is_serving("liveness")
        await asyncio.to_thread(cluster.wait_generate, True, timeout_s=30)
        again: list[Answer] = await asyncio.gather(
            *(generate(channel, by_ids(p, greedy(max_tokens=8, ignore_eos=True))) for p in PROMPTS)
        )
        assert [answer.ids for answer in again] == reference_ids(tiny, PROMPTS, 8, ignore_eos=True)


@pytest.mark.asyncio(loop_scope="module")
async def test_X2_a_request_whose_every_step_fails_ends_alone(
    cluster: Cluster, executor: Rig, hooked: Hooked, tiny: Path
) -> None:
    """The long prompt breaks each forward pass that computes it, as one of an unlucky shape would."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:

        def fail_for_many_tokens(_: object, __: object, kwargs: dict[str, torch.Tensor]) -> None:
            if kwargs["input_ids"].shape[-1] > 40:
                raise RuntimeError("shapes do not match")

        hooked.before_call = fail_for_many_tokens
        try:
            calls, begun = [], [asyncio.Event() for _ in PROMPTS]
            for prompt, event in zip(PROMPTS, begun, strict=True):
                request = by_ids(prompt, greedy(max_tokens=200, ignore_eos=True))
                calls.append(asyncio.create_task(generate(channel, request, on_message=event.set)))
            await asyncio.gather(*(event.wait() for event in begun))  # what comes between two epochs is refused
            bad = generate(channel, by_ids([5] * 100, greedy(max_tokens=4)))
            *answers, broken = await asyncio.gather(*calls, bad, return_exceptions=True)
        finally:
            hooked.before_call = None
        assert isinstance(broken, grpc.aio.AioRpcError)
        assert broken.code() is grpc.StatusCode.INTERNAL and "ran alone" in str(broken.details())
        assert [answer.ids for answer in answers] == reference_ids(tiny, PROMPTS, 200, ignore_eos=True)
