"""The prefix cache's events, numbered and kept for a while, for subscribers that follow them or come back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import grpc
from triptych.engine.v1 import admin_pb2

from services.common.errors import RequestError
from services.scheduler.core.kv_events import KvEvent, Removed, Stored

_ANEW = "leave from_sequence unset to begin with all that is cached now"
EVENTS_A_MESSAGE = 512
"""Blocks a message tells of: at 16 tokens a block about 50 KB."""

MAX_KEPT_EVENTS = 1 << 18
"""Blocks that all entries kept tell of: some 100 MB at 16 tokens a block."""


@dataclass(frozen=True)
class Entry:
    """What happened at once."""

    sequence: int
    unix_ns: int
    events: Sequence[KvEvent]


class KvEventLog:
    """The last `capacity` entries, fewer where they tell of more than MAX_KEPT_EVENTS blocks. Sequence numbers go on
    from `before` without gaps; where that is a clock's milliseconds, no number of an earlier process is one of this.

    A subscriber reads at its own pace out of what is kept, so a slow one costs nothing; it is told when it has fallen
    out.
    """

    def __init__(self, capacity: int, block_tokens: int, before: int = 0) -> None:
        self._entries: deque[Entry] = deque()
        self._capacity = capacity
        self._num_events = 0  # of all entries
        self._block_tokens = block_tokens
        self._sequence = before
        self._more = asyncio.Event()

    @property
    def sequence(self) -> int:
        """Of the last entry; `before` before the first."""
        return self._sequence

    def append(self, events: Sequence[KvEvent], unix_ns: int) -> None:
        """Numbers what has just happened."""
        for start in range(0, len(events), EVENTS_A_MESSAGE):
            self._sequence += 1
            self._keep(Entry(self._sequence, unix_ns, events[start : start + EVENTS_A_MESSAGE]))
        if events:
            self._more.set()
            self._more = asyncio.Event()

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._num_events += len(entry.events)
        while len(self._entries) > self._capacity or self._num_events > MAX_KEPT_EVENTS:
            self._num_events -= len(self._entries.popleft().events)

    def snapshot(
        self, cached: Sequence[Stored], sequence: int, unix_ns: int
    ) -> Iterator[admin_pb2.SubscribeKvEventsResponse]:
        """All that is cached, in messages of the number that they bring a subscriber up to; one at least.

        Each is made when it is asked for, so that a large cache holds up no step.
        """
        starts = range(0, max(1, len(cached)), EVENTS_A_MESSAGE)
        for left, start in zip(reversed(range(len(starts))), starts, strict=True):
            message = self._message(Entry(sequence, unix_ns, cached[start : start + EVENTS_A_MESSAGE]))
            message.snapshot_left = left
            yield message

    async def follow(self, from_sequence: int) -> AsyncIterator[admin_pb2.SubscribeKvEventsResponse]:
        """Entries from that number on, without end. Raises RequestError(OUT_OF_RANGE) for one no longer or not yet."""
        next_sequence = from_sequence
        if next_sequence > self._sequence + 1:
            raise _out_of_range(f"event {next_sequence} has not happened yet, the last is {self._sequence}; {_ANEW}")
        while True:
            more = self._more
            for entry in self._from(next_sequence):
                yield self._message(entry)
                next_sequence = entry.sequence + 1
                if self._is_gone(next_sequence):
                    break
            if next_sequence > self._sequence:
                await more.wait()

    def _from(self, sequence: int) -> list[Entry]:
        if self._is_gone(sequence):
            oldest = self._entries[0].sequence if self._entries else self._sequence + 1
            raise _out_of_range(f"event {sequence} is no longer kept, the oldest is {oldest}; {_ANEW}")
        kept = len(self._entries)
        return list(islice(self._entries, kept - (self._sequence + 1 - sequence), None))

    def _is_gone(self, sequence: int) -> bool:
        return sequence < self._sequence + 1 - len(self._entries)

    def _message(self, entry: Entry) -> admin_pb2.SubscribeKvEventsResponse:
        return admin_pb2.SubscribeKvEventsResponse(
            sequence=entry.sequence,
            unix_ns=entry.unix_ns,
            events=[self._event(run) for run in _runs(entry.events)],
        )

    def _event(self, run: list[KvEvent]) -> admin_pb2.KvEvent:
        first = run[0]
        if isinstance(first, Stored):
            stored = [event for event in run if isinstance(event, Stored)]
            return admin_pb2.KvEvent(
                stored=admin_pb2.KvStored(
                    digests=b"".join(event.digest for event in stored),
                    parent_digest=first.parent,
                    token_ids=b"".join(event.token_ids for event in stored),
                    block_tokens=self._block_tokens,
                )
            )
        if isinstance(first, Removed):
            return admin_pb2.KvEvent(removed=b"".join(event.digest for event in run if isinstance(event, Removed)))
        return admin_pb2.KvEvent(cleared=True)


def _runs(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Neighbours that one event of the contract can tell: a chain of stored blocks, any removed ones."""
    run: list[KvEvent] = []
    for event in events:
        if run and not _continues(run[-1], event):
            yield run
            run = []
        run.append(event)
    if run:
        yield run


def _continues(last: KvEvent, event: KvEvent) -> bool:
    if isinstance(last, Stored) and isinstance(event, Stored):
        return event.parent == last.digest
    return isinstance(last, Removed) and isinstance(event, Removed)


def _out_of_range(message: str) -> RequestError:
    return RequestError(grpc.StatusCode.OUT_OF_RANGE, "EVENTS_GONE", message)
