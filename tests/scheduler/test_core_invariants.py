"""The five invariants of the core under random events. The driver asserts most of them in every step:

1. the books: `check_books` after each plan, result and epoch, `check_idle` at the end;
2. `CoreDriver._must_start`: nothing runs, something waits, enough is free: the next plan starts it;
3. what can never fit is refused when it is submitted;
4. every id is that of `expected_ids`, whatever happened on the way;
5. results for what has ended, and of earlier epochs, change nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.scheduler.core.request import FailureKind, RequestKey
from services.scheduler.core.step import ResultError
from tests.support.core_driver import MS, CoreDriver

WISHES = st.tuples(st.integers(0, 60), st.integers(0, 60))
"""Prompt and output lengths, before they are folded into the pool's size."""


class CoreMachine(RuleBasedStateMachine):
    """A small engine, so that slots, blocks, queue and budget all run out."""

    @initialize(
        in_flight=st.integers(1, 3),
        num_blocks=st.integers(3, 14),
        block_tokens=st.sampled_from([1, 2, 4]),
        max_slots=st.integers(1, 4),
        max_step_tokens=st.integers(1, 12),
        max_waiting=st.integers(0, 6),
        max_waiting_tokens=st.sampled_from([20, 1000]),
        tenant_share=st.sampled_from([0.5, 1.0]),
        prefill_reserve=st.integers(0, 6),
        max_overtakes=st.integers(0, 3),
        prefix_cache=st.booleans(),
        wishes=st.lists(WISHES, min_size=1, max_size=8),
    )
    def begin(
        self, in_flight: int, num_blocks: int, block_tokens: int, wishes: list[tuple[int, int]], **limits: Any
    ) -> None:
        pool_tokens = (num_blocks - 1) * block_tokens
        self.driver = CoreDriver(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            context_tokens=pool_tokens,
            max_in_flight=in_flight,
            vocab_size=23,
            **limits,
        )
        self.stale: Any = None
        for wish in wishes:
            self.submit(wish, frozenset(), None, 1, 1, 0, "", "", False)

    @rule(
        wish=WISHES,
        stops=st.frozensets(st.integers(0, 22), max_size=3),
        timeout_ms=st.none() | st.integers(0, 30),
        frontend=st.integers(1, 2),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "a", "b"]),
        salt=st.sampled_from(["", "", "s"]),
        common=st.booleans(),
        scored=st.sampled_from([None, None, 0]),
        grammar=st.sampled_from(["", "", "masked", "stepwise"]),
        resumed=st.lists(st.integers(0, 60), max_size=3),
    )
    def submit(
        self,
        wish: tuple[int, int],
        stops: frozenset[int],
        timeout_ms: int | None,
        frontend: int,
        choices: int,
        priority: int,
        tenant: str,
        salt: str,
        common: bool,
        scored: int | None = None,
        grammar: str = "",
        resumed: Sequence[int] = (),
    ) -> None:
        driver = self.driver
        pool_tokens = driver.limits.pool_tokens
        prompt = 1 + wish[0] % pool_tokens
        least = 0 if scored is not None and prompt > 1 and choices == 1 else 1
        max_tokens = least + wish[1] % (pool_tokens - prompt + 2)  # one more than fits, sometimes
        deadline_ns = None if timeout_ms is None else driver.now_ns + timeout_ms * MS
        waiting = driver.core.num_waiting
        received: dict[int, int] = {}
        if resumed and scored is None:
            received = {choice: length % max_tokens for choice, length in enumerate(resumed)}
            choices = len(resumed)
            stops = frozenset()  # what was received of it does not hold one
        key = driver.submit(
            [i % 23 for i in range(prompt)] if common else prompt,
            max_tokens=max_tokens,
            stop_ids=stops,
            deadline_ns=deadline_ns,
            frontend=frontend,
            choices=choices,
            priority=priority,
            tenant=tenant,
            salt=salt,
            prompt_logprobs=scored,
            is_masked=grammar != "",
            is_stepwise=grammar == "stepwise",
            received=received,
        )
        failure = driver.seen[key].failure
        if choices > driver.limits.max_slots + math.ceil(driver.limits.tenant_share * driver.limits.max_waiting):
            assert failure is not None and failure.kind is FailureKind.INVALID
        elif prompt + max_tokens > driver.limits.context_tokens:
            assert failure is not None and failure.kind is FailureKind.TOO_LONG
        elif failure is not None:
            assert failure.kind in (FailureKind.QUEUE_FULL, FailureKind.TENANT_OVER_SHARE)
        assert driver.core.num_waiting == waiting + choices * (failure is None)

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def apply(self) -> None:
        self.stale = self.driver.oldest_result
        self.driver.apply()

    @rule()
    def step(self) -> None:
        self.driver.step()

    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick: random.Random) -> None:
        if self.driver.seen:
            self.driver.abort(pick.choice(list(self.driver.seen)))

    @rule(pick=st.randoms(use_true_random=False), bad=st.sampled_from([23, 2**31, 2**32 - 1]))
    def bad_id(self, pick: random.Random, bad: int) -> None:
        if live := self._live():
            self.driver.bad_ids[pick.choice(live)] = bad

    @rule(pick=st.randoms(use_true_random=False))
    def failed_row(self, pick: random.Random) -> None:
        if live := self._live():
            self.driver.failing.add(pick.choice(live))

    @rule()
    def settle(self) -> None:
        self.driver.settle()

    @rule(pick=st.randoms(use_true_random=False))
    def grammar_ends(self, pick: random.Random) -> None:
        if live := self._live():
            self.driver.finish(pick.choice(live))

    @rule()
    def flush(self) -> None:
        self.driver.core.flush_prefix_cache()
        assert self.driver.core.cached_blocks == 0

    @rule()
    def expire(self) -> None:
        self.driver.take(self.driver.core.expire(self.driver.now_ns))

    @rule(keep=st.booleans())
    def lose_executor(self, keep: bool) -> None:
        if self.driver.in_flight:
            self.stale = self.driver.oldest_result
        if not keep:
            self.driver.take(self.driver.core.fail_all(FailureKind.EXECUTOR_LOST, "lost"))
            assert self.driver.core.num_requests == 0
        self.driver.lose_executor()

    @precondition(lambda self: self.stale is not None)
    @rule()
    def stale_result(self) -> None:
        core = self.driver.core
        before = (core.num_running, core.num_waiting, core.free_blocks, core.num_in_flight, core.applied_step)
        with pytest.raises(ResultError):
            core.apply(self.stale, self.driver.now_ns)
        assert before == (core.num_running, core.num_waiting, core.free_blocks, core.num_in_flight, core.applied_step)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.core.check_books()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            assert all(seen.ended for seen in self.driver.seen.values())

    def _live(self) -> list[RequestKey]:
        return [key for key, seen in self.driver.seen.items() if not seen.ended]


def test_K6_the_invariants_hold_under_random_events() -> None:
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", range(6))
def test_K6_the_invariants_hold_over_2000_steps(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, block_tokens = rng.randint(8, 16), rng.choice([1, 2, 3])
    pool_tokens = (num_blocks - 1) * block_tokens
    driver = CoreDriver(
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        context_tokens=pool_tokens,
        max_in_flight=seed % 3 + 1,
        max_slots=rng.randint(2, 5),
        max_step_tokens=rng.randint(3, 20),
        max_waiting=8,
        prefill_reserve=seed % 4,
        max_overtakes=seed % 3,
    )
    live: list[RequestKey] = []
    for _ in range(2000):
        event = rng.random()
        if event < 0.5:
            deadline_ns = driver.now_ns + rng.randrange(40) * MS if rng.random() < 0.2 else None
            prompt = rng.randint(1, pool_tokens - 1 if rng.random() < 0.1 else pool_tokens // 4)
            max_tokens = rng.randint(1, min(16, pool_tokens - prompt))
            scored = 0 if prompt > 1 and rng.random() < 0.3 else None
            if scored is not None and rng.random() < 0.5:
                max_tokens = 0
            key = driver.submit(
                [i % 97 for i in range(prompt)] if rng.random() < 0.3 else prompt,
                max_tokens=max_tokens,
                deadline_ns=deadline_ns,
                choices=1 if max_tokens == 0 else rng.choice([1, 1, 1, 3]),
                priority=rng.choice([0, 0, 1]),
                tenant=rng.choice("ab"),
                prompt_logprobs=scored,
                is_masked=seed % 2 == 1,
                is_stepwise=seed % 2 == 1 and rng.random() < 0.5,
            )
            live += driver.seen[key].submission.choice_keys()
        live = [key for key in live if not driver.seen[key].ended]
        if event > 0.9 and live:
            driver.abort(rng.choice(live))
        if event > 0.995:
            if rng.random() < 0.5:
                driver.take(driver.core.fail_all(FailureKind.EXECUTOR_LOST, "lost"))
            driver.lose_executor()
        if live and 0.5 < event < 0.51:
            driver.bad_ids[rng.choice(live)] = 2**31
        driver.take(driver.core.expire(driver.now_ns))
        driver.step()
    assert driver.core.counters.preemptions > 10
    assert driver.core.counters.prefix_hit_tokens > 0
    assert block_tokens == 1 or any(plan.copies for plan in driver.plans)
    driver.run()
    assert all(seen.ended for seen in driver.seen.values())
    assert sum(seen.finished is not None for seen in driver.seen.values()) > 50
