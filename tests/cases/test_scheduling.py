"""Rows of the case table that the scheduler answers for: K1, K5, C1, and its half of T3, C2, C3, G3."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import Faults, StubExecutor
from tests.support.attached import Told, bench, finished, until, write_model

VOCAB = 512


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", vocab_size=VOCAB, context_tokens=1024)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"),
    [(129, 1, False), (127, 2, False), (128, 1, False), (127, 1, True), (1, 127, True), (1, 128, False)],
)
async def test_K1_what_exceeds_the_pool_is_refused_and_a_tiny_request_served(
    model: Path, prompt_tokens: int, max_tokens: int, fits: bool
) -> None:
    # 9 blocks of 16, one of them the null block: the pool holds 128 tokens, the model 1024.
    async with bench(model, num_kv_blocks=9, block_size=16) as b:
        large = await b.frontend.submit([1] * prompt_tokens, max_tokens=max_tokens)
        tiny = await b.frontend.submit([2], max_tokens=2)
        await finished(large, tiny)
        assert tiny.finished
        if fits:
            assert len(large.ids) == max_tokens
        else:
            assert large.code is grpc.StatusCode.INVALID_ARGUMENT
            assert large.failed is not None and "the KV pool 128" in large.failed.message
            assert all(len(start.token_ids) == 4 for plan in b.stub.plans for start in plan.started)
        await b.idle()


async def test_K5_after_2000_requests_that_finish_abort_and_fail_everything_is_free(model: Path) -> None:
    rng = random.Random(5)
    bad = {(seed, seed % 5): 2**31 for seed in range(0, 2000, 11)}
    failed_rows = frozenset((seed, seed % 4) for seed in range(1, 2000, 13))
    stub = StubExecutor(max_in_flight=2, faults=Faults(bad_ids=bad, failed_rows=failed_rows))
    async with bench(model, stub=stub, num_kv_blocks=24, block_size=4, max_num_seqs=16, max_waiting_requests=3000) as b:
        told: dict[int, Told] = {}
        aborted: set[int] = set()
        for seed in range(2000):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
            told[seed] = await b.frontend.submit(
                prompt,
                request_id=seed + 1,
                seed=seed,
                max_tokens=rng.randint(1, 40),
                stop_ids=[rng.randrange(VOCAB) for _ in range(30)],
                timeout_ms=rng.choice([20, 200]) if rng.random() < 0.05 else 600_000,
            )
            if rng.random() < 0.2:
                aborted.add(rng.randrange(seed + 1))
                await b.frontend.abort(*(victim + 1 for victim in aborted))  # most of them long ended
        await finished(*(mine for seed, mine in told.items() if seed not in aborted))
        await b.idle()
        codes = {mine.code for mine in told.values() if mine.failed}
        assert codes == {grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert sum(mine.finished is not None for mine in told.values()) > 800
        assert sum(not mine.done.is_set() for mine in told.values()) > 20  # aborted in time
        assert all(mine.after_end == 0 for mine in told.values())
        assert b.server.engine.core.counters.preemptions > 0


# -- C1: cancel in every phase. With the step held, "free" is looked at before and after it is applied.


async def test_C1_cancel_at_once(model: Path) -> None:
    async with bench(model) as b:
        told = await b.frontend.submit([1] * 300, request_id=1)
        await b.frontend.abort(1)
        await b.frontend.synced()
        await b.idle()
        assert not told.done.is_set()
        # The prompt takes two steps of 256; at most the first was under way when the cancel came.
        assert sum(1 for plan in b.stub.plans if plan.slots) <= 1


async def test_C1_cancel_between_submit_and_the_first_output(model: Path) -> None:
    async with bench(model) as b:
        b.stub.hold()
        told = await b.frontend.submit([1] * 40, request_id=1)
        await b.stub.plan_arrived(1)
        await b.frontend.abort(1)
        beat = await b.frontend.synced()
        assert beat.running_requests == 0
        assert beat.free_blocks == b.total_blocks - 3  # its step is in flight
        b.stub.let(1)
        await until(lambda: b.free_blocks == b.total_blocks)
        b.stub.release()
        await b.idle()
        assert not told.ids and not told.done.is_set()
        assert [len(plan.slots) for plan in b.stub.plans] == [4, 0]  # one row of 4 bytes, then the slot is freed


async def test_C1_cancel_while_waiting(model: Path) -> None:
    async with bench(model, max_num_seqs=1) as b:
        b.stub.hold()
        running = await b.frontend.submit([1], request_id=1, max_tokens=3)
        await b.stub.plan_arrived(1)
        waiting = await b.frontend.submit([2] * 50, request_id=2)
        await b.frontend.abort(2)
        beat = await b.frontend.synced()
        assert (beat.waiting_requests, beat.waiting_tokens) == (0, 0)
        b.stub.release()
        await finished(running)
        await b.idle()
        assert not waiting.ids and not waiting.done.is_set()
        assert sum(len(plan.started) for plan in b.stub.plans) == 1


async def test_C1_cancel_in_the_middle_of_a_prefill(model: Path) -> None:
    async with bench(model, max_num_batched_tokens=32) as b:
        b.stub.hold()
        told = await b.frontend.submit([1] * 320, request_id=1)
        b.stub.let(2)
        await b.stub.plan_arrived(3)  # 64 of 320 tokens are computed, 32 more on their way
        await b.frontend.abort(1)
        beat = await b.frontend.synced()
        assert beat.free_blocks == b.total_blocks - 20
        b.stub.let(1)
        await until(lambda: b.free_blocks == b.total_blocks)
        b.stub.release()
        await b.idle()
        assert not told.ids
        assert len(b.stub.plans) == 4 and not b.stub.plans[3].slots  # nothing is prefilled after the cancel


async def test_C1_cancel_in_the_tick_in_which_it_finishes(model: Path) -> None:
    async with bench(model) as b:
        b.stub.hold()
        told = await b.frontend.submit([1], request_id=1, max_tokens=2)
        b.stub.let(1)
        await b.stub.plan_arrived(2)  # the step that makes its last id
        await b.frontend.abort(1)
        await b.frontend.synced()
        b.stub.release()
        await b.idle()
        assert told.finished is None and told.failed is None and len(told.ids) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_C1_cancel_at_any_moment_leaves_one_terminal_event_at_most(model: Path, seed: int) -> None:
    rng = random.Random(seed)
    stub = StubExecutor(step_s=0.001, max_in_flight=seed % 2 + 1)
    async with bench(model, stub=stub, max_num_batched_tokens=16, max_num_seqs=4) as b:
        told = []
        for n in range(60):
            told.append(
                await b.frontend.submit([n] * rng.randint(1, 60), request_id=n + 1, max_tokens=rng.randint(1, 6))
            )
            await asyncio.sleep(rng.random() * 0.003)
            await b.frontend.abort(rng.randrange(n + 1) + 1)
        await until(lambda: b.server.engine.core.num_requests == 0)
        await b.frontend.synced()
        await b.idle()
        assert all(mine.after_end == 0 for mine in told)


async def test_T3_an_id_outside_the_vocabulary_fails_its_request_alone(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for bad in (VOCAB, 2**31, 2**32 - 1):  # -1 is 2^32 - 1 in a column of uint32
        caplog.clear()
        stub = StubExecutor(faults=Faults(bad_ids={(7, 2): bad}))
        async with bench(model, stub=stub) as b:
            told = [await b.frontend.submit([n], seed=n, max_tokens=6) for n in (6, 7, 8)]
            await finished(*told)
            assert told[1].code is grpc.StatusCode.INTERNAL
            assert told[1].ids == expected_ids([7], 7, 2, VOCAB)
            assert [told[0].ids, told[2].ids] == [expected_ids([n], n, 6, VOCAB) for n in (6, 8)]
            assert caplog.text.count(f"the executor returned id {bad}, the vocabulary has 512") == 1


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_C2_abort_is_idempotent_and_an_id_may_follow_itself(model: Path, max_in_flight: int) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=max_in_flight)) as b:
        b.stub.hold()
        await b.frontend.submit([1] * 9, request_id=1, max_tokens=50)
        await b.stub.plan_arrived(1)
        await b.frontend.abort(1, 1, 999)
        again = await b.frontend.submit([2], request_id=1, seed=4, max_tokens=5)
        await b.frontend.abort(999)
        b.stub.release()
        await finished(again)
        assert again.ids == expected_ids([2], 4, 5, VOCAB)
        await b.idle()


async def test_C3_200_deadlines_near_the_median_latency_leave_nothing_behind(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.002), max_num_seqs=16) as b:
        rng = random.Random(3)
        told = [await b.frontend.submit([n], max_tokens=10, timeout_ms=rng.randint(1, 500)) for n in range(200)]
        await finished(*told)
        ended = {mine.code if mine.failed else grpc.StatusCode.OK for mine in told}
        assert ended == {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
        await b.idle()
