"""The adapter's SubscribeKvEvents, before a real scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from loadtest.stub_executor import StubExecutor
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from tests.frontend.harness import attached, reason
from tests.support.attached import scheduler_for
from tests.support.vllm_calls import by_ids, failure, generate, stub
from tests.support.vllm_stack import with_scheduler

PROMPT = list(range(40))


class Index:
    """What a gateway makes of the events: which blocks there are, by hash, and after which."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.ids: dict[int, list[int]] = {}
        self.sequence = 0

    def apply(self, batch: common_pb2.KvEventBatch) -> None:
        assert self.sequence in (0, batch.sequence_number - 1), "numbers have no gaps"
        self.sequence = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.parents.clear()
            elif kind == "removed":
                for block_hash in event.removed.block_hashes:
                    del self.parents[block_hash]
            else:
                parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                assert parent is None or parent in self.parents
                for block in event.stored.blocks:
                    assert block.block_size == len(block.token_ids) == 16
                    self.parents[block.block_hash] = parent
                    self.ids[block.block_hash] = list(block.token_ids)
                    parent = block.block_hash

    def chains(self) -> list[list[int]]:
        """Prompts of one block or more that would be found."""
        found = []
        for block_hash in self.parents:
            ids, at = [], block_hash
            while at is not None:
                ids, at = self.ids[at] + ids, self.parents[at]  # type: ignore[assignment]
            found.append(ids)
        return sorted(found)


def subscribe(channel: grpc.aio.Channel, start: int = 0, tenant: str = "") -> Any:
    metadata = (("triptych-tenant", tenant),) if tenant else ()
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start, load_records_before_first_batch=True)
    return stub(channel).SubscribeKvEvents(request, metadata=metadata)


async def follow(events: Any, index: Index, chains: list[list[int]]) -> None:
    """Reads until the index holds those chains."""
    while index.chains() != chains:
        index.apply(await asyncio.wait_for(events.read(), 10))


async def test_a_gateway_can_follow_what_is_cached(text_model: Path) -> None:
    async with with_scheduler(text_model) as channel:
        await generate(channel, by_ids(PROMPT, max_tokens=1))
        events, index = subscribe(channel), Index()
        first = await events.read()
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 2)
        assert first.events[0].WhichOneof("data") == "cleared"
        index.apply(first)
        assert index.chains() == [PROMPT[:16], PROMPT[:32]]
        other = [7] * 17
        await generate(channel, by_ids(other, max_tokens=1))
        await follow(events, index, sorted([PROMPT[:16], PROMPT[:32], other[:16]]))
        await stub(channel).FlushCache(common_pb2.FlushCacheRequest())
        await follow(events, index, [])
        events.cancel()


async def test_blocks_that_the_subscribers_requests_cannot_find_are_left_out(text_model: Path) -> None:
    async with with_scheduler(text_model) as channel:
        blue = (("triptych-tenant", "blue"),)
        await generate(channel, by_ids(PROMPT, max_tokens=1), metadata=blue)
        mine, blues = subscribe(channel), subscribe(channel, tenant="blue")
        nothing, some = Index(), Index()
        nothing.apply(await mine.read())
        some.apply(await blues.read())
        assert nothing.chains() == [] and some.chains() == [PROMPT[:16], PROMPT[:32]]
        await generate(channel, by_ids([9] * 40, max_tokens=1), metadata=blue)
        await generate(channel, by_ids([7] * 17, max_tokens=1))
        await follow(mine, nothing, [[7] * 16])
        await follow(blues, some, sorted([PROMPT[:16], PROMPT[:32], [9] * 16, [9] * 32]))
        for events in (mine, blues):
            events.cancel()


async def test_a_subscriber_goes_on_where_it_has_missed_nothing_and_else_begins_anew(text_model: Path) -> None:
    async with with_scheduler(text_model) as channel:
        await generate(channel, by_ids(PROMPT, max_tokens=1))
        first, index = subscribe(channel), Index()
        index.apply(await first.read())
        first.cancel()
        again = subscribe(channel, start=index.sequence)
        await again.initial_metadata()  # though there is nothing to tell yet
        await generate(channel, by_ids([7] * 17, max_tokens=1))
        await follow(again, index, sorted([PROMPT[:16], PROMPT[:32], [7] * 16]))
        again.cancel()
        late = subscribe(channel, start=index.sequence - 1)
        assert not list(await late.initial_metadata() or ())  # gateways look for this status at the start alone
        error = await failure(late.read())
        assert error.code() is grpc.StatusCode.OUT_OF_RANGE and "start_sequence_number" in (error.details() or "")


async def test_a_large_cache_comes_in_chunks_numbered_up_to_the_newest_event(
    text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.kv_event_log.EVENTS_A_MESSAGE", 2)
    async with with_scheduler(text_model) as channel:
        for first in range(3):
            await generate(channel, by_ids([first] * 33, max_tokens=1))
        events, index = subscribe(channel), Index()
        for at in range(3):
            chunk = await events.read()
            assert (chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks) == (at, 3, 6)
            index.apply(chunk)
        assert index.chains() == sorted([[i] * n for i in range(3) for n in (16, 32)])
        await generate(channel, by_ids([5] * 17, max_tokens=1))
        index.apply(await events.read())
        assert [5] * 16 in index.chains()
        events.cancel()


async def test_an_engine_that_is_lost_ends_the_stream_of_events(text_model: Path) -> None:
    async with StubExecutor() as fake, scheduler_for(fake, text_model) as server:
        address = f"127.0.0.1:{server.server.port}"
        frontend = Frontend(FrontendConfig(port=0, engine=address, model=str(text_model), vllm_adapter=True))
        await frontend.start()
        try:
            await attached(frontend)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
                events = subscribe(channel)
                await events.read()
                await server.server.stop()
                error = await failure(events.read())
                assert error.code() is grpc.StatusCode.UNAVAILABLE and reason(error) == "NO_ENGINE"
        finally:
            await frontend.close()
