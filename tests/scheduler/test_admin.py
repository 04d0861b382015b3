"""AdminService: flushing the prefix cache, following its events, draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc, engine_pb2

from services.common.digests import prompt_digests, root_digest
from services.scheduler.core.kv_events import Cleared, Removed, Stored
from services.scheduler.kv_event_log import EVENTS_A_MESSAGE, MAX_KEPT_EVENTS, KvEventLog
from tests.support.attached import Bench, bench, until

PROMPT = list(range(40))
ROOT = root_digest(tenant="", salt="", adapter="")
DIGESTS = prompt_digests(ROOT, np.array(PROMPT, dtype=np.uint32), 16)


@asynccontextmanager
async def admin_of(b: Bench) -> AsyncIterator[admin_pb2_grpc.AdminServiceAsyncStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{b.server.server.port}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def run_prompt(b: Bench) -> int:
    """Once through; its cached tokens."""
    told = await b.frontend.run(PROMPT, root_digest=ROOT, block_digests=DIGESTS, max_tokens=1)
    assert told.started is not None
    return told.started.cached_tokens


async def test_a_flush_forgets_and_says_how_much(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        assert [await run_prompt(b) for _ in range(2)] == [0, 32]
        assert (await admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())).flushed_blocks == 2
        assert await run_prompt(b) == 0


async def test_a_subscriber_is_told_what_is_cached_and_then_what_changes(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        await run_prompt(b)
        events = admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        first = await events.read()
        stored = admin_pb2.KvStored(
            digests=DIGESTS,
            parent_digest=ROOT,
            token_ids=np.array(PROMPT[:32], dtype="<u4").tobytes(),
            block_tokens=16,
        )
        assert [event.stored for event in first.events] == [stored]
        await admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
        second = await events.read()
        assert (second.sequence, [event.cleared for event in second.events]) == (first.sequence + 1, [True])
        events.cancel()


async def test_a_subscriber_that_comes_back_is_told_what_it_missed(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        await run_prompt(b)
        await admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
        await run_prompt(b)
        first = b.server.engine.kv_events.sequence - 2
        events = admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(from_sequence=first))
        told = [await events.read() for _ in range(3)]
        assert [message.sequence for message in told] == [first, first + 1, first + 2]
        assert [message.events[0].WhichOneof("event") for message in told] == ["stored", "cleared", "stored"]
        events.cancel()


@pytest.mark.parametrize(("sequence", "words"), [(0, "no longer kept"), (2**60, f"event {2**60} has not happened yet")])
async def test_an_event_that_is_not_there_is_out_of_range(model: Path, sequence: int, words: str) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        await run_prompt(b)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest(from_sequence=sequence)).read()
        assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert words in (caught.value.details() or "")


# -- draining


def drain(grace_ms: int | None = None) -> admin_pb2.DrainRequest:
    return admin_pb2.DrainRequest(grace_ms=grace_ms)


async def ready(b: Bench) -> bool:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{b.server.server.port}") as channel:
        request = health_pb2.HealthCheckRequest(service="readiness")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_drain_lets_what_runs_finish_and_refuses_what_is_new(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        b.stub.hold()
        running = await b.frontend.submit([1], max_tokens=5)
        await b.stub.plan_arrived(1)
        assert await ready(b)
        draining = asyncio.ensure_future(admin.Drain(drain()))
        await until(lambda: b.frontend.heartbeats[-1].state == engine_pb2.ENGINE_STATE_DRAINING)
        late = await b.frontend.run([2])
        assert late.failed is not None and late.failed.reason == "DRAINING"
        assert not draining.done() and not await ready(b)
        b.stub.release()
        assert (await draining).moved_requests == 0
        assert running.finished and len(running.ids) == 5
        assert (await admin.Drain(drain())).moved_requests == 0  # of an empty engine: at once
        assert not b.server.engine.can_generate


async def test_after_its_grace_a_drain_ends_the_rest_and_says_how_many(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        b.stub.hold()
        stuck = [await b.frontend.submit([1]) for _ in range(2)]
        await b.frontend.synced()
        assert (await admin.Drain(drain(grace_ms=50))).moved_requests == 2
        for told in stuck:
            await told.done.wait()
            assert told.code is grpc.StatusCode.UNAVAILABLE and told.failed is not None
            assert told.failed.reason == "DRAINING"


async def test_who_leaves_a_drain_undoes_nothing_and_ends_nothing(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        b.stub.hold()
        running = await b.frontend.submit([1], max_tokens=5)
        await b.stub.plan_arrived(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.Drain(drain(grace_ms=500), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(0.6)
        assert not running.done.is_set()
        b.stub.release()
        await running.done.wait()
        assert running.finished and (await b.frontend.run([2])).code is grpc.StatusCode.UNAVAILABLE


# -- the log


def stored(i: int, parent: int | None = None) -> Stored:
    return Stored(bytes([i]) * 32, bytes([i - 1 if parent is None else parent]) * 32, bytes([i, 0, 0, 0]))


async def taken(log: KvEventLog, sequence: int, count: int) -> list[Any]:
    messages = []
    async for message in log.follow(sequence):
        messages.append(message)
        if len(messages) == count:
            return messages
    raise AssertionError("follow never ends by itself")


async def test_chains_and_removals_are_told_together() -> None:
    log = KvEventLog(10, 1)
    log.append([stored(1), stored(2), stored(9, 0), Removed(b"x"), Removed(b"y"), Cleared(), Cleared()], 5)
    (message,) = await taken(log, 1, 1)
    kinds = [event.WhichOneof("event") for event in message.events]
    assert kinds == ["stored", "stored", "removed", "cleared", "cleared"]
    assert [len(event.stored.digests) // 32 for event in message.events[:2]] == [2, 1]
    assert message.events[2].removed == b"xy"


async def test_what_no_longer_fits_is_gone_and_a_reader_that_lags_is_told() -> None:
    log = KvEventLog(3, 1)
    for i in range(1, 3):
        log.append([stored(i)], i)
    reader = log.follow(1)
    assert (await anext(reader)).sequence == 1
    for i in range(3, 9):
        log.append([stored(i)], i)
    with pytest.raises(Exception, match="event 2 is no longer kept, the oldest is 6"):
        for _ in range(3):
            await anext(reader)
    assert [message.sequence for message in await taken(log, 6, 3)] == [6, 7, 8]


async def test_what_is_kept_is_bounded_in_blocks_too() -> None:
    """Large steps change a thousand blocks each: ten thousand such entries would be gigabytes."""
    log = KvEventLog(10_000, 1)
    event, entries = stored(1), MAX_KEPT_EVENTS // EVENTS_A_MESSAGE
    for i in range(entries + 2):
        log.append([event] * EVENTS_A_MESSAGE, i)
    with pytest.raises(Exception, match="event 2 is no longer kept, the oldest is 3"):
        await taken(log, 2, 1)
    assert len((await taken(log, 3, entries))[-1].events) > 0


async def test_a_reader_waits_for_what_comes() -> None:
    log = KvEventLog(3, 1)
    waiting = asyncio.create_task(taken(log, 1, 1))
    await asyncio.sleep(0)
    log.append([], 1)
    assert not waiting.done()
    log.append([Cleared()], 2)
    assert [message.unix_ns for message in await waiting] == [2]


async def test_large_changes_and_snapshots_come_in_messages_of_bounded_size() -> None:
    log = KvEventLog(10, 1)
    events = [Stored(i.to_bytes(32, "little"), b"", b"") for i in range(EVENTS_A_MESSAGE + 1)]
    log.append(events, 1)
    assert log.sequence == 2
    assert [len(message.events) for message in await taken(log, 1, 2)] == [EVENTS_A_MESSAGE, 1]
    snapshot = list(log.snapshot(events, 2, 1))
    assert [(message.sequence, len(message.events)) for message in snapshot] == [(2, EVENTS_A_MESSAGE), (2, 1)]
    assert [len(message.events) for message in log.snapshot([], 2, 1)] == [0]
