"""Counters: the core's against its own clock, and GetStats and GetLoad of a scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc, engine_pb2
from triptych.executor.v1 import executor_pb2

from loadtest.stub_executor import StubExecutor
from services.common.digests import prompt_digests, root_digest
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.counters import (
    INTER_TOKEN_LATENCY_BOUNDS_S,
    TIME_TO_FIRST_TOKEN_BOUNDS_S,
    Histogram,
)
from services.scheduler.core.request import FailureKind, FinishReason
from services.scheduler.server import SchedulerServer
from tests.support.attached import Bench, bench, finished, until, until_idle
from tests.support.core_driver import MS, CoreDriver

OFTEN = {"self_test_interval_s": 0.1}
ROOT = root_digest(tenant="", salt="", adapter="")


def filled(histogram: Histogram) -> dict[float, int]:
    """Counts by upper bound in seconds, without the empty buckets."""
    bounds_s = (*histogram.bounds_s, float("inf"))
    return {bound_s: count for bound_s, count in zip(bounds_s, histogram.counts, strict=True) if count}


def wait(driver: CoreDriver, ms: int) -> None:
    """So long until the next step; the step itself takes 1 ms of the driver's clock."""
    driver.now_ns += ms * MS


# -- histograms


def test_a_bound_belongs_to_its_bucket_and_what_is_longer_than_all_has_one_too() -> None:
    histogram = Histogram((0.01, 0.1))
    for duration_ns in (0, 10 * MS, 10 * MS + 1, 100 * MS, 101 * MS):
        histogram.add(duration_ns)
    histogram.add(50 * MS, times=3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.sum_ns == 371 * MS + 1


def test_buckets_are_those_of_the_genai_conventions_and_go_on_upward() -> None:
    # https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/, ExplicitBucketBoundaries of both.
    first = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
    output = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
    for ours, conventions in ((TIME_TO_FIRST_TOKEN_BOUNDS_S, first), (INTER_TOKEN_LATENCY_BOUNDS_S, output)):
        assert list(ours[: len(conventions)]) == conventions
        assert list(ours) == sorted(set(ours)) and len(ours) > len(conventions)


# -- the core's


def test_the_first_token_counts_the_queue_and_later_ones_the_gaps() -> None:
    driver = CoreDriver(max_slots=1)
    driver.submit(5, max_tokens=3)
    driver.submit(5, max_tokens=2)
    for pause_ms in (39, 59, 19, 99, 99, 29):  # the fourth step only frees the slot; each takes 1 ms more
        wait(driver, pause_ms)
        driver.step()
    driver.run()
    counters = driver.core.counters
    # First ids after 40 ms, and after 40 + 60 + 20 + 100 + 100 = 320 ms in the queue and in a step.
    assert filled(counters.time_to_first_token) == {0.04: 1, 0.5: 1}
    assert counters.time_to_first_token.sum_ns == 360 * MS
    assert filled(counters.inter_token_latency) == {0.075: 1, 0.025: 1, 0.05: 1}
    assert counters.inter_token_latency.sum_ns == (60 + 20 + 30) * MS
    assert (counters.prompt_tokens, counters.output_tokens) == (10, 5)
    assert counters.finished == {FinishReason.LENGTH: 2}


def test_a_gap_is_measured_from_the_choices_own_last_token() -> None:
    driver = CoreDriver(max_step_tokens=2, prefill_reserve=0, context_tokens=32)
    one = driver.submit(1, max_tokens=6)
    driver.step()
    driver.submit(2, max_tokens=2)
    for pause_ms in (9, 19, 29, 39, 49):
        wait(driver, pause_ms)
        driver.step()
    driver.run()
    assert driver.seen[one].finished
    # The first has a token each step; the second's prompt of 2 takes two steps beside it, its second token one more.
    assert driver.core.counters.inter_token_latency.sum_ns == (10 + 20 + 30 + 40 + 50 + 30) * MS
    assert sum(driver.core.counters.inter_token_latency.counts) == 6


def test_a_preempted_request_has_one_first_token_and_its_gap_holds_the_wait() -> None:
    driver = CoreDriver(num_blocks=9, context_tokens=32, max_slots=2)
    driver.submit(12, max_tokens=15)
    driver.submit(12, max_tokens=15)
    driver.run()
    counters = driver.core.counters
    assert counters.preemptions > 0
    assert sum(counters.time_to_first_token.counts) == 2
    assert sum(counters.inter_token_latency.counts) == 28
    assert counters.inter_token_latency.sum_ns == sum(
        seen.finished.last_token_ns - seen.started.first_token_ns
        for seen in driver.seen.values()
        if seen.finished and seen.started
    )
    assert (counters.prompt_tokens, counters.output_tokens) == (24, 30)


def test_gaps_add_up_to_the_time_from_the_first_to_the_last_token_whatever_happens() -> None:
    rng = np.random.default_rng(7)
    driver = CoreDriver(max_step_tokens=5, prefill_reserve=0, num_blocks=9, context_tokens=32, max_in_flight=2)
    for _ in range(30):
        driver.submit(int(rng.integers(1, 12)), max_tokens=int(rng.integers(1, 9)), choices=int(rng.integers(1, 3)))
        wait(driver, int(rng.integers(0, 50)))
        driver.step()
    driver.run()
    counters = driver.core.counters
    ends = [(seen.started, seen.finished) for seen in driver.seen.values() if seen.started and seen.finished]
    assert counters.preemptions > 0 and len(ends) == len(driver.seen)
    spans_ns = sum(finish.last_token_ns - start.first_token_ns for start, finish in ends)
    assert counters.inter_token_latency.sum_ns == spans_ns
    assert counters.time_to_first_token.sum_ns == sum(start.first_token_ns - start.queued_ns for start, _ in ends)
    assert sum(counters.time_to_first_token.counts) == len(ends)
    assert counters.output_tokens == sum(len(seen.ids) for seen in driver.seen.values())
    assert sum(counters.inter_token_latency.counts) == counters.output_tokens - len(ends)


def test_an_aborted_request_counts_its_tokens_and_what_comes_after_its_end() -> None:
    driver = CoreDriver(max_in_flight=2)
    key = driver.submit(4, max_tokens=9)
    waits = driver.submit(4, max_tokens=9)
    driver.abort(waits)
    driver.step()
    driver.abort(key)
    driver.abort(key)
    driver.run()
    counters = driver.core.counters
    assert (counters.aborted, counters.output_tokens, counters.dropped_tokens) == (2, 1, 1)
    assert sum(counters.time_to_first_token.counts) == 1
    assert counters.prompt_tokens == 4 and not counters.finished


@pytest.mark.parametrize("aborted", [None, "before it runs", "while it runs"])
def test_choices_count_their_prompt_once(aborted: str | None) -> None:
    driver = CoreDriver(max_slots=1)
    first = driver.submit(4, max_tokens=3, choices=3)
    if aborted == "before it runs":
        driver.abort(first)
    driver.step()
    if aborted == "while it runs":
        driver.abort(first)
    driver.run()
    assert driver.core.counters.prompt_tokens == 4
    assert driver.core.counters.finished[FinishReason.LENGTH] == (2 if aborted else 3)


def test_what_is_refused_starts_nothing() -> None:
    driver = CoreDriver(max_waiting=1, max_slots=1)
    driver.submit(4, max_tokens=2)
    refused = driver.submit(4, choices=2)
    failure = driver.seen[refused].failure
    assert failure is not None and failure.kind is FailureKind.QUEUE_FULL
    driver.run()
    assert driver.core.counters.prompt_tokens == 4


def test_requests_are_counted_by_what_they_do() -> None:
    driver = CoreDriver(num_blocks=9, context_tokens=32, max_slots=2, max_step_tokens=8)
    phases = driver.core.by_phase
    assert phases() == {"prefill": 0, "decode": 0, "waiting_new": 0, "waiting_preempted": 0}
    driver.submit(12, max_tokens=15)
    driver.step()
    assert phases()["prefill"] == 1
    driver.step()
    assert phases()["decode"] == 1
    driver.submit(12, max_tokens=15)
    driver.submit(1, max_tokens=1)
    assert phases()["waiting_new"] == 2
    while driver.core.counters.preemptions == 0:
        driver.step()
    assert phases() == {"prefill": 0, "decode": 1, "waiting_new": 1, "waiting_preempted": 1}
    driver.run()
    assert set(phases().values()) == {0}


def test_what_is_not_counted_leaves_no_trace() -> None:
    driver = CoreDriver(max_in_flight=2)
    hidden = driver.submit(1, max_tokens=1, is_counted=False)
    assert set(driver.core.by_phase().values()) == {0}
    driver.plan()
    assert set(driver.core.by_phase().values()) == {0}
    driver.run()
    driver.submit(1, max_tokens=2, is_counted=False)
    driver.plan()
    driver.abort(list(driver.seen)[-1])
    driver.run()
    assert driver.seen[hidden].finished
    counters = driver.core.counters
    figures = {name: value for name, value in vars(counters).items() if isinstance(value, int)}
    del figures["last_ids_ns"]
    assert set(figures.values()) == {0}, figures
    assert not any(counters.finished.values())
    assert not filled(counters.time_to_first_token) and not filled(counters.inter_token_latency)


# -- as told


@asynccontextmanager
async def admin_of(b: Bench) -> AsyncIterator[admin_pb2_grpc.AdminServiceAsyncStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{b.server.server.port}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def stats_of(b: Bench) -> admin_pb2.GetStatsResponse:
    async with admin_of(b) as admin:
        return await admin.GetStats(admin_pb2.GetStatsRequest())


async def test_get_stats_tells_what_was_done(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.002)) as b:
        prompt = list(range(40))
        cached = {"root_digest": ROOT, "block_digests": prompt_digests(ROOT, np.array(prompt, dtype=np.uint32), 16)}
        for _ in range(2):
            await b.frontend.run(prompt, max_tokens=5, **cached)
        stopped = await b.frontend.run(prompt, max_tokens=5, min_tokens=0, stop_ids=range(512))
        await b.frontend.run(prompt, max_tokens=0)  # its length does not matter: it is refused
        told = await stats_of(b)
    assert stopped.ids and stopped.finished
    assert told.engine_id == (b.frontend.hello.engine_id if b.frontend.hello else "")
    assert 0 < told.uptime_s < 100
    assert (told.prompt_tokens, told.output_tokens) == (120, 11)
    assert (told.prefix_query_tokens, told.prefix_hit_tokens, told.preemptions) == (80, 32, 0)
    assert dict(told.finished) == {"length": 2, "stop": 1}
    assert sum(told.failed.values()) == 1
    assert set(told.requests) == {"prefill", "decode", "waiting_new", "waiting_preempted"}
    assert not any(told.requests.values())
    assert set(told.step_s) == {"plan", "execute", "sample", "apply"}
    assert told.step_s["execute"] == pytest.approx(11 * 0.002)  # the stub's own figure, a step of 2 ms an id
    assert told.step_s["sample"] == pytest.approx(11e-6)
    assert told.step_s["plan"] > 0 and told.step_s["apply"] > 0
    first, later = told.time_to_first_token, told.inter_token_latency
    assert list(first.bounds_s) == list(TIME_TO_FIRST_TOKEN_BOUNDS_S) and len(first.counts) == len(first.bounds_s) + 1
    assert list(later.bounds_s) == list(INTER_TOKEN_LATENCY_BOUNDS_S) and len(later.counts) == len(later.bounds_s) + 1
    assert (sum(first.counts), sum(later.counts)) == (3, 8)
    assert first.sum_s >= 3 * 0.002 and later.sum_s >= 8 * 0.002
    assert told.heartbeat.state == engine_pb2.ENGINE_STATE_SERVING


class _Captured(StubExecutor):
    """Says that steps of prompts ran eagerly, and all others by a graph."""

    async def _step(self, batch: Any, step: int, taken: Any, masks: Any) -> executor_pb2.StepResult | None:
        result = await super()._step(batch, step, taken, masks)
        if result is not None and taken.plan.slots:
            eager = bool(taken.plan.token_counts)
            result.graph = executor_pb2.GRAPH_KIND_EAGER if eager else executor_pb2.GRAPH_KIND_FULL
        return result


async def test_get_stats_tells_which_steps_were_a_graph_replayed(model: Path) -> None:
    async with bench(model, stub=_Captured()) as b:
        await b.frontend.run(list(range(40)), max_tokens=5)
        told = await stats_of(b)
    assert told.graph_steps["eager"] == 1
    assert told.graph_steps["full"] in (4, 5)  # one may have been planned before the end was known


async def test_failures_are_counted_by_the_reason_that_callers_are_told(model: Path) -> None:
    async with bench(model, max_num_seqs=1, max_waiting_requests=1) as b:
        b.stub.hold()
        running, waiting = [await b.frontend.submit([1, 2, 3]) for _ in range(2)]
        refused = [await b.frontend.run([1, 2, 3]), await b.frontend.run([1] * 2000), await b.frontend.run([9999])]
        late = await b.frontend.submit([1], timeout_ms=1)
        await finished(late)
        assert dict((await stats_of(b)).requests)["waiting_new"] == 1
        b.stub.release()
        await finished(running)
        await finished(waiting)
        told = await stats_of(b)
        reasons = [each.failed.reason for each in (*refused, late) if each.failed]
        assert len(set(reasons)) >= 3
        assert dict(told.failed) == {reason: reasons.count(reason) for reason in set(reasons)}


async def test_a_request_that_is_aborted_and_one_that_leaves_with_its_frontend_count_as_that(model: Path) -> None:
    async with bench(model) as b:
        b.stub.hold()
        told = await b.frontend.submit([1, 2, 3])
        await b.stub.plan_arrived(1)
        await b.frontend.abort(*b.frontend.told)
        await b.frontend.synced()
        assert dict((await stats_of(b)).finished) == {"abort": 1}
        assert not told.done.is_set()


async def test_an_executor_that_is_lost_counts_its_requests_and_the_counters_go_on(model: Path) -> None:
    async with bench(model, recovery_s=0.1) as b:
        await b.frontend.run([1, 2, 3], max_tokens=2)
        b.stub.hold()
        lost = await b.frontend.submit([1, 2, 3])
        await b.stub.plan_arrived(3)
        await b.stub.stop()
        await finished(lost)
        await b.stub.start()
        b.stub.release()
        await until(lambda: b.server.engine.can_generate)
        await b.frontend.run([1, 2, 3], max_tokens=2)
        told = await stats_of(b)
    assert dict(told.failed) == {"EXECUTOR_LOST": 1}
    assert (told.output_tokens, dict(told.finished)) == (4, {"length": 2})


async def test_the_self_test_is_in_no_counter(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.001), **OFTEN) as b:
        await until(lambda: len([plan for plan in b.stub.plans if plan.started]) >= 3)
        await until_idle(b.server)
        told = await stats_of(b)
        assert not any(told.step_s.values()) and not any(told.requests.values())
        assert not (told.prompt_tokens or told.output_tokens or told.dropped_tokens or told.finished or told.failed)
        assert not sum(told.time_to_first_token.counts) and not sum(told.inter_token_latency.counts)


async def test_before_the_model_is_loaded_there_are_counters_already(model: Path) -> None:
    settings = SchedulerConfig(port=0, executor="127.0.0.1:9", model=str(model))  # nobody listens there
    server = SchedulerServer(settings)
    told = server.engine.stats()
    await server.stop()
    assert told.heartbeat.state == engine_pb2.ENGINE_STATE_LOADING
    assert (told.engine_id, told.output_tokens, dict(told.requests)) == ("", 0, {})
    assert told.uptime_s > 0 and set(told.step_s.values()) == {0.0}


async def test_get_load_is_a_heartbeat_of_now(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        b.stub.hold()
        await b.frontend.submit([1, 2, 3])
        await b.stub.plan_arrived(1)
        beat = (await admin.GetLoad(admin_pb2.GetLoadRequest())).heartbeat
        assert (beat.running_requests, beat.waiting_requests) == (1, 0)
        assert beat.free_blocks < beat.total_blocks
