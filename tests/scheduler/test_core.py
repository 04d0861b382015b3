"""The core's rules, each alone. The driver checks every plan, id and book besides."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.stub_batch import expected_ids
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import FailureKind, FinishReason, RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import InvariantError, ResultError, StepResult
from tests.support.core_driver import MS, CoreDriver


def kind_of(driver: CoreDriver, key: RequestKey) -> FailureKind | None:
    failure = driver.seen[key].failure
    return failure.kind if failure else None


def test_an_idle_core_plans_nothing() -> None:
    driver = CoreDriver()
    assert driver.plan() is None
    driver.core.check_idle()


def test_a_request_runs_to_its_length() -> None:
    driver = CoreDriver()
    key = driver.submit(5, max_tokens=3)
    driver.run()
    finished = driver.seen[key].finished
    assert finished is not None
    assert (finished.reason, finished.stop_id, finished.preemptions) == (FinishReason.LENGTH, None, 0)
    # 1 prefill of 5 tokens, 2 decodes, then a plan that only frees the slot.
    assert [plan.token_counts for plan in driver.plans] == [[5], [1], [1], []]
    assert driver.plans[-1].freed_slots == [0]


def test_a_request_is_named_whole_once_and_in_columns_after_that() -> None:
    driver = CoreDriver(block_tokens=4)
    driver.submit(6, max_tokens=4)
    driver.run()
    first, *rest = driver.plans
    assert [len(start.block_ids) for start in first.started] == [2]  # 6 tokens in blocks of 4
    assert all(not plan.started for plan in rest)
    # Positions 6 and 7 fit; 8 needs a third block. The last of 4 ids is never computed.
    assert [len(plan.new_blocks) for plan in driver.plans] == [0, 0, 0, 1, 0]
    assert [plan.computed_tokens for plan in driver.plans] == [0, 6, 7, 8, 0]


def test_a_long_prompt_is_computed_in_chunks_and_samples_once_at_its_end() -> None:
    driver = CoreDriver(max_step_tokens=8)
    key = driver.submit(20, max_tokens=2)
    driver.run()
    assert [plan.token_counts for plan in driver.plans] == [[8], [8], [4], [1], []]
    assert driver.seen[key].ids == driver.expected(key)


def test_decodes_go_on_beside_a_long_prefill_and_stand_first() -> None:
    driver = CoreDriver(max_step_tokens=8, context_tokens=64)
    small = driver.submit(2, max_tokens=10)
    driver.step()
    driver.submit(30, max_tokens=1)
    for expected in ([1, 7], [1, 7], [1, 7], [1, 7], [1, 2]):
        plan = driver.step()
        assert plan is not None and plan.token_counts == expected
    assert len(driver.seen[small].ids) == 6


def test_rows_that_compute_one_token_come_first_whatever_their_age() -> None:
    driver = CoreDriver(max_step_tokens=16)
    driver.submit(5)
    driver.submit(1)
    plan = driver.plan()
    assert plan is not None
    assert plan.token_counts == [1, 5]
    assert plan.slots == [1, 0]


def test_the_queue_is_served_in_order_and_not_overtaken() -> None:
    driver = CoreDriver(max_slots=1)
    keys = [driver.submit(n) for n in (9, 1, 5)]
    driver.run()
    started = [driver.seen[key].started for key in keys]
    times = [begun.first_token_ns for begun in started if begun]
    assert times == sorted(times) and len(times) == 3


def test_a_head_that_does_not_fit_is_not_overtaken_by_a_smaller_one() -> None:
    driver = CoreDriver(num_blocks=9, context_tokens=32, block_tokens=4, max_step_tokens=32)
    driver.submit(16, max_tokens=12)
    driver.step()
    big, small = driver.submit(20, max_tokens=2), driver.submit(1, max_tokens=1)
    driver.step()
    assert (driver.core.num_running, driver.core.num_waiting) == (1, 2)
    driver.run()
    assert driver.seen[big].finished and driver.seen[small].finished


def test_no_more_requests_run_than_there_are_slots() -> None:
    driver = CoreDriver(max_slots=2)
    for _ in range(5):
        driver.submit(1, max_tokens=2)
    driver.step()
    assert (driver.core.num_running, driver.core.num_waiting) == (2, 3)
    driver.run()


# -- ends


@pytest.mark.parametrize("position", [0, 1, 4])
def test_a_stop_id_ends_the_request_and_is_its_last_id(position: int) -> None:
    prompt = [3, 1, 4]
    ids = expected_ids(prompt, 9, 8, 97)
    stop_id = ids[position]
    driver = CoreDriver()
    key = driver.submit(prompt, seed=9, max_tokens=8, stop_ids=frozenset({stop_id}))
    driver.run()
    finished = driver.seen[key].finished
    assert finished is not None
    assert (finished.reason, finished.stop_id) == (FinishReason.STOP, stop_id)
    assert driver.seen[key].ids == ids[: ids.index(stop_id) + 1]


def test_a_stop_id_on_the_last_id_allowed_is_a_stop() -> None:
    stop_id = expected_ids([3, 1, 4], 9, 4, 97)[3]
    driver = CoreDriver()
    key = driver.submit([3, 1, 4], seed=9, max_tokens=4, stop_ids=frozenset({stop_id}))
    driver.run()
    finished = driver.seen[key].finished
    assert finished is not None and finished.reason is FinishReason.STOP


def test_a_stop_id_before_min_tokens_does_not_stop() -> None:
    # The stub, as an executor must, does not draw stop ids there; this core does not stop even if one is told.
    driver = CoreDriver()
    key = driver.submit([3, 1, 4], seed=9, max_tokens=5, min_tokens=2)
    submission = driver.seen[key].submission
    ids = expected_ids([3, 1, 4], 9, 5, 97)
    core = Scheduler(driver.limits)
    core.submit(Submission(key, submission.prompt_ids, 5, 2, frozenset(ids)), 0)
    told = []
    for position in range(3):
        plan = core.plan(0)
        assert plan is not None
        updates = core.apply(StepResult(plan.step, [1], [ids[position]]), 0)
        told += updates.token_ids
        assert bool(updates.finished) == (position == 2)
    assert told == ids[:3]


def test_times_are_told_with_the_first_and_the_last_id() -> None:
    driver = CoreDriver(max_slots=1)
    driver.submit(1, max_tokens=3)
    key = driver.submit(2, max_tokens=2)
    driver.run()
    seen = driver.seen[key]
    assert seen.started and seen.finished
    # Submitted at 1 ms. Three steps and one that frees the slot come first, each 1 ms.
    assert seen.started.queued_ns == 1 * MS
    assert seen.started.scheduled_ns == 5 * MS
    assert seen.started.first_token_ns == 6 * MS
    assert seen.finished.last_token_ns == 7 * MS


# -- admission


def test_a_prompt_that_can_never_fit_is_refused_and_says_why() -> None:
    driver = CoreDriver(context_tokens=64, num_blocks=17, block_tokens=4)
    assert kind_of(driver, driver.submit(60, max_tokens=4)) is None
    key = driver.submit(60, max_tokens=5)
    failure = driver.seen[key].failure
    assert failure is not None and failure.kind is FailureKind.TOO_LONG
    assert "prompt has 60 tokens and max_tokens is 5, the context holds 64" in failure.message
    driver.run()


def test_the_largest_request_that_fits_the_pool_runs_alone_to_its_end() -> None:
    driver = CoreDriver(context_tokens=64, num_blocks=17, block_tokens=4)
    key = driver.submit(1, max_tokens=63)
    driver.run()
    assert len(driver.seen[key].ids) == 63


def test_limits_with_a_context_beyond_the_pool_are_refused() -> None:
    with pytest.raises(ValueError, match="a context of 65 tokens exceeds the pool's 64"):
        Limits(
            vocab_size=9,
            context_tokens=65,
            num_blocks=17,
            block_tokens=4,
            max_slots=1,
            max_step_tokens=1,
            max_waiting=1,
        )


@pytest.mark.parametrize(("slots", "waiting"), [(1, 1), (2, 0), (3, 2)])
def test_a_full_queue_refuses_and_what_could_start_does_not_count(slots: int, waiting: int) -> None:
    driver = CoreDriver(max_slots=slots, max_waiting=waiting)
    keys = [driver.submit(1) for _ in range(slots + waiting + 1)]
    assert [kind_of(driver, key) for key in keys] == [None] * (slots + waiting) + [FailureKind.QUEUE_FULL]
    driver.step()
    assert kind_of(driver, driver.submit(1)) is FailureKind.QUEUE_FULL
    driver.run()
    assert kind_of(driver, driver.submit(1)) is None
    driver.run()


def test_an_id_in_use_is_refused() -> None:
    driver = CoreDriver()
    key = driver.submit(3)
    again = driver.core.submit(driver.seen[key].submission, 0)
    assert again is not None and again.kind is FailureKind.INVALID
    driver.run()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(0, 1), (1, 0)])
def test_an_empty_prompt_or_no_tokens_wanted_is_refused(prompt: int, max_tokens: int) -> None:
    driver = CoreDriver()
    assert kind_of(driver, driver.submit(prompt, max_tokens=max_tokens)) is FailureKind.INVALID


# -- preemption


def preempting(num_blocks: int = 9, **limits: int) -> CoreDriver:
    return CoreDriver(
        **{
            "num_blocks": num_blocks,
            "block_tokens": 4,
            "context_tokens": 32,
            "max_step_tokens": 64,
            "max_slots": 4,
            **limits,
        }
    )


@pytest.mark.parametrize("max_step_tokens", [64, 5, 3])
def test_preempted_streams_are_those_of_a_pool_that_never_runs_out(max_step_tokens: int) -> None:
    streams = []
    for num_blocks in (9, 100):
        driver = preempting(num_blocks, max_step_tokens=max_step_tokens)
        keys = [driver.submit(4, max_tokens=20) for _ in range(4)]
        driver.run()
        streams.append([driver.seen[key].ids for key in keys])
        assert (driver.core.counters.preemptions > 0) == (num_blocks == 9)
    assert streams[0] == streams[1]


def test_the_newest_is_preempted_and_returns_whole_before_the_queue() -> None:
    driver = preempting()
    old, new = driver.submit(12, max_tokens=15), driver.submit(12, max_tokens=15)
    driver.step()
    late = driver.submit(1, max_tokens=1)
    while driver.core.counters.preemptions == 0:
        driver.step()
    assert driver.core.num_running == 1
    assert not driver.seen[new].ended
    driver.run()
    finished = [driver.seen[key].finished for key in (old, new, late)]
    assert all(finished)
    assert [end.preemptions for end in finished if end] == [0, 1, 0]
    returned = [start for plan in driver.plans for start in plan.started if start.submission.key == new]
    assert len(returned) == 2
    assert len(returned[1].token_ids) > 12  # prompt and the output it had
    order = [start.submission.key for plan in driver.plans for start in plan.started]
    assert order == [old, new, new, late]


def test_the_oldest_is_never_preempted() -> None:
    driver = preempting(num_blocks=9, max_slots=4)
    oldest = driver.submit(4, max_tokens=28)
    for _ in range(6):
        driver.submit(4, max_tokens=28)
    driver.run()
    end = driver.seen[oldest].finished
    assert end is not None and end.preemptions == 0
    assert driver.core.counters.preemptions > 0


def test_a_preempted_request_can_be_aborted_while_it_waits() -> None:
    driver = preempting()
    driver.submit(12, max_tokens=15)
    new = driver.submit(12, max_tokens=15)
    while driver.core.counters.preemptions == 0:
        driver.step()
    driver.abort(new)
    driver.run()
    assert driver.seen[new].finished is None


# -- abort


def test_abort_while_waiting_leaves_at_once() -> None:
    driver = CoreDriver(max_slots=1)
    driver.submit(1)
    driver.step()
    waiting = driver.submit(1)
    driver.abort(waiting)
    assert driver.core.num_waiting == 0
    driver.run()
    assert all(start.submission.key != waiting for plan in driver.plans for start in plan.started)


def test_blocks_of_an_aborted_request_are_free_at_once_when_nothing_is_in_flight() -> None:
    driver = CoreDriver()
    key = driver.submit(9, max_tokens=9)
    driver.step()
    driver.abort(key)
    assert driver.core.free_blocks == driver.core.total_blocks
    plan = driver.plan()
    assert plan is not None and (plan.freed_slots, plan.slots) == ([0], [])


def test_blocks_of_an_aborted_request_are_free_once_the_step_in_flight_is_applied() -> None:
    driver = CoreDriver()
    key = driver.submit(9, max_tokens=9)
    driver.plan()
    driver.abort(key)
    assert driver.core.free_blocks == driver.core.total_blocks - 3  # 9 tokens in blocks of 4
    updates = driver.apply()
    assert not updates.keys and not updates.finished
    assert driver.core.free_blocks == driver.core.total_blocks
    driver.run()


def test_abort_twice_and_of_an_unknown_id_is_nothing() -> None:
    driver = CoreDriver()
    key = driver.submit(2)
    driver.plan()
    driver.abort(key)
    driver.core.abort(key)
    driver.core.abort(RequestKey(9, 9))
    driver.apply()
    driver.run()


def test_an_id_may_be_used_again_while_the_aborted_one_is_still_in_flight() -> None:
    driver = CoreDriver()
    first = driver.submit(9, max_tokens=5)
    driver.plan()
    driver.abort(first)
    prompt = np.array([8, 8], dtype=np.uint32)
    assert driver.core.submit(Submission(first, prompt, 2, seed=77), driver.now_ns) is None
    driver._slot_keys[1] = first
    updates = driver.apply()
    assert not updates.keys  # the first one's id is not the second's
    second = [core_plan_ids(driver) for _ in range(2)]
    assert second == expected_ids([8, 8], 77, 2, 97)


def core_plan_ids(driver: CoreDriver) -> int:
    """One step by hand; the one id that came of it."""
    plan = driver.core.plan(driver.now_ns)
    assert plan is not None
    (token_id,) = driver.core.apply(driver._execute(plan), driver.now_ns).token_ids
    return token_id


# -- faults


def test_an_id_outside_the_vocabulary_fails_its_request_alone() -> None:
    for bad in (97, 2**31, 2**32 - 1):
        driver = CoreDriver()
        keys = [driver.submit(3, max_tokens=5) for _ in range(3)]
        driver.step()
        driver.bad_ids[keys[1]] = bad
        driver.run()
        assert kind_of(driver, keys[1]) is FailureKind.BAD_TOKEN_ID
        assert len(driver.seen[keys[1]].ids) == 1
        assert driver.seen[keys[0]].finished and driver.seen[keys[2]].finished


def test_a_failed_row_ends_its_request_alone() -> None:
    driver = CoreDriver()
    keys = [driver.submit(3, max_tokens=5) for _ in range(3)]
    driver.step()
    driver.failing.add(keys[0])
    driver.run()
    assert kind_of(driver, keys[0]) is FailureKind.ROW_FAILED
    assert driver.seen[keys[1]].finished and driver.seen[keys[2]].finished


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (StepResult(7, [1], [1]), "a result for step 7, but 1 is the next in flight"),
        (StepResult(1, [1, 1], [1, 1]), "has 1 rows, its result 2"),
        (StepResult(1, [1], [1, 2]), "counts say 1 ids, there are 2"),
        (StepResult(1, [2], [1, 2]), "2 ids for slot 0, the plan asks for 1"),
        (StepResult(1, [0], []), "0 ids for slot 0, the plan asks for 1"),
        (StepResult(1, [1], [1], {3: "x"}), r"slots \[3\] failed, but have no row"),
        (StepResult(1, [1], [1], {0: "x"}), "1 ids for slot 0, the plan asks for 0"),
    ],
)
def test_a_result_that_contradicts_its_plan_is_refused_and_changes_nothing(result: StepResult, complaint: str) -> None:
    driver = CoreDriver()
    key = driver.submit(2, max_tokens=2)
    driver.plan()
    with pytest.raises(ResultError, match=complaint):
        driver.core.apply(result, 0)
    driver.core.check_books()
    driver.apply()
    driver.run()
    assert driver.seen[key].ids == driver.expected(key)


def test_a_result_of_an_earlier_epoch_changes_nothing() -> None:
    driver = CoreDriver()
    key = driver.submit(2, max_tokens=4)
    driver.plan()
    stale = driver.oldest_result
    driver.lose_executor()
    with pytest.raises(ResultError, match="none is in flight"):
        driver.core.apply(stale, 0)
    driver.plan()
    with pytest.raises(ResultError, match="but 2 is the next in flight"):
        driver.core.apply(stale, 0)
    driver.apply()
    driver.run()
    assert driver.seen[key].ids == driver.expected(key)


def test_a_new_epoch_computes_again_what_ran_in_the_order_of_arrival() -> None:
    driver = CoreDriver()
    keys = [driver.submit(3, max_tokens=6) for _ in range(4)]
    driver.step()
    driver.step()
    driver.plan()
    driver.lose_executor()
    plan = driver.plan()
    assert plan is not None
    assert [start.submission.key for start in plan.started] == keys
    assert [len(start.token_ids) for start in plan.started] == [5, 5, 5, 5]
    driver.apply()
    driver.run()


def test_fail_all_ends_what_runs_and_what_waits() -> None:
    driver = CoreDriver(max_slots=1)
    keys = [driver.submit(3) for _ in range(3)]
    driver.step()
    driver.take(driver.core.fail_all(FailureKind.EXECUTOR_LOST, "lost"))
    assert [kind_of(driver, key) for key in keys] == [FailureKind.EXECUTOR_LOST] * 3
    driver.run()


# -- deadlines


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs() -> None:
    driver = CoreDriver(max_slots=1)
    running = driver.submit(2, max_tokens=20, deadline_ns=50 * MS)
    waiting = driver.submit(2, deadline_ns=20 * MS)
    driver.step()
    driver.take(driver.core.expire(20 * MS - 1))
    assert kind_of(driver, waiting) is None
    driver.take(driver.core.expire(20 * MS))
    assert kind_of(driver, waiting) is FailureKind.DEADLINE
    assert driver.core.next_deadline_ns == 50 * MS
    driver.plan()
    driver.take(driver.core.expire(50 * MS))
    assert kind_of(driver, running) is FailureKind.DEADLINE
    assert driver.core.free_blocks < driver.core.total_blocks  # its step is in flight
    driver.apply()
    assert driver.core.free_blocks == driver.core.total_blocks
    driver.run()


def test_deadlines_of_ended_requests_do_not_pile_up_while_another_runs() -> None:
    driver = CoreDriver(max_slots=1)
    driver.submit(2, max_tokens=20, deadline_ns=50 * MS)
    for i in range(1000):
        driver.core.abort(driver.submit(2, deadline_ns=(60 + i) * MS))
    assert len(driver.core._deadlines) < 100
    assert driver.core.next_deadline_ns == 50 * MS


def test_a_deadline_of_a_request_that_has_ended_does_nothing() -> None:
    driver = CoreDriver()
    key = driver.submit(2, max_tokens=1, deadline_ns=50 * MS)
    driver.submit(2, max_tokens=30)
    driver.step()
    assert driver.seen[key].finished
    assert not driver.core.expire(60 * MS).failed
    driver.run()


# -- several steps in flight


@pytest.mark.parametrize("in_flight", [2, 3])
def test_with_more_steps_in_flight_the_ids_are_the_same(in_flight: int) -> None:
    driver = preempting(max_in_flight=in_flight)
    keys = [driver.submit(4, max_tokens=20, stop_ids=frozenset({n})) for n in range(6)]
    driver.run()
    assert driver.core.counters.preemptions > 0
    assert all(driver.seen[key].ids == driver.expected(key) for key in keys)


def test_with_more_steps_in_flight_the_last_id_is_not_computed() -> None:
    driver = CoreDriver(max_in_flight=3)
    driver.submit(5, max_tokens=3)
    driver.run()
    assert [plan.token_counts for plan in driver.plans if plan.slots] == [[5], [1], [1]]


def test_a_slot_that_only_needs_time_is_waited_for_with_an_empty_plan() -> None:
    driver = CoreDriver(max_in_flight=2, max_slots=1)
    keys = [driver.submit(2, max_tokens=1) for _ in range(2)]
    driver.run()
    assert all(driver.seen[key].finished for key in keys)
    # Step 2 frees the slot, step 3 lets it cool, step 4 = 2 + 2 may use it.
    assert [len(plan.slots) for plan in driver.plans] == [1, 0, 0, 1, 0]


def test_a_request_as_large_as_the_pool_starts_when_nothing_else_runs() -> None:
    driver = CoreDriver(num_blocks=5, block_tokens=4, context_tokens=16, max_step_tokens=64)
    driver.submit(1, max_tokens=2)
    driver.submit(15, max_tokens=1)
    driver.run()


def test_an_idle_core_that_holds_something_says_what() -> None:
    driver = CoreDriver()
    driver.core._pool.take(2)
    with pytest.raises(InvariantError, match="2 of 16 blocks"):
        driver.core.check_idle()
    with pytest.raises(InvariantError):
        driver.core.check_books()
