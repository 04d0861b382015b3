"""The generator against a real frontend and a stub engine: arrivals go on, nothing is hidden, all ends in time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest import open_loop
from loadtest.open_loop import CallError, Outcome
from loadtest.stub_engine import Faults, StubEngine
from loadtest.summary import summarize
from loadtest.workload import Lengths, Plan, Planned, burst, poisson
from tests.frontend.harness import VOCAB_SIZE, serving, text_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("text") / "tiny-text")


def engine(**arguments: object) -> StubEngine:
    return StubEngine(vocab_size=VOCAB_SIZE, context_tokens=1024, **arguments)


def planned(rate_per_s: float, requests: int, output: str = "4") -> Plan:
    return poisson(
        rate_per_s=rate_per_s,
        prompt=Lengths.parse("5-20"),
        output=Lengths.parse(output),
        vocab_size=VOCAB_SIZE,
        seed=0,
        max_requests=requests,
        duration_s=60.0,
        warmup_s=0.0,
    )


async def load(model: Path, stub: StubEngine, plan: Plan, *, timeout_s: float = 30.0) -> list[Outcome]:
    async with serving(model, stub) as served:
        return await open_loop.run(plan, open_loop.over_grpc(served.channel), timeout_s=timeout_s)


async def test_each_planned_request_is_sent_as_planned_and_measured(model: Path) -> None:
    stub = engine()
    plan = planned(100, 40, output="1-9")
    outcomes = await load(model, stub, plan)
    assert sorted(stub.prompts) == sorted(request.prompt_ids for request in plan.requests)
    assert [outcome.due_s for outcome in outcomes] == [request.at_s for request in plan.requests]
    assert [len(outcome.token_s) for outcome in outcomes] == [request.output_tokens for request in plan.requests]
    for outcome in outcomes:
        assert outcome.failure is None
        assert 0 <= outcome.lag_s < outcome.token_s[0] <= outcome.token_s[-1] <= outcome.end_s
    assert summarize(plan, outcomes).output_tokens == sum(request.output_tokens for request in plan.requests)


async def test_a_server_that_answers_nothing_does_not_slow_the_arrivals_and_the_run_is_bounded(model: Path) -> None:
    stub = engine(faults=Faults(silent=True))
    plan = planned(60, 60)
    started_s = time.monotonic()
    outcomes = await load(model, stub, plan, timeout_s=1.5)
    took_s = time.monotonic() - started_s
    # All 60 were in flight at once: a closed loop, or a limit on what is in flight, would have sent fewer.
    assert len(stub.submits) == 60
    assert max(outcome.lag_s for outcome in outcomes) < 1.0
    found = summarize(plan, outcomes)
    assert found.failures == {"DEADLINE_EXCEEDED": 60}
    assert all(1.4 < outcome.end_s < 3.0 for outcome in outcomes)
    assert took_s < plan.end_s + 1.5 + 5.0
    assert (found.good, found.ttft_s) == (0, ())


async def test_a_stall_is_in_the_latency_of_every_request_that_was_due_in_it(model: Path) -> None:
    stub = engine()
    plan = planned(40, 20)
    async with serving(model, stub) as served:
        stub.pause()
        running = asyncio.create_task(open_loop.run(plan, open_loop.over_grpc(served.channel), timeout_s=30))
        await stub.wait_until(lambda found: len(found.submits) == 20)
        await asyncio.sleep(0.5)
        stub.resume()
        outcomes = await running
    # The first ids came for all at about the same moment, at least 0.5 s after the last was due: measured from its own
    # due time, who came first waited longest.
    last_due_s = plan.requests[-1].at_s
    for outcome in outcomes:
        assert outcome.ttft_s is not None
        assert outcome.due_s + outcome.ttft_s >= last_due_s + 0.5
    assert outcomes[0].ttft_s - outcomes[-1].ttft_s == pytest.approx(last_due_s - outcomes[0].due_s, abs=0.25)


async def test_a_client_that_falls_behind_counts_its_own_delay() -> None:
    async def ask(request: Planned, left_s: float) -> AsyncIterator[int]:
        if request.output_tokens == 2:
            time.sleep(0.3)  # noqa: ASYNC251 (the client's loop stands still)
        yield request.output_tokens

    requests = (Planned(0.0, (1,), 2), Planned(0.05, (1,), 1), Planned(0.1, (1,), 1))
    outcomes = await open_loop.run(Plan(requests, 0.0, 0.1), ask, timeout_s=5)
    assert outcomes[1].lag_s >= 0.2
    assert outcomes[1].ttft_s is not None and outcomes[1].ttft_s >= outcomes[1].lag_s


async def test_failures_are_counted_by_status_beside_requests_that_end_well(model: Path) -> None:
    plan = planned(200, 10)
    broken = plan.requests[3].prompt_ids
    failed = engine_pb2.Failed(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], reason="QUEUE_FULL", message="full")
    stub = engine(faults=Faults(only_prompt=broken, failed=failed, failed_at=2))
    outcomes = await load(model, stub, plan)
    assert summarize(plan, outcomes).failures == {"RESOURCE_EXHAUSTED": 1}
    assert [index for index, outcome in enumerate(outcomes) if outcome.failure] == [3]
    assert len(outcomes[3].token_s) == 2


async def test_a_server_that_dies_fails_what_runs_and_what_is_still_due(model: Path) -> None:
    stub = engine(step_s=0.02)
    plan = planned(40, 30, output="200")
    async with serving(model, stub) as served:
        running = asyncio.create_task(open_loop.run(plan, open_loop.over_grpc(served.channel), timeout_s=10))
        await stub.wait_until(lambda found: len(found.submits) == 10)
        await served.frontend.close()
        outcomes = await asyncio.wait_for(running, 20)
    assert len(outcomes) == 30
    assert all(outcome.failure is not None for outcome in outcomes)


async def test_a_stream_with_other_than_the_asked_ids_is_no_success() -> None:
    async def ask(request: Planned, left_s: float) -> AsyncIterator[int]:
        for _ in range(request.output_tokens - request.prompt_ids[0]):
            yield 1

    requests = tuple(Planned(0.0, (missing,), 3) for missing in (0, 1, 3))
    outcomes = await open_loop.run(Plan(requests, 0.0, 0.0), ask, timeout_s=5)
    assert [outcome.failure for outcome in outcomes] == [None, open_loop.SHORT, open_loop.NO_TOKENS]
    assert "2 of 3 ids" in outcomes[1].message


async def test_ids_of_one_message_have_one_arrival_time(model: Path) -> None:
    plan = burst(streams=2, prompt=Lengths.parse("5"), output=Lengths.parse("8"), vocab_size=VOCAB_SIZE, seed=0)
    outcomes = await load(model, engine(ids_per_step=4), plan)
    for outcome in outcomes:
        # 4 ids a step: at most one gap in 7 is between steps.
        assert sum(gap > 0 for gap in outcome.gaps_s) <= 1
        assert outcome.mean_itl_s == pytest.approx((outcome.token_s[-1] - outcome.token_s[0]) / 7)


async def test_the_vocabulary_is_asked_of_the_server_and_its_absence_told(model: Path) -> None:
    async with serving(model) as served:
        assert await open_loop.vocab_size(served.channel, "", 5.0) == VOCAB_SIZE
        with pytest.raises(CallError, match="NOT_FOUND"):
            await open_loop.vocab_size(served.channel, "other", 5.0)


async def test_cancelling_a_run_ends_its_calls(model: Path) -> None:
    stub = engine(step_s=0.01)
    plan = burst(streams=4, prompt=Lengths.parse("5"), output=Lengths.parse("900"), vocab_size=VOCAB_SIZE, seed=0)
    async with serving(model, stub) as served:
        running = asyncio.create_task(open_loop.run(plan, open_loop.over_grpc(served.channel), timeout_s=30))
        await stub.wait_until(lambda found: found.num_running == 4)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await stub.wait_until(lambda found: found.num_running == 0 and len(found.aborts) == 4)


def test_gaps_lie_between_consecutive_ids() -> None:
    outcome = Outcome(0.0, 1, 4, 0.0, (0.5, 0.6, 0.6, 1.0), 1.0)
    assert outcome.gaps_s == pytest.approx([b - a for a, b in itertools.pairwise((0.5, 0.6, 0.6, 1.0))])
    assert outcome.ttft_s == 0.5
