"""The core: which requests run, what each step computes, who holds which block.

Pure: no I/O, no threads, no clock of its own; times are passed in as ns. The loop around it is

    plan = core.plan(now); result = <the executor's answer>; updates = core.apply(result, now)

A plan moves a request forward at once (`num_computed`, and a pending id where it samples), so that the next plan can be
made before the result is there; `apply` fills in the ids. Running requests come first, in order of arrival, then the
head of the queue while slots, blocks and the token budget allow. A request is admitted with blocks for all its tokens;
after that it grows a block at a time, and when none is left the newest running request is preempted: it gives up slot
and blocks, returns to the head of the queue and is computed again. The oldest is never preempted for another and fits
alone (see `submit`), so it always moves.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace

from services.scheduler.core import books
from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.in_flight import Step
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import (
    NO_SLOT,
    Failure,
    FailureKind,
    FinishReason,
    Request,
    RequestKey,
    Submission,
)
from services.scheduler.core.slots import SlotPool
from services.scheduler.core.step import (
    Finished,
    InvariantError,
    ResultError,
    Start,
    Started,
    StepPlan,
    StepResult,
    Updates,
)
from services.scheduler.core.waiting import WaitingQueue

_SPARE_DEADLINES = 64
"""Below so many there is nothing to gain from clearing out."""


class Scheduler:
    """Requests of one engine. Every method returns at once and leaves the books balanced."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.preemptions = 0
        self._requests: dict[RequestKey, Request] = {}
        self._waiting = WaitingQueue()
        self._deadlines: list[tuple[int, RequestKey]] = []  # a heap; entries outlive their request
        self._next_step = 1
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._pool = BlockPool(self.limits.num_blocks)
        self._slots = SlotPool(self.limits.max_slots, self.limits.max_in_flight)
        self._running: dict[RequestKey, Request] = {}  # in order of arrival
        self._leaving: list[Request] = []  # ended while a step with a row of theirs is in flight
        self._in_flight: deque[Step] = deque()
        self._applied_step = self._next_step - 1

    # -- what is so now

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Tokens in the queue that are to be computed."""
        return self._waiting.num_tokens

    @property
    def total_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self._pool.total

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    @property
    def num_in_flight(self) -> int:
        """Plans without a result."""
        return len(self._in_flight)

    @property
    def applied_step(self) -> int:
        """The last step whose result was applied."""
        return self._applied_step

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` may next have something to do."""
        return self._deadlines[0][0] if self._deadlines else None

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def keys_of(self, frontend: int) -> list[RequestKey]:
        """The requests of one frontend."""
        return [key for key in self._requests if key.frontend == frontend]

    # -- requests come and go

    def submit(self, submission: Submission, now_ns: int) -> Failure | None:
        """Queues a request, or says why not. What can never fit, and what finds the queue full, is refused here."""
        failure = self._refusal(submission)
        if failure is not None:
            return failure
        request = Request(submission, now_ns)
        self._requests[request.key] = request
        self._waiting.append(request)
        if submission.deadline_ns is not None:
            self._remember_deadline(submission.deadline_ns, request.key)
        return None

    def _remember_deadline(self, deadline_ns: int, key: RequestKey) -> None:
        heapq.heappush(self._deadlines, (deadline_ns, key))
        # Entries outlive their requests; more than half of them gone, the rest is made a heap anew.
        if len(self._deadlines) > 2 * len(self._requests) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(self._deadlines)

    def _refusal(self, submission: Submission) -> Failure | None:
        key, limits = submission.key, self.limits
        prompt_tokens = len(submission.prompt_ids)
        if key in self._requests:
            return Failure(key, FailureKind.INVALID, f"request_id: {key.request_id} is in use; use each id once")
        if prompt_tokens < 1 or (submission.max_tokens < 1 and not submission.has_scores):
            return Failure(key, FailureKind.INVALID, "prompt_ids and max_tokens: a request needs at least 1 of each")
        if prompt_tokens + submission.max_tokens > limits.context_tokens:
            message = (
                f"prompt has {prompt_tokens} tokens and max_tokens is {submission.max_tokens}, the context holds "
                f"{limits.context_tokens} (the KV pool {limits.pool_tokens}); shorten one of them, or start the "
                "scheduler with a larger --max-model-len or --num-kv-blocks"
            )
            return Failure(key, FailureKind.TOO_LONG, message)
        # What could start at once does not count as waiting.
        startable = limits.max_slots - self._slots.num_held
        if len(self._waiting) >= limits.max_waiting + startable:
            message = (
                f"{len(self._waiting)} requests wait, the limit is --max-waiting-requests {limits.max_waiting}; "
                "try again later"
            )
            return Failure(key, FailureKind.QUEUE_FULL, message)
        return None

    def abort(self, key: RequestKey) -> None:
        """Ends a request without a word; an unknown or ended one is ignored."""
        request = self._requests.get(key)
        if request is not None:
            self._end(request)

    def expire(self, now_ns: int) -> Updates:
        """Ends what is past its deadline, waiting or running."""
        updates = Updates(self._applied_step)
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline_ns, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is None or request.submission.deadline_ns != deadline_ns:
                continue
            state = f"after {len(request.output)} output tokens" if request.slot != NO_SLOT else "while it waited"
            self._fail(request, FailureKind.DEADLINE, f"the deadline passed {state}", updates)
        return updates

    def fail_all(self, kind: FailureKind, message: str) -> Updates:
        """Ends every request."""
        updates = Updates(self._applied_step)
        for request in list(self._requests.values()):
            self._fail(request, kind, message, updates)
        return updates

    def new_epoch(self, num_blocks: int | None = None) -> None:
        """The executor has forgotten everything: what ran is preempted, what was in flight never happened.

        `num_blocks`, where the executor has another number of them now, must still hold the context.
        """
        if num_blocks is not None:
            self.limits = replace(self.limits, num_blocks=num_blocks)
        for request in self._requests.values():
            request.num_tokens -= request.num_pending
            request.num_pending = 0
        for request in reversed(list(self._running.values())):
            self._preempt(request)
        self._waiting.recount()
        self._begin_epoch()

    def _fail(self, request: Request, kind: FailureKind, message: str, updates: Updates) -> None:
        updates.failed.append(Failure(request.key, kind, message))
        self._end(request)

    def _end(self, request: Request) -> None:
        request.ended = True
        del self._requests[request.key]
        self._waiting.discard(request)
        self._running.pop(request.key, None)
        if request.slot != NO_SLOT:
            if request.last_step > self._applied_step:
                self._leaving.append(request)
            else:
                self._release(request)
        if not self._requests:
            self._deadlines.clear()

    def _release(self, request: Request) -> None:
        self._pool.release(reversed(request.blocks))
        self._slots.release(request.slot)
        request.blocks, request.slot, request.num_computed = [], NO_SLOT, 0

    # -- plan

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step; None when there is nothing to do, or enough is in flight.

        A plan without rows only tells the executor of freed slots.
        """
        if len(self._in_flight) >= self.limits.max_in_flight:
            return None
        step = Step(self._next_step, self.limits.max_step_tokens)
        self._slots.thaw(step.number)
        self._plan_running(step)
        self._plan_waiting(step, now_ns)
        if not step.rows and not self._slots.has_unannounced and not self._waits_for_a_slot():
            return None
        return self._commit(step)

    def _plan_running(self, step: Step) -> None:
        block_tokens = self.limits.block_tokens
        for request in list(self._running.values()):
            if step.budget == 0:
                return
            count = min(request.num_to_compute, step.budget)
            if request.slot == NO_SLOT or count <= 0:  # preempted below, or its last id is on its way
                continue
            if request.num_computed + count > len(request.blocks) * block_tokens:
                missing = self._blocks_for(request.num_computed + count) - len(request.blocks)
                if not self._make_room(request, missing):
                    continue
                blocks = self._pool.take(missing)
                request.blocks += blocks
                step.new_blocks += [(request.slot, block) for block in blocks]
            step.add_row(request, count)

    def _make_room(self, request: Request, num_blocks: int) -> bool:
        """Preempts the newest until enough is free; False if that was `request` itself. None of them has a row yet."""
        while self._pool.num_free < num_blocks:
            newest = next(reversed(self._running.values()))
            self._preempt(newest)
            if newest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        del self._running[request.key]
        self._release(request)
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.put_back(request)

    def _plan_waiting(self, step: Step, now_ns: int) -> None:
        while step.budget > 0 and self._slots.num_usable > 0:
            request = self._waiting.head()
            # A preempted request whose last id is still on its way cannot be named whole yet.
            if request is None or request.num_pending:
                return
            num_blocks = self._blocks_for(request.num_tokens)
            # A block for each that runs: they are about to need one, and would take it back from the newest.
            if num_blocks + len(self._running) > self._pool.num_free:
                return
            self._admit(request, num_blocks, step, now_ns)

    def _admit(self, request: Request, num_blocks: int, step: Step, now_ns: int) -> None:
        self._waiting.discard(request)
        self._running[request.key] = request
        request.slot = self._slots.take()
        request.blocks = self._pool.take(num_blocks)
        request.scheduled_ns = request.scheduled_ns or now_ns
        request.is_scored = request.wants_scores
        start = Start(
            request.slot, request.submission, request.token_ids(), request.blocks.copy(), is_scored=request.is_scored
        )
        step.started.append(start)
        step.add_row(request, min(request.num_to_compute, step.budget))

    def _waits_for_a_slot(self) -> bool:
        """Whether only the passing of a step makes a slot usable."""
        return (
            len(self._waiting) > 0
            and not self._in_flight
            and self._slots.num_usable == 0
            and self._slots.is_cooling
            and not self._running
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_tokens)

    def _commit(self, step: Step) -> StepPlan:
        self._in_flight.append(step)
        self._next_step += 1
        return step.depart(self._slots.announce(step.number))

    # -- apply

    def apply(self, result: StepResult, now_ns: int) -> Updates:
        """Takes in the answer to the oldest plan in flight. Raises ResultError, with nothing changed, if it is none."""
        if not self._in_flight:
            raise ResultError(f"a result for step {result.step}, but none is in flight")
        step = self._in_flight[0]
        step.check(result)
        self._in_flight.popleft()
        self._applied_step = step.number
        updates = Updates(step.number)
        if result.scores:
            self._take_scores(step, result, now_ns, updates)
        place = 0
        for i, (request, _) in enumerate(step.rows):
            count = result.token_counts[i]
            request.num_pending -= step.samples[i]
            if request.ended:
                pass
            elif (kind := result.failed.get(step.row_slots[i])) is not None:
                self._fail(request, FailureKind.ROW_FAILED, f"the executor could not compute it: {kind}", updates)
            elif count:
                self._append(request, result.token_ids, place, count, now_ns, updates)
            place += count
        self._release_leaving()
        return updates

    def _take_scores(self, step: Step, result: StepResult, now_ns: int, updates: Updates) -> None:
        """Passes on what was not told before: what the executor computes again after a preemption, it scores again."""
        for slot, (request, _) in zip(step.row_slots, step.rows, strict=True):
            scores = result.scores.get(slot)
            if scores is None or request.ended or scores.stop <= request.next_scored:
                continue
            updates.scores.append((request.key, scores.since(request.next_scored)))
            request.next_scored = scores.stop
            if request.max_tokens == 0 and not request.wants_scores:
                updates.finished.append(Finished(request.key, FinishReason.LENGTH, None, request.preemptions, now_ns))
                self._end(request)

    def _append(
        self, request: Request, token_ids: list[int], place: int, count: int, now_ns: int, updates: Updates
    ) -> None:
        if not request.output:
            request.first_token_ns = now_ns
        kept = 0
        for at in range(place, place + count):
            token_id = token_ids[at]
            if not 0 <= token_id < self.limits.vocab_size:
                message = f"the executor returned id {token_id}, the vocabulary has {self.limits.vocab_size}"
                self._fail(request, FailureKind.BAD_TOKEN_ID, message, updates)
                break
            request.output.append(token_id)
            updates.token_ids.append(token_id)
            updates.places.append(at)
            kept += 1
            if self._finish(request, token_id, now_ns, updates):
                break
        if kept:
            if len(request.output) == kept:
                updates.started.append(
                    Started(request.key, request.queued_ns, request.scheduled_ns, request.first_token_ns)
                )
            updates.keys.append(request.key)
            updates.counts.append(kept)

    def _finish(self, request: Request, token_id: int, now_ns: int, updates: Updates) -> bool:
        if request.stops_at(token_id):
            reason, stop_id = FinishReason.STOP, token_id
        elif len(request.output) >= request.max_tokens:
            reason, stop_id = FinishReason.LENGTH, None
        else:
            return False
        updates.finished.append(Finished(request.key, reason, stop_id, request.preemptions, now_ns))
        self._end(request)
        return True

    def _release_leaving(self) -> None:
        if not self._leaving:
            return
        still = []
        for request in self._leaving:
            if request.last_step > self._applied_step:
                still.append(request)
            else:
                self._release(request)
        self._leaving = still

    # -- the books

    @property
    def is_idle(self) -> bool:
        """No request, nothing in flight, and the executor knows it."""
        return not self._requests and not self._in_flight and not self._slots.has_unannounced

    def check_idle(self) -> None:
        """Raises InvariantError when an idle engine still holds something; O(1)."""
        pool, slots = self._pool, self._slots
        held = [
            (f"{pool.num_held} of {pool.total} blocks", pool.num_held),
            (f"{slots.num_held} of {slots.count} slots", slots.num_held),
            (f"{len(self._running)} running requests", len(self._running)),
            (f"{len(self._waiting)} waiting requests", len(self._waiting)),
            (f"{self._waiting.num_tokens} waiting tokens", self._waiting.num_tokens),
            (f"{len(self._leaving)} leaving requests", len(self._leaving)),
            (f"{len(self._deadlines)} deadlines", len(self._deadlines)),
        ]
        if left := [what for what, count in held if count]:
            raise InvariantError(f"the engine is idle, but holds {', '.join(left)}")

    def check_books(self) -> None:
        """Raises InvariantError unless blocks, slots and requests add up; O(blocks), for tests."""
        holding = [*self._running.values(), *self._leaving]
        books.check_blocks(self._pool, holding)
        books.check_slots(self._slots, holding)
        books.check_waiting(self._waiting)
        if len(self._requests) != len(self._running) + len(self._waiting):
            raise InvariantError("a request neither runs nor waits")
