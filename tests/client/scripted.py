"""A public API server that answers with the messages a test wrote down, and keeps the requests it saw."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from triptych.inference.v1 import inference_pb2 as pb
from triptych.inference.v1 import inference_pb2_grpc

from services.common.errors import RequestError
from services.common.server import Server

REQUEST_ID = "req-7"


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """`messages` are streamed; then comes `error`, or, with `hang`, nothing until the call is left."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.error: RequestError | None = None
        self.breaks: deque[tuple[int, RequestError]] = deque()
        """Of the next streams: each ends after so many messages, with that; a unary call at once."""
        self.hang = False
        self.answer: Any = None
        self.requests: list[Any] = []
        self.left = asyncio.Event()
        self.time_remaining_s: float | None = None
        self.metadata: dict[str, Any] = {}

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self._stream(request, context):
            yield message

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self._stream(request, context):
            yield message

    async def GenerateUnary(self, request: Any, context: Any) -> Any:
        return await self._unary(request, context)

    async def ChatUnary(self, request: Any, context: Any) -> Any:
        return await self._unary(request, context)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        return await self._unary(request, context)

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return await self._unary(request, context)

    async def GetModel(self, request: Any, context: Any) -> Any:
        return await self._unary(request, context)

    async def ListModels(self, request: Any, context: Any) -> Any:
        return await self._unary(request, context)

    async def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.time_remaining_s = context.time_remaining()
        self.metadata = dict(context.invocation_metadata())
        await context.send_initial_metadata((("triptych-request-id", REQUEST_ID),))

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._note(request, context)
        count, broken = self.breaks.popleft() if self.breaks else (len(self.messages), None)
        try:
            for message in self.messages[:count]:
                yield message
            if broken is not None:
                raise broken
            if self.hang:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if self.error is not None:
            raise self.error

    async def _unary(self, request: Any, context: Any) -> Any:
        await self._note(request, context)
        if self.breaks:
            raise self.breaks.popleft()[1]
        if self.error is not None:
            raise self.error
        return self.answer


@asynccontextmanager
async def scripted_server() -> AsyncIterator[tuple[Scripted, str]]:
    """The servicer and its address."""
    scripted = Scripted()
    server = Server("127.0.0.1", 0)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scripted, server.grpc)
    await server.start([pb.DESCRIPTOR.services_by_name["InferenceService"].full_name])
    try:
        yield scripted, f"127.0.0.1:{server.port}"
    finally:
        await server.stop()
