"""Metrics: what they tell is what was done, by a workload that is counted."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.error
from pathlib import Path

import grpc
import pytest
from triptych.inference.v1 import inference_pb2

from loadtest.stub_executor import StubExecutor
from services.common.errors import StartError
from services.common.telemetry import names
from services.common.telemetry.export import CLOSE_S as SPANS_CLOSE_S
from services.common.telemetry.exposition import listen
from services.common.telemetry.metrics import CLOSE_S
from services.frontend.config import FrontendConfig
from services.frontend.server import Frontend
from services.scheduler.core import counters
from tests.frontend.harness import VOCAB_SIZE, text_checkpoint
from tests.support.attached import until, until_idle
from tests.support.calls import by_ids, greedy
from tests.support.metered import Metered, metered, read, scrape
from tests.support.metric_sink import collector

STREAMS, TOKENS, PROMPT = 8, 6, 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return text_checkpoint(tmp_path / "model")


async def generate(engine: Metered, first: int = 3, tokens: int = TOKENS, prompt: int = PROMPT) -> list[int]:
    """The ids of one stream."""
    request = by_ids(list(range(first, first + prompt)), greedy(max_tokens=tokens, ignore_eos=True))
    return [
        token
        async for message in engine.stub.Generate(request)
        for choice in message.choices
        for token in choice.token_ids
    ]


async def test_counters_and_histograms_are_those_of_a_counted_workload(model: Path) -> None:
    async with metered(model) as engine:
        for first in range(3, 3 + STREAMS - 1):
            assert len(await generate(engine, first)) == TOKENS
        assert len(await generate(engine, 3)) == TOKENS  # its first block is cached
        front, engine_side = await engine.of_frontend(), await engine.of_scheduler()
        for metric in (names.REQUEST_DURATION, names.TIME_TO_FIRST_TOKEN, names.TIME_PER_OUTPUT_TOKEN):
            assert front.count(metric, gen_ai_operation_name="text_completion", gen_ai_request_model="model") == STREAMS
            assert front.value(metric, "_sum") > 0
        calls = {"rpc_method": "triptych.inference.v1.InferenceService/Generate", "rpc_response_status_code": "OK"}
        assert front.count(names.CALL_DURATION, **calls) == STREAMS
        assert front.value(names.CLIENT_TOKENS) == STREAMS * TOKENS
        assert front.value(names.ENGINE_READY) == 1
        assert engine_side.value(names.PROMPT_TOKENS_COUNT) == STREAMS * PROMPT
        assert engine_side.value(names.GENERATION_TOKENS) == STREAMS * TOKENS
        assert engine_side.value(names.PREFIX_QUERIES) == STREAMS * PROMPT
        assert engine_side.value(names.PREFIX_HITS) == 16
        assert engine_side.value(names.FINISHED, reason="length") == STREAMS
        assert engine_side.value(names.FINISHED, reason="stop") == engine_side.value(names.FAILED) == 0
        for metric in (names.QUEUE_TIME, names.PREFILL_TIME, names.DECODE_TIME, names.ENGINE_TIME_TO_FIRST_TOKEN):
            assert engine_side.count(metric) == STREAMS
        assert engine_side.count(names.INTER_TOKEN_LATENCY) == STREAMS * (TOKENS - 1)
        assert engine_side.value(names.STEPS) >= STREAMS * TOKENS
        assert engine_side.value(names.EPOCHS) == engine_side.value(names.CAN_GENERATE) == 1
        assert engine_side.value(names.FRONTENDS) == 1
        assert engine_side.value(names.STEP_TIME, part="plan") > 0 < engine_side.value(names.STEP_TIME, part="apply")


async def test_phases_of_requests_add_up_to_the_time_to_their_last_token(model: Path) -> None:
    async with metered(model) as engine:
        await asyncio.gather(*(generate(engine, first) for first in range(3, 3 + STREAMS)))
        told = await engine.of_scheduler()
        first = told.value(names.QUEUE_TIME, "_sum") + told.value(names.PREFILL_TIME, "_sum")
        assert first == pytest.approx(told.value(names.ENGINE_TIME_TO_FIRST_TOKEN, "_sum"))
        gaps = told.value(names.INTER_TOKEN_LATENCY, "_sum")
        assert told.value(names.DECODE_TIME, "_sum") == pytest.approx(gaps)


async def test_gauges_show_what_runs_and_waits_and_return_to_zero_when_all_clients_have_left(model: Path) -> None:
    stub = StubExecutor(vocab_size=VOCAB_SIZE)
    async with metered(model, stub=stub) as engine:
        stub.hold()  # so the first that comes is read, and the others wait for its step
        calls = [engine.stub.Generate(by_ids([7 + i] * 20, greedy(max_tokens=50))) for i in range(5)]
        core = engine.scheduler.engine.core
        await until(lambda: core.num_requests == 5)
        told = await engine.of_scheduler()
        assert told.value(names.REQUESTS_RUNNING) == told.value(names.REQUESTS_RUNNING, phase="prefill") == 1
        assert told.value(names.REQUESTS_WAITING) == told.value(names.REQUESTS_WAITING, reason="new") == 4
        assert told.value(names.WAITING_TOKENS) == 4 * 20
        held = told.value(names.KV_BLOCKS, state="held")
        assert held == 2 and told.value(names.KV_USAGE) == pytest.approx(held / told.value(names.KV_BLOCKS))
        assert (await engine.of_frontend()).value(names.CALLS) == 5
        for call in calls:
            call.cancel()
        stub.release()
        await until(lambda: engine.frontend.calls.num_running == 0)
        await until_idle(engine.scheduler)
        told, front = await engine.of_scheduler(), await engine.of_frontend()
        assert front.value(names.CALLS) == 0
        for gauge in (names.REQUESTS_RUNNING, names.REQUESTS_WAITING, names.WAITING_TOKENS, names.KV_USAGE):
            assert gauge.prometheus in told.names()
            assert told.value(gauge) == 0
        assert told.value(names.KV_BLOCKS, state="held") == 0
        assert told.value(names.FINISHED, reason="abort") == 5
        assert front.count(names.CALL_DURATION, rpc_response_status_code="CANCELLED") == 5
        assert front.count(names.TIME_TO_FIRST_TOKEN) == 0  # nobody had a token


async def test_the_first_token_counts_once_from_arrival_with_the_queue_in_it_also_after_a_preemption(
    model: Path,
) -> None:
    stub = StubExecutor(vocab_size=VOCAB_SIZE)
    async with metered(model, stub=stub, max_num_seqs=4, num_kv_blocks=66, max_model_len=1024) as engine:
        stub.hold()
        tasks = [asyncio.create_task(generate(engine, 3 + i, tokens=400, prompt=64)) for i in range(4)]
        await until(lambda: engine.scheduler.engine.core.num_requests == 4)
        await asyncio.sleep(0.3)  # arrived, and not begun
        stub.release()
        assert [len(ids) for ids in await asyncio.gather(*tasks)] == [400] * 4
        front, told = await engine.of_frontend(), await engine.of_scheduler()
        assert told.value(names.PREEMPTIONS_COUNT) > 0
        assert front.count(names.TIME_TO_FIRST_TOKEN) == told.count(names.ENGINE_TIME_TO_FIRST_TOKEN) == 4
        assert front.value(names.TIME_TO_FIRST_TOKEN, "_sum") >= 4 * 0.3
        assert front.buckets(names.TIME_TO_FIRST_TOKEN)["0.25"] == 0
        assert told.count(names.INTER_TOKEN_LATENCY) == 4 * 399


async def test_a_call_that_is_cancelled_after_its_first_token_has_one_and_an_error_in_its_duration(model: Path) -> None:
    async with metered(model, stub=StubExecutor(vocab_size=VOCAB_SIZE, step_s=0.01)) as engine:
        call = engine.stub.Generate(by_ids([7] * 20, greedy(max_tokens=900, ignore_eos=True)))
        async for message in call:
            if message.choices:
                break
        call.cancel()
        await until(lambda: engine.frontend.calls.num_running == 0)
        await until_idle(engine.scheduler)
        front = await engine.of_frontend()
        assert front.count(names.TIME_TO_FIRST_TOKEN) == 1
        assert front.count(names.TIME_PER_OUTPUT_TOKEN) == 0
        assert front.count(names.REQUEST_DURATION, error_type="CANCELLED") == 1 == front.count(names.REQUEST_DURATION)


async def test_a_resumed_stream_has_no_second_first_token_and_counts_its_new_ids_alone(model: Path) -> None:
    async with metered(model) as engine:
        ids = await generate(engine, 3)
        facts = (await engine.stub.GetModel(inference_pb2.GetModelRequest())).model
        resume = inference_pb2.Resume(seed=0, fingerprint=facts.fingerprint)
        resume.choices.add(token_ids=ids[:3])
        request = by_ids(list(range(3, 3 + PROMPT)), greedy(max_tokens=TOKENS, ignore_eos=True, resume=resume))
        async for _ in engine.stub.Generate(request):
            pass
        front = await engine.of_frontend()
        assert front.count(names.TIME_TO_FIRST_TOKEN) == 1
        assert front.count(names.REQUEST_DURATION) == 2
        assert front.value(names.CLIENT_TOKENS) == TOKENS + (TOKENS - 3)


async def test_refusals_are_counted_by_the_reason_that_callers_are_told(model: Path) -> None:
    stub = StubExecutor(vocab_size=VOCAB_SIZE)
    async with metered(model, stub=stub, max_num_seqs=1, max_waiting_requests=1) as engine:
        stub.hold()
        first = [asyncio.create_task(generate(engine, 3 + i)) for i in range(2)]
        await until(lambda: engine.scheduler.engine.core.num_requests == 2)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await generate(engine)
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(engine, prompt=2, tokens=0, first=600)  # ids past the vocabulary
        stub.release()
        await asyncio.gather(*first)
        front, told = await engine.of_frontend(), await engine.of_scheduler()
        assert told.value(names.FAILED, reason="QUEUE_FULL") == told.value(names.FAILED) == 3
        assert front.value(names.CALLS_FAILED, reason="QUEUE_FULL") == 3
        assert front.value(names.CALLS_FAILED) == 4
        assert front.count(names.REQUEST_DURATION, error_type="RESOURCE_EXHAUSTED") == 3


async def test_the_self_test_is_in_no_metric(model: Path) -> None:
    stub = StubExecutor(vocab_size=VOCAB_SIZE)
    async with metered(model, stub=stub, self_test_interval_s=0.1) as engine:
        before = await engine.of_scheduler()
        self_test = engine.scheduler.engine._self_test
        stub.hold()
        await until(lambda: self_test.is_running and engine.scheduler.engine.core.num_running == 1)
        during = await engine.of_scheduler()
        assert self_test.is_running
        stub.release()
        await until(lambda: not self_test.is_running)
        after = await engine.of_scheduler()
        assert after.samples_of("triptych_") == before.samples_of("triptych_") == during.samples_of("triptych_")


async def test_no_label_holds_what_a_caller_made_up(model: Path) -> None:
    async with metered(model, frontend={"served_model_alias": ("other-name",)}) as engine:
        series = []
        for batch in range(2):
            for i in range(20):
                request = by_ids([7 + i] * 20, greedy(max_tokens=2))
                request.options.label = f"client-{batch}-{i}"
                request.model = "other-name" if i % 2 else ""
                metadata = (("triptych-tenant", f"tenant-{batch}-{i}"), ("traceparent", "junk"))
                async for _ in engine.stub.Generate(request, metadata=metadata):
                    pass
                wrong = inference_pb2.GenerateRequest(text="hello", model=f"made-up-{batch}-{i}")
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in engine.stub.Generate(wrong):
                        pass
                unknown = engine.channel.unary_unary(f"/triptych.inference.v1.InferenceService/Made{batch}x{i}")
                with pytest.raises(grpc.aio.AioRpcError):
                    await unknown(b"")
            told = [*(await engine.of_frontend()).samples, *(await engine.of_scheduler()).samples]
            series.append({(sample.name, *sorted(sample.labels.items())) for sample in told})
        assert series[0] == series[1]
        assert not any("tenant-" in str(one) or "made-up" in str(one) or "client-" in str(one) for one in series[0])


async def test_what_is_told_is_what_the_names_say_it_is(model: Path) -> None:
    async with metered(model) as engine:
        await generate(engine)
        for service, told in (("frontend", await engine.of_frontend()), ("scheduler", await engine.of_scheduler())):
            known = {metric.prometheus: metric for metric in (*names.METRICS[service], names.INFO)}
            for sample in told.samples:
                base = sample.name
                for suffix in ("_bucket", "_sum", "_count"):
                    base = base.removesuffix(suffix) if base.removesuffix(suffix) in known else base
                if not base.startswith(("process_", "target_")):
                    labels = {names.prometheus_label(label) for label in known[base].labels}
                    assert set(sample.labels) - {"le"} == labels, sample
            assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= told.names()


async def test_the_traced_call_is_the_example_in_openmetrics(model: Path) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    settings = {"otlp_endpoint": "http://127.0.0.1:9"}
    async with metered(model, frontend=settings) as engine:
        metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
        async for _ in engine.stub.Generate(by_ids([7] * 20, greedy(max_tokens=4)), metadata=metadata):
            pass
        assert engine.frontend.metrics is not None
        told = await scrape(engine.frontend.metrics.port, openmetrics=True)
        examples = [sample for sample in told.samples if sample.exemplar is not None]
        seen = {sample.name.removesuffix("_bucket") for sample in examples}
        assert {names.TIME_TO_FIRST_TOKEN.prometheus, names.REQUEST_DURATION.prometheus} <= seen
        assert all(sample.exemplar and sample.exemplar.labels["trace_id"] == trace_id for sample in examples)


async def test_a_stuck_event_loop_is_an_error_for_the_scraper(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.telemetry.readings.WAIT_S", 0.1)
    async with metered(model) as engine:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            read(engine.scheduler.metrics_port)  # on the loop that would have to answer
        assert (await engine.of_scheduler()).value(names.CAN_GENERATE) == 1


async def test_a_port_that_is_taken_is_named_at_the_start(model: Path) -> None:
    async with metered(model) as engine:
        config = FrontendConfig(
            port=0, engine="127.0.0.1:1", model=str(model), metrics_port=engine.scheduler.metrics_port
        )
        frontend = Frontend(config)
        with pytest.raises(StartError, match=f"127.0.0.1:{engine.scheduler.metrics_port} for metrics.*--metrics-port"):
            await frontend.start()
        await frontend.close()


async def test_a_collector_is_told_the_same_by_otlp_and_a_silent_one_holds_up_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    async with (
        collector() as (sink, endpoint),
        metered(model, frontend={"otlp_endpoint": endpoint}, otlp_endpoint=endpoint) as engine,
    ):
        for first in range(3, 3 + STREAMS):
            await generate(engine, first)
        await until(lambda: sink.count(names.TIME_TO_FIRST_TOKEN) == STREAMS)
        await until(lambda: sink.total(names.GENERATION_TOKENS) == STREAMS * TOKENS)
        await until(lambda: sink.count(names.INTER_TOKEN_LATENCY) == STREAMS * (TOKENS - 1))
        assert sink.services == {"triptych-frontend", "triptych-scheduler"}
    silent = socket.create_server(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
    async with metered(model, frontend={"otlp_endpoint": endpoint}, otlp_endpoint=endpoint) as engine:
        assert len(await generate(engine)) == TOKENS
        begun_s = time.monotonic()
    # Frontend and scheduler, one after the other, each with its spans' and its metrics' grace.
    assert time.monotonic() - begun_s < 2 * (CLOSE_S + SPANS_CLOSE_S + 2)
    silent.close()


def test_the_core_counts_in_the_buckets_that_the_names_have() -> None:
    assert counters.TIME_TO_FIRST_TOKEN_BOUNDS_S == names.TIME_TO_FIRST_TOKEN_BOUNDS_S
    assert counters.INTER_TOKEN_LATENCY_BOUNDS_S == names.TIME_PER_OUTPUT_TOKEN_BOUNDS_S


def test_buckets_of_durations_begin_with_those_of_the_conventions() -> None:
    # https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ and .../rpc/rpc-metrics/
    request = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
    call = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
    for ours, theirs in ((names.REQUEST_DURATION_BOUNDS_S, request), (names.CALL_DURATION_BOUNDS_S, call)):
        assert list(ours[: len(theirs)]) == theirs and list(ours) == sorted(set(ours)) and len(ours) > len(theirs)


@pytest.mark.parametrize(("host", "warnings"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_metrics_that_others_may_read_are_warned_of(host: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    listen(host, 0).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    assert all("metrics are told on 0.0.0.0 in plain HTTP" in record.getMessage() for record in caplog.records)
