"""A request through three services as processes, traced edge by edge; with the real model from a real gateway on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from loadtest.otlp_sink import OtlpSink, SpanSeen
from tests.support.calls import by_text, generate, greedy
from tests.support.checkpoints import tiny_llama
from tests.support.cluster import Cluster, running
from tests.support.smg import gateway
from tests.telemetry import edges
from tests.telemetry.stack import CALLER, SAMPLED, TRACE_ID

PATIENCE_S = 60.0
PROMPT = "Once upon a time"


@asynccontextmanager
async def cluster_of(model: Path, collector: OtlpSink, folder: Path) -> AsyncIterator[Cluster]:
    """It traces what its callers want traced."""
    told = ["--otlp-endpoint", collector.endpoint]
    begun = running(
        model,
        folder,
        executor=told,
        scheduler=told,
        frontend=[*told, "--vllm-adapter", "--trace-sample-ratio", "0"],
    )
    found = await asyncio.to_thread(begun.__enter__)
    try:
        yield found
    finally:
        await asyncio.to_thread(begun.__exit__, None, None, None)


def check_edges(spans: list[SpanSeen], tokens: int) -> None:
    """Of one request: partition, steps of the scheduler below it, each with the executor's below."""
    edges.check_partition(spans)
    whole = edges.server(spans)
    assert [*edges.parts(spans)] == list(edges.PARTS)
    assert whole.attributes["gen_ai.usage.output_tokens"] == tokens
    planned = {span.span_id: span for span in edges.steps(spans, edges.SCHEDULER)}
    executed = edges.steps(spans, edges.EXECUTOR)
    assert 2 <= len(planned) < tokens, "some steps, not each"
    assert {span.parent_id for span in executed} == set(planned)
    for step in planned.values():
        assert step.parent_id == whole.span_id and step.links == ((whole.trace_id, whole.span_id),)
        timings = [step.attributes[f"triptych.step.{name}_s"] for name in ("plan", "execute", "sample", "apply")]
        assert min(timings) >= 0 and sum(timings) * 1e9 <= step.duration_ns + edges.CLOCK_NS
    for step in executed:
        above = planned[step.parent_id]
        assert step.attributes["triptych.step.number"] == above.attributes["triptych.step.number"]
        assert above.start_ns <= step.start_ns and step.end_ns <= above.end_ns + edges.CLOCK_NS
    first = min(planned.values(), key=lambda step: step.start_ns)
    assert first.attributes["triptych.step.tokens"] == whole.attributes["gen_ai.usage.input_tokens"]
    assert len(spans) == 1 + len(edges.PARTS) + len(planned) + len(executed), "nothing else, and nothing a token"


async def own_spans(collector: OtlpSink, trace_id: str) -> list[SpanSeen]:
    """Of Triptych's services in a trace, once all of them have told theirs."""

    def all_told(spans: list[SpanSeen]) -> bool:
        planned, executed = edges.steps(spans, edges.SCHEDULER), edges.steps(spans, edges.EXECUTOR)
        return edges.has_ended(*edges.PARTS)(ours(spans)) and len(planned) == len(executed) > 0

    return ours(await collector.until(all_told, PATIENCE_S, trace_id))


def ours(spans: list[SpanSeen]) -> list[SpanSeen]:
    return [span for span in spans if span.service.startswith("triptych-")]


async def test_P4_one_trace_through_three_services(sink: OtlpSink, tmp_path: Path) -> None:
    tokens = 600  # of a tiny model: enough for more than one step to be told
    async with cluster_of(tiny_llama(tmp_path / "tiny-llama"), sink, tmp_path) as cluster:
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            request = by_text(PROMPT, greedy(max_tokens=tokens, ignore_eos=True))
            answer = await generate(channel, request, metadata=SAMPLED)
            untraced = await generate(channel, request)
        spans = await own_spans(sink, TRACE_ID)
    assert untraced.ids == answer.ids and len(answer.ids) == tokens
    check_edges(spans, tokens)
    assert edges.server(spans).parent_id == CALLER
    assert {span.trace_id for span in sink.spans} == {TRACE_ID}, "what nobody asked to trace is not"


@pytest.mark.slow
async def test_P4_one_trace_from_a_gateway_on(embedded: Path, sink: OtlpSink, tmp_path: Path) -> None:
    tokens = 64
    smg = ["--enable-trace", "--otlp-traces-endpoint", f"127.0.0.1:{sink.port}", "--log-level", "info"]
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with (
        cluster_of(embedded, sink, tmp_path) as cluster,
        gateway(cluster.address, tmp_path / "smg.log", *smg) as found,
    ):
        await found.ready(cluster.model.name)
        stream = await found.client.completions.create(
            model=cluster.model.name,
            prompt=PROMPT,
            temperature=0,
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"traceparent": f"00-{trace_id}-{CALLER}-01"},
        )
        assert len([chunk async for chunk in stream]) > tokens / 2
        spans = await own_spans(sink, trace_id)
        whole = edges.server(spans)
        above = await sink.until(
            lambda spans: any(span.span_id == whole.parent_id for span in spans), PATIENCE_S, trace_id
        )
    check_edges(spans, tokens)
    assert whole.name == "vllm.grpc.engine.VllmEngine/Generate"
    (caller,) = [span for span in above if span.span_id == whole.parent_id]
    assert not caller.service.startswith("triptych-")
    assert caller.start_ns - edges.CLOCK_NS <= whole.start_ns and whole.end_ns <= caller.end_ns + edges.CLOCK_NS
