"""Choices that ran elsewhere: they go on from the ids they have, and receive what the unbroken ones would."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.core.request import FailureKind
from tests.support.core_driver import CoreDriver


def roomy(**limits: Any) -> CoreDriver:
    return CoreDriver(**{"num_blocks": 100, "block_tokens": 4, "max_step_tokens": 64, **limits})


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("received", range(8))
def test_a_request_goes_on_at_every_position(received: int, in_flight: int, prefix_cache: bool) -> None:
    driver = roomy(max_in_flight=in_flight, prefix_cache=prefix_cache, max_step_tokens=5)
    key = driver.submit(6, received={0: received})
    driver.run()
    seen = driver.seen[key]
    assert seen.finished and seen.ids == driver.expected(key) and len(seen.ids) == 8
    assert seen.started, "its first id here is told as such"
    assert sum(plan.num_tokens for plan in driver.plans) == 6 + 8 - 1, "prompt and output but the last id, once each"
    assert driver.core.counters.output_tokens == 8 - received
    assert driver.core.counters.prompt_tokens == 6
    assert (
        driver.core.counters.time_to_first_token.counts.count(0)
        == len(driver.core.counters.time_to_first_token.counts) - 1
    )


def test_choices_that_are_not_named_are_not_run() -> None:
    driver = roomy()
    key = driver.submit(6, choices=4, received={1: 3, 3: 0})
    assert key.request_id == 2  # of choice 1
    driver.run()
    ran = driver.choices(key)
    assert [seen.choice for seen in ran] == [1, 3]
    assert all(seen.finished for seen in ran)
    assert driver.core.counters.prompt_tokens == 6, "the prompt counts once, whichever choice is the first"


def test_a_resumed_request_that_is_preempted_goes_on_again() -> None:
    driver = CoreDriver(num_blocks=9, block_tokens=4, context_tokens=32, max_slots=4)
    keys = [driver.submit(4, max_tokens=24, received={0: count}) for count in (3, 9, 15)]
    driver.run()
    assert driver.core.counters.preemptions > 0
    assert all(driver.seen[key].finished for key in keys)


def test_a_stop_id_counts_from_where_min_tokens_says_in_the_whole_output() -> None:
    plain = roomy()
    ids = plain.expected(plain.submit(6))
    for position in range(3, 8):
        driver = roomy()
        key = driver.submit(6, seed=1, stop_ids=frozenset({ids[position]}), min_tokens=3, received={0: 3})
        driver.run()
        assert driver.seen[key].ids == driver.expected(key)
        assert driver.seen[key].finished


def test_a_choice_that_has_all_its_ids_is_refused() -> None:
    driver = roomy()
    key = driver.submit(6, choices=2, received={1: 8})
    failure = driver.seen[key].failure
    assert failure and failure.kind is FailureKind.INVALID and failure.message.startswith("resumed: a choice has")
    driver.run()


def test_what_is_resumed_counts_as_tokens_that_wait() -> None:
    driver = roomy(max_slots=1, max_waiting_tokens=20)
    driver.submit(6)
    driver.submit(6)
    assert driver.core.waiting_tokens == 12
    refused = driver.submit(6, max_tokens=20, received={0: 14})
    failure = driver.seen[refused].failure
    assert failure and failure.kind is FailureKind.QUEUE_FULL and "this request has 20" in failure.message
    driver.run()
