"""One Run stream: plans in, results and heartbeats out, and what ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from triptych.executor.v1 import executor_pb2 as pb

from services.common.errors import RequestError, invalid
from services.executor import wire
from services.executor.device import DeviceLostError
from services.executor.executor import Executor, Launched, is_out_of_memory
from services.executor.masks import EpochOverError, MaskBook, StepMasks
from services.executor.plan import MAX_IN_FLIGHT, BadPlanError, Outcome, Plan, RanksLostError
from services.executor.step_spans import StepSpans
from services.executor.steps import StepThread
from services.executor.tallies import Tallies

HEARTBEAT_S = 1.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class Epoch:
    """Holds every slot while it lives; once `closed`, the executor has forgotten them and no step runs.

    Lives on the event loop. What it has to say is read from `events`; `end` may be called from anywhere on the loop.
    """

    def __init__(
        self,
        number: int,
        executor: Executor,
        steps: StepThread,
        results: Callable[[], StepThread],
        spans: StepSpans | None = None,
        tallies: Tallies | None = None,
    ) -> None:
        """`steps` launches steps; `results` gives the thread that waits for what is still under way on a device."""
        self.number = number
        self._spans = spans
        self._tallies = tallies
        self.closed = asyncio.Event()
        self._executor = executor
        self._steps = steps
        self._results = results
        self._waited_since_s: float | None = None  # for the oldest step that is left to a device
        self._outbox: asyncio.Queue[pb.RunResponse | None] = asyncio.Queue()
        self._error: RequestError | None = None
        self._ended = False
        self._draining = False
        self._last_taken: int | None = None
        self._last_done = 0
        self._in_flight: deque[asyncio.Task[None]] = deque()
        max_slots, self._vocab_size = executor.mask_shape
        self._masks = MaskBook(max_slots)
        self._over = False  # read and set on the step thread too: what waits there is not begun any more
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._utilities: set[asyncio.Task[None]] = set()

    def start(self, requests: AsyncIterator[pb.RunRequest]) -> None:
        """Answers Open and begins to serve what follows it."""
        self._say_heartbeat(None)
        self._tasks = [asyncio.create_task(self._read(requests)), asyncio.create_task(self._beat())]

    async def events(self) -> AsyncIterator[pb.RunResponse]:
        """Everything to be sent. Raises the RequestError that ended the stream, if one did."""
        while (event := await self._outbox.get()) is not None:
            yield event
        if self._error is not None:
            raise self._error

    def end(self, error: RequestError | None = None) -> None:
        """Ends the stream now; the step that runs does so to its end, unheard, and what waits behind it is not begun.

        Only the first call counts.
        """
        if self._ended:
            return
        self._ended = self._over = True
        self._masks.end(epoch_over=True)
        self._error = error
        self._outbox.put_nowait(None)
        for task in self._tasks:
            task.cancel()
        self._closing = asyncio.create_task(self._close())

    def lose(self, error: RanksLostError | DeviceLostError, step: int | None = None) -> None:
        """Says that the process will end, and ends the stream."""
        of_device = isinstance(error, DeviceLostError)
        self._fault(pb.FAULT_KIND_DEVICE if of_device else pb.FAULT_KIND_RANK_LOST, step, error, fatal=True)

    async def drain(self, error: RequestError) -> None:
        """Ends the stream after the steps in flight have been answered; takes no further plan."""
        self._draining = True
        await self._all_done()
        self.end(error)
        await self.closed.wait()

    async def _close(self) -> None:
        try:
            await self._all_done()
            if self._steps.is_alive():
                await asyncio.wrap_future(self._steps.submit(self._executor.reset))
        finally:
            self.closed.set()

    async def _all_done(self) -> None:
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    async def _read(self, requests: AsyncIterator[pb.RunRequest]) -> None:
        try:
            async for request in requests:
                received_ns = time.time_ns()
                kind = request.WhichOneof("command")
                if kind == "plan":
                    self._take(request.plan, received_ns)
                elif kind == "masks":
                    self._take_masks(request.masks)
                elif kind == "utility":
                    wire.DOOR.check(request)
                    self._serve_utility(request.utility)
                elif kind == "ping":
                    wire.DOOR.check(request)
                    self._say_heartbeat(request.ping.sent_unix_ns)
                elif kind == "open":
                    raise invalid("open", "comes once, first; start another Run stream for another epoch")
                else:
                    wire.DOOR.check(request)
                    raise invalid("command", "is empty")
            self._masks.end(epoch_over=False)
            await asyncio.gather(*self._utilities)
            await self._all_done()
            self.end()
        except RequestError as error:
            self.end(error)
        except Exception as error:
            # The transport's own error: the caller is gone.
            log.info("epoch %d: the stream broke: %r", self.number, error)
            self.end()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._say_heartbeat(None)

    def _say_heartbeat(self, ping_unix_ns: int | None) -> None:
        beat = pb.Heartbeat(
            epoch=self.number,
            sent_unix_ns=time.time_ns(),
            ping_unix_ns=ping_unix_ns,
            step=self._last_done,
            running_ms=self._running_ms(),
        )
        self._outbox.put_nowait(pb.RunResponse(heartbeat=beat))

    def _take(self, message: pb.StepPlan, received_ns: int) -> None:
        """Hands a plan to the step thread, unless it is malformed or too early; there it waits for those before it."""
        if self._draining or self._ended:
            return
        try:
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                raise BadPlanError(f"a plan more than may be in flight: {MAX_IN_FLIGHT} are without a result")
            if self._last_taken is not None and message.step != self._last_taken + 1:
                raise BadPlanError(f"step {message.step} follows step {self._last_taken}")
            plan = wire.plan(message)
            masks = self._masks.take(plan.step, plan.masked_slots.tolist(), plan.deadline_s)
        except BadPlanError as error:
            self._fault(pb.FAULT_KIND_BAD_PLAN, message.step, error)
            return
        self._last_taken = plan.step
        traced = message if self._spans is not None and message.traceparent else None
        step = asyncio.create_task(self._execute(plan, masks, received_ns, traced))
        self._in_flight.append(step)

    def _take_masks(self, message: pb.Masks) -> None:
        """Hands masks to the step that waits for them, or will."""
        if self._ended:
            return
        try:
            self._masks.put(message.step, wire.masks(message, self._vocab_size), self._last_taken)
        except BadPlanError as error:
            self._fault(pb.FAULT_KIND_BAD_PLAN, message.step, error)

    def _serve_utility(self, utility: pb.Utility) -> None:
        if utility.WhichOneof("call") is None:
            raise invalid("utility.call", "is empty")
        task = asyncio.create_task(self._between_steps(utility))
        self._utilities.add(task)
        task.add_done_callback(self._utilities.discard)

    async def _between_steps(self, utility: pb.Utility) -> None:
        """Waits for the steps before it no longer than its budget, and says what came of it."""
        duration_s = utility.duration_s if utility.HasField("duration_s") else None
        work = self._steps.submit(
            lambda: self._executor.set_log_level(utility.set_log_level, utility.logger, duration_s)
        )
        error = ""
        try:
            async with asyncio.timeout(utility.budget_ms / 1000):
                await asyncio.wrap_future(work)
        except TimeoutError:
            error = f"a step has run for longer than its budget, {utility.budget_ms} ms; try again"
        except (ValueError, RanksLostError) as refused:
            error = str(refused)
        self._outbox.put_nowait(pb.RunResponse(utility=pb.UtilityDone(id=utility.id, error=error)))

    async def _execute(
        self, plan: Plan, masks: StepMasks | None, received_ns: int, traced: pb.StepPlan | None = None
    ) -> None:
        begun_ns = received_ns

        def launch() -> Launched:
            nonlocal begun_ns
            begun_ns = time.time_ns()
            if self._over:
                raise EpochOverError
            return self._guarded(lambda: self._executor.launch(plan, masks))

        try:
            step = await asyncio.wrap_future(self._steps.submit(launch, deadline_s=plan.deadline_s))
            outcome = await self._outcome(step, plan.deadline_s)
        except EpochOverError:
            pass
        except BadPlanError as error:
            self._fault(pb.FAULT_KIND_BAD_PLAN, plan.step, error)
        except (RanksLostError, DeviceLostError) as error:
            self.lose(error, plan.step)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            kind = pb.FAULT_KIND_OUT_OF_MEMORY if is_out_of_memory(error) else pb.FAULT_KIND_INTERNAL
            log.error("epoch %d: step %d failed", self.number, plan.step, exc_info=error)
            self._fault(kind, plan.step, error)
        else:
            self._last_done = plan.step
            wait_us = max(0, begun_ns - received_ns) // 1000
            result = wire.result(outcome, received_ns, wait_us)
            self._outbox.put_nowait(pb.RunResponse(result=result))
            if self._tallies is not None:
                self._tallies.stepped(plan, result)
            if self._spans is not None and traced is not None:
                self._spans.done(traced, result, time.time_ns())
                traced = None
        finally:
            if self._spans is not None and traced is not None:
                self._spans.failed(traced, received_ns, time.time_ns(), "EPOCH_OVER")
            self._masks.done(plan.step)
            self._in_flight.popleft()

    def _guarded(self, work: Callable[[], T]) -> T:
        """What fails ends the epoch before the step behind it begins."""
        try:
            return work()
        except BaseException:
            self._over = True
            raise

    async def _outcome(self, step: Launched, deadline_s: float | None) -> Outcome:
        """Waits where waiting keeps nobody: the step thread launches the next step meanwhile."""
        if step.is_done:
            return step.outcome()
        waited = self._results().submit(lambda: self._guarded(step.outcome), deadline_s=deadline_s)
        self._waited_since_s = self._waited_since_s or time.monotonic()
        try:
            return await asyncio.wrap_future(waited)
        finally:
            self._waited_since_s = time.monotonic() if len(self._in_flight) > 1 else None

    def _running_ms(self) -> int | None:
        if self._waited_since_s is None:
            return self._steps.running_ms()
        return int((time.monotonic() - self._waited_since_s) * 1000)

    def _fault(
        self, kind: pb.FaultKind.ValueType, step: int | None, error: BaseException, *, fatal: bool = False
    ) -> None:
        """Says what went wrong and ends the stream; the process takes the next one, unless it is fatal."""
        slots = b"".join(slot.to_bytes(4, "little") for slot in error.slots) if isinstance(error, BadPlanError) else b""
        message = str(error) or type(error).__name__
        log.warning("epoch %d: fault %s in step %s: %s", self.number, pb.FaultKind.Name(kind), step, message)
        if not self._ended:
            if self._tallies is not None:
                self._tallies.faulted(kind)
            fault = pb.Fault(kind=kind, step=step, slots=slots, message=message, fatal=fatal)
            self._outbox.put_nowait(pb.RunResponse(fault=fault))
            self.end()
