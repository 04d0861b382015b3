"""How long a client may leave a message untaken: gRPC holds a write back while nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from services.common.errors import RequestError

M = TypeVar("M")

SLOW_READER = "SLOW_READER"


class Patience:
    """Writes to one client. One write at a time; `close` it in any case.

    A timer a write would cost a tenth of the write: here one a call looks, now and then, since when one has waited.
    """

    def __init__(self, write: Callable[[Any], Awaitable[None]], limit_s: float) -> None:
        self._write = write
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._since_s: float | None = None
        self._is_over = False
        self._timer = self._loop.call_later(limit_s, self._look)

    async def write(self, message: Any) -> None:
        """Raises RequestError(RESOURCE_EXHAUSTED) when the client has not taken what came before for too long."""
        self._since_s = self._loop.time()
        try:
            await self._write(message)
        except asyncio.CancelledError:
            if not self._is_over or self._task is None or self._task.uncancel() > 0:
                raise
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                SLOW_READER,
                f"the client took nothing for {self._limit_s:g} s; read as the answer comes, or ask for less",
            ) from None
        finally:
            self._since_s = None

    def close(self) -> None:
        """Leaves no timer behind."""
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = now_s + self._limit_s if self._since_s is None else self._since_s + self._limit_s
        if self._since_s is not None and now_s >= due_s:
            self._is_over = True
            if self._task is not None:
                self._task.cancel()
            return
        self._timer = self._loop.call_at(due_s, self._look)
