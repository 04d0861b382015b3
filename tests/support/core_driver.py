"""Drives the scheduler's core against the stub executor's batch, without I/O: every plan passes through the contract's
messages and its strict checks, every id is known in advance, and the books are audited after each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from loadtest.stub_batch import Batch, expected_ids, own_logprob
from services.common.digests import chained_digest, prompt_digests, root_digest
from services.common.philox import derived_seed
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Failure, RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import NO_ID_LEFT, Finished, Scores, Started, StepPlan, StepResult, Updates
from services.scheduler.plan_codec import encode_plan

MS = 1_000_000


@dataclass
class Seen:
    """What one request was told, and what it should be."""

    submission: Submission
    choice: int = 0
    ids: list[int] = field(default_factory=list)
    scores: list[tuple[float, int]] = field(default_factory=list)  # of the prompt's ids, from position 1
    started: Started | None = None
    finished: Finished | None = None
    failure: Failure | None = None
    aborted: bool = False
    cut: bool = False
    """Ended by its grammar, before its expected end."""

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.failure is not None or self.aborted


class CoreDriver:
    """`step()` plans, executes and applies once. With several plans in flight, results come as late as they may."""

    def __init__(self, *, prefix_cache: bool = True, **limits: Any) -> None:
        figures = {
            "vocab_size": 97,
            "context_tokens": 64,
            "num_blocks": 17,
            "block_tokens": 4,
            "max_slots": 4,
            "max_step_tokens": 16,
            "max_waiting": 100,
            **limits,
        }
        self.limits = Limits(**figures)
        self.core = Scheduler(self.limits, chained_digest if prefix_cache else None)
        self.seen: dict[RequestKey, Seen] = {}
        self.plans: list[StepPlan] = []
        self.now_ns = MS
        self.bad_ids: dict[RequestKey, int] = {}  # told in place of the next id
        self.failing: set[RequestKey] = set()  # whose next sampling row fails
        self.idless: set[RequestKey] = set()  # for whose next sampling row no id is left
        self._results: deque[StepResult] = deque()
        self._drawing: deque[list[RequestKey]] = deque()  # whose rows sample, by result
        self._unforced: list[tuple[RequestKey, list[int]]] = []  # (stepwise request, what is forced behind its last id)
        self._slot_keys: dict[int, RequestKey] = {}
        self._next_id = 1
        self._new_batch()

    def _new_batch(self) -> None:
        limits = self.limits
        self.batch = Batch(
            vocab_size=limits.vocab_size,
            num_blocks=limits.num_blocks,
            block_tokens=limits.block_tokens,
            max_slots=limits.max_slots,
            max_step_tokens=limits.max_step_tokens,
            context_tokens=limits.context_tokens,
            max_in_flight=limits.max_in_flight,
        )

    # -- requests

    def submit(self, prompt: Sequence[int] | int, **fields: Any) -> RequestKey:
        """A prompt of these ids, or of so many; the key of the first choice that runs. Fields are Submission's.

        `received` says of each choice that is resumed how many of its ids it has.
        """
        key = RequestKey(fields.pop("frontend", 1), self._next_id)
        choices = fields.pop("choices", 1)
        self._next_id += choices
        if isinstance(prompt, int):
            prompt = [(key.request_id * 7 + i) % self.limits.vocab_size for i in range(prompt)]
        prompt_ids = np.array(prompt, dtype=np.uint32)
        root = root_digest(tenant=fields.get("tenant", ""), salt=fields.pop("salt", ""), adapter="")
        fields = {
            "max_tokens": 8,
            "seed": key.request_id,
            "key": key,
            "root_digest": root,
            "digests": prompt_digests(root, prompt_ids, self.limits.block_tokens),
            **fields,
        }
        seeds = tuple(derived_seed(fields["seed"], choice) for choice in range(1, choices))
        received = sorted(fields.pop("received", {}).items())
        submission = Submission(prompt_ids=prompt_ids, more_seeds=seeds, **fields)
        outputs = {
            choice: self._drawn(prompt, derived_seed(submission.seed, choice), submission) for choice, _ in received
        }
        submission = replace(
            submission, resumed=tuple((choice, tuple(outputs[choice][:count])) for choice, count in received)
        )
        for (choice, output), each in zip(submission.choices, submission.choice_keys(), strict=True):
            self.seen[each] = Seen(submission, choice, list(output))
        failure = self.core.submit(submission, self.now_ns)
        if failure is not None:
            for each in submission.choice_keys():
                self.seen[each].failure = failure
        elif submission.is_stepwise and received:
            for (choice, count), each in zip(received, submission.choice_keys(), strict=True):
                if count:
                    self._unforced.append((each, self._left_forced(outputs[choice], count)))
        return submission.choice_keys()[0]

    def choices(self, key: RequestKey) -> list[Seen]:
        """All of its request that run, in order."""
        return [self.seen[each] for each in self.seen[key].submission.choice_keys()]

    def abort(self, key: RequestKey) -> None:
        if not self.seen[key].ended:
            self.seen[key].aborted = True
        self.core.abort(key)

    def expected(self, key: RequestKey) -> list[int]:
        """All ids that it receives when nothing ends it early: cut at its first stop id."""
        submission, choice = self.seen[key].submission, self.seen[key].choice
        seed = derived_seed(submission.seed, choice)
        ids = self._drawn(submission.prompt_ids.tolist(), seed, submission)
        for position, token_id in enumerate(ids):
            if token_id in submission.stop_ids and position >= submission.min_tokens:
                return ids[: position + 1]
        return ids

    def forced(self, token_id: int) -> list[int]:
        """What follows a drawn id of a stepwise request without being drawn."""
        return [(token_id + i) % self.limits.vocab_size for i in range(1, token_id % 4)]

    def _left_forced(self, output: list[int], count: int) -> list[int]:
        """What is still to be forced behind the first `count` ids of a stepwise output."""
        end = 0
        while end < count:
            end += 1 + len(self.forced(output[end]))
        return output[count:end]

    def _drawn(self, prompt: list[int], seed: int, submission: Submission) -> list[int]:
        vocab_size, length = self.limits.vocab_size, submission.max_tokens
        if not submission.is_stepwise:
            return expected_ids(prompt, seed, length, vocab_size)
        ids: list[int] = []
        while len(ids) < length:
            (drawn,) = expected_ids(prompt + ids, seed, 1, vocab_size)
            ids += [drawn, *self.forced(drawn)]
        return ids[:length]

    def settle(self) -> None:
        """Tells the core what is forced behind the ids that it was waiting with."""
        unforced, self._unforced = self._unforced, []
        for key, token_ids in unforced:
            self.take(self.core.force(key, token_ids, self.now_ns), forced=True)
            self.core.check_books()

    def finish(self, key: RequestKey) -> None:
        """As a grammar's end would."""
        self.seen[key].cut = True
        self.take(self.core.finish(key, self.now_ns))

    # -- steps

    def plan(self) -> StepPlan | None:
        """One plan, executed but not applied; None when there is none."""
        stuck_without = self._must_start()
        plan = self.core.plan(self.now_ns)
        self.core.check_books()
        assert plan is not None or not stuck_without, "something waits, nothing runs, enough is free: nothing planned"
        if plan is None:
            return None
        assert plan.started or not stuck_without
        assert plan.num_tokens <= self.limits.max_step_tokens
        self.plans.append(plan)
        for start in plan.started:
            self._slot_keys[start.slot] = start.key
        self._check_masked(plan)
        self._results.append(self._execute(plan))
        return plan

    def _check_masked(self, plan: StepPlan) -> None:
        """The position of each masked row is that of the id it is to draw: after those told, and those on their way."""
        for row in plan.masked:
            on_its_way = sum(row.key in keys for keys in self._drawing)
            assert row.position == len(self.seen[row.key].ids) + on_its_way
            assert self._slot_keys[row.slot] == row.key
            assert on_its_way == 0 or not self.seen[row.key].submission.is_stepwise

    def apply(self) -> Updates:
        """The oldest result in flight."""
        self.now_ns += MS
        updates = self.core.apply(self._results.popleft(), self.now_ns)
        self._drawing.popleft()
        self.core.check_books()
        self.take(updates)
        return updates

    def step(self) -> StepPlan | None:
        """Plans until enough is in flight, then applies one result; the last plan made."""
        last = None
        self.settle()
        while (plan := self.plan()) is not None:
            last = plan
        if self._results:
            self.apply()
            self.settle()
        return last

    def run(self, limit: int = 5000) -> int:
        """Steps until the engine is idle; how many it took."""
        for steps in range(limit):
            applied = self.core.applied_step
            if self.step() is None and self.core.applied_step == applied:
                assert self.core.num_requests == 0
                self.core.check_idle()
                assert self.batch.num_blocks_held == 0 and not self.batch.slots, "the executor still holds something"
                return steps
        raise AssertionError(f"{self.core.num_requests} requests are left after {limit} steps")

    def lose_executor(self, blamed_slots: Sequence[int] = ()) -> None:
        """A new epoch: what was in flight never arrives."""
        self._results.clear()
        self._drawing.clear()
        self.take(self.core.lose_epoch(blamed_slots))
        self.core.check_books()
        self.core.new_epoch()
        self._new_batch()
        self.core.check_books()

    def take(self, updates: Updates, *, forced: bool = False) -> None:
        """Keeps what the requests are told; nothing is told of one that has ended."""
        at = 0
        for key, scores in updates.scores:
            self._take_scores(self.seen[key], scores)
        for started in updates.started:
            assert self.seen[started.key].started is None
            self.seen[started.key].started = started
        for key, count in zip(updates.keys, updates.counts, strict=True):
            seen = self.seen[key]
            assert not seen.ended
            seen.ids += updates.token_ids[at : at + count]
            assert seen.ids == self.expected(key)[: len(seen.ids)]
            if seen.submission.is_stepwise and not forced:
                self._unforced.append((key, self.forced(seen.ids[-1])))
            at += count
        assert at == len(updates.token_ids) == len(updates.places)
        for finished in updates.finished:
            assert not self.seen[finished.key].ended
            seen = self.seen[finished.key]
            assert seen.cut or seen.ids == self.expected(finished.key)
            if seen.submission.prompt_logprobs is not None and seen.choice == 0 and not seen.cut:
                assert len(seen.scores) == len(seen.submission.prompt_ids) - 1
            self.seen[finished.key].finished = finished
        for failure in updates.failed:
            assert not self.seen[failure.key].ended
            self.seen[failure.key].failure = failure

    def _take_scores(self, seen: Seen, scores: Scores) -> None:
        """They come before the first id, each position once and in order."""
        assert not seen.ended and not seen.ids
        assert scores.start == len(seen.scores) + 1
        seen.scores += zip(scores.logprobs.tolist(), scores.ranks.tolist(), strict=True)
        told = seen.submission.prompt_ids[1 : len(seen.scores) + 1].tolist()
        assert seen.scores == [own_logprob(token_id) for token_id in told]

    @property
    def in_flight(self) -> int:
        return len(self._results)

    @property
    def oldest_result(self) -> StepResult:
        """In flight."""
        return self._results[0]

    def _must_start(self) -> bool:
        """Whether the next plan has to start the head of the queue: all blocks and a slot are free for it."""
        core = self.core
        usable = core._slots.num_usable > 0 or any(
            step <= core._next_step
            for step, _ in core._slots._cooling  # thawed by the plan itself
        )
        idle = core.num_running == 0 and core.num_in_flight == 0 and core.free_blocks == core.total_blocks
        return core.num_waiting > 0 and idle and usable

    def _execute(self, plan: StepPlan) -> StepResult:
        counts, ids, failed, scores = [], [], {}, {}
        drawing: list[RequestKey] = []
        self._drawing.append(drawing)
        for row in self.batch.take(encode_plan(plan).plan):
            key = self._slot_keys[row.number]
            if row.samples:
                drawing.append(key)
            if row.scored:
                own = [own_logprob(row.slot.ids[position]) for position in row.scored]
                logprobs, ranks = zip(*own, strict=True)
                scores[row.number] = Scores.plain(
                    row.scored.start, np.array(logprobs, dtype=np.float32), np.array(ranks, dtype=np.uint32)
                )
            if not row.samples:
                counts.append(0)
            elif key in self.failing | self.idless or row.slot.failed:
                self.failing.discard(key)
                row.slot.fail(samples=True)
                failed[row.number] = NO_ID_LEFT if key in self.idless else "BAD_LOGITS"
                scores.pop(row.number, None)
                counts.append(0)
            else:
                token_id = self.batch.next_id(row.slot)
                row.slot.append(token_id)
                counts.append(1)
                ids.append(self.bad_ids.pop(key, token_id))
        masked = {key for key in drawing if self.seen[key].submission.is_masked}
        assert masked == {row.key for row in plan.masked} and len(masked) == len(plan.masked)
        return StepResult(plan.step, counts, ids, failed, scores)
