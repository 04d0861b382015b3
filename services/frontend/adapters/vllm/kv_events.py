"""SubscribeKvEvents: which prompts' blocks the engine has cached, for a gateway that routes by them.

A request through the adapter has no cache salt, so of all blocks only those of the subscriber's tenant without one can
ever be found by its requests; others are left out. A block's hash is the start of its digest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import grpc
from smg_grpc_proto.generated import common_pb2 as pb

from services.common.digests import root_digest
from services.common.errors import RequestError
from services.frontend.engine_admin import Cleared, KvBatch, Removed, Stored
from services.frontend.fleet_admin import FleetAdmin

_NS_PER_S = 1_000_000_000
_HASH_BYTES = 8


@asynccontextmanager
async def subscribed(admin: FleetAdmin, tenant: str, start: int) -> AsyncIterator[AsyncIterator[pb.KvEventBatch]]:
    """All that is cached, then each change; the changes alone where `start` is the newest number there is.

    Raises OUT_OF_RANGE for any other: who has missed something begins anew, as gateways do on that.
    """
    async with aclosing(admin.kv_events()) as batches:
        yield await _begin(batches, _OwnBlocks(tenant), start)


async def _begin(batches: AsyncIterator[KvBatch], own: _OwnBlocks, start: int) -> AsyncIterator[pb.KvEventBatch]:
    snapshot = await _snapshot(batches)
    messages = [own.message(batch) for batch in snapshot]  # read in any case: they tell whose the changes are
    newest = snapshot[-1].sequence
    if start not in (0, newest):
        raise RequestError(
            grpc.StatusCode.OUT_OF_RANGE,
            "EVENTS_GONE",
            f"start_sequence_number: is {start}, the newest event is {newest}; begin with all that is cached, at 0",
        )
    if start == 0:
        _number(messages, newest, len(own))
    return _chained([] if start else messages, batches, own)


async def _chained(
    messages: Sequence[pb.KvEventBatch], batches: AsyncIterator[KvBatch], own: _OwnBlocks
) -> AsyncIterator[pb.KvEventBatch]:
    for message in messages:
        yield message
    async for batch in batches:
        yield own.message(batch)


async def _snapshot(batches: AsyncIterator[KvBatch]) -> list[KvBatch]:
    taken = [await anext(batches)]
    while taken[-1].snapshot_left:
        taken.append(await anext(batches))
    return taken


def _number(messages: Sequence[pb.KvEventBatch], newest: int, num_blocks: int) -> None:
    """As the contract wants a snapshot: numbers that run up to the newest event's, and a clear at the start."""
    for index, message in enumerate(messages):
        message.sequence_number = newest - len(messages) + 1 + index
        message.snapshot.index = index
        message.snapshot.count = len(messages)
        message.snapshot.blocks = num_blocks
    messages[0].events.insert(0, pb.KvCacheEvent(cleared=pb.KvCacheCleared()))


class _OwnBlocks:
    """The cached blocks that one tenant's requests can find, by digest."""

    def __init__(self, tenant: str) -> None:
        self._root = root_digest(tenant=tenant, salt="", adapter="")
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def message(self, batch: KvBatch) -> pb.KvEventBatch:
        """What of a batch is of them, perhaps nothing: numbers have no gaps."""
        events = [told for event in batch.events if (told := self._event(event)) is not None]
        return pb.KvEventBatch(
            sequence_number=batch.sequence, timestamp=batch.unix_ns / _NS_PER_S, events=events, dp_rank=0
        )

    def _event(self, event: Stored | Removed | Cleared) -> pb.KvCacheEvent | None:
        if isinstance(event, Cleared):
            self._known.clear()
            return pb.KvCacheEvent(cleared=pb.KvCacheCleared())
        if isinstance(event, Stored):
            return self._stored(event)
        return self._removed(event)

    def _stored(self, event: Stored) -> pb.KvCacheEvent | None:
        is_first = event.parent == self._root
        if not is_first and event.parent not in self._known:
            return None
        self._known.update(event.digests)
        blocks = [
            pb.KvBlock(block_hash=_hash(digest), token_ids=token_ids, block_size=len(token_ids))
            for digest, token_ids in zip(event.digests, event.token_ids, strict=True)
        ]
        stored = pb.KvBlocksStored(
            blocks=blocks, tier=pb.KV_CACHE_TIER_DEVICE, locality=pb.KV_CACHE_LOCALITY_LOCAL, group_idx=0
        )
        if not is_first:
            stored.parent_block_hash = _hash(event.parent)
        return pb.KvCacheEvent(stored=stored)

    def _removed(self, event: Removed) -> pb.KvCacheEvent | None:
        gone = [digest for digest in event.digests if digest in self._known]
        self._known.difference_update(gone)
        if not gone:
            return None
        removed = pb.KvBlocksRemoved(block_hashes=[_hash(digest) for digest in gone], tier=pb.KV_CACHE_TIER_DEVICE)
        return pb.KvCacheEvent(removed=removed)


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:_HASH_BYTES], "little", signed=True)
