"""One running generation."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Self

import grpc
from triptych.inference.v1 import inference_pb2

from triptych_client import results
from triptych_client.errors import REQUEST_ID_KEY, TriptychError, from_rpc, text_of
from triptych_client.results import Completion, Delta, PositionLogprobs, PromptInfo, Usage

Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


class Stream:
    """The deltas of one call, which starts when this is made; raises TriptychError where the call fails.

    Leaving it cancels the call: at the end of `async with`, by `cancel()`, when the reading task is cancelled, or when
    the last reference goes (a `break` out of `async for delta in client.chat(...)`).
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
        self._call = call
        self._pending: deque[Delta] = deque()
        self.prompt: PromptInfo | None = None
        """Known once the first delta is."""
        self.prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self.usage: Usage | None = None
        """Known at the end."""

    def __del__(self) -> None:
        # grpc's call object stands in a reference cycle, so without this it would live until the collector's next run.
        if not self._call.done():
            self._call.cancel()

    async def request_id(self) -> str:
        """The server's name for this request, known before any token."""
        try:
            return text_of(await self._call.initial_metadata(), REQUEST_ID_KEY) or ""
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None

    def cancel(self) -> None:
        """Ends the call; who reads on gets TriptychError(CANCELLED)."""
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
            response = await self._read()
            if response is grpc.aio.EOF:
                raise StopAsyncIteration
            self._take(response)
        return self._pending.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

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
            raise TriptychError(grpc.StatusCode.CANCELLED, "", "the call was cancelled by this client") from None

    def _take(self, response: Response) -> None:
        if response.HasField("prompt"):
            self.prompt = results.prompt_info(response.prompt)
        if response.HasField("prompt_logprobs"):
            self.prompt_logprobs += results.positions(response.prompt_logprobs.positions)
        self._pending.extend(results.delta(choice) for choice in response.choices)
        if response.HasField("usage"):
            self.usage = results.usage(response.usage)
            self._pending.append(Delta(usage=self.usage))
