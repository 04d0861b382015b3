"""One running generation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from triptych_client import results
from triptych_client.course import Course, Request
from triptych_client.errors import REQUEST_ID_KEY, TriptychError, cancelled, from_rpc, text_of
from triptych_client.results import Completion, Delta, PositionLogprobs, PromptInfo, Usage

Start = Callable[[Request, float | None], Any]
"""Begins a call, within so many seconds."""


class Stream:
    """The deltas of one generation, which starts when this is made; raises TriptychError where it fails.

    A call that breaks is made again, and goes on where it broke (see Retry). Leaving the stream cancels it: at the end
    of `async with`, by `cancel()`, when the reading task is cancelled, or when the last reference goes (a `break` out
    of `async for delta in client.chat(...)`).
    """

    def __init__(self, start: Start, course: Course) -> None:
        self._start = start
        self._course = course
        self._pending: deque[Delta] = deque()
        self._cancelled = False
        self._call = start(course.request(), course.attempts.left_s)

    def __del__(self) -> None:
        # grpc's call object stands in a reference cycle, so without this it would live until the collector's next run.
        call = getattr(self, "_call", None)
        if call is not None and not call.done():
            call.cancel()

    @property
    def prompt(self) -> PromptInfo | None:
        """Known once the first delta is."""
        return self._course.prompt

    @property
    def prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Known once the first delta is."""
        return self._course.prompt_logprobs

    @property
    def usage(self) -> Usage | None:
        """Known at the end."""
        return self._course.usage

    async def request_id(self) -> str:
        """The server's name for the call that runs, known before any token."""
        try:
            return text_of(await self._call.initial_metadata(), REQUEST_ID_KEY) or ""
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    def cancel(self) -> None:
        """Ends it; who reads on gets TriptychError(CANCELLED)."""
        self._cancelled = True
        self._call.cancel()

    async def collect(self) -> Completion:
        """Reads to the end, and joins the deltas."""
        choices = results.join([delta async for delta in self])
        if self.prompt is None or self.usage is None:
            raise TriptychError(grpc.StatusCode.INTERNAL, "", "the stream ended without prompt facts or usage")
        return Completion(await self.request_id(), self.prompt, self.prompt_logprobs, choices, self.usage)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            try:
                response = await self._read()
            except TriptychError as error:
                await self._go_on(error)
                continue
            if response is grpc.aio.EOF:
                raise StopAsyncIteration
            self._pending.extend(self._course.take(response))
        return self._pending.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _go_on(self, error: TriptychError) -> None:
        """With another call, after a while. Raises what ends the stream."""
        if self._cancelled:
            raise cancelled()
        await asyncio.sleep(self._course.wait_s(error))
        if self._cancelled:
            raise cancelled()
        try:
            self._call = self._start(self._course.request(), self._course.attempts.left_s)
        except grpc.aio.UsageError:  # the client was closed meanwhile
            raise cancelled() from None

    async def _read(self) -> Any:
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc raises this for a call cancelled on this side too, which is no cancellation of who reads it.
            raise cancelled() from None
