"""The door: triptych.executor.v1.ExecutorService over one Executor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from triptych.executor.v1 import executor_pb2 as pb
from triptych.executor.v1 import executor_pb2_grpc

from services.common.contract import PROTOCOL_VERSION
from services.common.errors import RequestError, StartError, invalid, unavailable
from services.common.health import Health
from services.common.startup import Startup
from services.executor import wire
from services.executor.epoch import Epoch
from services.executor.executor import Executor, Facts
from services.executor.loader import Progress
from services.executor.plan import RanksLostError
from services.executor.step_spans import StepSpans
from services.executor.steps import StepThread
from services.executor.tallies import Tallies

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name

_CLOSE_S = 2.0
"""What a step still running after the drain is given."""

log = logging.getLogger(__name__)


class _Loading:
    """A load under way or done, and how far it has come. Outlives the call that began it: the next one joins it."""

    def __init__(self, call: wire.LoadCall, weights_hash: str, executor: Executor, steps: StepThread) -> None:
        self.call = call
        self._progress = Progress("", 0, 0)
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def report(progress: Progress) -> None:
            loop.call_soon_threadsafe(self._show, progress)

        future = steps.submit(
            lambda: executor.load(call.settings, call.dtype, weights_hash, report, kv_dtype=call.kv_dtype)
        )
        self.done: asyncio.Future[Facts] = asyncio.wrap_future(future)
        self.done.add_done_callback(lambda _: self._changed.set())

    def failed(self) -> bool:
        return self.done.done() and self.done.exception() is not None

    async def watch(self) -> AsyncIterator[Progress]:
        """Progress, the newest each time, until the load is done or has failed."""
        while not self.done.done():
            await self._changed.wait()
            self._changed.clear()
            if not self.done.done():
                yield self._progress

    def _show(self, progress: Progress) -> None:
        self._progress = progress
        self._changed.set()


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves Load, Allocate and Run, and keeps the health names true."""

    def __init__(
        self, executor: Executor, health: Health, startup: Startup | None = None, spans: StepSpans | None = None
    ) -> None:
        self._executor = executor
        self._spans = spans
        self.tallies = Tallies(executor.tp_size)
        self._health = health
        self._startup = startup or Startup()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._steps = StepThread(on_end=lambda: loop.call_soon_threadsafe(ended.set))
        self._on_thread_end = lambda: loop.call_soon_threadsafe(ended.set)
        self._results: StepThread | None = None
        self._loading: _Loading | None = None
        self._block_bytes = 0
        self._allocated = False
        self._epoch: Epoch | None = None
        self._last_epoch = 0
        self._opening = asyncio.Lock()
        self._draining = False
        self._notes: set[asyncio.Task[None]] = set()
        self._watch = asyncio.create_task(self._watch_step_thread(ended))

    async def Load(  # noqa: N802 - gRPC's name
        self, request: pb.LoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.LoadResponse]:
        self._refuse_when_draining()
        call = wire.load_call(request, self._executor.tp_size, self._executor.dtypes)
        ours = self._executor.revision
        if ours and call.revision and ours != call.revision:
            raise _precondition(
                "OTHER_REVISION",
                f"the executor's files are of commit {ours}, the scheduler's of {call.revision} of {call.model}; give "
                "both the same --revision",
            )
        weights_hash = request.config.weights_hash
        if self._loading is None or self._loading.failed():
            self._startup.done("waiting for a scheduler")
            self._loading = _Loading(call, weights_hash, self._executor, self._steps)
            self._loading.done.add_done_callback(lambda _: self._startup.done("weights"))
            self._loading.done.add_done_callback(self._note_loaded(time.monotonic()))
        loading = self._loading
        if loading.call != call:
            raise _precondition(
                "OTHER_CONFIG",
                f"another config is loaded already ({loading.call.difference(call)}); restart the executor for yours",
            )
        async for progress in loading.watch():
            yield pb.LoadResponse(
                stage=progress.stage, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
            )
        try:
            facts = await asyncio.shield(loading.done)
        except StartError as error:
            raise _precondition("CANNOT_LOAD", str(error)) from error
        except RanksLostError as error:
            raise _ranks_lost(error) from error
        if weights_hash and weights_hash != facts.weights_hash:
            raise _precondition(
                "OTHER_WEIGHTS",
                f"the weights loaded hash to {facts.weights_hash}, the scheduler expects {weights_hash}",
            )
        yield wire.loaded(facts, call.settings, self._last_epoch)

    def _note_loaded(self, begun_s: float) -> Callable[[asyncio.Future[Facts]], None]:
        def note(done: asyncio.Future[Facts]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.tallies.load_s = time.monotonic() - begun_s
                self._block_bytes = done.result().block_bytes

        return note

    async def Allocate(  # noqa: N802 - gRPC's name
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AllocateResponse:
        self._refuse_when_draining()
        num_blocks = wire.allocation(request)
        begun = time.monotonic()
        try:
            await asyncio.wrap_future(self._steps.submit(lambda: self._executor.allocate(num_blocks)))
        except StartError as error:
            raise _precondition("CANNOT_ALLOCATE", str(error)) from error
        except RanksLostError as error:
            raise _ranks_lost(error) from error
        self._allocated = True
        self._startup.ready("KV pool and warm-up", log)
        self.tallies.kv_bytes = num_blocks * self._block_bytes
        self.tallies.warm_up_s = time.monotonic() - begun
        return pb.AllocateResponse(warmup_ms=int(self.tallies.warm_up_s * 1000))

    async def Run(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.RunRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.RunResponse]:
        self._refuse_when_draining()
        requests = aiter(request_iterator)
        epoch = await self._open(await _first(requests))
        # The call's end is heard even where this generator is not resumed.
        context.add_done_callback(lambda _: epoch.end())  # type: ignore[arg-type]
        epoch.start(requests)
        try:
            async for event in epoch.events():
                yield event
        finally:
            epoch.end()

    async def drain(self) -> None:
        """Finishes the step in flight, ends the Run stream and refuses new calls."""
        self._draining = True
        if self._epoch is not None:
            await self._epoch.drain(unavailable("DRAINING", "the executor is shutting down"))

    async def lose(self, reason: str) -> None:
        """Refuses new calls and ends the Run stream with a fatal Fault: the process is to end."""
        self._draining = True
        if self._epoch is not None:
            self._epoch.lose(self._executor.lost_error(reason))
        await self._health.set_ready(False)
        await self._health.set_generate(False)

    async def close(self) -> None:
        """Ends the step thread, after `drain`; one that does not come back from its step is left behind."""
        self._watch.cancel()
        if self._epoch is not None:
            self._epoch.end()
        await asyncio.to_thread(self._steps.close, _CLOSE_S)
        if self._results is not None:
            await asyncio.to_thread(self._results.close, _CLOSE_S)

    def _results_thread(self) -> StepThread:
        """Made where a device needs it: on a CPU a step's outcome is there when the step thread is through with it."""
        if self._results is None:
            self._results = StepThread(name="results", on_end=self._on_thread_end)
        return self._results

    async def _open(self, first: pb.Open) -> Epoch:
        """Begins the epoch, ending the one that runs. Raises RequestError."""
        if not self._allocated:
            raise _precondition("NOT_ALLOCATED", "no KV tensors yet; call Load and Allocate first")
        if first.version != PROTOCOL_VERSION:
            raise _precondition("VERSION", f"Open names version {first.version}, Load agreed on {PROTOCOL_VERSION}")
        if first.epoch <= self._last_epoch:
            raise _precondition(
                "OLD_EPOCH", f"epoch {first.epoch} is not above {self._last_epoch}, which this executor has seen"
            )
        self._last_epoch = first.epoch
        async with self._opening:
            if self._epoch is not None:
                self._epoch.end(_aborted(first.epoch))
                await self._epoch.closed.wait()
            if first.epoch != self._last_epoch:
                raise _aborted(self._last_epoch)
            self._refuse_when_draining()
            epoch = self._epoch = Epoch(
                first.epoch, self._executor, self._steps, self._results_thread, self._spans, self.tallies
            )
        self.tallies.epochs += 1
        self.tallies.is_driven = True
        log.info("epoch %d begins", epoch.number)
        await self._health.set_generate(True)
        note = asyncio.create_task(self._note_end(epoch))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)
        return epoch

    async def _note_end(self, epoch: Epoch) -> None:
        await epoch.closed.wait()
        log.info("epoch %d has ended", epoch.number)
        if self._epoch is epoch:
            self.tallies.is_driven = False
            await self._health.set_generate(False)

    async def _watch_step_thread(self, ended: asyncio.Event) -> None:
        await ended.wait()
        log.critical("the step thread has ended; this process cannot work any more")
        await self._health.set_live(False)
        await self._health.set_ready(False)
        await self._health.set_generate(False)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise unavailable("DRAINING", "the executor is shutting down")


async def _first(requests: AsyncIterator[pb.RunRequest]) -> pb.Open:
    async for request in requests:
        wire.DOOR.check(request)
        if request.WhichOneof("command") != "open":
            break
        return request.open
    raise invalid("open", "must be the first message of a Run stream")


def _precondition(reason: str, message: str) -> RequestError:
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def _ranks_lost(error: RanksLostError) -> RequestError:
    return unavailable("RANK_LOST", str(error))


def _aborted(by: int) -> RequestError:
    return RequestError(grpc.StatusCode.ABORTED, "NEWER_EPOCH", f"epoch {by} has begun")
