"""Two steps under way, between a real scheduler and an executor without a model: the same ids, no plan held back."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import Faults, StubExecutor
from services.scheduler import executor_run, plan_codec
from tests.support.attached import Told, bench, finished, until, until_idle

VOCAB = 512


def pair(**options: Any) -> StubExecutor:
    """An executor that takes two plans."""
    return StubExecutor(max_in_flight=2, **options)


async def test_the_next_step_is_planned_before_the_ids_of_the_last_are_known(model: Path) -> None:
    async with bench(model, stub=pair()) as b:
        b.stub.hold()
        told = await b.frontend.submit([1, 2, 3], max_tokens=5, seed=9)
        second = await b.stub.plan_arrived(2)
        assert second.computed_tokens == 3 and not second.started  # the first id, not sampled yet
        await b.frontend.synced()
        assert len(b.stub.plans) == 2 and b.server.engine.core.num_in_flight == 2
        b.stub.let(1)
        await b.stub.plan_arrived(3)
        b.stub.release()
        await finished(told)
        assert told.ids == expected_ids([1, 2, 3], 9, 5, VOCAB)
        # 5 ids in 5 steps, and one that frees the slot: the last one's step is known beforehand.
        await b.idle()
        assert [len(plan.slots) for plan in b.stub.plans] == [4] * 5 + [0]


async def test_one_step_is_under_way_where_the_operator_says_so(model: Path) -> None:
    async with bench(model, stub=pair(), max_in_flight=1, max_num_seqs=1) as b:
        b.stub.hold()
        told = [await b.frontend.submit([n], max_tokens=5, seed=n) for n in range(3)]
        await b.stub.plan_arrived(1)
        await b.frontend.synced()
        assert len(b.stub.plans) == 1
        b.stub.release()
        await finished(*told)
        # The executor's slots are reusable two steps later still; its stub would complain.
        assert [mine.ids for mine in told] == [expected_ids([n], n, 5, VOCAB) for n in range(3)]


async def test_an_executor_that_takes_one_plan_gets_one(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with bench(model, stub=StubExecutor(max_in_flight=1), max_in_flight=2) as b:
            assert (await b.frontend.run([1], seed=4)).ids == expected_ids([1], 4, 8, VOCAB)
    assert "--max-in-flight is 2, but the executor takes 1" in caplog.text


async def test_what_comes_beside_a_step_under_way_is_planned_at_once(model: Path) -> None:
    async with bench(model, stub=pair()) as b:
        b.stub.hold()
        first = await b.frontend.submit([1], max_tokens=1)  # nothing of it can be planned after this step
        await b.stub.plan_arrived(1)
        second = await b.frontend.submit([2], max_tokens=1)
        plan = await b.stub.plan_arrived(2)
        assert len(plan.started) == 1 and not first.done.is_set()
        b.stub.release()
        await finished(first, second)


@pytest.mark.parametrize("budget", [5, 256])
async def test_ids_are_the_same_with_one_step_or_two_whatever_happens(model: Path, budget: int) -> None:
    """Stops in the middle, aborts, failing rows and a pool that runs out, in the same requests for both."""
    failed_rows = frozenset((seed, seed % 3) for seed in range(7, 120, 17))
    streams: dict[int, list[Told]] = {}
    aborted: set[int] = set()
    for depth in (1, 2):
        rng = random.Random(budget)
        stub = pair(faults=Faults(failed_rows=failed_rows))
        config = {"num_kv_blocks": 14, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": budget}
        async with bench(model, stub=stub, max_in_flight=depth, **config) as b:
            told = streams[depth] = []
            for seed in range(120):
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
                stops = [rng.randrange(VOCAB) for _ in range(25)]
                told.append(
                    await b.frontend.submit(
                        prompt, request_id=seed + 1, seed=seed, max_tokens=rng.randint(1, 25), stop_ids=stops
                    )
                )
                if rng.random() < 0.1:
                    aborted.add(seed)
                    await b.frontend.abort(seed + 1)
            await finished(*(mine for seed, mine in enumerate(told) if seed not in aborted))
            await b.idle()
            assert b.server.engine.core.counters.preemptions > 0
            assert all(mine.after_end == 0 for mine in told)
    for seed, (one, two) in enumerate(zip(streams[1], streams[2], strict=True)):
        if seed in aborted:
            shorter = min(len(one.ids), len(two.ids))
            assert one.ids[:shorter] == two.ids[:shorter]
            continue
        assert one.ids == two.ids, seed
        assert (one.failed is None) == (two.failed is None)
        if one.finished and two.finished:
            assert (one.finished.reason, one.finished.stop_id) == (two.finished.reason, two.finished.stop_id)
    ends = [mine for seed, mine in enumerate(streams[2]) if seed not in aborted]
    assert sum(bool(mine.finished and mine.finished.HasField("stop_id")) for mine in ends) > 10
    assert any(mine.code is grpc.StatusCode.INTERNAL for mine in ends if mine.failed)


async def test_what_overran_a_stop_is_discarded(model: Path) -> None:
    ids = expected_ids([1, 2], 5, 10, VOCAB)
    async with bench(model, stub=pair()) as b:
        b.stub.hold()
        told = await b.frontend.submit([1, 2], seed=5, max_tokens=10, stop_ids=[ids[1]])
        await b.stub.plan_arrived(2)
        b.stub.let(1)
        await b.stub.plan_arrived(3)
        b.stub.let(1)  # the stop; a third step is under way
        await finished(told)
        assert told.ids == ids[:2] and b.free_blocks == b.total_blocks - 1
        b.stub.let(1)
        await until(lambda: b.free_blocks == b.total_blocks)
        b.stub.release()
        await b.idle()
        assert told.after_end == 0 and [len(plan.slots) for plan in b.stub.plans] == [4, 4, 4, 0]


async def test_C1_cancel_with_two_steps_under_way(model: Path) -> None:
    async with bench(model, stub=pair()) as b:
        b.stub.hold()
        told = await b.frontend.submit([1] * 40, request_id=1, max_tokens=20)
        await b.stub.plan_arrived(2)
        await b.frontend.abort(1)
        beat = await b.frontend.synced()
        assert beat.running_requests == 0 and beat.free_blocks == b.total_blocks - 3
        b.stub.let(1)
        await until(lambda: b.server.engine.core.num_in_flight == 1)
        assert b.free_blocks == b.total_blocks - 3
        b.stub.let(1)
        await until(lambda: b.free_blocks == b.total_blocks)
        b.stub.release()
        await b.idle()
        assert not told.ids and not told.done.is_set()
        assert [len(plan.slots) for plan in b.stub.plans] == [4, 4, 0]


@pytest.mark.parametrize(
    "faults",
    [Faults(fault_at_step=4), Faults(cut_at_step=4), Faults(wrong_count_at_step=4), Faults(hang_at_step=4)],
    ids=["fault", "cut", "contradiction", "hang"],
)
async def test_both_steps_of_a_lost_epoch_are_done_again(
    model: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_codec, "BASE_DEADLINE_MS", 1000)
    monkeypatch.setattr(plan_codec, "DEADLINE_MS_PER_TOKEN", 0)
    monkeypatch.setattr(executor_run, "STEP_SLACK_S", 0.1)
    async with bench(model, stub=pair(faults=faults), max_num_seqs=2) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=20, seed=n) for n in range(5)]
        await finished(*told)
        for n, mine in enumerate(told):
            assert mine.ids == expected_ids([n] * 9, n, 20, VOCAB)
        await until(lambda: b.server.engine.can_generate)
        assert (await b.frontend.run([4, 4], seed=3)).ids == expected_ids([4, 4], 3, 8, VOCAB)
        assert len(b.stub.epochs) == 2
        await b.idle()


async def test_the_time_of_a_step_runs_from_the_end_of_the_one_before(model: Path) -> None:
    async with bench(model, stub=pair()) as b:
        b.stub.hold()
        await b.frontend.submit([1], max_tokens=9)
        await b.stub.plan_arrived(2)
        run = b.server.engine._run
        assert run is not None and run.step_since_s is not None and run._expiry is not None
        since_s, expires_s = run.step_since_s, run._expiry.when()
        await asyncio.sleep(0.2)
        b.stub.let(1)
        await b.stub.plan_arrived(3)
        assert run.step_since_s >= since_s + 0.2  # step 2 was sent with step 1, and begins now
        assert run._expiry.when() >= expires_s + 0.2
        b.stub.release()


async def test_a_restarted_executor_may_take_another_number_of_plans(model: Path) -> None:
    async with bench(model, stub=StubExecutor(max_in_flight=1), max_num_seqs=2) as b:
        told = [await b.frontend.submit([n], max_tokens=6, seed=n) for n in range(4)]
        await finished(*told)
        await b.stub.stop()
        for depth in (2, 1):
            async with StubExecutor(port=b.stub.port, max_in_flight=depth) as next_one:
                await until(lambda: next_one.batch is not None and b.server.engine.can_generate)
                told = [await b.frontend.submit([n], max_tokens=6, seed=n) for n in range(4)]
                await finished(*told)
                assert [mine.ids for mine in told] == [expected_ids([n], n, 6, VOCAB) for n in range(4)]
                await until_idle(b.server)
                assert next_one.violations == []


async def test_a_drain_waits_for_what_is_under_way(model: Path) -> None:
    async with bench(model, stub=pair()) as b:
        b.stub.hold()
        told = await b.frontend.submit([1], max_tokens=3, seed=1)
        await b.stub.plan_arrived(2)
        draining = asyncio.create_task(b.server.engine.drain())
        await b.frontend.synced()
        assert not draining.done()
        b.stub.release()
        await draining
        await finished(told)
        assert told.ids == expected_ids([1], 1, 3, VOCAB)
