"""The idle self-test: it feeds health, and nobody sees it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import Faults, StubExecutor
from services.scheduler import self_test
from tests.support.attached import Bench, bench, finished, until, until_idle

VOCAB = 512
OFTEN = {"self_test_interval_s": 0.1}


def num_tests(b: Bench) -> int:
    """Self-tests so far: one id of a prompt of one, with the seed 0 that no request of these tests has."""
    return sum(start.seed == 0 for plan in b.stub.plans for start in plan.started)


def held() -> StubExecutor:
    """An executor whose first step, a self-test, is not done until it is let."""
    stub = StubExecutor()
    stub.hold()
    return stub


async def test_an_idle_engine_makes_a_token_now_and_then_and_tells_nobody(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with bench(model, stub=StubExecutor(max_in_flight=2), **OFTEN) as b:
            caplog.clear()
            await until(lambda: num_tests(b) >= 3)
            await until_idle(b.server)
            beat = await b.frontend.synced()
            assert beat.since_token_ms < 5_000 and beat.state == engine_pb2.ENGINE_STATE_SERVING
            assert (beat.prompt_tokens_per_s, beat.output_tokens_per_s) == (0, 0)
            assert b.frontend.outputs == [] and b.frontend.told == {}
            (start,) = b.stub.plans[0].started
            assert (start.prompt_tokens, start.sampling.temperature) == (1, 0)
            assert caplog.records == []


async def test_it_is_counted_nowhere_while_it_is_under_way(model: Path) -> None:
    async with bench(model, stub=held(), **OFTEN) as b:
        await until(lambda: num_tests(b) == 1)
        beat = await b.frontend.synced()
        assert b.server.engine.core.num_running == 1
        assert (beat.running_requests, beat.waiting_requests, beat.waiting_tokens) == (0, 0, 0)
        told = await b.frontend.submit([1] * 5, seed=3)
        beat = await b.frontend.synced()
        assert (beat.running_requests, beat.waiting_requests, beat.waiting_tokens) == (0, 1, 5)
        b.stub.release()
        await finished(told)


@pytest.mark.parametrize(("features", "is_told"), [(("uncounted",), True), ((), False)])
async def test_an_executor_that_can_leave_its_row_out_is_told_which_it_is(
    model: Path, features: tuple[str, ...], is_told: bool
) -> None:
    stub = StubExecutor(step_s=0.002, features=features, max_in_flight=2)
    async with bench(model, stub=stub, **OFTEN) as b:
        await until(lambda: num_tests(b) == 1)
        told = [await b.frontend.submit([5 + n] * 3, seed=3, max_tokens=4) for n in range(3)]
        for each in told:
            await finished(each)
        await until(lambda: num_tests(b) >= 3)
        plans = list(b.stub.plans)
    own = [np.array([start.slot for start in plan.started if start.seed == 0], "<u4").tobytes() for plan in plans]
    assert [plan.uncounted_slots for plan in plans] == (own if is_told else [b""] * len(plans))
    assert sum(map(bool, own)) >= 3 and b"" in own


async def test_a_request_waits_for_one_step_of_it_at_most_and_is_not_refused_because_of_it(model: Path) -> None:
    async with bench(model, stub=held(), max_num_seqs=1, max_waiting_requests=0, **OFTEN) as b:
        await until(lambda: num_tests(b) == 1)
        told = await b.frontend.submit([7, 7], seed=5)
        await b.frontend.synced()
        refused = await b.frontend.submit([8], seed=6)  # there is room for one request, as always
        await finished(refused)
        assert refused.failed is not None and refused.failed.reason == "QUEUE_FULL"
        b.stub.release()
        await finished(told)
        assert told.ids == expected_ids([7, 7], 5, 8, VOCAB)
        before = next(i for i, plan in enumerate(b.stub.plans) if any(start.seed == 5 for start in plan.started))
        assert sum(len(plan.slots) > 0 for plan in b.stub.plans[:before]) == 1  # other steps before it compute nothing


async def test_there_is_none_while_requests_make_tokens(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.02), **OFTEN) as b:
        await b.frontend.run([1], seed=3, max_tokens=40)
        first = next(i for i, plan in enumerate(b.stub.plans) if any(start.seed == 3 for start in plan.started))
        assert all(len(plan.slots) == 4 and not plan.started for plan in b.stub.plans[first + 1 : first + 40])


async def test_one_that_does_not_come_back_turns_generate_false_until_it_does(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "LIMIT_S", 0.2)
    async with bench(model, stub=held(), **OFTEN) as b:
        await until(lambda: not b.server.engine.can_generate)
        health = b.server.server.health
        await until(lambda: not health.is_serving("generate"))
        assert health.is_serving("readiness") and health.is_serving("liveness")
        await until(lambda: b.frontend.heartbeats[-1].state == engine_pb2.ENGINE_STATE_RECOVERING)
        assert num_tests(b) == 1
        b.stub.release()
        await until(lambda: health.is_serving("generate"))
        await until(lambda: b.frontend.heartbeats[-1].state == engine_pb2.ENGINE_STATE_SERVING)


async def test_one_that_fails_turns_generate_false_until_a_token_is_made(model: Path) -> None:
    stub = StubExecutor(faults=Faults(failed_rows=frozenset({(0, 0)})))  # the self-test's seed, its only id
    async with bench(model, stub=stub, **OFTEN) as b:
        await until(lambda: not b.server.engine.can_generate)
        b.server.engine._self_test._interval_s = 3600  # none of them comes between
        assert (await b.frontend.run([1], seed=3)).finished  # any token proves that one can be made
        assert b.server.engine.can_generate


async def test_after_a_loss_a_failed_one_is_repeated_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "LIMIT_S", 0.1)
    async with bench(model, stub=held(), **OFTEN) as b:
        await until(lambda: not b.server.engine.can_generate)
        await b.stub.stop()
        monkeypatch.setattr(self_test, "LIMIT_S", 10.0)
        b.server.engine._self_test._interval_s = 3600
        async with StubExecutor(port=b.stub.port):
            await until(lambda: b.server.engine.can_generate)
            await until_idle(b.server)


async def test_a_drain_does_not_wait_for_it(model: Path) -> None:
    async with bench(model, stub=held(), **OFTEN) as b:
        await until(lambda: num_tests(b) == 1)
        async with asyncio.timeout(5):
            await b.server.engine.drain()
        assert not b.server.engine._self_test.is_running
        assert b.server.engine.core._num_uncounted == 0
        b.stub.release()
