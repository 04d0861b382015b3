"""An engine that only keeps time: an id of each request at a fixed rate, all in one message, as a busy scheduler sends.

It knows when it sent what, so who receives it can tell how long that took; it is to run in that process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc
from triptych.inference.v1 import generation_pb2

from services.common.server import server_options

HEARTBEAT_S = 1.0
FIRST_ID, NUM_IDS = 400, 100
"""Ids that are sent, in turn: words and pieces of words in a vocabulary of any size."""


@dataclass
class _Running:
    """A choice under way."""

    stream: int
    max_tokens: int
    sent: int = 0


@dataclass
class _Attached:
    """One frontend: what is sent to it, and its requests by id."""

    outbox: asyncio.Queue[engine_pb2.AttachResponse] = field(default_factory=asyncio.Queue)
    running: dict[int, _Running] = field(default_factory=dict)


class PacedEngine:
    """Serves EngineService on loopback. A request's stream is the first id of its prompt."""

    def __init__(self, *, step_s: float, vocab_size: int, context_tokens: int = 8192) -> None:
        self.port = 0
        self._step_s = step_s
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._step_times_s: list[float] = []
        self._first_steps: dict[int, int] = {}
        self._attached: list[_Attached] = []
        self._server = grpc.aio.server(options=server_options())
        self._clock: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT to dial."""
        return f"127.0.0.1:{self.port}"

    def sent_s(self, stream: int, position: int) -> float:
        """When the id at an output position of a stream's last request was sent, by `time.perf_counter`."""
        return self._step_times_s[self._first_steps[stream] + position]

    async def __aenter__(self) -> PacedEngine:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(_Service(self), self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._clock = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._clock is not None:
            self._clock.cancel()
        await self._server.stop(grace=None)

    async def serve(self, requests: AsyncIterator[Any]) -> AsyncIterator[engine_pb2.AttachResponse]:
        """One frontend's stream."""
        await anext(requests)
        attached = _Attached()
        self._attached.append(attached)
        tasks = [asyncio.create_task(self._read(requests, attached)), asyncio.create_task(self._beat(attached))]
        try:
            yield engine_pb2.AttachResponse(hello=self._hello())
            while True:
                yield await attached.outbox.get()
        finally:
            for task in tasks:
                task.cancel()
            self._attached.remove(attached)

    async def _read(self, requests: AsyncIterator[Any], attached: _Attached) -> None:
        async for message in requests:
            if message.HasField("submit"):
                submit = message.submit
                stream = int(np.frombuffer(submit.prompt_ids, "<u4", 1)[0])
                self._first_steps[stream] = len(self._step_times_s)
                attached.running[submit.request_id] = _Running(stream, submit.max_tokens)
            elif message.HasField("abort"):
                for request_id in np.frombuffer(message.abort.request_ids, "<u8").tolist():
                    attached.running.pop(request_id, None)

    async def _beat(self, attached: _Attached) -> None:
        while True:
            attached.outbox.put_nowait(
                engine_pb2.AttachResponse(
                    heartbeat=engine_pb2.Heartbeat(sent_unix_ns=time.time_ns(), state=engine_pb2.ENGINE_STATE_SERVING)
                )
            )
            await asyncio.sleep(HEARTBEAT_S)

    async def _tick(self) -> None:
        next_s = time.perf_counter()
        while True:
            next_s = max(next_s + self._step_s, time.perf_counter())
            await asyncio.sleep(next_s - time.perf_counter())
            messages = [(attached, self._step(attached)) for attached in self._attached if attached.running]
            self._step_times_s.append(time.perf_counter())
            for attached, message in messages:
                attached.outbox.put_nowait(message)

    def _step(self, attached: _Attached) -> engine_pb2.AttachResponse:
        step = len(self._step_times_s)
        ids = [FIRST_ID + (one.stream + one.sent) % NUM_IDS for one in attached.running.values()]
        outputs = engine_pb2.StepOutputs(
            step=step,
            request_ids=np.fromiter(attached.running, "<u8", len(ids)).tobytes(),
            token_ids=np.array(ids, "<u4").tobytes(),
        )
        for request_id, one in list(attached.running.items()):
            one.sent += 1
            if one.sent == 1:
                outputs.started.add(request_id=request_id)
            if one.sent == one.max_tokens:
                outputs.finished.add(request_id=request_id, reason=generation_pb2.FINISH_REASON_LENGTH)
                del attached.running[request_id]
        return engine_pb2.AttachResponse(outputs=outputs)

    def _hello(self) -> engine_pb2.EngineHello:
        return engine_pb2.EngineHello(
            version=1,
            engine_id="paced",
            model="paced",
            fingerprint="0" * 64,
            vocab_size=self._vocab_size,
            context_tokens=self._context_tokens,
            max_choices=1,
        )


class _Service(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine

    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for message in self._engine.serve(requests):
            yield message
