"""What is to go down one Attach stream: small messages as they come, large Submits in pieces between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from triptych.engine.v1 import engine_pb2


@dataclass
class _Large:
    """A Submit that goes in pieces, and how much of it has gone."""

    request_id: int
    data: bytes
    piece_bytes: int
    sent_bytes: int = 0

    @property
    def is_done(self) -> bool:
        return self.sent_bytes == len(self.data)

    def next_piece(self) -> engine_pb2.AttachRequest:
        total_bytes = 0 if self.sent_bytes else len(self.data)
        piece = self.data[self.sent_bytes : self.sent_bytes + self.piece_bytes]
        self.sent_bytes += len(piece)
        return engine_pb2.AttachRequest(
            fragment=engine_pb2.Fragment(request_id=self.request_id, total_bytes=total_bytes, data=piece)
        )


class Outgoing:
    """Large Submits go one after the other; small messages and pieces take turns, so neither waits for more than one.

    A Submit of more than `fragment_bytes`, encoded, is large; 0: none is.
    """

    def __init__(self) -> None:
        self.fragment_bytes = 0
        """As the engine's hello says."""
        self._small: deque[engine_pb2.AttachRequest] = deque()
        self._large: deque[_Large] = deque()
        self._news = asyncio.Event()
        self._was_small = False

    def put(self, message: engine_pb2.AttachRequest) -> None:
        """Adds a message; it never waits."""
        submit = message.submit
        if 0 < self.fragment_bytes < submit.ByteSize():
            self._large.append(_Large(submit.request_id, submit.SerializeToString(), self.fragment_bytes))
        else:
            self._small.append(message)
        self._news.set()

    def drop(self, request_ids: Iterable[int]) -> None:
        """Forgets what has not gone yet of large Submits; the Abort that follows ends what has."""
        dropped = frozenset(request_ids)
        self._large = deque(large for large in self._large if large.request_id not in dropped)

    async def take(self) -> engine_pb2.AttachRequest:
        """The next to be written, as soon as there is one."""
        while not (self._small or self._large):
            self._news.clear()
            await self._news.wait()
        self._was_small = bool(self._small) and not (self._large and self._was_small)
        if self._was_small:
            return self._small.popleft()
        large = self._large[0]
        message = large.next_piece()
        if large.is_done:
            self._large.popleft()
        return message
