"""What waits to be sent to one frontend."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc
from triptych.engine.v1 import engine_pb2

from services.common.errors import RequestError
from services.scheduler.outputs import Outputs, cut, encode, merge

PLAIN_PENDING_BYTES = 4 * 1024 * 1024
"""Of outputs that a frontend has not taken, prompt logprobs apart: about a million ids."""

PENDING_STEPS_OF_SCORES = 2
"""A frontend that keeps pace has taken a step's outputs when the next step's come; then the last of the one may still
wait beside the whole of the other."""

MAX_PENDING_ANSWERS = 64
"""Pings that a frontend sends without reading the answers."""


def pending_limit_bytes(step_scores_bytes: int) -> int:
    """What may wait for a frontend, where a step makes so many bytes of prompt logprobs at most."""
    return PLAIN_PENDING_BYTES + PENDING_STEPS_OF_SCORES * step_scores_bytes


class Outbox:
    """A writer never waits here; outputs that wait merge into one message when they are taken.

    The engine puts, one stream takes. Closed, it gives nothing more: `take` raises the error it was closed with, or
    answers None.
    """

    def __init__(self, max_pending_bytes: int = PLAIN_PENDING_BYTES) -> None:
        self._max_pending_bytes = max_pending_bytes
        self._hello: engine_pb2.EngineHello | None = None
        self._answers: deque[engine_pb2.Heartbeat] = deque()
        self._heartbeat: engine_pb2.Heartbeat | None = None
        self._outputs: list[Outputs] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._error: RequestError | None = None

    @property
    def is_closed(self) -> bool:
        """Nothing is sent any more."""
        return self._closed

    def put_hello(self, hello: engine_pb2.EngineHello) -> None:
        """Goes before all else."""
        if not self._closed:
            self._hello = hello
            self._wake.set()

    def put_heartbeat(self, heartbeat: engine_pb2.Heartbeat) -> None:
        """Goes before outputs. One that answers no ping takes the place of the one that waits."""
        if self._closed:
            return
        if not heartbeat.HasField("ping_unix_ns"):
            self._heartbeat = heartbeat
        else:
            self._answers.append(heartbeat)
            if len(self._answers) > MAX_PENDING_ANSWERS:
                self._close_slow(f"{len(self._answers)} answers to its pings wait for it")
        self._wake.set()

    def put_outputs(self, outputs: Outputs) -> None:
        """Merged with what waits. Over the limit the outbox closes itself: the frontend reads too slowly."""
        if self._closed:
            return
        waiting_bytes = self._pending_bytes
        self._outputs.append(outputs)
        self._pending_bytes += outputs.size_bytes
        # What one step alone makes, the prompt logprobs of a large chunk perhaps, is no fault of the reader's.
        if waiting_bytes and self._pending_bytes > self._max_pending_bytes:
            limit = self._max_pending_bytes
            self._close_slow(f"{self._pending_bytes} bytes of outputs wait for it, the limit is {limit}")
        self._wake.set()

    def close(self, error: RequestError | None = None) -> None:
        """Drops what waits; the first close counts."""
        if self._closed:
            return
        self._closed, self._error = True, error
        self._hello = self._heartbeat = None
        self._answers.clear()
        self._outputs.clear()
        self._wake.set()

    async def take(self) -> engine_pb2.AttachResponse | None:
        """The next message, as soon as there is one."""
        while True:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return None
            if (message := self._next()) is not None:
                return message
            self._wake.clear()
            await self._wake.wait()

    def _next(self) -> engine_pb2.AttachResponse | None:
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return engine_pb2.AttachResponse(hello=hello)
        if self._answers:
            return engine_pb2.AttachResponse(heartbeat=self._answers.popleft())
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            return engine_pb2.AttachResponse(heartbeat=heartbeat)
        if self._outputs:
            taken, rest = cut(merge(self._outputs))
            self._outputs = [] if rest is None else [rest]
            self._pending_bytes = 0 if rest is None else rest.size_bytes
            return encode(taken)
        return None

    def _close_slow(self, what: str) -> None:
        message = f"the frontend reads too slowly: {what}; attach again and submit again"
        self.close(RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", message))
