"""The spans of a request through frontend and scheduler, however it ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.otlp_sink import OtlpSink, SpanSeen
from loadtest.stub_executor import StubExecutor
from tests.frontend.harness import text_checkpoint, user
from tests.support.attached import until
from tests.support.calls import Answer, by_ids, by_text, chat, generate, greedy
from tests.telemetry import edges
from tests.telemetry.stack import CALLER, NOT_SAMPLED, SAMPLED, TRACE_ID, traced

METHOD = "triptych.inference.v1.InferenceService/Generate"
SECRET = "the secret word is xylophone"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("traced") / "tiny-text")


def all_values(spans: list[SpanSeen]) -> str:
    return repr([(span.name, span.attributes, span.error, span.events) for span in spans])


async def test_the_parts_of_a_generation_partition_its_server_span(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        options = greedy(max_tokens=64, ignore_eos=True)
        options.sampling.top_k, options.seed = 7, 11
        answer = await generate(stack.channel, by_text(SECRET, options), metadata=SAMPLED)
        spans = await stack.trace(*edges.PARTS)
    whole = edges.server(spans)
    edges.check_partition(spans)
    assert [*edges.parts(spans)] == list(edges.PARTS)
    assert (whole.name, whole.trace_id, whole.parent_id) == (METHOD, TRACE_ID, CALLER) and whole.error is None
    told = whole.attributes
    assert (told["rpc.system.name"], told["rpc.method"]) == ("grpc", METHOD)
    assert told["rpc.response.status_code"] == "OK" and "error.type" not in told
    assert (told["gen_ai.operation.name"], told["gen_ai.provider.name"]) == ("text_completion", "triptych")
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny-text"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.top_k"], told["gen_ai.request.seed"]) == (64, 7, 11)
    assert told["gen_ai.request.stream"] is True and told["gen_ai.output.type"] == "text"
    assert told["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == 64 == answer.usage.completion_tokens
    assert told["gen_ai.usage.cache_read.input_tokens"] == 0
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert not any(key.startswith("gen_ai") for span in spans if span is not whole for key in span.attributes)
    assert "xylophone" not in all_values(spans) and answer.text not in all_values(spans)
    assert not whole.events
    ((event, received_ns),) = edges.parts(spans)["queue"].events
    assert event == "received" and received_ns >= edges.parts(spans)["queue"].start_ns


async def test_a_seed_that_is_no_integer_of_otlp_is_left_out_without_a_word(
    model: Path, sink: OtlpSink, caplog: pytest.LogCaptureFixture
) -> None:
    async with traced(model, sink) as stack:
        await generate(stack.channel, by_ids([10], greedy(max_tokens=2, seed=2**64 - 1)))
        spans = await stack.trace(*edges.PARTS)
    assert "gen_ai.request.seed" not in edges.server(spans).attributes
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


async def test_the_resource_says_which_process_of_what_version_tells(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        await generate(stack.channel, by_ids([10], greedy(max_tokens=2)))
        await stack.trace(*edges.PARTS)
    assert {edges.FRONTEND, edges.SCHEDULER} == set(sink.resources)
    ids = {told["service.instance.id"] for told in sink.resources.values()}
    assert len(ids) == 2 and all(told["service.version"] for told in sink.resources.values())


async def test_the_time_to_the_first_chunk_counts_once_from_arrival_with_the_queue_in_it(
    model: Path, sink: OtlpSink
) -> None:
    async with traced(model, sink) as stack:
        stack.executor.hold()
        call = asyncio.create_task(generate(stack.channel, by_ids([10], greedy(max_tokens=3)), metadata=SAMPLED))
        await until(lambda: stack.scheduler.engine.core.num_requests == 1)
        await asyncio.sleep(0.3)
        stack.executor.release()
        await call
        spans = await stack.trace(*edges.PARTS)
    first_s = edges.server(spans).attributes["gen_ai.response.time_to_first_chunk"]
    until_first_ns = edges.parts(spans)["prefill"].end_ns - edges.server(spans).start_ns
    assert until_first_ns / 1e9 >= 0.3 and first_s * 1e9 >= until_first_ns - edges.CLOCK_NS
    assert first_s * 1e9 <= edges.server(spans).duration_ns


async def test_a_chat_and_a_unary_call_say_what_they_are(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        await chat(stack.channel, inference_pb2.ChatRequest(messages=[user("Hi")], options=greedy(max_tokens=2)))
        stub = inference_pb2_grpc.InferenceServiceStub(stack.channel)
        asked = by_ids([10, 11], greedy(max_tokens=2, n=3))
        await stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(request=asked))
        await stub.GetModel(inference_pb2.GetModelRequest())
        spans = await sink.until(lambda spans: sum(span.kind == "SERVER" for span in spans) == 3)
    told = {span.name.rpartition("/")[2]: span.attributes for span in spans if span.kind == "SERVER"}
    assert told["Chat"]["gen_ai.operation.name"] == "chat" and told["Chat"]["gen_ai.request.stream"] is True
    assert told["GenerateUnary"]["gen_ai.request.stream"] is False
    assert told["GenerateUnary"]["gen_ai.request.choice.count"] == 3
    assert len(told["GenerateUnary"]["gen_ai.response.finish_reasons"]) == 3
    assert not any(key.startswith("gen_ai") for key in told["GetModel"])


async def test_choices_of_one_request_are_one_set_of_parts(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink, scheduler={"max_num_seqs": 2}) as stack:
        await generate(stack.channel, by_ids([10, 11], greedy(max_tokens=8, n=5, ignore_eos=True)), metadata=SAMPLED)
        spans = await stack.trace(*edges.PARTS)
    edges.check_partition(spans)
    assert [*edges.parts(spans)] == list(edges.PARTS)


async def test_P4_a_cancelled_call_ends_its_spans_in_every_service(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        call = inference_pb2_grpc.InferenceServiceStub(stack.channel).Generate(
            by_ids([10], greedy(max_tokens=900, ignore_eos=True)), metadata=SAMPLED
        )
        async for message in call:
            if message.choices:
                break
        call.cancel()
        spans = await stack.trace("tokenize", "queue", "prefill", "decode")
    whole, found = edges.server(spans), edges.parts(spans)
    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert whole.attributes["rpc.response.status_code"] == whole.attributes["error.type"] == "CANCELLED"
    assert whole.error is None, "a client that leaves is no fault of the server's"
    assert whole.attributes["gen_ai.usage.output_tokens"] >= 1
    assert whole.attributes["gen_ai.response.finish_reasons"] == [""]
    assert found["decode"].attributes["triptych.end"] == "aborted" and found["decode"].error is None
    assert "delivery" not in found


async def test_P4_a_call_cancelled_in_the_queue_has_no_later_part(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink, scheduler={"max_num_seqs": 1}) as stack:
        long = asyncio.create_task(generate(stack.channel, by_ids([9], greedy(max_tokens=900, ignore_eos=True))))
        await until(lambda: stack.scheduler.engine.core.num_running == 1)
        waiting = asyncio.create_task(generate(stack.channel, by_ids([10], greedy()), metadata=SAMPLED))
        await until(lambda: stack.scheduler.engine.core.num_waiting == 1)
        waiting.cancel()
        spans = await stack.trace("tokenize", "queue", trace_id=TRACE_ID)
        long.cancel()
    assert set(edges.parts(spans)) == {"tokenize", "queue"}
    assert edges.parts(spans)["queue"].attributes["triptych.end"] == "aborted"


async def test_P4_a_deadline_that_passes_in_the_queue_is_an_error_of_both(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        stack.executor.hold()
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(stack.channel, by_ids([10], greedy()), timeout_s=0.3, metadata=SAMPLED)
        spans = await stack.trace("tokenize", "queue", "prefill", trace_id=TRACE_ID)
        stack.executor.release()
    assert edges.server(spans).attributes["error.type"] == edges.server(spans).error == "DEADLINE_EXCEEDED"
    assert edges.parts(spans)["prefill"].attributes["triptych.end"] in ("failed", "aborted")


async def test_P4_a_refusal_at_the_door_is_one_part_with_the_clients_error(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(stack.channel, by_text("x", greedy(n=1000)), metadata=SAMPLED)
        spans = await stack.trace("tokenize")
    whole = edges.server(spans)
    assert whole.attributes["error.type"] == "INVALID_ARGUMENT" and whole.error is None
    assert whole.attributes["gen_ai.operation.name"] == "text_completion"
    assert set(edges.parts(spans)) == {"tokenize"}


async def test_P4_a_full_queue_ends_the_queue_span_with_its_reason(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink, scheduler={"max_num_seqs": 1, "max_waiting_requests": 0}) as stack:
        long = asyncio.create_task(generate(stack.channel, by_ids([9], greedy(max_tokens=900, ignore_eos=True))))
        await until(lambda: stack.scheduler.engine.core.num_running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stack.channel, by_ids([10], greedy()), metadata=SAMPLED)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        spans = await stack.trace("tokenize", "queue", trace_id=TRACE_ID)
        long.cancel()
    queue = edges.parts(spans)["queue"]
    assert queue.error == queue.attributes["error.type"] == "QUEUE_FULL"
    assert queue.attributes["triptych.end"] == "failed"


async def test_P4_a_lost_executor_ends_parts_and_steps_with_the_error(model: Path, sink: OtlpSink) -> None:
    executor = StubExecutor(step_s=0.002, max_in_flight=2)
    async with traced(model, sink, executor, scheduler={"recovery_s": 0.2}, failover_s=0.0) as stack:
        call = asyncio.create_task(
            generate(stack.channel, by_ids([10], greedy(max_tokens=900, ignore_eos=True)), metadata=SAMPLED)
        )
        await until(lambda: stack.scheduler.engine.core.num_running == 1 and len(executor.plans) > 3)
        await executor.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        spans = await stack.trace("decode", trace_id=TRACE_ID)
        await executor.start()
        await until(lambda: stack.scheduler.engine.can_generate)
    assert edges.server(spans).error == "UNAVAILABLE"
    decode = edges.parts(spans)["decode"]
    assert decode.error == "EXECUTOR_LOST" and decode.attributes["triptych.end"] == "failed"


async def test_a_request_that_outlives_its_executor_has_each_part_once(model: Path, sink: OtlpSink) -> None:
    executor = StubExecutor(step_s=0.002, max_in_flight=2)
    async with traced(model, sink, executor) as stack:
        request = by_ids([10], greedy(max_tokens=300, ignore_eos=True))
        call = asyncio.create_task(generate(stack.channel, request, metadata=SAMPLED))
        await until(lambda: stack.scheduler.engine.core.num_running == 1 and len(executor.plans) > 3)
        await executor.stop()
        await executor.start()
        assert len((await call).ids) == 300
        spans = await stack.trace("decode", trace_id=TRACE_ID)
    assert edges.server(spans).error is None
    decode = edges.parts(spans)["decode"]
    assert decode.error is None and decode.attributes["triptych.preemptions"] == 1


async def test_preempted_requests_have_each_part_once_and_say_how_often(model: Path, sink: OtlpSink) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": 9, "block_size": 16, "prefix_cache": False}
    async with traced(model, sink, scheduler=settings) as stack:
        options = greedy(max_tokens=60, ignore_eos=True)
        calls = [generate(stack.channel, by_ids([10 + n] * 20, options)) for n in range(3)]
        await asyncio.gather(*calls)
        assert stack.scheduler.engine.core.counters.preemptions > 0
        spans = await sink.until(lambda spans: sum(span.name == "delivery" for span in spans) == 3)
        spans = await sink.until(lambda spans: sum(span.name == "decode" for span in spans) == 3)
    for trace_id in {span.trace_id for span in spans}:
        own = [span for span in spans if span.trace_id == trace_id]
        edges.check_partition(own)
        first_ns = edges.server(own).attributes["gen_ai.response.time_to_first_chunk"] * 1e9
        assert abs(first_ns - (edges.parts(own)["prefill"].end_ns - edges.server(own).start_ns)) < 1e9
    assert sum(edges.attributes(spans, "decode", "triptych.preemptions")) > 0


async def test_a_stop_string_ends_decode_and_begins_the_delivery(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        whole = await generate(stack.channel, by_ids([10], greedy(max_tokens=40, ignore_eos=True, seed=5)))
        stop = whole.text[4:8]
        options = greedy(max_tokens=900, ignore_eos=True, seed=5, stop=[stop])
        await generate(stack.channel, by_ids([10], options), metadata=SAMPLED)
        spans = await stack.trace(*edges.PARTS, trace_id=TRACE_ID)
    edges.check_partition(spans)
    assert edges.server(spans).attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert edges.parts(spans)["decode"].attributes["triptych.end"] == "aborted"


async def test_resumed_streams_are_told_as_such_and_trace_as_others_do(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink) as stack:
        options = greedy(max_tokens=20, ignore_eos=True)
        answer = await generate(stack.channel, by_ids([10], options))
        request = by_ids([10], options)
        arrived = Answer(answer.messages[:8])  # prompt facts, then one id each
        request.options.resume.CopyFrom(resume_of(arrived))
        again = await generate(stack.channel, request, metadata=SAMPLED)
        spans = await stack.trace(*edges.PARTS, trace_id=TRACE_ID)
    assert again.ids == answer.ids[7:] and len(arrived.ids) == 7
    edges.check_partition(spans)
    assert edges.server(spans).attributes["triptych.request.resumed"] is True


def resume_of(arrived: Answer) -> inference_pb2.Resume:
    received = inference_pb2.Resume.Received(token_ids=arrived.ids, text_bytes=len(arrived.text.encode()))
    prompt = arrived.prompt
    return inference_pb2.Resume(seed=prompt.seed, fingerprint=prompt.fingerprint, choices=[received])


async def test_ids_are_the_same_with_tracing_on_and_off(model: Path, sink: OtlpSink) -> None:
    requests = [
        by_ids([10 + n], inference_pb2.Options(sampling=generation_pb2.Sampling(temperature=1), seed=n, max_tokens=20))
        for n in range(4)
    ]
    told = []
    for settings in ({}, {"otlp_endpoint": None}):
        async with traced(model, sink, scheduler=settings, **settings) as stack:
            told.append([(await generate(stack.channel, request)).ids for request in requests])
    assert told[0] == told[1] and all(told[0])
    assert sum(span.kind == "SERVER" for span in sink.spans) == len(requests)


@pytest.mark.parametrize(("metadata", "ratio", "num_servers"), [((), 0.0, 0), (SAMPLED, 0.0, 1), (NOT_SAMPLED, 1.0, 0)])
async def test_a_callers_word_counts_before_the_ratio(
    model: Path, sink: OtlpSink, metadata: Any, ratio: float, num_servers: int
) -> None:
    async with traced(model, sink, trace_sample_ratio=ratio) as stack:
        await generate(stack.channel, by_ids([10], greedy(max_tokens=2)), metadata=metadata)
    assert sum(span.kind == "SERVER" for span in sink.spans) == num_servers
    assert len({span.trace_id for span in sink.spans}) == num_servers


async def test_what_is_off_makes_no_thread_and_no_spans(model: Path, sink: OtlpSink) -> None:
    async with traced(model, sink, scheduler={"otlp_endpoint": None}, otlp_endpoint=None) as stack:
        await generate(stack.channel, by_ids([10], greedy(max_tokens=2)), metadata=SAMPLED)
        assert not [thread for thread in threading.enumerate() if thread.name == "otlp-spans"]
    assert sink.num_spans == 0
