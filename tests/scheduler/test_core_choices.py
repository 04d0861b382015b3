"""Several choices of one request: one prefill, shared blocks, a copy of the one that all go on writing."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.philox import derived_seed
from services.scheduler.core.request import FailureKind, RequestKey
from tests.support.core_driver import MS, CoreDriver


def roomy(**limits: Any) -> CoreDriver:
    return CoreDriver(**{"num_blocks": 100, "block_tokens": 4, "max_step_tokens": 64, **limits})


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("tokens", [1, 4, 5, 6, 8, 11])
def test_three_choices_are_three_requests_with_the_derived_seeds(
    tokens: int, in_flight: int, prefix_cache: bool
) -> None:
    together = roomy(max_in_flight=in_flight, prefix_cache=prefix_cache)
    key = together.submit(tokens, seed=77, choices=3)
    together.run()
    alone = roomy()
    prompt = together.seen[key].submission.prompt_ids.tolist()
    keys = [alone.submit(prompt, seed=derived_seed(77, choice)) for choice in range(3)]
    alone.run()
    streams = [seen.ids for seen in together.choices(key)]
    assert streams == [alone.seen[each].ids for each in keys]
    assert len({tuple(ids) for ids in streams}) == 3


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_once_and_its_last_block_copied(prefix_cache: bool) -> None:
    driver = roomy(prefix_cache=prefix_cache)
    driver.submit(11, max_tokens=3, choices=3)
    driver.run()
    first, second = driver.plans[:2]
    assert first.token_counts == [11]
    # The others compute the last prompt token alone, beside the first one's decode.
    assert second.token_counts == [1, 1, 1]
    assert [start.num_computed for start in second.started] == [10, 10]
    leader = first.started[0].block_ids
    for start in second.started:
        assert start.block_ids[:2] == leader[:2]
        assert (leader[2], start.block_ids[2]) in second.copies
    assert len(second.copies) == 2


def test_a_last_token_alone_in_its_block_needs_no_copy() -> None:
    driver = roomy()
    driver.submit(9, max_tokens=3, choices=2)
    driver.run()
    assert not any(plan.copies for plan in driver.plans)
    assert [start.num_computed for plan in driver.plans for start in plan.started] == [0, 8]


def test_a_prompt_in_chunks_is_waited_for() -> None:
    driver = roomy(max_step_tokens=4)
    driver.submit(11, max_tokens=3, choices=3)
    driver.run()
    assert [len(plan.started) for plan in driver.plans if plan.slots][:4] == [1, 0, 0, 2]


def test_others_do_not_wait_behind_choices_that_wait_for_their_prompt() -> None:
    driver = roomy(max_step_tokens=8, prefill_reserve=4)
    driver.submit(30, max_tokens=2, choices=2)
    small = driver.submit(2, max_tokens=1)
    driver.step()
    assert driver.seen[small].finished
    driver.run()


def test_choices_without_enough_slots_run_one_after_the_other() -> None:
    driver = roomy(max_slots=1)
    key = driver.submit(6, max_tokens=3, choices=3)
    driver.run()
    assert all(seen.finished for seen in driver.choices(key))
    # With nobody left to share with, the later ones find the prompt's full block in the cache.
    starts = [start.num_computed for plan in driver.plans for start in plan.started]
    assert starts == [0, 4, 4]


def test_aborting_the_first_choice_leaves_the_others() -> None:
    driver = roomy(max_in_flight=2)
    key = driver.submit(11, max_tokens=6, choices=3)
    driver.plan()
    driver.abort(key)
    driver.run()
    assert [seen.finished is not None for seen in driver.choices(key)] == [False, True, True]


def test_choices_preempted_by_a_small_pool_are_the_same() -> None:
    driver = roomy(num_blocks=9, context_tokens=32, max_in_flight=2)
    key = driver.submit(10, max_tokens=20, choices=4)
    driver.run()
    assert driver.core.counters.preemptions > 0
    assert all(seen.finished for seen in driver.choices(key))


def test_all_choices_find_room_in_the_queue_or_none() -> None:
    driver = roomy(max_slots=1, max_waiting=2)
    one = driver.submit(3)
    refused = driver.submit(3, choices=3)
    assert [seen.failure.kind for seen in driver.choices(refused) if seen.failure] == [FailureKind.QUEUE_FULL] * 3
    assert driver.core.num_requests == 1
    driver.abort(one)
    accepted = driver.submit(3, choices=3)
    assert driver.core.num_waiting == 3
    driver.run()
    assert all(seen.finished for seen in driver.choices(accepted))


def test_a_range_of_ids_that_overlaps_one_in_use_is_refused() -> None:
    driver = roomy()
    key = driver.submit(3)
    submission = driver.seen[key].submission
    driver._next_id = 1
    del driver.seen[key]
    failure = driver.core.submit(submission, 0)
    assert failure is not None and "request_id: 1 is in use" in failure.message
    driver.core.abort(RequestKey(1, 1))


def test_a_deadline_ends_every_choice() -> None:
    driver = roomy(max_slots=2)
    key = driver.submit(3, max_tokens=30, choices=3, deadline_ns=5 * MS)
    driver.step()
    driver.take(driver.core.expire(5 * MS))
    assert [seen.failure.kind for seen in driver.choices(key) if seen.failure] == [FailureKind.DEADLINE] * 3
    driver.run()


@pytest.mark.parametrize(("share", "places"), [(1.0, 6), (0.5, 4)])
def test_more_choices_than_could_ever_wait_and_run_are_refused_for_good(share: float, places: int) -> None:
    driver = roomy(max_slots=2, max_waiting=4, tenant_share=share)
    accepted = driver.submit(3, choices=places)
    driver.run()
    refused = driver.submit(3, choices=places + 1)
    failure = driver.seen[refused].failure
    assert failure is not None and failure.kind is FailureKind.INVALID
    assert failure.message.startswith(f"num_choices: is {places + 1}, of one tenant at most {places} can run and wait")
    assert all(seen.finished for seen in driver.choices(accepted))
