"""What is asked of all engines of a frontend beside requests: their load together, and their prefix caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from services.common.errors import RequestError
from services.common.peer import Peer
from services.frontend.engine_admin import EngineAdmin, KvBatch, Load, together

T = TypeVar("T")


class FleetAdmin:
    """As one engine, the engines in the order of the configuration."""

    def __init__(self, peers: Sequence[Peer | str]) -> None:
        self._engines = [EngineAdmin(peer) for peer in peers]

    def __len__(self) -> int:
        return len(self._engines)

    async def close(self) -> None:
        """Ends what is open."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    async def load(self) -> Load:
        """Of the engines that answer, together. Raises RequestError, UNAVAILABLE, where none does."""
        loads, errors = await self._ask(EngineAdmin.load)
        if not loads:
            raise errors[0]
        return together(loads)

    async def all_loads(self) -> Load:
        """Of all together. Raises RequestError where one does not answer."""
        loads, errors = await self._ask(EngineAdmin.load)
        if errors:
            raise errors[0]
        return together(loads)

    async def flush_prefix_cache(self) -> tuple[int, list[RequestError]]:
        """Every engine forgets what is cached: how many blocks that were, and why some have not. Raises RequestError
        where none has."""
        flushed, errors = await self._ask(EngineAdmin.flush_prefix_cache)
        if not flushed:
            raise errors[0]
        return sum(flushed), errors

    def kv_events(self) -> AsyncGenerator[KvBatch]:
        """Of the first engine alone: the numbers of two could not be made one sequence that a subscriber goes on in."""
        return self._engines[0].kv_events()

    async def _ask(self, question: Callable[[EngineAdmin], Awaitable[T]]) -> tuple[list[T], list[RequestError]]:
        """All at once: answers, and the errors of the others."""

        async def ask(engine: EngineAdmin) -> T | RequestError:
            try:
                return await question(engine)
            except RequestError as error:
                return error

        told = await asyncio.gather(*(ask(engine) for engine in self._engines))
        errors = [one for one in told if isinstance(one, RequestError)]
        return [one for one in told if not isinstance(one, RequestError)], errors
