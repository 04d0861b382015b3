"""One epoch: a Run stream to the executor, from Open to its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np
from triptych.executor.v1 import executor_pb2

from services.common.telemetry.clock import ClockOffset, ping_interval_s
from services.scheduler.core.step import ResultError, StepPlan, StepResult
from services.scheduler.plan_codec import Logprob, deadline_ms, decode_result, encode_plan, fault_name, uncounted_slots

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
UTILITY_MS = 5_000
"""What a utility may wait for the steps before it."""
STEP_SLACK_S = 5.0
"""Past the step's deadline the executor ends itself; this is how much longer its end may take to arrive."""

SILENCE_LIMIT_S = 4.0
"""An executor heard of for so long not at all is frozen or cut off: its heartbeats come each second."""

_LISTEN_INTERVAL_S = 0.5


class ExecutorLostError(Exception):
    """The executor's stream has ended, or must; the message says why. `blamed_slots`: whose requests it blames."""

    def __init__(self, message: str, blamed_slots: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.blamed_slots = blamed_slots


class ExecutorTakenError(ExecutorLostError):
    """Another scheduler has opened a higher epoch on the executor."""


_GRAPHS = {
    executor_pb2.GRAPH_KIND_EAGER: "eager",
    executor_pb2.GRAPH_KIND_PIECEWISE: "piecewise",
    executor_pb2.GRAPH_KIND_FULL: "full",
}


class StepTrace(NamedTuple):
    """Of a step that is traced: its span, and what the executor's clock is ahead of that of the trace."""

    traceparent: str
    clock_offset_ns: int


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan's result. `step_s` is the time the executor had for it alone: since it was sent, or the last was done;
    of it the executor says what the model took, and what sampling did."""

    plan: StepPlan
    result: StepResult
    logprobs: Mapping[int, Logprob]
    """by place in the result's ids"""
    step_s: float
    execute_s: float
    sample_s: float
    graph: str = ""
    """how an executor that has graphs ran it: "eager", "full"; empty: it has none"""


class ExecutorRun:
    """Plans down, results up, in order; several plans may be under way. Once lost it stays lost.

    `on_event` is called when an answer has come, and when the run is lost. With `traces` the executor is pinged now and
    then, which tells its clock; with `uncounts` it is told which rows are nobody's.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[executor_pb2.RunRequest, executor_pb2.RunResponse],
        epoch: int,
        on_event: Callable[[], None],
        *,
        traces: bool = False,
        uncounts: bool = False,
    ) -> None:
        self.epoch = epoch
        self._clock_offset = ClockOffset() if traces else None
        self._uncounts = uncounts
        self.heard_s = time.monotonic()
        self.step_since_s: float | None = None
        """When the step that the executor is at began; None: it has none."""
        self._call = call
        self._on_event = on_event
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._plans: deque[StepPlan] = deque()  # without an answer
        self._answers: deque[Answer] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        self._lost: ExecutorLostError | None = None
        self._utilities: dict[int, asyncio.Future[str]] = {}
        self._last_utility = 0
        self._writing = asyncio.Lock()  # a stream takes one message at a time
        self._reader = asyncio.create_task(self._read(), name=f"executor-run-{epoch}")
        self._unheard_s = 0.0
        self._listening = asyncio.get_running_loop().call_later(_LISTEN_INTERVAL_S, self._listen)
        self._pinger: asyncio.Task[None] | None = None

    @property
    def clock_offset_ns(self) -> int | None:
        """What the executor's clock is ahead of ours; None where it is not told of traces."""
        return None if self._clock_offset is None else self._clock_offset.ns

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
        if self._clock_offset is not None:
            self._pinger = asyncio.create_task(self._ping(), name=f"executor-clock-{self.epoch}")

    @property
    def num_under_way(self) -> int:
        """Plans whose answer has not been taken yet."""
        return len(self._plans) + len(self._answers)

    async def _ping(self) -> None:
        with contextlib.suppress(ExecutorLostError):  # the engine hears of it by itself
            for number in itertools.count(1):
                await self._write(executor_pb2.RunRequest(ping=executor_pb2.Ping(sent_unix_ns=time.time_ns())))
                await asyncio.sleep(ping_interval_s(number))

    async def send(self, plan: StepPlan, trace: StepTrace | None = None) -> None:
        """Sends a plan behind those under way. Raises ExecutorLostError: also when it cannot be written in time."""
        if self._lost is not None:
            raise self._lost
        self._plans.append(plan)
        if len(self._plans) == 1:
            self._begin_step()
        try:
            async with asyncio.timeout(_limit_s(plan)):
                message = encode_plan(plan)
                if trace is not None:
                    message.plan.traceparent, message.plan.clock_offset_ns = trace
                if self._uncounts and plan.started:
                    message.plan.uncounted_slots = uncounted_slots(plan)
                await self._write(message)
        except TimeoutError:
            raise ExecutorLostError(f"step {plan.step} could not be sent within {_limit_s(plan):g} s") from None

    async def send_masks(self, masks: executor_pb2.Masks) -> None:
        """Sends masks of a step that was sent, or will be. Raises ExecutorLostError."""
        if self._lost is not None:
            raise self._lost
        await self._write(executor_pb2.RunRequest(masks=masks))

    async def set_log_level(self, level: str, logger: str, duration_s: int | None) -> str:
        """Why the executor could not, empty where it has. Raises ExecutorLostError."""
        if self._lost is not None:
            raise self._lost
        self._last_utility += 1
        utility = executor_pb2.Utility(
            id=self._last_utility, budget_ms=UTILITY_MS, set_log_level=level, logger=logger, duration_s=duration_s
        )
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._utilities[utility.id] = done
        try:
            await self._write(executor_pb2.RunRequest(utility=utility))
            async with asyncio.timeout(UTILITY_MS / 1000 + STEP_SLACK_S):
                return await done
        except TimeoutError:
            return "it does not answer"
        finally:
            del self._utilities[utility.id]

    def take(self) -> Answer | None:
        """The next answer that is here. Raises ExecutorLostError when none is and none will come."""
        if self._answers:
            return self._answers.popleft()
        if self._lost is not None:
            raise self._lost
        return None

    async def close(self) -> None:
        """Ends the stream, and with it the epoch."""
        self._lose(ExecutorLostError("its stream was closed"))
        self._call.cancel()
        tasks = [self._reader] if self._pinger is None else [self._reader, self._pinger]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, message: executor_pb2.RunRequest) -> None:
        try:
            async with self._writing:
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.wait([self._reader])  # it knows how the stream ended
            raise self._lost or ExecutorLostError("its stream is closed") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._lost is None or (task is not None and task.cancelling()):
                raise
            raise self._lost from None  # the stream was cancelled under the write, not who writes

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if self._lost is not None:
                    return  # too late: its deadline has passed
                self.heard_s = time.monotonic()
                self._unheard_s = 0.0
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
            self._take_result(message.result)
        elif kind == "heartbeat":
            beat = message.heartbeat
            if not self._opened.done() and beat.epoch == self.epoch:
                self._opened.set_result(None)
            if self._clock_offset is not None and beat.HasField("ping_unix_ns"):
                self._clock_offset.add(beat.ping_unix_ns, beat.sent_unix_ns, time.time_ns())
        elif kind == "utility":
            done = self._utilities.get(message.utility.id)
            if done is not None and not done.done():
                done.set_result(message.utility.error)
        elif kind == "fault":
            fault = message.fault
            step = f" in step {fault.step}" if fault.HasField("step") else ""
            slots = np.frombuffer(fault.slots[: len(fault.slots) // 4 * 4], "<u4").tolist()
            raise ExecutorLostError(f"it reports {fault_name(fault.kind)}{step}: {fault.message}", slots)

    def _take_result(self, message: executor_pb2.StepResult) -> None:
        if not self._plans:
            raise ExecutorLostError(f"a result for step {message.step} that nobody waits for")
        plan = self._plans.popleft()
        try:
            result, logprobs = decode_result(message, len(plan.slots))
        except ResultError as error:
            raise ExecutorLostError(f"its result cannot be: {error}") from error
        step_s = time.monotonic() - (self.step_since_s or self.heard_s)
        execute_s, sample_s = message.execute_us / 1e6, message.sample_us / 1e6
        graph = _GRAPHS.get(message.graph, "")
        self._answers.append(Answer(plan, result, logprobs, step_s, execute_s, sample_s, graph))
        self._end_step()
        if self._plans:
            self._begin_step()
        self._on_event()

    def _begin_step(self) -> None:
        """The first of the plans is the executor's now: the time for what waits behind it does not run yet."""
        plan = self._plans[0]
        self.step_since_s = time.monotonic()
        self._expiry = asyncio.get_running_loop().call_later(_limit_s(plan), self._expire, plan)

    def _end_step(self) -> None:
        self.step_since_s = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _listen(self) -> None:
        """Counts silence by ticks, not by the clock: after a stop of this process there is much still to be read."""
        self._unheard_s += _LISTEN_INTERVAL_S
        if self._unheard_s > SILENCE_LIMIT_S:
            self._lose(ExecutorLostError(f"it has not been heard of for {SILENCE_LIMIT_S:g} s"))
        else:
            self._listening = asyncio.get_running_loop().call_later(_LISTEN_INTERVAL_S, self._listen)

    def _expire(self, plan: StepPlan) -> None:
        self._lose(ExecutorLostError(f"step {plan.step} is not done after {_limit_s(plan):g} s"))

    def _lose(self, error: ExecutorLostError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._listening.cancel()
        self._end_step()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # seen: nobody may be waiting
        for done in self._utilities.values():
            if not done.done():
                done.set_exception(error)
        self._on_event()


def _limit_s(plan: StepPlan) -> float:
    return deadline_ms(plan) / 1000 + STEP_SLACK_S


def _ended(code: grpc.StatusCode, details: str | None) -> ExecutorLostError:
    kind = ExecutorTakenError if code is grpc.StatusCode.ABORTED else ExecutorLostError
    return kind(f"its stream ended with {code.name}: {details or 'no details'}")
