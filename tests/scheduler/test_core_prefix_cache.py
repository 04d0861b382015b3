"""The core's prefix cache. The stub executor reads every row's ids back through its table, so a wrong block is seen."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.digests import chained_digest, prompt_digests
from services.scheduler.core import scheduler
from services.scheduler.core.kv_events import Cleared, Removed, Stored
from services.scheduler.core.request import FailureKind, RequestKey
from tests.support.core_driver import CoreDriver

BLOCK = 4


def roomy(**limits: Any) -> CoreDriver:
    return CoreDriver(**{"num_blocks": 100, "block_tokens": BLOCK, "max_step_tokens": 64, **limits})


def cached_tokens(driver: CoreDriver, key: RequestKey) -> int:
    started = driver.seen[key].started
    assert started is not None
    return started.cached_tokens


@pytest.mark.parametrize(("tokens", "hit"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_K2_a_prompt_sent_twice_finds_its_full_blocks_and_computes_at_least_its_last_token(
    tokens: int, hit: int
) -> None:
    driver, without = roomy(), roomy(prefix_cache=False)
    prompt = list(range(tokens))
    streams = []
    for each in (driver, without):
        for _ in range(2):
            key = each.submit(prompt, seed=5)
            each.run()
            streams.append(each.seen[key].ids)
        assert cached_tokens(each, key) == (hit if each is driver else 0)
    assert streams[0] == streams[1] == streams[2] == streams[3]
    # The second run's prefill computes what was not found, never nothing.
    starts = [plan for plan in driver.plans if plan.started]
    assert starts[1].token_counts == [tokens - hit]
    assert (driver.core.counters.prefix_query_tokens, driver.core.counters.prefix_hit_tokens) == (2 * tokens, hit)


def test_blocks_that_an_output_filled_are_found_by_a_prompt_that_goes_on_from_it() -> None:
    driver = roomy()
    first = driver.submit([1, 2, 3], max_tokens=10)
    driver.run()
    # 3 + 10 tokens, the last one never computed: 12 of 13 are stored, three full blocks.
    turn = [1, 2, 3, *driver.seen[first].ids, 9, 9]
    second = driver.submit(turn)
    driver.run()
    assert cached_tokens(driver, second) == 12


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"salt": "X"}, {"tenant": "a", "salt": "X"}], ids=["tenant", "salt", "both"]
)
def test_K7_tenants_and_salts_share_no_blocks(other: dict[str, str]) -> None:
    driver = roomy()
    prompt = list(range(12))
    for fields in ({"tenant": "a"}, other, {"tenant": "a"}):
        key = driver.submit(prompt, **fields)
        driver.run()
        expected = 8 if fields == {"tenant": "a"} and len(driver.seen) == 3 else 0
        assert cached_tokens(driver, key) == expected


def test_a_request_without_a_root_has_no_part_in_the_cache() -> None:
    driver = roomy()
    for _ in range(2):
        key = driver.submit(list(range(9)), root_digest=b"", digests=b"")
        driver.run()
        assert cached_tokens(driver, key) == 0
    assert driver.core.cached_blocks == 0


def test_a_prompt_that_is_scored_is_computed_whole_and_still_fills_the_cache() -> None:
    driver = roomy()
    for scored, hit in ((0, 0), (0, 0), (None, 8)):
        key = driver.submit(list(range(9)), prompt_logprobs=scored)
        driver.run()
        assert cached_tokens(driver, key) == hit


def test_two_that_run_at_once_share_what_is_full_and_written() -> None:
    driver = roomy(max_in_flight=1)
    driver.submit(list(range(9)), max_tokens=20)
    driver.step()
    held = driver.core.total_blocks - driver.core.free_blocks
    driver.submit(list(range(9)), max_tokens=20)
    driver.step()
    # Three blocks for 9 tokens, two of them shared.
    assert driver.core.total_blocks - driver.core.free_blocks == held + 1
    driver.run()


def test_what_is_still_being_computed_is_not_found() -> None:
    driver = roomy(max_in_flight=2)
    driver.submit(list(range(9)), max_tokens=2)
    driver.plan()
    late = driver.submit(list(range(9)), max_tokens=2)
    driver.plan()
    driver.run()
    assert cached_tokens(driver, late) == 0


def test_the_tail_of_a_prefix_is_evicted_before_its_head_and_the_oldest_first() -> None:
    driver = roomy(num_blocks=9, context_tokens=32)
    old, new = list(range(12)), list(range(50, 62))
    for prompt in (old, new):
        driver.submit(prompt, max_tokens=1)
        driver.run()
    names = [stored.digest for stored in driver.core.cached()]
    assert len(names) == 6  # three of each
    # Two of eight blocks were never used; 12 tokens take three, so the last block of the older prompt goes.
    driver.submit(12, max_tokens=1)
    driver.run()
    left = {stored.digest for stored in driver.core.cached()}
    assert [name in left for name in names] == [True, True, False, True, True, True]


def test_a_matched_block_is_pinned_and_not_taken_for_the_request_itself() -> None:
    # The pool holds 4 blocks, all of them cached; the match is the oldest, which a careless admission takes first.
    driver = roomy(num_blocks=5, context_tokens=16)
    driver.submit(list(range(16))[:15], max_tokens=1)
    driver.run()
    key = driver.submit([*range(8), 50, 51, 52], max_tokens=5)
    driver.run()
    assert cached_tokens(driver, key) == 8
    assert driver.seen[key].ids == driver.expected(key)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    driver = roomy(num_blocks=9, context_tokens=32)
    keys = [driver.submit(12, max_tokens=15) for _ in range(2)]
    driver.run()
    assert driver.core.counters.preemptions == 1
    (returned,) = [start for plan in driver.plans for start in plan.started if start.key == keys[1]][1:]
    assert returned.num_computed >= BLOCK
    # What it found of its own is no hit that a user is told of.
    assert cached_tokens(driver, keys[1]) == 0


def test_a_failed_row_stores_nothing() -> None:
    driver = roomy()
    driver.failing.add(driver.submit(list(range(9))))
    driver.run()
    assert driver.core.cached_blocks == 0


def test_a_request_that_fails_takes_back_what_its_earlier_chunks_stored() -> None:
    """Only a row that samples shows that it failed: the keys and values of chunks before it may be NaN already, and
    whoever found them would fail too, for as long as they are found."""
    driver = roomy(max_step_tokens=8)
    first = driver.submit(list(range(9)), max_tokens=1)
    driver.failing.add(first)
    driver.step()
    assert driver.core.cached_blocks == 2
    driver.run()
    assert driver.core.cached_blocks == 0
    key = driver.submit(list(range(9)), max_tokens=1)
    driver.run()
    assert cached_tokens(driver, key) == 0


def test_a_request_that_no_id_is_left_for_says_so_and_what_it_stored_is_good() -> None:
    driver = roomy(max_step_tokens=8)
    key = driver.submit(list(range(9)), max_tokens=1)
    driver.idless.add(key)
    driver.run()
    failure = driver.seen[key].failure
    assert failure is not None and failure.kind is FailureKind.NO_ID_LEFT
    assert driver.core.cached_blocks == 2
    key = driver.submit(list(range(9)), max_tokens=1)
    driver.run()
    assert cached_tokens(driver, key) == 8


def test_a_request_that_fails_when_it_was_preempted_already_takes_it_back_too() -> None:
    driver = roomy(max_step_tokens=8, max_in_flight=2)
    key = driver.submit(list(range(9)), max_tokens=4)
    driver.plan()
    driver.failing.add(key)
    driver.plan()
    driver.apply()
    assert driver.core.cached_blocks == 2
    driver.core._preempt(driver.core._requests[key])
    driver.apply()
    assert driver.seen[key].failure and driver.core.cached_blocks == 0
    driver.run()


def test_a_request_that_fails_on_what_it_found_leaves_it_to_its_holders_alone() -> None:
    driver = roomy()
    holder = driver.submit([*range(8), 50], max_tokens=8)
    driver.step()
    driver.failing.add(driver.submit([*range(8), 60]))
    driver.step()
    driver.step()
    later = driver.submit([*range(8), 70], max_tokens=1)
    driver.run()
    assert driver.seen[holder].finished and cached_tokens(driver, later) == 0


def test_nothing_is_found_after_the_executor_was_lost() -> None:
    driver = roomy()
    driver.submit(list(range(9)), max_tokens=1)
    driver.run()
    driver.lose_executor()
    key = driver.submit(list(range(9)), max_tokens=1)
    driver.run()
    assert cached_tokens(driver, key) == 0


def test_a_flush_also_holds_for_blocks_that_running_requests_fill_later() -> None:
    driver = roomy()
    driver.submit([1, 2, 3, 4, 5], max_tokens=20)
    driver.step()
    assert driver.core.cached_blocks == 1
    assert driver.core.flush_prefix_cache() == 1
    driver.run()
    assert driver.core.cached_blocks == 0


def test_a_flush_also_holds_for_a_choice_that_goes_on_from_a_siblings_prompt() -> None:
    driver = roomy()
    key = driver.submit([1, 2, 3, 4, 5], max_tokens=20, choices=2)
    driver.plan()
    driver.apply()
    assert driver.core.num_waiting == 1
    assert driver.core.flush_prefix_cache() == 1
    driver.run()
    assert driver.seen[key].finished and driver.core.cached_blocks == 0


def test_requests_found_whole_are_not_all_named_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached, each costs the step one token, but the plan all its ids: a message has a limit, whose excess would end
    the epoch, and with it every request."""
    monkeypatch.setattr(scheduler, "MAX_NAMED_TOKENS", 30)
    driver = roomy(max_slots=8)
    driver.submit(list(range(17)), max_tokens=1)
    driver.run()
    for _ in range(6):
        driver.submit(list(range(17)), max_tokens=1)
    driver.run()
    assert [len(plan.started) for plan in driver.plans if plan.started] == [1, 2, 2, 2]


# -- events


def test_events_tell_what_was_stored_with_its_parent_and_ids() -> None:
    driver = roomy()
    key = driver.submit([1, 2, 3, 4, 5, 6], max_tokens=4)
    driver.run()
    submission = driver.seen[key].submission
    first = prompt_digests(submission.root_digest, submission.prompt_ids, BLOCK)
    column = submission.prompt_ids[4:].tobytes() + b"".join(i.to_bytes(4, "little") for i in driver.seen[key].ids[:2])
    assert driver.core.take_kv_events() == [
        Stored(first, submission.root_digest, submission.prompt_ids[:4].tobytes()),
        Stored(chained_digest(first, column), first, column),
    ]
    assert driver.core.take_kv_events() == []


def test_events_followed_from_the_start_tell_what_can_be_found() -> None:
    driver = roomy(num_blocks=9, context_tokens=32)
    found: set[bytes] = set()
    for n in range(30):
        driver.submit([n % 5, *range(n % 11)], max_tokens=1 + n % 7)
        driver.run()
        if n == 20:
            driver.core.flush_prefix_cache()
        if n == 25:
            driver.lose_executor()
        for event in driver.core.take_kv_events():
            match event:
                case Stored(digest, parent, _):
                    assert parent in found or parent == driver.seen[RequestKey(1, 1)].submission.root_digest
                    found.add(digest)
                case Removed(digest):
                    found.remove(digest)
                case Cleared():
                    found.clear()
        assert found == {stored.digest for stored in driver.core.cached()}
    assert found
