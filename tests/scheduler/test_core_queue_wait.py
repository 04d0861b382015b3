"""The limit of waiting: who is refused at once, who later, and that what is let in starts in time under overload."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.scheduler.core.limits import Limits
from services.scheduler.core.queue_wait import PATIENCE, Ahead, QueueWait
from services.scheduler.core.request import FailureKind, RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import StepResult
from tests.support.core_driver import MS, CoreDriver

S = 1000 * MS
STEP_NS = 10 * MS


def driver(**limits: object) -> CoreDriver:
    """One slot; a choice of 8 ids runs for 8 steps."""
    return CoreDriver(**{"max_slots": 1, "max_queue_wait_ns": S, **limits})


def slow_step(d: CoreDriver, step_ns: int) -> None:
    if d.plan() is not None:
        d.now_ns += step_ns - MS
        d.apply()


def run_one(d: CoreDriver, step_ns: int) -> None:
    """A choice that runs alone, 8 steps of `step_ns`: what later waits are expected from."""
    key = d.submit(4)
    while not d.seen[key].ended:
        slow_step(d, step_ns)
    d.step()


def refused(d: CoreDriver, key: RequestKey) -> bool:
    failure = d.seen[key].failure
    assert failure is None or failure.kind is FailureKind.QUEUE_WAIT
    return failure is not None


def test_one_that_would_wait_too_long_is_refused_at_once_with_the_excess_as_hint() -> None:
    d = driver()
    run_one(d, 50 * MS)  # so a choice runs for 0.4 s, and a step more
    running = d.submit(4)
    d.step()
    assert not refused(d, d.submit(4)) and not refused(d, d.submit(4))
    third = d.submit(4)
    assert refused(d, third)
    failure = d.seen[third].failure
    assert failure is not None and failure.retry_after_ns is not None
    assert failure.message.startswith("would wait for about 1.3 s before it starts, the limit is --max-queue-wait-s 1;")
    assert 200 * MS < failure.retry_after_ns <= 350 * MS
    assert not d.seen[running].ended
    d.run()


def test_without_a_limit_nobody_is_refused_and_the_wait_is_told_all_the_same() -> None:
    d = driver(max_queue_wait_ns=None)
    run_one(d, 50 * MS)
    d.submit(4)
    d.step()
    assert not any(refused(d, d.submit(4)) for _ in range(20))
    assert 21 * 400 * MS < d.core.expected_wait_ns(d.now_ns) < 21 * 450 * MS
    d.run()
    assert d.core.expected_wait_ns(d.now_ns) == 0


def test_where_slots_and_blocks_are_free_nobody_waits_however_long_choices_run() -> None:
    d = driver(max_slots=4)
    run_one(d, 1000 * MS)
    assert not any(refused(d, d.submit(4)) for _ in range(4))
    assert refused(d, d.submit(4))
    d.run()


def test_before_any_choice_has_ended_the_age_of_the_oldest_counts() -> None:
    d = driver()
    d.submit(4, max_tokens=40)
    d.step()
    assert not any(refused(d, d.submit(4)) for _ in range(5)), "nothing is known yet"
    d.now_ns += S // 2
    assert refused(d, d.submit(4)), "behind five of which none is over after half a second"
    d.run()


def test_blocks_that_are_missing_count_where_slots_are_free() -> None:
    d = driver(max_slots=8, num_blocks=17, prefix_cache=False)
    run_one(d, 100 * MS)
    first = d.submit(40, max_tokens=20)  # 10 of 16 blocks now, 15 later
    d.step()
    assert not refused(d, d.submit(40, max_tokens=20))
    assert refused(d, d.submit(40, max_tokens=20))
    assert not d.seen[first].ended
    d.run()


def test_prompts_before_it_count_at_the_rate_of_full_steps() -> None:
    d = driver(max_slots=8, num_blocks=200, max_step_tokens=16, prefix_cache=False)
    key = d.submit(48, max_tokens=1)  # three full steps of 0.1 s
    while not d.seen[key].ended:
        slow_step(d, 100 * MS)
    assert not any(refused(d, d.submit(48, max_tokens=8)) for _ in range(4)), "0.9 s for the three before the last"
    assert refused(d, d.submit(48, max_tokens=8))
    d.run()


def test_a_long_prompt_of_its_own_is_no_wait() -> None:
    d = driver(max_slots=8, num_blocks=200, context_tokens=600, max_step_tokens=16, prefix_cache=False)
    run_one(d, 500 * MS)
    assert not refused(d, d.submit(500))
    d.run()


def test_a_higher_priority_and_another_tenant_do_not_wait_for_those_behind_them() -> None:
    d = driver(max_waiting=50)
    run_one(d, 50 * MS)
    d.submit(4)
    d.step()
    while not refused(d, d.submit(4, tenant="many")):
        pass
    assert not refused(d, d.submit(4, tenant="few"))
    assert not refused(d, d.submit(4, tenant="many", priority=-1))
    d.now_ns += S // 2
    d.run()


def test_all_choices_of_a_request_are_waited_for() -> None:
    d = driver(max_slots=2)
    run_one(d, 200 * MS)
    assert not refused(d, d.submit(4, choices=2))
    d.step()
    assert not refused(d, d.submit(4)) and refused(d, d.submit(4, choices=4))
    d.run()


def test_one_that_was_let_in_and_waits_too_long_is_refused_then() -> None:
    d = driver()
    d.submit(4, max_tokens=40)
    d.step()
    waiting = [d.submit(4), d.submit(4, choices=2)]
    began_ns = d.now_ns
    assert d.core.next_deadline_ns == began_ns + round(PATIENCE * S)
    d.now_ns = began_ns + round(PATIENCE * S) - 1
    d.take(d.core.expire(d.now_ns))
    assert not any(seen.ended for key in waiting for seen in d.choices(key))
    d.now_ns += 1
    d.take(d.core.expire(d.now_ns))
    assert all(refused(d, key) for key in waiting) and all(seen.failure for seen in d.choices(waiting[1]))
    failure = d.seen[waiting[0]].failure
    assert failure is not None and failure.message.startswith("waited for 1.1 s and has not started")
    assert d.core.next_deadline_ns is None
    d.run()


def test_what_has_started_is_never_refused_also_where_it_waits_again() -> None:
    d = driver(max_slots=2, num_blocks=17, prefix_cache=False)
    first, second = d.submit(20, max_tokens=30), d.submit(20, max_tokens=30)
    while not d.core.counters.preemptions:
        d.step()
    assert d.core.num_waiting == 1
    d.now_ns += 10 * S
    d.take(d.core.expire(d.now_ns))
    d.run()
    assert d.seen[first].finished and d.seen[second].finished


def test_what_goes_on_from_elsewhere_may_wait_as_long_as_it_takes() -> None:
    d = driver()
    run_one(d, 50 * MS)
    d.submit(4)
    d.step()
    while not refused(d, d.submit(4)):
        pass
    resumed = d.submit(4, received={0: 3})
    assert not refused(d, resumed)
    d.now_ns += 10 * S
    d.take(d.core.expire(d.now_ns))
    d.run()
    assert d.seen[resumed].finished


def test_a_lost_executor_changes_nothing_of_what_was_measured_and_nothing_is_left() -> None:
    d = driver()
    run_one(d, 50 * MS)
    key = d.submit(4)
    d.step()
    d.submit(4)
    d.lose_executor()
    assert not refused(d, d.submit(4)) and refused(d, d.submit(4))
    d.run()
    assert d.seen[key].finished


def test_the_mean_is_of_what_ended_lately() -> None:
    wait = QueueWait(S)
    ahead = Ahead(choices=2, queued_tokens=0, room=1, prefill_tokens=0, running=0, oldest_ns=0)
    assert wait.expected_ns(ahead, 7) == 7
    wait._run_ns.add(100)
    assert wait.expected_ns(ahead, 7) == 100
    for _ in range(400):
        wait._run_ns.add(300)
    assert wait.expected_ns(ahead, 7) == pytest.approx(300, abs=1)


@dataclass
class Overload:
    """Requests that come at `times` of what the engine can do, at random; time is the steps' and nothing else's."""

    core: Scheduler
    times: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    per_s: float
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    now_ns: int = MS
    refused_at_once: list[int] = field(default_factory=list)
    """When."""
    refused_later: list[int] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)
    """When, and after how long."""

    def run(self, seconds: int) -> None:
        next_ns, number = 0, 0
        while self.now_ns < seconds * S:
            while next_ns <= self.now_ns:
                number += 1
                self._submit(number)
                next_ns += round(self.draw.expovariate(self.times * self.per_s) * S)
            self.step()

    def step(self) -> None:
        self.refused_later += [self.now_ns] * len(self.core.expire(self.now_ns).failed)
        while self.core.plan(self.now_ns) is not None:
            pass
        self.now_ns += STEP_NS
        if self.core.num_in_flight:
            step = self.core._in_flight[0]
            ids = [1] * sum(step.samples)
            told = self.core.apply(StepResult(step.number, step.samples, ids), self.now_ns)
            self.started += [(one.scheduled_ns, one.scheduled_ns - one.queued_ns) for one in told.started]

    def _submit(self, number: int) -> None:
        submission = Submission(
            key=RequestKey(1, number),
            prompt_ids=np.zeros(self.draw.randint(*self.prompt_tokens), np.uint32),
            max_tokens=self.draw.randint(*self.output_tokens),
        )
        if self.core.submit(submission, self.now_ns) is not None:
            self.refused_at_once.append(self.now_ns)


@pytest.mark.parametrize(
    ("limits", "prompts", "outputs", "per_s"),
    [
        ({"max_slots": 8}, (4, 12), (4, 36), 40.0),  # slots: 8 choices of 20 steps of 10 ms
        ({"max_slots": 64, "max_step_tokens": 16}, (30, 50), (1, 2), 40.0),  # prefill: 16 tokens a step, 40 a prompt
        ({"max_slots": 64, "num_blocks": 41}, (30, 50), (2, 10), 60.0),  # blocks: 40, some 12 a choice
    ],
    ids=["slots", "prefill", "blocks"],
)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_under_five_times_the_load_what_is_let_in_starts_in_time_and_afterwards_nobody_waits(
    limits: dict[str, int], prompts: tuple[int, int], outputs: tuple[int, int], per_s: float, max_in_flight: int
) -> None:
    figures = {
        "vocab_size": 97,
        "context_tokens": 64,
        "num_blocks": 400,
        "block_tokens": 4,
        "max_step_tokens": 64,
        "max_waiting": 100_000,
        "max_queue_wait_ns": S,
    }
    core = Scheduler(Limits(**figures | limits, max_in_flight=max_in_flight))
    overload = Overload(core, 5.0, prompts, outputs, per_s)
    overload.run(20)
    measured_ns = 5 * S  # from then on enough has been measured
    waits = sorted(wait_ns for at_ns, wait_ns in overload.started if at_ns > measured_ns)
    at_once, later = (
        sum(at_ns > measured_ns for at_ns in times) for times in (overload.refused_at_once, overload.refused_later)
    )
    assert waits[-1] <= PATIENCE * S + STEP_NS
    assert waits[len(waits) // 2] > 0.5 * S, "the queue is used"
    assert at_once > len(waits) > 300
    assert later < 0.03 * at_once, "hardly anybody is sent away late"
    while core.num_requests:
        overload.step()
    overload.refused_at_once.clear()
    overload._submit(1_000_000)
    assert not overload.refused_at_once
    assert core.expected_wait_ns(overload.now_ns) < S // 20
