"""The engine: the core between its frontends and its executor.

Its step loop is the sentence "plan, execute, apply, deliver", with as many steps under way as the executor takes: a
plan is sent as soon as there is one, and never held back for another. Nothing in it waits for a frontend: what is
delivered goes into outboxes. A Run stream is an epoch; when one is lost, requests are kept, and go on in the next from
the ids they have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from triptych.engine.v1 import admin_pb2, engine_pb2

from services.common.contract import GRAMMAR, LOG_LEVEL, TRACE_CONTEXT, UNCOUNTED
from services.common.digests import DIGEST_BYTES, chained_digest
from services.common.errors import RequestError, StartError, invalid, unavailable, unserved
from services.common.telemetry import names
from services.common.telemetry.readings import Reading
from services.scheduler import door, outputs, self_test
from services.scheduler.clock import now_ns
from services.scheduler.core.kv_events import Stored
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Failure, FailureKind, RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import InvariantError, ResultError, StepPlan, Updates
from services.scheduler.engine_spans import EngineSpans
from services.scheduler.executor_link import ExecutorFacts, ExecutorLink
from services.scheduler.executor_run import Answer, ExecutorLostError, ExecutorRun, ExecutorTakenError
from services.scheduler.frontends import Frontends
from services.scheduler.grammar_requests import GrammarRequests
from services.scheduler.identity import Model
from services.scheduler.kv_event_log import KvEventLog
from services.scheduler.outbox import Outbox
from services.scheduler.plan_codec import Logprob
from services.scheduler.readings import core_readings, masking_readings
from services.scheduler.recording import Journal, RecordedScheduler
from services.scheduler.self_test import SelfTest
from services.scheduler.statistics import Statistics
from services.scheduler.throughput import DrainRate, Throughput

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
START_RETRY_S = 0.25
"""While an executor may be starting: its first step should not wait for the next try."""

LAST_RETRY_S = 2.0
SILENCE_S = 3.0
"""An executor not heard of for so long makes no tokens now."""

STUCK_S = 30.0
"""Nor does one whose step runs for so long."""

_WAITING_LOG_INTERVAL_S = 5.0
_NORMAL_WAIT_S = 30.0
"""An executor takes so long to start; later than that, waiting for it is worth an alert."""

_STAND_BY_INTERVAL_S = 1.0

SUBMIT_BYTES = 1024 * 1024
"""Of a Submit beside its prompt: far more than stop ids and biases can come to."""


class Engine:
    """Serves from `run` on; the other methods are called from the same event loop and return at once."""

    def __init__(
        self,
        model: Model,
        links: Sequence[ExecutorLink],
        journal: Journal | None = None,
        spans: EngineSpans | None = None,
    ) -> None:
        """`links` in the order in which executors are taken; after the last comes the first again."""
        self.model = model
        self._spans = spans
        self._journal = journal
        self.changed = asyncio.Event()
        """Set with every change of state, for whoever tells others."""
        self.idle_faults = 0
        """Times that the idle check found the books out of balance; a bug each."""
        self._links = deque(links)  # the first is in use, or is tried next
        self._own_link = links[0]  # nobody else's; the others are shared with other schedulers
        self._giving_up: asyncio.TimerHandle | None = None
        self._frontends = Frontends()
        self._core: Scheduler | None = None
        self._first: tuple[ExecutorFacts, Limits] | None = None  # of the first epoch; what frontends were told
        self._hello: engine_pb2.EngineHello | None = None
        self._run: ExecutorRun | None = None
        self._max_in_flight = 1
        self._self_test = SelfTest(model.config.self_test_interval_s, self.changed.set)
        self._draining = False
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._armed_ns: int | None = None
        self.kv_events = KvEventLog(
            model.config.kv_event_log, model.config.block_size, before=now_ns() // door.NS_PER_MS
        )
        """What happens to the prefix cache."""
        self._grammars = GrammarRequests(
            model.path,
            core=lambda: self.core,
            accepting=self._accepting_grammars,
            deliver=self._deliver_between_steps,
            changed=self._work.set,
        )
        self._serves_grammars = False
        self._sets_log_levels = False
        self._throughput = Throughput()
        self._drain_rate = DrainRate()
        self._statistics = Statistics()
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
        self._grammars.forget_frontend(number)
        if self._spans is not None:
            self._spans.left(number)
        if self._core is not None:
            for key in self._core.keys_of(number):
                self._abort(key)
            self._requests_changed()
        return True

    def submit(self, number: int, submit: engine_pb2.Submit) -> None:
        """Queues a request; a refusal goes the way of its outputs."""
        if number not in self._frontends:
            return  # cut already; its stream has not noticed
        try:
            core = self._accepting()
            grammar = door.read_grammar(submit, is_served=self._serves_grammars)
            submission = door.read_submit(
                submit,
                number,
                now_ns(),
                vocab_size=core.limits.vocab_size,
                text_vocab_size=self.model.text_vocab_size(core.limits.vocab_size),
                block_tokens=core.limits.block_tokens,
                max_choices=self.model.config.max_choices,
                max_logprobs=self.model.config.most_logprobs,
            )
        except RequestError as error:
            self.refuse(number, submit.request_id, error)
            return
        if self._spans is not None:
            self._spans.received(submit, submission)
        if any(key in self._grammars for key in submission.choice_keys()):
            self._submitted(submission, invalid("request_id", f"{submit.request_id} is in use; use each id once"))
        elif grammar is None:
            self._submitted(submission, core.submit(submission, now_ns()))
        else:
            self._grammars.submit(
                submission, grammar, core.limits.vocab_size, lambda failure: self._submitted(submission, failure)
            )

    def _submitted(self, submission: Submission, failure: Failure | RequestError | None) -> None:
        """The core has a request now, or it was refused."""
        if failure is not None:
            if self._spans is not None:
                self._spans.refused(submission.choice_keys(), _reason(failure))
            for key in submission.choice_keys():  # an id used twice: its first use must not go on past this end
                self._abort(key)
        if isinstance(failure, RequestError):
            self.refuse(*submission.key, failure)
            return
        if failure is not None:
            self._deliver(Updates(self.core.applied_step, failed=[failure]))
        self._requests_changed()

    def _abort(self, key: RequestKey) -> None:
        if self._spans is not None:
            self._spans.aborted(key)
        self._grammars.forget(key)
        if self._core is not None:
            self._core.abort(key)

    def abort(self, number: int, abort: engine_pb2.Abort) -> None:
        """Ends requests without a word. Raises RequestError for a column that is none."""
        keys = door.read_abort(abort, number)
        if self._core is not None:
            for key in keys:
                self._abort(key)
            self._requests_changed()

    def refuse(self, number: int, request_id: int, error: RequestError) -> None:
        """Ends a request at the door, and what runs under its id."""
        step = 0
        if self._spans is not None:
            self._spans.refused([RequestKey(number, request_id)], error.reason)
        if self._core is not None:
            step = self._core.applied_step
            self._abort(RequestKey(number, request_id))
        self._statistics.failed(error.reason)
        self._send(number, outputs.Outputs(step, failed=[outputs.failed_message(request_id, error)]))
        self._requests_changed()

    async def set_executor_log_level(self, level: str, logger: str, duration_s: int | None) -> str:
        """Why the executor's could not be set; empty where it is."""
        if self._run is None:
            return "the scheduler has no executor now; try again"
        if not self._sets_log_levels:
            return "this executor's version does not serve it"
        try:
            return await self._run.set_log_level(level, logger, duration_s)
        except ExecutorLostError as error:
            return f"it was lost: {error}"

    def flush_prefix_cache(self) -> int:
        """Forgets all cached blocks; how many."""
        if self._core is None:
            return 0
        flushed = self._core.flush_prefix_cache()
        self._requests_changed()
        return flushed

    def cached_blocks(self) -> list[Stored]:
        """All that the prefix cache can find now."""
        return self._core.cached() if self._core is not None else []

    def max_submit_bytes(self) -> int:
        """What a Submit that fits the context can come to, encoded. Raises RequestError where none is taken now."""
        limits = self._accepting().limits
        blocks = -(-limits.context_tokens // limits.block_tokens)
        return 4 * limits.context_tokens + DIGEST_BYTES * blocks + SUBMIT_BYTES

    def _accepting(self) -> Scheduler:
        if self._draining:
            raise unavailable("DRAINING", "the scheduler is shutting down; submit to another")
        return self._open_core()

    def _accepting_grammars(self) -> Scheduler:
        """For requests that came in before a drain began, or in an epoch before this one."""
        if self._core is None:
            raise unavailable("LOADING", "the model is not loaded yet; wait for the hello")
        if self._run is not None and not self._serves_grammars:
            raise unserved("grammar", "is not served by the executor that this engine has now")
        return self._core

    def _open_core(self) -> Scheduler:
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
        """A token could be made now: an epoch is open, its executor speaks, no step is stuck, the self-test passes."""
        run = self._run
        if run is None or run.lost is not None or self._draining or not self._self_test.passes:
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
            # The self-test is nobody's request. Where it waits it is the head of the queue, and nothing runs.
            hidden, runs = int(self._self_test.is_running), core.num_running > 0
            beat.running_requests = core.num_running - hidden * runs
            beat.waiting_requests = core.num_waiting - hidden * (not runs)
            beat.waiting_tokens = core.waiting_tokens - hidden * (not runs)
            beat.total_blocks = core.total_blocks
            beat.free_blocks = core.free_blocks
            beat.prompt_tokens_per_s = self._throughput.prompt_tokens_per_s
            beat.output_tokens_per_s = self._throughput.output_tokens_per_s
        return beat

    def stats(self) -> admin_pb2.GetStatsResponse:
        """What has been done since the start, and by whom the engine is held now."""
        engine_id = self._hello.engine_id if self._hello is not None else ""
        told = self._statistics.message(self.heartbeat(), engine_id, self._core)
        masking = self._grammars.masking
        told.grammar_requests, told.masks, told.mask_s = masking.num_requests, masking.num_masks, masking.mask_s
        return told

    def readings(self) -> Iterator[Reading]:
        """What metrics tell; as in `stats`, the self-test is in none of it."""
        yield Reading(names.CAN_GENERATE, self.can_generate)
        yield Reading(names.FRONTENDS, len(self._frontends))
        yield Reading(names.IDLE_FAULTS, self.idle_faults)
        yield from self._statistics.readings()
        yield from masking_readings(self._grammars.masking)
        if self._core is not None:
            yield from core_readings(
                self._core, self.heartbeat(), self._grammars.num_waiting, self._self_test.is_running
            )

    def beat(self) -> None:
        """Tells all frontends."""
        if len(self._frontends):
            self._frontends.send_heartbeat(self.heartbeat())

    # -- epochs

    async def run(self) -> NoReturn:
        """Connects, serves, and begins again when the executor is lost. Raises StartError when it can never serve."""
        self._grammars.start()
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
                    log.log(level, "waiting for the executor at %s: %s", self._links[0].address, error)
                    told_s = now_s
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, START_RETRY_S if now_s - since_s < _NORMAL_WAIT_S else LAST_RETRY_S)
                continue
            try:
                await self._serve(run, self.core)
            except ExecutorLostError as error:
                self._lose(error)
                if isinstance(error, ExecutorTakenError) and self._links[0] is self._own_link:
                    self._give_up()  # whoever has the executor has its frontends too, or will
                    await self._stand_by()
                    since_s = time.monotonic()
                    continue
                self._links.rotate(-1)
                await asyncio.sleep(FIRST_RETRY_S if len(self._links) == 1 else 0)
                since_s = time.monotonic()
            finally:
                self._run = None
                await run.close()

    async def _stand_by(self) -> None:
        """The newest scheduler has the executor; taking it back at once would leave both without."""
        link = self._links[0]
        log.error("another scheduler drives the executor at %s; standing by until it leaves", link.address)
        while True:
            await asyncio.sleep(_STAND_BY_INTERVAL_S)
            if not await link.is_driven():
                return

    async def _connect(self) -> ExecutorRun:
        """An epoch on the first executor that takes one. Raises the error of the first that was tried."""
        first_error: Exception | None = None
        for place, link in enumerate(list(self._links)):
            try:
                if link is not self._own_link and await link.is_driven():
                    raise ExecutorLostError(f"another scheduler drives the spare executor at {link.address}")
                run = await self._open(link)
            except (ExecutorLostError, StartError) as error:
                if first_error is not None:
                    log.info("nor the executor at %s: %s", link.address, error)
                first_error = first_error or error
            else:
                self._links.rotate(-place)
                return run
        assert first_error is not None
        raise first_error

    async def _open(self, link: ExecutorLink) -> ExecutorRun:
        facts = await link.load()
        core = self._core or self._new_core(self.model.limits(facts))
        num_blocks = self._blocks_of(facts, core)
        await link.allocate(num_blocks)
        self._serves_grammars = await self._grammars.is_served() and GRAMMAR in facts.features
        self._sets_log_levels = LOG_LEVEL in facts.features
        if link is not self._own_link and await link.is_driven():  # it may have taken minutes to load
            raise ExecutorLostError(f"another scheduler drives the spare executor at {link.address} now")
        run = await link.open(
            facts.version,
            self._work.set,
            traces=self._spans is not None and TRACE_CONTEXT in facts.features,
            uncounts=UNCOUNTED in facts.features,
        )
        core.new_epoch(num_blocks, facts.max_in_flight)
        self._grammars.masking.new_epoch()
        self._statistics.epoch_began()
        self._max_in_flight = self.model.max_in_flight(facts)
        self._self_test.new_epoch()
        self._run = run
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        if self._core is not None and not self._serves_grammars:
            self._deliver(self._grammars.fail_all("the executor that this engine has now serves no grammars"))
        log.info("serving %s on %s, epoch %d", self.model.name, facts.device, run.epoch)
        if self._core is None:
            self._core, self._first = core, (facts, core.limits)
            self._hello = self.model.hello(facts, core.limits, (GRAMMAR,) if self._serves_grammars else ())
            self._frontends.greet(self._hello)
        self.changed.set()
        return run

    def _new_core(self, limits: Limits) -> Scheduler:
        digest = chained_digest if self.model.config.prefix_cache else None
        return Scheduler(limits, digest) if self._journal is None else RecordedScheduler(limits, digest, self._journal)

    def _blocks_of(self, facts: ExecutorFacts, core: Scheduler) -> int:
        if self._first is None:
            return core.limits.num_blocks
        first_facts, first_limits = self._first
        if self.model.fingerprint(facts) != self.model.fingerprint(first_facts):
            raise StartError("it has loaded other weights than the one before it; restart the scheduler to use them")
        return self.model.blocks_of_later_epoch(facts, first_limits)

    def _lose(self, error: ExecutorLostError) -> None:
        self._run = None
        self._deliver(self.core.lose_epoch(error.blamed_slots))
        self._grammars.masking.new_epoch()
        num_requests = self.core.num_requests - self._self_test.is_running
        log.error("lost the executor: %s; %d requests are kept", error, num_requests)
        self._giving_up = self._giving_up or asyncio.get_running_loop().call_later(
            self.model.config.recovery_s, self._give_up
        )
        if self._spans is not None:
            self._spans.lost()
        self.changed.set()

    def _give_up(self) -> None:
        """Ends the requests that were kept; the frontend may know another engine."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        if self.core.num_requests:
            if (num_requests := self.core.num_requests - self._self_test.is_running) > 0:
                log.error("no executor in time: %d requests end", num_requests)
            message = "the executor was lost while this request waited or ran; try again"
            self._deliver(self.core.fail_all(FailureKind.EXECUTOR_LOST, message))

    async def _serve(self, run: ExecutorRun, core: Scheduler) -> NoReturn:
        while True:
            while (answer := run.take()) is not None:
                self._apply(run, core, answer)
            self._work.clear()  # what comes from here on, also while a plan is written, is seen in the next round
            await self._plan_ahead(run, core)
            if run.num_under_way or self._grammars.masking.is_busy:
                await self._work.wait()
            else:
                await self._idle(core)

    async def _plan_ahead(self, run: ExecutorRun, core: Scheduler) -> None:
        """Sends what can be planned now."""
        while run.num_under_way < self._max_in_flight:
            preemptions = core.counters.preemptions
            begun_s = time.monotonic()
            plan = core.plan(now_ns())
            if plan is not None and self._counts(plan):
                self._statistics.planned(time.monotonic() - begun_s)
            if (preempted := core.counters.preemptions - preemptions) > 0:
                log.debug("%d requests preempted: the KV pool is full", preempted)
            if plan is None:
                return
            self._grammars.planned(plan, run)
            trace = self._spans.planned(plan, begun_s, run.clock_offset_ns) if self._spans is not None else None
            await run.send(plan, trace)

    def _apply(self, run: ExecutorRun, core: Scheduler, answer: Answer) -> None:
        counts = self._counts(answer.plan)
        begun_s = time.monotonic()
        try:
            updates = core.apply(answer.result, now_ns())
        except ResultError as error:
            raise ExecutorLostError(f"its result contradicts the plan: {error}") from error
        apply_s = time.monotonic() - begun_s
        if self._spans is not None:
            self._spans.applied(answer, apply_s)
        if counts:
            self._statistics.applied(
                execute_s=answer.execute_s, sample_s=answer.sample_s, apply_s=apply_s, graph=answer.graph
            )
        if answer.plan.slots and not self._self_test.is_running:
            self._throughput.add(answer.step_s, answer.plan.prefilled_tokens, len(updates.token_ids))
        if updates.token_ids:
            self._token_s = time.monotonic()
            self._self_test.token_made(self._token_s)
        self._grammars.masking.applied(updates, run)
        self._deliver(updates, answer.logprobs)

    def _counts(self, plan: StepPlan) -> bool:
        """Whether a step has rows, and not the self-test's alone, which is counted nowhere."""
        return len(plan.slots) > (1 if self._self_test.is_running else 0)

    async def _idle(self, core: Scheduler) -> None:
        """Waits for work, on nothing but an event; after a while without a token, makes one."""
        try:
            if core.num_requests:
                raise InvariantError(f"{core.num_requests} requests wait, but nothing is planned")
            core.check_idle()
        except InvariantError as error:
            self.idle_faults += 1
            log.error("idle check: %s", error)
        try:
            async with asyncio.timeout(None if self._draining else self._self_test.due_in_s()):
                await self._work.wait()
        except TimeoutError:
            self._self_test.begin(core, now_ns())

    # -- outputs and deadlines

    def _deliver(self, updates: Updates, logprobs: Mapping[int, Logprob] | None = None) -> None:
        self._self_test.settle(self.core, updates)
        self._grammars.masking.ended(updates)
        if self._spans is not None:
            self._spans.updated(updates)
        for failure in updates.failed:
            if failure.key.frontend != self_test.FRONTEND:
                _log_failure(failure)
                self._statistics.failed(outputs.reason_of(failure.kind))
        now_s = time.monotonic()
        self._drain_rate.add(now_s, len(updates.finished))
        retry_after_ms = self._drain_rate.retry_after_ms(now_s, self.core.num_waiting) if updates.failed else None
        for number, share in outputs.split(updates, logprobs, retry_after_ms).items():
            if number != self_test.FRONTEND:
                self._send(number, share)
        self._requests_changed()

    def _deliver_between_steps(self, updates: Updates) -> None:
        """What a grammar has made of a request: ids that are forced are output, though no step has drawn them."""
        if updates.token_ids:
            self._throughput.add(0.0, 0, len(updates.token_ids))
        self._deliver(updates)

    def _send(self, number: int, share: outputs.Outputs) -> None:
        if not self._frontends.send(number, share):
            log.warning("frontend %d reads too slowly and is cut", number)
            self.detach(number)

    def _requests_changed(self) -> None:
        self._work.set()
        if self._core is not None:
            self.kv_events.append(self._core.take_kv_events(), now_ns())
        self._arm_deadline()
        if self._core is None or self._core.num_requests + self._grammars.num_waiting == 0:
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

    def close(self) -> None:
        """Ends the work beside the event loop."""
        self._grammars.close()

    async def drain_within(self, grace_s: float | None) -> int:
        """Refuses what is new, for good, and returns when no request is left, or, after a grace, has ended the rest
        UNAVAILABLE: how many choices that were. Who does not wait for it takes the grace away, and nothing else."""
        self._begin_drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            moved = self.core.num_requests + self._grammars.num_waiting
            self._end_all()
            return moved
        return 0

    async def drain(self) -> None:
        """Refuses what is new and returns when no request is left; cut short, it ends the rest UNAVAILABLE."""
        self._begin_drain()
        try:
            await self._empty.wait()
        except asyncio.CancelledError:
            self._end_all()
            raise

    def _begin_drain(self) -> None:
        self._draining = True
        self.changed.set()
        if self._core is not None:
            self._self_test.abandon(self._core)
        self._requests_changed()

    def _end_all(self) -> None:
        message = "the scheduler shut down before this request was done; submit it to another"
        self._grammars.refuse_all(unavailable("DRAINING", message))  # those that the core does not know yet
        self._grammars.close()
        self._deliver(self.core.fail_all(FailureKind.DRAINING, message))


def _reason(failure: Failure | RequestError) -> str:
    return failure.reason if isinstance(failure, RequestError) else outputs.reason_of(failure.kind)


def _log_failure(failure: Failure) -> None:
    kind, key = failure.kind, failure.key
    if kind in (FailureKind.BAD_TOKEN_ID, FailureKind.ROW_FAILED, FailureKind.GRAMMAR_FAILED):
        log.error("request %d of frontend %d: %s", key.request_id, key.frontend, failure.message)
    else:
        log.debug("request %d of frontend %d: %s", key.request_id, key.frontend, failure.message)
