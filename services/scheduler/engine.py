"""The engine: the core between its frontends and its executor.

Its step loop is the sentence "plan, execute, apply, deliver". Nothing in it waits for a frontend: what is delivered
goes into outboxes. A Run stream is an epoch; when one is lost, all requests end UNAVAILABLE and the next starts empty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

from triptych.engine.v1 import engine_pb2

from services.common.errors import RequestError, StartError, unavailable
from services.scheduler import door, outputs
from services.scheduler.clock import now_ns
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Failure, FailureKind, RequestKey
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import InvariantError, ResultError, StepPlan, Updates
from services.scheduler.executor_link import ExecutorFacts, ExecutorLink
from services.scheduler.executor_run import ExecutorLostError, ExecutorRun, ExecutorTakenError
from services.scheduler.frontends import Frontends
from services.scheduler.identity import Model
from services.scheduler.outbox import Outbox
from services.scheduler.plan_codec import OwnLogprobs
from services.scheduler.throughput import Throughput

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
SILENCE_S = 3.0
"""An executor not heard of for so long makes no tokens now."""

STUCK_S = 30.0
"""Nor does one whose step runs for so long."""

_WAITING_LOG_INTERVAL_S = 5.0
_NORMAL_WAIT_S = 30.0
"""An executor takes so long to start; later than that, waiting for it is worth an alert."""

_STAND_BY_INTERVAL_S = 1.0


class Engine:
    """Serves from `run` on; the other methods are called from the same event loop and return at once."""

    def __init__(self, model: Model, link: ExecutorLink) -> None:
        self.model = model
        self.changed = asyncio.Event()
        """Set with every change of state, for whoever tells others."""
        self.idle_faults = 0
        """Times that the idle check found the books out of balance; a bug each."""
        self._link = link
        self._frontends = Frontends()
        self._core: Scheduler | None = None
        self._first: tuple[ExecutorFacts, Limits] | None = None  # of the first epoch; what frontends were told
        self._hello: engine_pb2.EngineHello | None = None
        self._run: ExecutorRun | None = None
        self._draining = False
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._armed_ns: int | None = None
        self._throughput = Throughput()
        self._token_s: float | None = None

    # -- frontends

    def attach(self, outbox: Outbox) -> int:
        """A frontend has come; its number. The hello follows once the model is loaded."""
        number = self._frontends.add(outbox)
        if self._hello is not None:
            outbox.put_hello(self._hello)
        outbox.put_heartbeat(self.heartbeat())
        return number

    def detach(self, number: int) -> bool:
        """Its stream has ended, and with it all its requests; False if it was detached already."""
        if not self._frontends.remove(number):
            return False
        if self._core is not None:
            for key in self._core.keys_of(number):
                self._core.abort(key)
            self._requests_changed()
        return True

    def submit(self, number: int, submit: engine_pb2.Submit) -> None:
        """Queues a request; a refusal goes the way of its outputs."""
        if number not in self._frontends:
            return  # cut already; its stream has not noticed
        try:
            core = self._accepting()
            vocab_size = core.limits.vocab_size
            text_vocab_size = self.model.text_vocab_size(vocab_size)
            submission = door.read_submit(submit, number, vocab_size, now_ns(), text_vocab_size=text_vocab_size)
        except RequestError as error:
            self.refuse(number, submit.request_id, error)
            return
        if (failure := core.submit(submission, now_ns())) is not None:
            core.abort(submission.key)  # an id used twice: its first use must not go on past this end
            self._deliver(Updates(core.applied_step, failed=[failure]))
        self._requests_changed()

    def abort(self, number: int, abort: engine_pb2.Abort) -> None:
        """Ends requests without a word. Raises RequestError for a column that is none."""
        keys = door.read_abort(abort, number)
        if self._core is not None:
            for key in keys:
                self._core.abort(key)
            self._requests_changed()

    def refuse(self, number: int, request_id: int, error: RequestError) -> None:
        """Ends a request at the door, and what runs under its id."""
        step = 0
        if self._core is not None:
            step = self._core.applied_step
            self._core.abort(RequestKey(number, request_id))
        self._send(number, outputs.Outputs(step, failed=[outputs.failed_message(request_id, error)]))
        self._requests_changed()

    def _accepting(self) -> Scheduler:
        if self._draining:
            raise unavailable("DRAINING", "the scheduler is shutting down; submit to another")
        if self._core is None:
            raise unavailable("LOADING", "the model is not loaded yet; wait for the hello")
        if self._run is None:
            raise unavailable("EXECUTOR_LOST", "the scheduler is waiting for its executor; try again")
        return self._core

    # -- what is so now

    @property
    def state(self) -> engine_pb2.EngineState.ValueType:
        """Of the contract's states."""
        if self._draining:
            return engine_pb2.ENGINE_STATE_DRAINING
        if self._core is None:
            return engine_pb2.ENGINE_STATE_LOADING
        return engine_pb2.ENGINE_STATE_SERVING if self.can_generate else engine_pb2.ENGINE_STATE_RECOVERING

    @property
    def can_generate(self) -> bool:
        """A token could be made now: an epoch is open, its executor speaks, and no step is stuck."""
        run = self._run
        if run is None or run.lost is not None or self._draining:
            return False
        now_s = time.monotonic()
        stuck = run.step_since_s is not None and now_s - run.step_since_s > STUCK_S
        return not stuck and now_s - run.heard_s < SILENCE_S

    @property
    def core(self) -> Scheduler:
        """The core, once the model is loaded."""
        if self._core is None:
            raise RuntimeError("the model is not loaded yet")
        return self._core

    @property
    def num_frontends(self) -> int:
        """Frontends attached."""
        return len(self._frontends)

    def heartbeat(self, ping_unix_ns: int | None = None) -> engine_pb2.Heartbeat:
        """How the engine is now."""
        beat = engine_pb2.Heartbeat(sent_unix_ns=now_ns(), ping_unix_ns=ping_unix_ns, state=self.state)
        if self._run is not None:
            beat.epoch = self._run.epoch
        if self._token_s is not None:
            beat.since_token_ms = round((time.monotonic() - self._token_s) * 1000)
        if (core := self._core) is not None:
            beat.step = core.applied_step
            beat.running_requests = core.num_running
            beat.waiting_requests = core.num_waiting
            beat.waiting_tokens = core.waiting_tokens
            beat.total_blocks = core.total_blocks
            beat.free_blocks = core.free_blocks
            beat.prompt_tokens_per_s = self._throughput.prompt_tokens_per_s
            beat.output_tokens_per_s = self._throughput.output_tokens_per_s
        return beat

    def beat(self) -> None:
        """Tells all frontends."""
        if len(self._frontends):
            self._frontends.send_heartbeat(self.heartbeat())

    # -- epochs

    async def run(self) -> NoReturn:
        """Connects, serves, and begins again when the executor is lost. Raises StartError when it can never serve."""
        retry_s, told_s, since_s = FIRST_RETRY_S, 0.0, time.monotonic()
        while True:
            try:
                run = await self._connect()
                retry_s, since_s = FIRST_RETRY_S, time.monotonic()
            except (ExecutorLostError, StartError) as error:
                if isinstance(error, StartError) and self._core is None:
                    raise
                now_s = time.monotonic()
                if now_s - told_s >= _WAITING_LOG_INTERVAL_S:
                    normal = isinstance(error, ExecutorLostError) and now_s - since_s < _NORMAL_WAIT_S
                    level = logging.INFO if normal else logging.WARNING
                    log.log(level, "waiting for the executor at %s: %s", self._link.address, error)
                    told_s = now_s
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
                continue
            try:
                await self._serve(run, self.core)
            except ExecutorTakenError as error:
                self._lose(error)
                await self._stand_by()
                since_s = time.monotonic()
            except ExecutorLostError as error:
                self._lose(error)
                await asyncio.sleep(FIRST_RETRY_S)
                since_s = time.monotonic()
            finally:
                self._run = None
                await run.close()

    async def _stand_by(self) -> None:
        """The newest scheduler has the executor; taking it back at once would leave both without."""
        log.error("another scheduler drives the executor at %s; standing by until it leaves", self._link.address)
        while True:
            await asyncio.sleep(_STAND_BY_INTERVAL_S)
            if not await self._link.is_driven():
                return

    async def _connect(self) -> ExecutorRun:
        facts = await self._link.load()
        core = self._core or Scheduler(self.model.limits(facts))
        num_blocks = self._blocks_of(facts, core)
        await self._link.allocate(num_blocks)
        run = await self._link.open(facts.version, self._work.set)
        core.new_epoch(num_blocks)
        self._run = run
        log.info("serving %s on %s, epoch %d", self.model.name, facts.device, run.epoch)
        if self._core is None:
            self._core, self._first = core, (facts, core.limits)
            self._hello = self.model.hello(facts, core.limits)
            self._frontends.greet(self._hello)
        self.changed.set()
        return run

    def _blocks_of(self, facts: ExecutorFacts, core: Scheduler) -> int:
        if self._first is None:
            return core.limits.num_blocks
        first_facts, first_limits = self._first
        if self.model.fingerprint(facts) != self.model.fingerprint(first_facts):
            raise StartError("it has loaded other weights than the one before it; restart the scheduler to use them")
        return self.model.blocks_of_later_epoch(facts, first_limits)

    def _lose(self, error: ExecutorLostError) -> None:
        self._run = None
        log.error("lost the executor: %s; %d requests end", error, self.core.num_requests)
        message = "the executor was lost while this request waited or ran; try again"
        self._deliver(self.core.fail_all(FailureKind.EXECUTOR_LOST, message))
        self.core.new_epoch()
        self.changed.set()

    async def _serve(self, run: ExecutorRun, core: Scheduler) -> NoReturn:
        while True:
            preemptions = core.preemptions
            plan = core.plan(now_ns())
            if core.preemptions > preemptions:
                log.debug("%d requests preempted: the KV pool is full", core.preemptions - preemptions)
            if plan is None:
                await self._idle(run, core)
                continue
            await self._step(run, core, plan)

    async def _step(self, run: ExecutorRun, core: Scheduler, plan: StepPlan) -> None:
        began_s = time.monotonic()
        result, logprobs = await run.execute(plan)
        try:
            updates = core.apply(result, now_ns())
        except ResultError as error:
            raise ExecutorLostError(f"its result contradicts the plan: {error}") from error
        now_s = time.monotonic()
        if plan.slots:
            prefilled = sum(count for count in plan.token_counts if count > 1)
            self._throughput.add(now_s - began_s, prefilled, len(updates.token_ids))
        if updates.token_ids:
            self._token_s = now_s
        self._deliver(updates, logprobs)

    async def _idle(self, run: ExecutorRun, core: Scheduler) -> None:
        """Waits for work, on nothing but an event."""
        if run.lost is not None:
            raise run.lost
        try:
            if core.num_requests:
                raise InvariantError(f"{core.num_requests} requests wait, but nothing is planned")
            core.check_idle()
        except InvariantError as error:
            self.idle_faults += 1
            log.error("idle check: %s", error)
        self._work.clear()
        await self._work.wait()

    # -- outputs and deadlines

    def _deliver(self, updates: Updates, logprobs: OwnLogprobs | None = None) -> None:
        for failure in updates.failed:
            _log_failure(failure)
        for number, share in outputs.split(updates, logprobs).items():
            self._send(number, share)
        self._requests_changed()

    def _send(self, number: int, share: outputs.Outputs) -> None:
        if not self._frontends.send(number, share):
            log.warning("frontend %d reads too slowly and is cut", number)
            self.detach(number)

    def _requests_changed(self) -> None:
        self._work.set()
        self._arm_deadline()
        if self._core is None or self._core.num_requests == 0:
            self._empty.set()
        else:
            self._empty.clear()

    def _arm_deadline(self) -> None:
        next_ns = self._core.next_deadline_ns if self._core is not None else None
        if next_ns == self._armed_ns:
            return
        self._armed_ns = next_ns
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if next_ns is not None:
            delay_s = max(0.0, (next_ns - now_ns()) / 1e9)
            self._deadline = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._armed_ns = None
        self._deliver(self.core.expire(now_ns()))

    # -- the end

    async def drain(self) -> None:
        """Refuses what is new and returns when no request is left; cut short, it ends the rest UNAVAILABLE."""
        self._draining = True
        self.changed.set()
        self._requests_changed()
        try:
            await self._empty.wait()
        except asyncio.CancelledError:
            message = "the scheduler shut down before this request was done; submit it to another"
            self._deliver(self.core.fail_all(FailureKind.DRAINING, message))
            raise


def _log_failure(failure: Failure) -> None:
    kind, key = failure.kind, failure.key
    if kind in (FailureKind.BAD_TOKEN_ID, FailureKind.ROW_FAILED):
        log.error("request %d of frontend %d: %s", key.request_id, key.frontend, failure.message)
    else:
        log.debug("request %d of frontend %d: %s", key.request_id, key.frontend, failure.message)
