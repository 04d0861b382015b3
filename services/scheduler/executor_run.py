"""One epoch: a Run stream to the executor, from Open to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from triptych.executor.v1 import executor_pb2

from services.scheduler.core.step import ResultError, StepPlan, StepResult
from services.scheduler.plan_codec import OwnLogprobs, deadline_ms, decode_result, encode_plan, fault_name

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
STEP_SLACK_S = 5.0
"""Past the step's deadline the executor ends itself; this is how much longer its end may take to arrive."""


class ExecutorLostError(Exception):
    """The executor's stream has ended, or must; the message says why."""


class ExecutorTakenError(ExecutorLostError):
    """Another scheduler has opened a higher epoch on the executor."""


class ExecutorRun:
    """Plans down, results up. Once lost it stays lost: nothing of this epoch arrives after that."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[executor_pb2.RunRequest, executor_pb2.RunResponse],
        epoch: int,
        on_lost: Callable[[], None],
    ) -> None:
        self.epoch = epoch
        self.heard_s = time.monotonic()
        self.step_since_s: float | None = None
        self._call = call
        self._on_lost = on_lost
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[executor_pb2.StepResult] | None = None
        self._lost: ExecutorLostError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"executor-run-{epoch}")

    @property
    def lost(self) -> ExecutorLostError | None:
        """Why it ended; None while it lasts."""
        return self._lost

    async def open(self, version: int) -> None:
        """Begins the epoch. Raises ExecutorLostError when the executor does not take it."""
        await self._write(
            executor_pb2.RunRequest(open=executor_pb2.Open(epoch=self.epoch, version=version)),
        )
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._opened
        except TimeoutError:
            raise ExecutorLostError(f"no heartbeat within {OPEN_TIMEOUT_S:g} s of Open") from None

    async def execute(self, plan: StepPlan) -> tuple[StepResult, OwnLogprobs | None]:
        """Sends a plan, waits for its result. Raises ExecutorLostError: also when the step's deadline passes."""
        limit_s = deadline_ms(plan) / 1000 + STEP_SLACK_S
        answer = self._answer = asyncio.get_running_loop().create_future()
        self.step_since_s = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                await self._write(encode_plan(plan))
                if self._lost is not None:
                    raise self._lost
                message = await answer
            return decode_result(message, len(plan.slots))
        except TimeoutError:
            raise ExecutorLostError(f"step {plan.step} is not done after {limit_s:g} s") from None
        except ResultError as error:
            raise ExecutorLostError(f"its result cannot be: {error}") from error
        finally:
            self.step_since_s = self._answer = None

    async def close(self) -> None:
        """Ends the stream, and with it the epoch."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _write(self, message: executor_pb2.RunRequest) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._reader  # it knows how the stream ended
            raise self._lost or ExecutorLostError("its stream is closed") from None

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self.heard_s = time.monotonic()
                self._handle(message)
            code, details = await self._call.code(), await self._call.details()
            raise _ended(code, details)
        except ExecutorLostError as error:
            self._lose(error)
        except grpc.aio.AioRpcError as error:
            self._lose(_ended(error.code(), error.details()))
        except Exception as error:
            log.exception("reading the executor's stream failed")
            self._lose(ExecutorLostError(f"reading its stream failed: {error}"))

    def _handle(self, message: Any) -> None:
        kind = message.WhichOneof("event")
        if kind == "result":
            if self._answer is None or self._answer.done():
                raise ExecutorLostError(f"a result for step {message.result.step} that nobody waits for")
            self._answer.set_result(message.result)
        elif kind == "heartbeat":
            if not self._opened.done() and message.heartbeat.epoch == self.epoch:
                self._opened.set_result(None)
        elif kind == "fault":
            fault = message.fault
            step = f" in step {fault.step}" if fault.HasField("step") else ""
            raise ExecutorLostError(f"it reports {fault_name(fault.kind)}{step}: {fault.message}")

    def _lose(self, error: ExecutorLostError) -> None:
        self._lost = error
        for future in (self._opened, self._answer):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # seen: nobody may be waiting
        self._on_lost()


def _ended(code: grpc.StatusCode, details: str | None) -> ExecutorLostError:
    kind = ExecutorTakenError if code is grpc.StatusCode.ABORTED else ExecutorLostError
    return kind(f"its stream ended with {code.name}: {details or 'no details'}")
