"""The executor comes late, dies, faults, hangs, contradicts itself, or does not fit."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest import stub_executor
from loadtest.stub_batch import expected_ids
from loadtest.stub_executor import Faults, StubExecutor
from services.common.errors import StartError
from services.scheduler import executor_run, plan_codec
from services.scheduler.config import SchedulerConfig
from services.scheduler.server import SchedulerServer
from tests.support.attached import Bench, Frontend, Told, bench, finished, scheduler_for, until, until_idle, write_model

VOCAB = 512


def states(frontend: Frontend) -> list[int]:
    """Of its heartbeats, repetitions left out."""
    seen: list[int] = []
    for beat in frontend.heartbeats:
        if not seen or seen[-1] != beat.state:
            seen.append(beat.state)
    return seen


async def lost_and_back(b: Bench, told: list[Told]) -> None:
    """All that ran or waited gets its ids in a higher epoch, as if nothing had been."""
    await finished(*told)
    for n, mine in enumerate(told):
        assert mine.finished is not None
        assert mine.ids == expected_ids([n] * 9, n, 20, VOCAB)
        assert mine.after_end == 0
    await until(lambda: b.server.engine.can_generate)
    again = await b.frontend.run([4, 4], seed=3)
    assert again.ids == expected_ids([4, 4], 3, 8, VOCAB)
    assert b.stub.epochs == sorted(set(b.stub.epochs)) and len(b.stub.epochs) == 2
    await b.idle()
    serving, recovering = engine_pb2.ENGINE_STATE_SERVING, engine_pb2.ENGINE_STATE_RECOVERING
    await until(lambda: states(b.frontend)[-3:] == [serving, recovering, serving])


@pytest.mark.parametrize(
    "faults",
    [
        Faults(fault_at_step=3),
        Faults(cut_at_step=3),
        Faults(wrong_count_at_step=3),
    ],
    ids=["fault", "cut", "contradiction"],
)
@pytest.mark.parametrize("in_flight", [1, 2])
async def test_X3_the_requests_of_a_lost_epoch_go_on_in_the_next(model: Path, faults: Faults, in_flight: int) -> None:
    async with bench(model, stub=StubExecutor(faults=faults, max_in_flight=in_flight), max_num_seqs=2) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=20, seed=n) for n in range(5)]
        await lost_and_back(b, told)


async def test_X3_a_step_past_its_deadline_ends_the_epoch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_codec, "BASE_DEADLINE_MS", 300)
    monkeypatch.setattr(plan_codec, "DEADLINE_MS_PER_TOKEN", 0)
    monkeypatch.setattr(executor_run, "STEP_SLACK_S", 0.1)
    async with bench(model, stub=StubExecutor(faults=Faults(hang_at_step=2))) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=20, seed=n) for n in range(3)]
        await lost_and_back(b, told)
        assert b.stub.plans[0].deadline_ms == 300


async def test_X3_an_executor_that_falls_silent_is_lost_before_its_step_is_due(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor_run, "SILENCE_LIMIT_S", 1.0)
    monkeypatch.setattr(stub_executor, "HEARTBEAT_INTERVAL_S", 3600.0)
    async with bench(model, stub=StubExecutor(faults=Faults(hang_at_step=3))) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=20, seed=n) for n in range(3)]
        await finished(*told)
        assert [mine.ids for mine in told] == [expected_ids([n] * 9, n, 20, VOCAB) for n in range(3)]
        assert "has not been heard of for 1 s" in caplog.text


async def test_many_epochs_are_lost_and_no_request_as_long_as_each_brings_ids(model: Path) -> None:
    faults = Faults(cut_at_step=4, epochs=12)
    async with bench(model, stub=StubExecutor(faults=faults), max_num_seqs=4) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=20, seed=n) for n in range(6)]
        await finished(*told)
        assert [mine.ids for mine in told] == [expected_ids([n] * 9, n, 20, VOCAB) for n in range(6)]
        assert len(b.stub.epochs) == 13
        await b.idle()


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_the_request_that_executors_die_of_is_found_and_the_others_go_on(model: Path, in_flight: int) -> None:
    faults = Faults(deadly=frozenset({(2, 5)}))  # the request with seed 2, at its sixth id
    async with bench(model, stub=StubExecutor(faults=faults, max_in_flight=in_flight), max_num_seqs=4) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=20, seed=n) for n in range(6)]
        await finished(*told)
        poison = told.pop(2)
        assert poison.failed is not None and poison.code is grpc.StatusCode.INTERNAL
        assert poison.failed.reason == "POISON" and "ran alone" in poison.failed.message
        assert poison.ids == expected_ids([2] * 9, 2, 5, VOCAB)
        for n, mine in zip((0, 1, 3, 4, 5), told, strict=True):
            assert mine.ids == expected_ids([n] * 9, n, 20, VOCAB)
        assert len(b.stub.epochs) == 4  # lost beside others, lost again, lost alone; then all is well
        await b.idle()


async def test_a_request_that_a_fault_names_ends_alone(model: Path) -> None:
    faults = Faults(blamed=frozenset({(1, 3)}))
    async with bench(model, stub=StubExecutor(faults=faults), max_num_seqs=4) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=20, seed=n) for n in range(4)]
        await finished(*told)
        blamed = told.pop(1)
        assert blamed.failed is not None and blamed.failed.reason == "POISON" and "blames" in blamed.failed.message
        assert [mine.ids for mine in told] == [expected_ids([n] * 9, n, 20, VOCAB) for n in (0, 2, 3)]
        assert len(b.stub.epochs) == 2
        await b.idle()


async def test_requests_are_kept_until_the_operator_says(model: Path) -> None:
    async with bench(model, recovery_s=0.5) as b:
        b.stub.hold()
        told = [await b.frontend.submit([n] * 9, max_tokens=20) for n in range(3)]
        await b.stub.plan_arrived(1)
        await b.stub.stop()
        await finished(*told)
        for mine in told:
            assert mine.code is grpc.StatusCode.UNAVAILABLE
            assert mine.failed is not None and mine.failed.reason == "EXECUTOR_LOST"
        assert b.server.engine.core.num_requests == 0


async def test_what_is_kept_can_be_aborted_and_its_deadline_holds(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.01)) as b:
        left, late = [
            await b.frontend.submit([n] * 9, max_tokens=500, seed=n, **late)
            for n, late in enumerate(({}, {"timeout_ms": 1000}))
        ]
        await left.first.wait()
        await b.stub.stop()
        await until(lambda: b.server.engine.state == engine_pb2.ENGINE_STATE_RECOVERING)
        assert b.server.engine.core.num_requests == 2
        await b.frontend.abort(1)
        await late.done.wait()
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: b.server.engine.core.num_requests == 0)


async def test_an_idle_scheduler_notices_the_loss_too(model: Path) -> None:
    async with bench(model, stub=StubExecutor()) as b:
        port = b.stub.port
        await b.stub.stop()
        await until(lambda: b.server.engine.state == engine_pb2.ENGINE_STATE_RECOVERING)
        assert not b.server.engine.can_generate
        refused = await b.frontend.run([1])
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert b.server.server.health.is_serving("readiness")
        async with StubExecutor(port=port) as second:  # a restart: nothing is loaded, the address is the same
            await until(lambda: b.server.engine.can_generate)
            assert second.num_blocks == b.stub.num_blocks
            assert (await b.frontend.run([1])).finished
            await until_idle(b.server)


async def test_X3_a_killed_executor_is_succeeded_and_its_requests_go_on(model: Path) -> None:
    async with bench(model, stub=StubExecutor(step_s=0.01)) as b:
        told = [await b.frontend.submit([n] * 9, max_tokens=100, seed=n) for n in range(3)]
        await told[0].first.wait()
        await b.stub.stop()
        async with StubExecutor(port=b.stub.port) as second:
            await finished(*told)
            assert [mine.ids for mine in told] == [expected_ids([n] * 9, n, 100, VOCAB) for n in range(3)]
            await until_idle(b.server)
            assert second.violations == []


async def test_a_spare_executor_takes_over_and_the_first_after_it(model: Path) -> None:
    async with StubExecutor(step_s=0.01) as spare:
        first = StubExecutor(step_s=0.01)
        async with bench(model, stub=first, spare_executors=(f"127.0.0.1:{spare.port}",)) as b:
            told = [await b.frontend.submit([n] * 9, max_tokens=150, seed=n) for n in range(3)]
            await told[0].first.wait()
            await first.stop()
            await until(lambda: spare.epochs and b.server.engine.can_generate)
            seen = len(told[0].ids)
            await until(lambda: len(told[0].ids) > seen)
            async with StubExecutor(port=first.port) as third:
                await spare.stop()
                await finished(*told)
                assert [mine.ids for mine in told] == [expected_ids([n] * 9, n, 150, VOCAB) for n in range(3)]
                await until_idle(b.server)
                assert third.epochs and spare.violations == third.violations == []


async def test_a_spare_executor_that_another_scheduler_drives_is_left_to_it(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, own = StubExecutor(), StubExecutor()
    async with bench(model, stub=shared), bench(model, stub=own, spare_executors=(f"127.0.0.1:{shared.port}",)) as b:
        await own.stop()
        with caplog.at_level(logging.INFO):
            await until(lambda: "another scheduler drives the spare executor" in caplog.text)
        assert len(shared.epochs) == 1
        assert not b.server.engine.can_generate


async def test_a_successor_with_other_weights_is_not_used(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(model) as b:
        await b.stub.stop()
        async with StubExecutor(port=b.stub.port, weights_hash="ff" * 32):
            with caplog.at_level(logging.WARNING):
                await until(lambda: "other weights" in caplog.text)
            assert not b.server.engine.can_generate


async def test_a_successor_with_less_memory_serves_as_long_as_the_context_fits(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A context of 1024 tokens needs 64 blocks of 16 and the null block.
    async with bench(model, stub=StubExecutor(kv_bytes=100 * 1024)) as b:
        port, hello = b.stub.port, await b.frontend.greeted()
        assert (b.stub.num_blocks, hello.context_tokens) == (100, 1024)
        await b.stub.stop()
        async with StubExecutor(port=port, kv_bytes=64 * 1024):
            with caplog.at_level(logging.WARNING):
                await until(lambda: "memory for 64 KV blocks now" in caplog.text)
            assert "promised needs 65" in caplog.text
        async with StubExecutor(port=port, kv_bytes=65 * 1024) as second:
            await until(lambda: b.server.engine.can_generate)
            assert (second.num_blocks, b.total_blocks) == (65, 64)
            assert len((await b.frontend.run([1] * 1000, max_tokens=24)).ids) == 24
            await until_idle(b.server)
        async with StubExecutor(port=port, kv_bytes=200 * 1024) as third:
            await until(lambda: third.batch is not None and b.server.engine.can_generate)
            assert (third.num_blocks, b.total_blocks) == (100, 99)
            assert third.violations == second.violations == []


async def test_no_more_blocks_are_taken_than_all_requests_can_fill(model: Path) -> None:
    async with bench(model, stub=StubExecutor(kv_bytes=1 << 30), max_num_seqs=3, max_model_len=100) as b:
        assert b.stub.num_blocks == 3 * 7 + 1  # 100 tokens in blocks of 16


async def test_an_executor_that_has_seen_epochs_of_a_later_clock_is_driven_all_the_same(model: Path) -> None:
    """The clock was set back, and the scheduler started again."""
    stub = StubExecutor()
    tomorrow = time.time_ns() // 1_000_000 + 24 * 3600 * 1000
    stub.epochs.append(tomorrow)
    async with bench(model, stub=stub) as b:
        assert stub.epochs == [tomorrow, tomorrow + 1]
        assert (await b.frontend.run([1])).finished


async def test_an_executor_that_is_late_is_waited_for(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    stub = StubExecutor()
    async with stub:
        pass  # its port is free again
    with caplog.at_level(logging.INFO):
        async with scheduler_for(stub, model, wait=False) as server, Frontend(server) as frontend:
            await until(lambda: len(frontend.heartbeats) >= 2)
            assert states(frontend) == [engine_pb2.ENGINE_STATE_LOADING]
            early = await frontend.run([1])
            assert early.code is grpc.StatusCode.UNAVAILABLE
            assert server.server.health.is_serving("readiness")
            assert not server.server.health.is_serving("generate")
            await until(lambda: "waiting for the executor at" in caplog.text)
            assert frontend.hello is None
            await stub.start()
            await frontend.greeted()
            await until(lambda: server.server.health.is_serving("generate"))
            assert (await frontend.run([1])).finished
            await until_idle(server)
    await stub.stop()


async def test_generate_turns_false_when_the_executor_falls_silent(model: Path) -> None:
    async with bench(model) as b:
        run = b.server.engine._run
        assert run is not None and b.server.engine.can_generate
        run.heard_s -= 3.5
        assert not b.server.engine.can_generate
        await until(lambda: b.server.engine.can_generate)  # its next heartbeat


async def test_generate_turns_false_when_a_step_is_stuck(model: Path) -> None:
    async with bench(model) as b:
        b.stub.hold()
        await b.frontend.submit([1])
        await b.stub.plan_arrived(1)
        assert b.server.engine.can_generate
        run = b.server.engine._run
        assert run is not None and run.step_since_s is not None
        run.step_since_s -= 31
        assert not b.server.engine.can_generate
        b.stub.release()


# -- configurations that cannot be


async def start_error(stub: StubExecutor, model: Path, **config: Any) -> str:
    async with stub:
        server = SchedulerServer(SchedulerConfig(port=0, executor=f"127.0.0.1:{stub.port}", model=str(model), **config))
        await server.start()
        with pytest.raises(StartError) as caught:
            async with asyncio.timeout(10):
                await server.run()
        return str(caught.value)


async def test_an_executor_that_refuses_the_model_ends_the_start(model: Path) -> None:
    error = await start_error(StubExecutor(refuse_load="gpt2 is not served"), model)
    assert "refuses Load: FAILED_PRECONDITION: gpt2 is not served" in error


async def test_an_executor_with_another_vocabulary_ends_the_start(model: Path) -> None:
    error = await start_error(StubExecutor(vocab_size=100), model)
    assert "has 100 ids, model here has 512" in error


async def test_an_executor_with_another_config_json_ends_the_start(model: Path) -> None:
    mine = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()
    error = await start_error(StubExecutor(config_hash="0" * 64), model)
    assert f"config.json has SHA-256 {'0' * 12}, that of model here {mine[:12]}" in error


async def test_memory_for_less_than_two_blocks_ends_the_start(model: Path) -> None:
    error = await start_error(StubExecutor(kv_bytes=1500, block_bytes=1024), model)
    assert "1500 bytes for KV, a block takes 1024 and 2 are needed" in error


async def test_a_length_beyond_the_models_ends_the_start(model: Path) -> None:
    with pytest.raises(StartError, match="--max-model-len is 2000, but model holds 1024"):
        SchedulerServer(SchedulerConfig(model=str(model), max_model_len=2000))


async def test_the_context_is_the_least_of_model_operator_and_pool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "m", context_tokens=300)
    for config, context_tokens in (({}, 300), ({"max_model_len": 200}, 200), ({"num_kv_blocks": 9}, 128)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            async with bench(model, stub=StubExecutor(), **config) as b:
                hello = await b.frontend.greeted()
                assert hello.context_tokens == context_tokens
                assert b.stub.config is not None
                assert b.stub.config.context_tokens == (200 if "max_model_len" in config else 300)
        assert ("the context is lowered" in caplog.text) == ("num_kv_blocks" in config)


async def test_more_blocks_than_fit_are_not_promised(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with bench(model, stub=StubExecutor(kv_bytes=20 * 1024), num_kv_blocks=500) as b:
            assert b.stub.num_blocks == 20
    assert "--num-kv-blocks is 500, but the executor's memory holds 20" in caplog.text
