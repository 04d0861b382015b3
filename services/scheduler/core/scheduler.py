"""The core: which requests run, what each step computes, who holds which block.

Pure: no I/O, no threads, no clock of its own; times are passed in as ns. The loop around it is

    plan = core.plan(now); result = <the executor's answer>; updates = core.apply(result, now)

A plan moves a request forward at once (`num_computed`, and an id to come where it samples), so that the next plan can
be made before the result is there; `apply` fills in the ids. A step is filled in this order, by rank (priority, then
arrival) within each:

1. decodes: one token for each request that generates;
2. prefills under way, and then those that wait, as the queue's order, slots, blocks and the token budget allow. The
   first that does not end in the step leaves a reserve to those behind it that do (Agrawal et al. 2024,
   "Sarathi-Serve", mixes chunks of prompts into decode steps); what nobody uses goes back to it.

A request starts with blocks for all its tokens, cached or a sibling's where they exist (`placement`); after that it
grows a block at a time, and when none is left the last by rank is preempted: it gives up slot and blocks, waits before
all of its priority that never ran, and finds what is still cached of it when it returns. The first by rank is never
preempted for another and fits alone (see `gate`), so it always moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from services.scheduler.core import books, gate
from services.scheduler.core.counters import Counters
from services.scheduler.core.deadlines import Deadlines
from services.scheduler.core.in_flight import Step
from services.scheduler.core.kv_events import KvEvent, Stored
from services.scheduler.core.limits import Limits
from services.scheduler.core.placement import Placement, fits, place
from services.scheduler.core.quarantine import Quarantine, count_loss
from services.scheduler.core.queue_wait import Ahead, QueueWait
from services.scheduler.core.request import (
    DIGEST_BYTES,
    NO_SLOT,
    Failure,
    FailureKind,
    FinishReason,
    Request,
    RequestKey,
    Submission,
)
from services.scheduler.core.residents import ChainedDigest, Residents
from services.scheduler.core.step import (
    NO_ID_LEFT,
    Finished,
    InvariantError,
    ResultError,
    Start,
    Started,
    StepPlan,
    StepResult,
    Updates,
)
from services.scheduler.core.tenants import OUTPUT_WEIGHT, PROMPT_WEIGHT, Tenants
from services.scheduler.core.waiting import WaitingQueue

_LOOK_AHEAD = 16
"""Requests of the queue that are looked at for one that can start."""

MAX_NAMED_TOKENS = 1 << 21
"""Ids of requests named whole in one step, past which no other starts in it: 8 MB of a message's 64. What is cached
costs a step little and its plan all of it, so many could start at once."""


class Scheduler:
    """Requests of one engine. Every method returns at once and leaves the books balanced.

    Without `chained_digest` there is no prefix cache.
    """

    def __init__(self, limits: Limits, chained_digest: ChainedDigest | None = None) -> None:
        self.limits = limits
        self.counters = Counters()
        self._chained_digest = chained_digest
        self._kv_events: list[KvEvent] = []
        self._requests: dict[RequestKey, Request] = {}
        self._tenants = Tenants()
        self._waiting = WaitingQueue(self._tenants)
        self._deadlines = Deadlines()
        self._queue_wait = QueueWait(limits.max_queue_wait_ns)
        self._arrivals = 0
        self._num_uncounted = 0
        self._num_masked = 0
        self._next_step = 1
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._residents = Residents(self.limits, self._chained_digest, self._kv_events)
        self._pool, self._slots = self._residents.pool, self._residents.slots
        self._running = self._residents.running
        self._in_flight: deque[Step] = deque()
        self._quarantine = Quarantine(self._requests.values())
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
        """Blocks that nobody holds, cached ones included."""
        return self._pool.num_free

    @property
    def cached_blocks(self) -> int:
        """Blocks that the prefix cache can find, held ones included."""
        return self._pool.num_cached

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
        ahead = (self._deadlines.next_ns, self._queue_wait.next_ns)
        return min((next_ns for next_ns in ahead if next_ns is not None), default=None)

    def expected_wait_ns(self, now_ns: int) -> int:
        """Of a request of a block's tokens and a new tenant that would come now, until it starts."""
        return self._expected_wait_ns(1, self.limits.block_tokens, self._waiting.num_before(0, ""), now_ns)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def keys_of(self, frontend: int) -> list[RequestKey]:
        """The requests of one frontend."""
        return [key for key in self._requests if key.frontend == frontend]

    def by_phase(self) -> dict[str, int]:
        """Requests by what they do, those not counted left out; one pass over the running ones."""
        counted = [request for request in self._running if request.submission.is_counted]
        decodes = sum(request.is_decoding for request in counted)
        preempted = self._waiting.num_preempted
        waiting = len(self._waiting) - preempted - (self._num_uncounted - (len(self._running) - len(counted)))
        return {
            "prefill": len(counted) - decodes,
            "decode": decodes,
            "waiting_new": waiting,
            "waiting_preempted": preempted,
        }

    # -- requests come and go

    def submit(self, submission: Submission, now_ns: int) -> Failure | None:
        """Queues all choices of a request, or says why none. What can never fit is refused, and what finds no room."""
        failure = self._id_failure(submission) or gate.length_failure(submission, self.limits)
        if failure is not None:
            return failure
        digests = self._digests_of(submission)
        num_tokens = len(submission.prompt_ids)
        if not submission.has_scores:
            num_tokens -= self.limits.block_tokens * len(self._pool.match(digests))
        with_output = num_tokens + sum(len(output) for _, output in submission.resumed)
        failure = gate.queue_failure(
            submission,
            self.limits,
            startable=self._num_startable,
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            tenant_waiting=self._tenants.num_waiting(submission.tenant),
            num_tokens=with_output,
        )
        if failure is None and self.limits.max_queue_wait_ns is not None:
            before = self._waiting.num_before(submission.priority, submission.tenant)
            expected_ns = self._expected_wait_ns(submission.num_choices, with_output, before, now_ns)
            failure = gate.wait_failure(submission, self.limits, expected_ns)
        if failure is not None:
            return failure
        account = self._tenants.open(submission.tenant, submission.num_choices)
        self._num_uncounted += not submission.is_counted
        self._num_masked += submission.num_choices * submission.is_masked
        siblings: list[Request] = []
        for choice, output in submission.choices:
            request = Request(submission, choice, self._arrivals, now_ns, account, digests.copy(), siblings, output)
            self._arrivals += 1
            siblings.append(request)
            self._requests[request.key] = request
            self._waiting.append(request, len(output) + (num_tokens if len(siblings) == 1 else 1))
            self._queue_wait.joined(request)
            if submission.deadline_ns is not None:
                self._deadlines.add(submission.deadline_ns, request.key, len(self._requests), self.__contains__)
        return None

    @property
    def _num_startable(self) -> int:
        """Requests that free slots are there for."""
        return self.limits.max_slots - self._slots.num_held + self._num_uncounted

    def _expected_wait_ns(self, choices: int, num_tokens: int, num_before: int, now_ns: int) -> int:
        """Of a request of so many choices, and tokens to compute, behind `num_before` choices of the queue."""
        queued_tokens = self._waiting.num_tokens * num_before // max(1, len(self._waiting))
        waiting, prefilled = num_before + choices, [request.num_to_compute for request in self._running]
        free = self._pool.num_free - len(self._running)  # see _admit_next
        needed = (queued_tokens + num_tokens) // self.limits.block_tokens + waiting
        ahead = Ahead(
            choices=waiting,
            queued_tokens=queued_tokens,
            room=min(self._num_startable, waiting * min(max(0, free), needed) // needed),
            prefill_tokens=sum(missing for missing in prefilled if missing > 1),
            running=len(self._running),
            oldest_ns=min((request.scheduled_ns for request in self._running), default=now_ns),
        )
        return self._queue_wait.expected_ns(ahead, now_ns)

    def _id_failure(self, submission: Submission) -> Failure | None:
        for key in submission.choice_keys():
            if key in self._requests:
                message = f"request_id: {key.request_id} is in use; use each id once"
                return Failure(submission.key, FailureKind.INVALID, message)
        return None

    def _digests_of(self, submission: Submission) -> list[bytes]:
        if self._chained_digest is None or not submission.root_digest:
            return []
        column = submission.digests
        return [column[start : start + DIGEST_BYTES] for start in range(0, len(column), DIGEST_BYTES)]

    def abort(self, key: RequestKey) -> None:
        """Ends a choice without a word; an unknown or ended one is ignored."""
        request = self._requests.get(key)
        if request is not None:
            self.counters.aborted += request.submission.is_counted
            self._end(request)

    def expire(self, now_ns: int) -> Updates:
        """Ends what is past its deadline, waiting or running, and what has waited too long for its first step."""
        updates = Updates(self._applied_step)
        for deadline_ns, key in self._deadlines.passed(now_ns):
            request = self._requests.get(key)
            if request is None or request.submission.deadline_ns != deadline_ns:
                continue
            state = f"after {len(request.output)} output tokens" if request.slot != NO_SLOT else "while it waited"
            self._fail(request, FailureKind.DEADLINE, f"the deadline passed {state}", updates)
        for request in self._queue_wait.overdue(now_ns):
            waited_s, limit_s = (now_ns - request.queued_ns) / 1e9, (self.limits.max_queue_wait_ns or 0) / 1e9
            message = f"waited for {waited_s:.1f} s and has not started, the limit is --max-queue-wait-s {limit_s:g}"
            self._fail(request, FailureKind.QUEUE_WAIT, f"{message}; try again later", updates)
        return updates

    def fail_all(self, kind: FailureKind, message: str) -> Updates:
        """Ends every request."""
        updates = Updates(self._applied_step)
        for request in list(self._requests.values()):
            self._fail(request, kind, message, updates)
        return updates

    def lose_epoch(self, blamed_slots: Collection[int] = ()) -> Updates:
        """The executor is lost, and with it all that it knew; requests are kept, but for what is poison.

        That is whose row of a step in flight was in one of `blamed_slots`, and who ran alone under suspicion.
        """
        updates = Updates(self._applied_step)
        rows = [
            (request, slot)
            for step in self._in_flight
            for request, slot in zip(step.requests, step.row_slots, strict=True)
            if not request.ended
        ]
        at_risk = dict.fromkeys(request for request, _ in rows)
        for request in at_risk:
            count_loss(request)
        blamed = dict.fromkeys(request for request, slot in rows if slot in blamed_slots)
        for request in blamed:
            self._fail(request, FailureKind.POISON, "the executor was lost, and blames this request", updates)
        alone = self._quarantine.alone
        if alone is not None and alone in at_risk and alone not in blamed:
            message = f"the executor was lost {alone.losses} times with this request, the last time while it ran alone"
            self._fail(alone, FailureKind.POISON, message, updates)
        self._restart()
        return updates

    def new_epoch(self, num_blocks: int | None = None, max_in_flight: int | None = None) -> None:
        """The executor has forgotten everything: what ran is preempted, what was in flight never happened.

        `num_blocks` and `max_in_flight` are the executor's now; the blocks must still hold the context.
        """
        self.limits = replace(
            self.limits,
            num_blocks=num_blocks or self.limits.num_blocks,
            max_in_flight=max_in_flight or self.limits.max_in_flight,
        )
        self._restart()

    def _restart(self) -> None:
        for request in self._requests.values():
            request.num_tokens = request.num_known
        for request in reversed(self._running.copy()):
            self._preempt(request)
        self._pool.flush()
        self._begin_epoch()

    def flush_prefix_cache(self) -> int:
        """Forgets all that is cached, also what running requests would still add; how many blocks that were."""
        return self._residents.flush()

    def take_kv_events(self) -> list[KvEvent]:
        """What happened to the prefix cache since the last call."""
        taken = self._kv_events.copy()
        self._kv_events.clear()
        return taken

    def cached(self) -> list[Stored]:
        """All that the prefix cache can find."""
        return self._pool.cached()

    def _fail(self, request: Request, kind: FailureKind, message: str, updates: Updates) -> None:
        updates.failed.append(Failure(request.key, kind, message))
        self._end(request)

    def _fail_row(self, request: Request, kind: str, updates: Updates) -> None:
        if kind == NO_ID_LEFT:
            message = "its bans and bias together leave no id that may come next; loosen one of them"
            self._fail(request, FailureKind.NO_ID_LEFT, message, updates)
            return
        self._residents.distrust(request)
        self._fail(request, FailureKind.ROW_FAILED, f"the executor could not compute it: {kind}", updates)

    def _end(self, request: Request) -> None:
        request.ended = True
        del self._requests[request.key]
        self._quarantine.discard(request)
        request.siblings.remove(request)
        if request.slot == NO_SLOT:
            self._waiting.discard(request)
        else:
            self._residents.leave(request, self._applied_step)
        self._tenants.ended(request.account)
        self.counters.ended(request)
        self._queue_wait.ended(request)
        self._num_uncounted -= not request.submission.is_counted
        self._num_masked -= request.is_masked
        if not self._requests:
            self._deadlines.clear()
            self._queue_wait.clear()

    # -- plan

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step; None when there is nothing to do, or enough is in flight.

        A plan without rows only tells the executor of freed slots.
        """
        if len(self._in_flight) >= self.limits.max_in_flight:
            return None
        step = Step(self._next_step, self.limits.max_step_tokens, now_ns)
        self._slots.thaw(step.number)
        for request in self._plan_decodes(step):
            if request.num_to_compute <= step.budget or (step.budget > 0 and not step.is_cut):
                step.add_chunk(request, self._chunk(request.num_to_compute, step.budget))
        while step.budget > 0 and step.num_named < MAX_NAMED_TOKENS and self._slots.num_usable > 0:
            if not self._admit_next(step, now_ns):
                break
        step.use_up()
        if step.is_empty and not self._slots.has_unannounced and not self._waits_for_a_slot():
            return None
        self._in_flight.append(step)
        self._next_step += 1
        return step.depart(self._slots.announce(step.number), any_masked=self._num_masked > 0)

    def _plan_decodes(self, step: Step) -> list[Request]:
        """Adds the requests that miss one token; returns those that miss more."""
        prefills = []
        singles, budget = step.singles, step.budget
        for request in self._running:  # it may shrink from its end, which a list's iterator allows
            computed = request.num_computed
            if request.num_tokens - computed > 1:
                missing = request.num_tokens - request.room_tokens  # where ids were forced
                if missing > 0 and not self._grow(request, step, -(-missing // self.limits.block_tokens)):
                    break
                prefills.append(request)
            elif computed < request.last_computed and budget > 0:  # else its last id is on its way
                if request.is_stepwise and request.is_held:
                    continue
                if computed == request.room_tokens and not self._grow(request, step):
                    break  # it was the last, and is preempted
                singles.append(request)
                budget -= 1
        step.budget = budget
        return prefills

    def _grow(self, request: Request, step: Step, count: int = 1) -> bool:
        """So many blocks more, for which the last by rank are preempted; False, and none, if that was `request`."""
        while self._pool.num_free < count:
            last = self._running[-1]
            self._preempt(last)
            if last is request:
                return False
        for _ in range(count):
            step.new_blocks.append((request.slot, self._residents.grow(request)))
        return True

    def _preempt(self, request: Request) -> None:
        self._residents.evict(request)
        request.preemptions += 1
        self.counters.preemptions += request.submission.is_counted
        self._waiting.put_back(request)

    def _chunk(self, missing: int, budget: int) -> int:
        """Tokens of a prefill of `missing` that are computed when `budget` are left."""
        if missing <= budget:
            return missing
        return budget - min(self.limits.prefill_reserve, budget // 2)

    def _admit_next(self, step: Step, now_ns: int) -> bool:
        """Starts the first of the queue that can start; False if none may. What is passed over for it is counted."""
        if self._quarantine.is_open:
            return self._admit_alone(step, now_ns)
        passed: list[Request] = []
        for request in self._waiting:
            is_due = request.overtaken >= self.limits.max_overtakes
            if request.can_be_named:
                placement = place(request, self._pool, self.limits.block_tokens)
                if placement is None:
                    continue
                ends = request.num_to_compute - placement.num_computed <= step.budget
                # A block for each that runs: they are about to need one, and would take it back from the last.
                if (ends or is_due or not step.is_cut) and fits(placement, self._pool, len(self._running)):
                    for other in passed:
                        other.overtaken += 1
                    self._admit(request, placement, step, now_ns)
                    return True
            if is_due or len(passed) == _LOOK_AHEAD:
                return False
            passed.append(request)
        return False

    def _admit_alone(self, step: Step, now_ns: int) -> bool:
        """Starts the first suspect, beside nothing."""
        if self._running or self._in_flight or not step.is_empty:
            return False
        for request in self._waiting:
            if request in self._quarantine and request.can_be_named:
                placement = place(request, self._pool, self.limits.block_tokens)
                if placement is not None and fits(placement, self._pool, 0):
                    self._quarantine.alone = request
                    self._admit(request, placement, step, now_ns)
                    return True
        return False

    def _release_passed(self) -> None:
        """The one that ran alone has got an id. Where others are to run alone yet, it waits for them."""
        passed = self._quarantine.alone
        assert passed is not None
        self._quarantine.discard(passed)
        if self._quarantine.is_open:
            self._preempt(passed)

    def _admit(self, request: Request, placement: Placement, step: Step, now_ns: int) -> None:
        self._waiting.discard(request)
        if (copy := self._residents.admit(request, placement)) is not None:
            step.copies.append(copy)
        request.overtaken = 0
        step.num_named += request.num_tokens
        request.is_scored = request.wants_scores
        request.given_tokens, request.unsent_forced = request.num_tokens, []
        if request.scheduled_ns == 0:
            request.scheduled_ns = now_ns
            request.account.served += PROMPT_WEIGHT * request.num_to_compute
            self.counters.started(request)
            self.counters.first_step(request)
            self._count_hits(request, placement)
        step.started.append(
            Start(
                key=request.key,
                slot=request.slot,
                submission=request.submission,
                seed=request.seed,
                token_ids=request.token_ids(),
                block_ids=request.blocks.copy(),
                num_computed=placement.num_computed,
                is_scored=request.is_scored,
            )
        )
        step.add_chunk(request, self._chunk(request.num_to_compute, step.budget))

    def _count_hits(self, request: Request, placement: Placement) -> None:
        if self._residents.caches(request) and not request.is_scored and placement.sibling is None:
            request.cached_tokens = placement.num_computed
            if request.submission.is_counted:
                self.counters.prefix_query_tokens += request.prompt_tokens
                self.counters.prefix_hit_tokens += placement.num_computed

    def _waits_for_a_slot(self) -> bool:
        """Whether only the passing of a step makes a slot usable."""
        return (
            len(self._waiting) > 0
            and not self._in_flight
            and self._slots.num_usable == 0
            and self._slots.is_cooling
            and not self._running
        )

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
        prompt_tokens = sum(chunk.count for chunk in step.chunks)
        room_tokens = self.limits.max_step_tokens - (len(step.requests) - len(step.chunks))
        self._queue_wait.stepped(step.planned_ns, now_ns, prompt_tokens, room_tokens)
        if result.scores:
            self._take_scores(step, result, now_ns, updates)
        self._apply_rows(step, result, now_ns, updates)
        if self._quarantine.has_passed():
            self._release_passed()
        self._residents.release_leaving(self._applied_step)
        return updates

    def _apply_rows(self, step: Step, result: StepResult, now_ns: int, updates: Updates) -> None:
        # Every running request passes here in every step: what most rows need stands in the loop.
        token_ids, failed, keys, vocab_size = result.token_ids, result.failed, updates.keys, self.limits.vocab_size
        last_ids_ns, hidden = self.counters.last_ids_ns, self._hidden_keys(step)
        place = 0
        dropped: set[int] = set()
        earlier_ns: list[int] = []
        for request, slot, computed, count in zip(
            step.requests, step.row_slots, step.token_counts, result.token_counts, strict=True
        ):
            if request.ended:
                self.counters.dropped_tokens += count * request.submission.is_counted
                dropped.update(range(place, place + count))
            elif failed and slot in failed:
                self._fail_row(request, failed[slot], updates)
            else:
                if request.slot == slot:  # else it was preempted, and this KV is gone
                    request.num_stored = stored = request.num_stored + computed
                    if stored >= request.next_stored:
                        self._residents.store(request)
                if count:
                    token_id = token_ids[place]
                    if 0 <= token_id < vocab_size:
                        output = request.output
                        output.append(token_id)
                        keys.append(request.key)
                        if request.last_id_ns != last_ids_ns:
                            earlier_ns.append(request.last_id_ns)
                        request.last_id_ns = now_ns
                        request.account.served += OUTPUT_WEIGHT
                        length = len(output)
                        request.awaits_forced = request.is_stepwise
                        if request.first_token_ns == 0:
                            self._note_first(request, now_ns, updates)
                        if token_id in request.stop_ids and length > request.min_tokens:
                            self._finish(request, FinishReason.STOP, token_id, now_ns, updates)
                        elif length >= request.max_tokens:
                            self._finish(request, FinishReason.LENGTH, None, now_ns, updates)
                    else:
                        message = f"the executor returned id {token_id}, the vocabulary has {vocab_size}"
                        self._fail(request, FailureKind.BAD_TOKEN_ID, message, updates)
                        dropped.add(place)
            place += count
        updates.take_ids(token_ids, dropped)
        self.counters.ids_told(len(keys), sum(key in hidden for key in keys) if hidden else 0, earlier_ns, now_ns)

    # -- grammars, whose states somebody else keeps

    def force(self, key: RequestKey, token_ids: Sequence[int], now_ns: int) -> Updates:
        """Appends the ids, perhaps none, that follow the last one of a stepwise request, which may go on now.

        They count as the output's: a stop id among them, or the length, ends it. Nothing happens to one that has ended.
        """
        updates = Updates(self._applied_step)
        request = self._requests.get(key)
        if request is None or not request.awaits_forced:
            return updates
        request.awaits_forced = False
        taken = self._forcible(request, token_ids)
        if taken:
            request.output += taken
            request.num_tokens = request.num_known
            if request.slot != NO_SLOT:
                request.unsent_forced += taken
            request.account.served += OUTPUT_WEIGHT * len(taken)
            updates.add_forced(key, taken)
            self.counters.output_tokens += len(taken) * request.submission.is_counted
            if taken[-1] in request.stop_ids and len(request.output) > request.min_tokens:
                self._finish(request, FinishReason.STOP, taken[-1], now_ns, updates)
            elif len(request.output) >= request.max_tokens:
                self._finish(request, FinishReason.LENGTH, None, now_ns, updates)
        return updates

    def _forcible(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """Those of the ids that the request takes: up to its length, and to the first that stops it."""
        taken: list[int] = []
        for token_id in token_ids[: request.max_tokens - len(request.output)]:
            taken.append(token_id)
            if token_id in request.stop_ids and len(request.output) + len(taken) > request.min_tokens:
                break
        return taken

    def finish(self, key: RequestKey, now_ns: int) -> Updates:
        """Ends a request whose grammar is at its end, as a stop id would."""
        updates = Updates(self._applied_step)
        if (request := self._requests.get(key)) is not None:
            self._finish(request, FinishReason.STOP, None, now_ns, updates)
        return updates

    def fail(self, key: RequestKey, kind: FailureKind, message: str) -> Updates:
        """Ends a request that cannot go on, alone."""
        updates = Updates(self._applied_step)
        if (request := self._requests.get(key)) is not None:
            self._fail(request, kind, message, updates)
        return updates

    def _hidden_keys(self, step: Step) -> set[RequestKey]:
        """The rows of a step that do not count; most often nobody's."""
        if not self._num_uncounted:
            return set()
        return {request.key for request in step.requests if not request.submission.is_counted}

    def _take_scores(self, step: Step, result: StepResult, now_ns: int, updates: Updates) -> None:
        """Passes on what was not told before: what the executor computes again after a preemption, it scores again."""
        for slot, request in zip(step.row_slots, step.requests, strict=True):
            scores = result.scores.get(slot)
            if scores is None or request.ended or scores.stop <= request.next_scored:
                continue
            updates.scores.append((request.key, scores.since(request.next_scored)))
            request.next_scored = scores.stop
            if request.max_tokens == 0 and not request.wants_scores:
                self._finish(request, FinishReason.LENGTH, None, now_ns, updates)

    def _note_first(self, request: Request, now_ns: int, updates: Updates) -> None:
        request.first_token_ns = now_ns
        self.counters.first_id(request)
        updates.started.append(
            Started(request.key, request.queued_ns, request.scheduled_ns, now_ns, request.cached_tokens)
        )

    def _finish(
        self, request: Request, reason: FinishReason, stop_id: int | None, now_ns: int, updates: Updates
    ) -> None:
        updates.finished.append(Finished(request.key, reason, stop_id, request.preemptions, now_ns))
        self.counters.finished[reason] += request.submission.is_counted
        self._end(request)

    # -- the books

    @property
    def is_idle(self) -> bool:
        """No request, nothing in flight, and the executor knows it."""
        return not self._requests and not self._in_flight and not self._slots.has_unannounced

    def check_idle(self) -> None:
        """Raises InvariantError when an idle engine still holds something; O(1)."""
        counts = [
            (f"{len(self._waiting)} waiting requests", len(self._waiting)),
            (f"{self._waiting.num_tokens} waiting tokens", self._waiting.num_tokens),
            (f"{len(self._deadlines)} deadlines", len(self._deadlines)),
            (f"{len(self._queue_wait)} limits of waiting", len(self._queue_wait)),
            (f"the accounts of {len(self._tenants)} tenants", len(self._tenants)),
        ]
        if left := [*self._residents.held(), *(what for what, count in counts if count)]:
            raise InvariantError(f"the engine is idle, but holds {', '.join(left)}")

    def check_books(self) -> None:
        """Raises InvariantError unless blocks, slots and requests add up; O(blocks), for tests."""
        holding = list(self._residents)
        books.check_blocks(self._pool, holding)
        books.check_slots(self._slots, holding)
        books.check_waiting(self._waiting)
        books.check_tenants(self._tenants, self._requests.values(), self._waiting)
        preempted = sum(request.preemptions > 0 and request.submission.is_counted for request in self._waiting)
        if preempted != self._waiting.num_preempted:
            raise InvariantError(f"{preempted} preempted requests wait, {self._waiting.num_preempted} are counted")
        if len(self._requests) != len(self._running) + len(self._waiting):
            raise InvariantError("a request neither runs nor waits")
