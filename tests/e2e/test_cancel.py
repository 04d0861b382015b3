"""A client that leaves frees everything its request held, in every phase, across all three services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import inference_pb2_grpc

from tests.support.calls import by_ids, generate, greedy
from tests.support.cluster import Cluster, running

LONG = list(range(100, 700))


@pytest.fixture(scope="module")
def cluster(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One slot and 16 tokens a step, so that waiting and prefilling last long enough to be seen."""
    flags = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16"]
    with running(embedded, tmp_path_factory.mktemp("logs"), scheduler=flags) as cluster:
        yield cluster


@pytest.fixture
async def beats(cluster: Cluster) -> AsyncIterator[AsyncIterator[engine_pb2.Heartbeat]]:
    async with cluster.heartbeats() as beats:
        yield beats


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def until(
    beats: AsyncIterator[engine_pb2.Heartbeat], holds: Callable[[engine_pb2.Heartbeat], bool]
) -> engine_pb2.Heartbeat:
    async with asyncio.timeout(20):
        async for beat in beats:
            if holds(beat):
                return beat
    raise AssertionError("the stream of heartbeats ended")


def idle(beat: engine_pb2.Heartbeat) -> bool:
    return beat.running_requests == beat.waiting_requests == 0


def idle_again(baseline: engine_pb2.Heartbeat) -> Callable[[engine_pb2.Heartbeat], bool]:
    """Idle, and every block free: those of steps that were in flight are free once these have been applied."""
    return lambda beat: idle(beat) and beat.free_blocks == baseline.free_blocks


async def test_a_disconnect_after_three_tokens_frees_every_block(beats, stub) -> None:
    baseline = await until(beats, idle)
    call = stub.Generate(by_ids(LONG[:64], greedy(max_tokens=500, ignore_eos=True)))
    ids: list[int] = []
    async for message in call:
        ids += [i for choice in message.choices for i in choice.token_ids]
        if len(ids) >= 3:
            break
    busy = await until(beats, lambda beat: beat.running_requests == 1)
    assert busy.free_blocks < baseline.free_blocks
    call.cancel()
    await until(beats, idle_again(baseline))


async def test_a_cancel_while_waiting_frees_its_place(beats, stub) -> None:
    baseline = await until(beats, idle)
    running_call = stub.Generate(by_ids(LONG[:16], greedy(max_tokens=500, ignore_eos=True)))
    await until(beats, lambda beat: beat.running_requests == 1)
    waiting_call = stub.Generate(by_ids(LONG[:16], greedy(max_tokens=500, ignore_eos=True)))
    await until(beats, lambda beat: beat.waiting_requests == 1)
    waiting_call.cancel()
    assert (await until(beats, lambda beat: beat.waiting_requests == 0)).running_requests == 1
    running_call.cancel()
    await until(beats, idle_again(baseline))


async def test_a_cancel_in_the_middle_of_a_prefill_stops_it(beats, stub) -> None:
    baseline = await until(beats, idle)
    call = stub.Generate(by_ids(LONG, greedy(max_tokens=500, ignore_eos=True)))
    started = await until(beats, lambda beat: beat.running_requests == 1)
    call.cancel()
    after = await until(beats, idle_again(baseline))
    # 600 tokens at 16 a step take 38 steps, and 500 more follow; the cancel came in the first second of them.
    assert after.step - started.step < 38


async def test_the_engine_serves_on_after_cancels(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        answer = await generate(channel, by_ids(LONG[:5], greedy(max_tokens=4, ignore_eos=True)))
    assert len(answer.ids) == 4


async def test_a_deadline_ends_the_call_and_frees_its_blocks(beats, stub) -> None:
    baseline = await until(beats, idle)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in stub.Generate(by_ids(LONG[:16], greedy(max_tokens=2000, ignore_eos=True)), timeout=1.0):
            pass
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(beats, idle_again(baseline))
