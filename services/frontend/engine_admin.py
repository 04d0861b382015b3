"""What is asked of the engine beside requests: its load, its prefix cache. Protobuf of AdminService ends here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import astuple, dataclass

import grpc
import numpy as np
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.common.digests import DIGEST_BYTES
from services.common.errors import RequestError, unavailable
from services.common.peer import Peer

TIMEOUT_S = 5.0
"""Of one question; no answer to any takes an engine more than a step."""

_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class Load:
    """How busy the engine is; `waiting_tokens` are of prompts, and not cached."""

    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    total_blocks: int
    free_blocks: int
    output_tokens_per_s: float
    prefix_query_tokens: int
    """Of prompts, since the engine's start."""
    prefix_hit_tokens: int
    """Of these, found in the prefix cache."""

    @property
    def is_idle(self) -> bool:
        """Nobody's request is there."""
        return self.running_requests + self.waiting_requests == 0

    @property
    def prefix_hit_rate(self) -> float:
        """0 before the first prompt."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


def together(loads: Sequence[Load]) -> Load:
    """The sum of what each has."""
    return Load(*(sum(column) for column in zip(*map(astuple, loads), strict=True)))


@dataclass(frozen=True)
class Stored:
    """Blocks that the cache now holds, each digest (32 bytes) chained to the one before, the first to `parent`."""

    digests: tuple[bytes, ...]
    parent: bytes
    token_ids: tuple[tuple[int, ...], ...]
    """By block."""


@dataclass(frozen=True)
class Removed:
    """Blocks that it no longer holds."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Cleared:
    """It holds nothing."""


@dataclass(frozen=True)
class KvBatch:
    """What happened to the cache at once, or, of a snapshot, what there is at `sequence`."""

    sequence: int
    unix_ns: int
    events: tuple[Stored | Removed | Cleared, ...]
    snapshot_left: int
    """Batches that follow of the same snapshot."""


class EngineAdmin:
    """AdminService of the engine. All methods raise RequestError, UNAVAILABLE where the engine does not answer."""

    def __init__(self, peer: Peer | str) -> None:
        self._peer = Peer(peer) if isinstance(peer, str) else peer

    async def close(self) -> None:
        """Ends what is open."""
        await self._peer.close()

    async def load(self) -> Load:
        """As it is now."""
        try:
            stats = await self._stub().GetStats(admin_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error
        beat = stats.heartbeat
        return Load(
            running_requests=beat.running_requests,
            waiting_requests=beat.waiting_requests,
            waiting_tokens=beat.waiting_tokens,
            total_blocks=beat.total_blocks,
            free_blocks=beat.free_blocks,
            output_tokens_per_s=beat.output_tokens_per_s,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
        )

    async def flush_prefix_cache(self) -> int:
        """Forgets what is cached; how many blocks that were."""
        try:
            answer = await self._stub().FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error
        return answer.flushed_blocks

    async def kv_events(self) -> AsyncGenerator[KvBatch]:
        """All that is cached, as one batch or more of one sequence number, then each change, numbered without gaps."""
        call = self._stub().SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        try:
            async for message in call:
                yield _read_batch(message)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from error
        finally:
            call.cancel()
        raise unavailable("NO_ENGINE", "the engine has ended the stream of its cache's events; subscribe again")

    def _stub(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        return admin_pb2_grpc.AdminServiceStub(self._peer.channel())


def _read_batch(message: admin_pb2.SubscribeKvEventsResponse) -> KvBatch:
    events = tuple(map(_read_event, message.events))
    return KvBatch(message.sequence, message.unix_ns, events, message.snapshot_left)


def _read_event(event: admin_pb2.KvEvent) -> Stored | Removed | Cleared:
    kind = event.WhichOneof("event")
    if kind == "removed":
        return Removed(_digests(event.removed))
    if kind == "cleared":
        return Cleared()
    ids = np.frombuffer(event.stored.token_ids, "<u4").reshape(-1, event.stored.block_tokens).tolist()
    return Stored(_digests(event.stored.digests), event.stored.parent_digest, tuple(map(tuple, ids)))


def _digests(column: bytes) -> tuple[bytes, ...]:
    return tuple(column[start : start + DIGEST_BYTES] for start in range(0, len(column), DIGEST_BYTES))


def _translated(error: grpc.aio.AioRpcError) -> RequestError:
    """The engine's address stays in the log of who dials it; a client learns that the engine was not reached."""
    if error.code() in _RETRIED:
        return unavailable("NO_ENGINE", f"the engine did not answer ({error.code().name})")
    return RequestError(error.code(), "ENGINE_ADMIN", f"the engine refused: {error.details()}")
