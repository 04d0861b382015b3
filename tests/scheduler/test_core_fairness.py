"""Who is next: priorities, tenants, reserves, and how far one may be overtaken."""

from __future__ import annotations

import pytest

from services.scheduler.core.request import FailureKind, RequestKey
from services.scheduler.core.tenants import MAX_IDLE, OUTPUT_WEIGHT, PROMPT_WEIGHT, Tenants
from tests.support.core_driver import CoreDriver


def order_of_starts(driver: CoreDriver) -> list[RequestKey]:
    return [start.key for plan in driver.plans for start in plan.started]


def kind_of(driver: CoreDriver, key: RequestKey) -> FailureKind | None:
    failure = driver.seen[key].failure
    return failure.kind if failure else None


# -- priorities


def test_lower_priority_values_run_first_and_equals_by_arrival() -> None:
    driver = CoreDriver(max_slots=1)
    keys = [driver.submit(2, max_tokens=1, priority=priority) for priority in (0, 5, -3, 0, -3)]
    driver.run()
    assert order_of_starts(driver) == [keys[i] for i in (2, 4, 0, 3, 1)]


def test_the_lowest_priority_is_preempted_even_when_it_is_older() -> None:
    driver = CoreDriver(num_blocks=9, block_tokens=4, context_tokens=32, max_step_tokens=64)
    low, high = driver.submit(12, max_tokens=15, priority=1), driver.submit(12, max_tokens=15, priority=0)
    driver.run()
    ends = {key: driver.seen[key].finished for key in (low, high)}
    assert [end.preemptions for end in ends.values() if end] == [1, 0]


def test_of_equal_priorities_the_newest_is_preempted() -> None:
    driver = CoreDriver(num_blocks=9, block_tokens=4, context_tokens=32, max_step_tokens=64)
    keys = [driver.submit(12, max_tokens=15, priority=1) for _ in range(2)]
    driver.run()
    assert [end.preemptions for key in keys if (end := driver.seen[key].finished)] == [0, 1]


# -- tenants


def test_a_thousand_requests_of_one_tenant_do_not_delay_anothers_first() -> None:
    driver = CoreDriver(max_slots=2, max_waiting=2000)
    for _ in range(1000):
        driver.submit(4, max_tokens=4, tenant="many")
    for _ in range(20):
        driver.step()
    first = driver.submit(4, max_tokens=4, tenant="one")
    started = len(order_of_starts(driver))
    while first not in order_of_starts(driver):
        driver.step()
    # It takes the first slot that becomes free; at most the other slot's next request comes before it.
    assert order_of_starts(driver).index(first) - started <= 1


def test_tenants_that_always_have_work_are_served_alike_whatever_their_request_sizes() -> None:
    driver = CoreDriver(max_slots=3, max_waiting=2000, num_blocks=100, max_step_tokens=64)
    for _ in range(200):
        driver.submit(20, max_tokens=10, tenant="large")
        for _ in range(4):
            driver.submit(5, max_tokens=3, tenant="small")
    served = {"large": 0, "small": 0}
    while driver.core._tenants.num_waiting("large") and driver.core._tenants.num_waiting("small"):
        driver.step()
    for seen in driver.seen.values():
        if seen.started:
            prompt = len(seen.submission.prompt_ids)
            served[seen.submission.tenant] += PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * len(seen.ids)
    # The paper bounds the difference by 2 max(w_p L_input, w_q M); M, the tokens that may run at once, is 3 * 30 here.
    assert abs(served["large"] - served["small"]) <= 2 * max(PROMPT_WEIGHT * 20, OUTPUT_WEIGHT * 90)
    assert min(served.values()) > 2000


def test_idleness_earns_no_credit() -> None:
    driver = CoreDriver(max_slots=1, max_waiting=2000)
    for _ in range(50):
        driver.submit(4, max_tokens=4, tenant="busy")
    for _ in range(100):
        driver.step()
    # "late" was idle all the time: it takes turns from now on, instead of running until it has caught up.
    late = [driver.submit(4, max_tokens=4, tenant="late") for _ in range(10)]
    begun = len(order_of_starts(driver))
    driver.run()
    order = [key in late for key in order_of_starts(driver)[begun : begun + 8]]
    assert 3 <= sum(order) <= 5


def test_one_that_comes_while_nothing_waits_is_lifted_to_what_the_last_was_served_by_now() -> None:
    """What "busy" was served since it left the queue is no credit of "late"."""
    tenants = Tenants()
    busy = tenants.open("busy", 1)
    tenants.joined_queue(busy)
    tenants.left_queue(busy)
    busy.served += 1000
    assert tenants.open("late", 1).served == 1000


def test_a_tenant_that_ran_alone_is_not_kept_waiting_for_another_to_catch_up() -> None:
    driver = CoreDriver(max_slots=1, max_waiting=100, context_tokens=256, num_blocks=65)
    driver.submit(4, max_tokens=200, tenant="busy")
    while driver.core.num_requests:
        driver.step()
        if len(next(iter(driver.seen.values())).ids) == 199:
            break
    begun = len(order_of_starts(driver))
    late = [driver.submit(4, max_tokens=4, tenant="late") for _ in range(10)]
    for _ in range(10):
        driver.submit(4, max_tokens=4, tenant="busy")
    driver.run()
    order = [key in late for key in order_of_starts(driver)[begun : begun + 8]]
    assert 3 <= sum(order) <= 5


def test_an_account_is_forgotten_when_too_many_are_idle() -> None:
    tenants = Tenants()
    for i in range(MAX_IDLE + 10):
        tenants.ended(tenants.open(str(i), 1))
    assert len(tenants) == 0 and len(tenants._idle) == MAX_IDLE


def test_a_tenant_may_fill_its_share_of_the_queue_and_another_finds_room() -> None:
    driver = CoreDriver(max_slots=1, max_waiting=8, tenant_share=0.75)
    driver.submit(2, max_tokens=20, tenant="many")
    driver.step()
    keys = [driver.submit(2, tenant="many") for _ in range(7)]
    assert [kind_of(driver, key) for key in keys] == [None] * 6 + [FailureKind.TENANT_OVER_SHARE]
    failure = driver.seen[keys[-1]].failure
    assert failure is not None
    assert "tenant 'many' has 6 requests waiting, its share of the queue is 6 of 8" in failure.message
    assert [kind_of(driver, driver.submit(2, tenant="one")) for _ in range(3)] == [None, None, FailureKind.QUEUE_FULL]
    driver.run()


def test_the_queue_is_bounded_in_tokens_too_and_takes_one_request_whatever_its_size() -> None:
    driver = CoreDriver(max_slots=1, max_waiting_tokens=20)
    driver.submit(2, max_tokens=20)
    driver.step()
    sizes = (30, 1)
    assert [kind_of(driver, driver.submit(size)) for size in sizes] == [None, FailureKind.QUEUE_FULL]
    driver.run()
    assert driver.core.waiting_tokens == 0


def test_tokens_that_are_cached_do_not_count_as_waiting() -> None:
    driver = CoreDriver(max_slots=1)
    driver.submit(list(range(9)), max_tokens=20)
    driver.step()
    driver.submit([*range(9), 1], max_tokens=1)
    assert driver.core.waiting_tokens == 2
    driver.run()


# -- one huge prompt


@pytest.mark.parametrize("reserve", [4, 8])
def test_K4_small_requests_behind_a_huge_prompt_start_in_the_next_step(reserve: int) -> None:
    driver = CoreDriver(num_blocks=300, context_tokens=1000, max_step_tokens=16, max_slots=8, prefill_reserve=reserve)
    huge = driver.submit(800, max_tokens=1)
    driver.step()
    for _ in range(10):
        small = driver.submit(reserve, max_tokens=1)
        plan = driver.step()
        assert plan is not None and [start.key for start in plan.started] == [small]
        assert sorted(plan.token_counts) == sorted([reserve, 16 - reserve])
        assert driver.seen[small].finished
    driver.run()
    assert driver.seen[huge].finished


def test_without_a_reserve_they_wait_for_its_end() -> None:
    driver = CoreDriver(num_blocks=300, context_tokens=1000, max_step_tokens=16)
    driver.submit(800, max_tokens=1)
    driver.step()
    small = driver.submit(4, max_tokens=1)
    for _ in range(40):
        driver.step()
        assert not driver.seen[small].started
    driver.run()


def test_a_reserve_that_nobody_needs_is_used_up() -> None:
    driver = CoreDriver(num_blocks=300, context_tokens=1000, max_step_tokens=16, prefill_reserve=8)
    driver.submit(64, max_tokens=1)
    driver.run()
    assert [plan.token_counts for plan in driver.plans if plan.slots] == [[16], [16], [16], [16]]


def test_decodes_come_before_the_chunks_of_an_older_prompt() -> None:
    driver = CoreDriver(num_blocks=300, context_tokens=1000, max_step_tokens=8, prefill_reserve=4)
    driver.submit(100, max_tokens=1)
    driver.step()
    small = driver.submit(3, max_tokens=6)
    for _ in range(6):
        driver.step()
    assert driver.seen[small].finished


# -- overtaking


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_head_that_does_not_fit_is_overtaken_so_often_and_not_more(limit: int) -> None:
    driver = CoreDriver(
        num_blocks=9, block_tokens=4, context_tokens=32, max_step_tokens=32, max_slots=8, max_overtakes=limit
    )
    long = driver.submit(13, max_tokens=19)
    driver.step()
    head = driver.submit(20, max_tokens=2)
    small = [driver.submit(1, max_tokens=1) for _ in range(6)]
    while not driver.seen[long].finished:
        driver.step()
    before_head = [key for key in order_of_starts(driver) if key in small]
    assert len(before_head) == limit
    driver.run()
    assert driver.seen[head].finished and all(driver.seen[key].finished for key in small)
    assert order_of_starts(driver).index(head) == limit + 1


def test_overtaking_by_a_tenants_turn_is_no_overtaking() -> None:
    driver = CoreDriver(max_slots=1, max_waiting=100, max_overtakes=0)
    for _ in range(10):
        driver.submit(4, max_tokens=2, tenant="a")
    for _ in range(10):
        driver.submit(4, max_tokens=2, tenant="b")
    driver.run()
    tenants = [driver.seen[key].submission.tenant for key in order_of_starts(driver)]
    assert all(set(tenants[i : i + 3]) == {"a", "b"} for i in range(15))


@pytest.mark.parametrize("limit", [0, 2])
def test_a_second_long_prompt_is_passed_by_short_ones_so_often_and_then_starts(limit: int) -> None:
    driver = CoreDriver(
        num_blocks=300,
        context_tokens=1000,
        max_step_tokens=16,
        max_slots=8,
        prefill_reserve=4,
        max_overtakes=limit,
    )
    driver.submit(400, max_tokens=1)
    driver.step()
    medium = driver.submit(30, max_tokens=1)
    short = [driver.submit(2, max_tokens=1) for _ in range(8)]
    while medium not in order_of_starts(driver):
        plan = driver.step()
        assert plan is not None
        # The first prompt is the only one that is cut: 12 tokens of it, and whole short ones in the reserve.
        assert plan.token_counts[0] == 12 or limit == 0
    assert order_of_starts(driver).index(medium) == 1 + limit
    driver.run()
    assert all(driver.seen[key].finished for key in [medium, *short])


def test_one_prompt_at_a_time_is_cut() -> None:
    driver = CoreDriver(num_blocks=300, context_tokens=1000, max_step_tokens=16, prefill_reserve=4, max_overtakes=8)
    first, second = driver.submit(40, max_tokens=1), driver.submit(40, max_tokens=1)
    driver.run()
    # 40 = 16 + 16 + 8; then the second begins in what is left of the third step.
    assert [plan.token_counts for plan in driver.plans if plan.slots] == [[16], [16], [8, 8], [16], [16]]
    assert order_of_starts(driver) == [first, second]
