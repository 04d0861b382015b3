"""Through a real scheduler and its stream: choices, tenants, priorities, full queues and their retry hints."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import StubExecutor
from services.common.digests import prompt_digests, root_digest
from services.common.philox import derived_seed
from services.scheduler.throughput import DrainRate
from tests.support.attached import bench, finished, until

VOCAB = 512
PROMPT = list(range(40))


def cache_fields(prompt: list[int], *, tenant: str = "", salt: str = "") -> dict[str, object]:
    root = root_digest(tenant=tenant, salt=salt, adapter="")
    digests = prompt_digests(root, np.array(prompt, dtype=np.uint32), 16)
    return {"tenant": tenant, "root_digest": root, "block_digests": digests}


async def test_choices_are_told_apart_by_their_ids_and_each_ends_once(model: Path) -> None:
    async with bench(model) as b:
        first = await b.frontend.submit(PROMPT, request_id=10, num_choices=3, seed=7)
        await until(lambda: len(b.frontend.told) == 3)
        await finished(*b.frontend.told.values())
        expected = [expected_ids(PROMPT, derived_seed(7, choice), 8, VOCAB) for choice in range(3)]
        assert [b.frontend.told[10 + choice].ids for choice in range(3)] == expected
        assert first.finished and first.started


async def test_cached_tokens_are_told_and_tenants_do_not_share(model: Path) -> None:
    async with bench(model) as b:
        told = [
            await b.frontend.run(PROMPT, **cache_fields(PROMPT, tenant=tenant), max_tokens=1)
            for tenant in ("a", "a", "b", "b")
        ]
        # 40 tokens in blocks of 16: two full ones.
        assert [each.started.cached_tokens for each in told if each.started] == [0, 32, 0, 32]


async def test_the_prefix_cache_can_be_turned_off(model: Path) -> None:
    async with bench(model, prefix_cache=False) as b:
        for _ in range(2):
            told = await b.frontend.run(PROMPT, **cache_fields(PROMPT))
            assert told.started and told.started.cached_tokens == 0


async def test_a_lower_priority_value_is_served_first(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.01), max_num_seqs=1) as b:
        running = await b.frontend.submit([1], max_tokens=10)
        late, soon = [await b.frontend.submit([1], max_tokens=2, priority=priority) for priority in (1, -1)]
        await finished(running, late, soon)
        assert late.started and soon.started
        assert soon.started.scheduled_unix_ns < late.started.scheduled_unix_ns


async def test_G3_a_queue_of_one_and_three_streams(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.01), max_num_seqs=1, max_waiting_requests=1) as b:
        running = await b.frontend.submit([1], max_tokens=30)
        await running.first.wait()
        waiting, refused = await b.frontend.submit([1]), await b.frontend.submit([1])
        await finished(refused)
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not refused.ids
        assert refused.failed is not None
        assert refused.failed.reason == "QUEUE_FULL"
        assert refused.failed.message.startswith("1 requests wait, the limit is --max-waiting-requests 1")
        assert 100 <= refused.failed.retry_after_ms <= 60_000
        await finished(running, waiting)


async def test_who_would_wait_too_long_is_told_so_at_once_and_when_to_come_back(model: Path) -> None:
    stub = StubExecutor(step_s=0.02)
    async with bench(model, stub=stub, max_num_seqs=1, max_queue_wait_s=0.5) as b:
        await finished(await b.frontend.submit([1], max_tokens=20))  # some 0.4 s
        running = await b.frontend.submit([1], max_tokens=20)
        await running.first.wait()
        told = [await b.frontend.submit([1], max_tokens=20) for _ in range(4)]
        await finished(*told)
        waited, *refused = told
        assert waited.finished and len(waited.ids) == 20
        for one in refused:
            assert one.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not one.ids and one.failed is not None
            assert one.failed.reason == "QUEUE_WAIT" and 0 < one.failed.retry_after_ms < 5_000
            assert "the limit is --max-queue-wait-s 0.5; try again in" in one.failed.message
        await finished(await b.frontend.submit([1], max_tokens=1))
        assert b.server.engine.stats().failed["QUEUE_WAIT"] == 3


async def test_a_tenant_over_its_share_is_told_so_and_when_to_come_back(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.01), max_num_seqs=1, max_waiting_requests=4) as b:
        running = await b.frontend.submit([1], max_tokens=30, tenant="many")
        await running.first.wait()
        many = [await b.frontend.submit([1], tenant="many") for _ in range(4)]
        one = await b.frontend.submit([1], tenant="one")
        await finished(many[3])
        assert many[3].failed is not None
        assert (many[3].failed.reason, many[3].code) == ("TENANT_OVER_SHARE", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert many[3].failed.retry_after_ms >= 100
        await finished(running, one, *many[:3])


async def test_only_a_full_queue_is_worth_a_retry_hint(model: Path) -> None:
    async with bench(model) as b:
        told = await b.frontend.run([1] * 1020)
        assert told.failed is not None and not told.failed.HasField("retry_after_ms")


def test_the_hint_is_when_half_of_the_queue_will_have_drained() -> None:
    rate = DrainRate()
    assert rate.retry_after_ms(0.0, 100) == 1000  # nothing is known yet
    for second in range(11):
        rate.add(float(second), 2)
    # 20 more requests in 10 s after the first two: 50 of 100 leave in 25 s.
    assert rate.retry_after_ms(10.0, 100) == 25_000


@pytest.mark.parametrize(("waiting", "expected"), [(0, 500), (1, 500), (10_000, 60_000)])
def test_the_hint_stays_within_bounds(waiting: int, expected: int) -> None:
    rate = DrainRate()
    rate.add(0.0, 1)
    rate.add(1.0, 2)
    assert rate.retry_after_ms(1.0, waiting) == expected
