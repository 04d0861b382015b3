"""The bytes of spans, against what the SDK's own encoder makes of the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.trace import SpanContext as SdkSpanContext

from services.common.telemetry.context import SpanContext, new_span_id, new_trace_id
from services.common.telemetry.encoding import Encoder
from services.common.telemetry.spans import Event, Span

RESOURCE = Resource({"service.name": "test", "service.instance.id": "é", "list": ["a", "b"], "n": 3}, "http://schema")
VERSION = "1.2"


def expected(spans: list[Span]) -> ExportTraceServiceRequest:
    """By the SDK: the reference."""
    return encode_spans([readable(span) for span in spans])


def readable(span: Span) -> ReadableSpan:
    return ReadableSpan(
        span.name,
        context=sdk_context(span.context),
        parent=None if span.parent is None else sdk_context(span.parent, is_remote=span.is_server),
        resource=RESOURCE,
        attributes=span.attributes,
        events=[SdkEvent(event.name, timestamp=event.unix_ns) for event in span.events],
        links=[Link(sdk_context(link)) for link in span.links],
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        instrumentation_scope=InstrumentationScope("triptych", VERSION),
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
    )


def sdk_context(context: SpanContext, *, is_remote: bool = False) -> SdkSpanContext:
    return SdkSpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote,
        TraceFlags(int(context.flags, 16)),
        TraceState.from_header([context.tracestate]) if context.tracestate else None,
    )


encoder = Encoder(RESOURCE, VERSION)

text = st.text(max_size=300)
times_ns = st.integers(0, (1 << 64) - 1)
integers = st.integers(-(1 << 63), (1 << 63) - 1)
few = st.sampled_from([0, 1, 0.0, -0.0, 1.0, True, False, "", "1", "true"])
"""Alike to a cache that tells no types."""

values = few | text | integers | st.booleans() | st.floats(allow_nan=False) | st.lists(text, max_size=4)
contexts = st.builds(
    SpanContext,
    st.integers(1, (1 << 128) - 1).map("{:032x}".format),
    st.integers(1, (1 << 64) - 1).map("{:016x}".format),
    st.sampled_from(["00", "01", "ff"]),
    st.sampled_from(["", "a=b", "a=b,vendor@x=y/z", " a=b , c=d ", "a=b,,c=d", "a=b,a=c", "no pair", "ä=b"]),
)
keys = st.sampled_from(["a", "b", "gen_ai.request.top_p"]) | text
spans = st.builds(
    Span,
    text,
    contexts,
    st.none() | contexts,
    times_ns,
    times_ns,
    st.dictionaries(keys, values, max_size=8),
    st.booleans(),
    st.none() | text,
    st.lists(st.builds(Event, text, times_ns), max_size=3).map(tuple),
    st.lists(contexts, max_size=3).map(tuple),
)


@given(st.lists(spans, min_size=1, max_size=3))
def test_any_spans_are_what_the_sdk_makes_of_them(told: list[Span]) -> None:
    assert encoder.request(told) == expected(told)


def a_span(**attributes: object) -> Span:
    context = SpanContext(new_trace_id(), new_span_id())
    return Span("a", context, None, 1, 2, attributes)  # type: ignore[arg-type]


def test_lengths_on_both_sides_of_each_digit_of_a_varint_are_written_right() -> None:
    lengths = (0, 1, 100, 126, 127, 128, 129, 16_382, 16_383, 16_384, 16_385, 2_097_151, 2_097_152)
    told = [a_span(key="x" * length) for length in lengths]
    assert encoder.request(told) == expected(told)


def test_an_integer_that_otlp_cannot_hold_is_left_out_and_the_others_are_not() -> None:
    (span,) = encoder.request([a_span(a=1 << 63, b=1, c=-(1 << 63) - 1)]).resource_spans[0].scope_spans[0].spans
    assert [each.key for each in span.attributes] == ["b"]


def test_half_a_surrogate_pair_costs_a_letter_and_not_its_batch() -> None:
    (span,) = encoder.request([a_span(a="x\ud83dy")]).resource_spans[0].scope_spans[0].spans
    assert span.attributes[0].value.string_value == "x?y"
