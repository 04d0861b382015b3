"""Spans as OTLP's protobuf, written as bytes: a seventh of what the SDK's encoder takes, and equal to what it makes.

https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/trace/v1/trace.proto
Field numbers stand in the tags: a tag is `number << 3 | wire type`, wire types are 0 varint, 1 fixed64, 2 length and
bytes, 5 fixed32 (https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import INVALID_SPAN_CONTEXT, TraceState

from services.common.telemetry import names
from services.common.telemetry.spans import Event, Span

_CACHED = 4096
"""Attributes whose bytes are kept: nearly all of a request are like those of the one before."""

_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1

_OWN = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _OWN | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_flags = struct.Struct("<I").pack
_FLAGS = {is_server: b"\x85\x01" + _flags(_REMOTE if is_server else _OWN) for is_server in (False, True)}
"""Whether the parent is another process's, which is so of a SERVER span's."""

_LINK_FLAGS = b"\x35" + _flags(_OWN)
_KINDS = {False: bytes((0x30, OtlpSpan.SPAN_KIND_INTERNAL)), True: bytes((0x30, OtlpSpan.SPAN_KIND_SERVER))}
_NO_STATUS = b"\x7a\x00"
_ERROR = bytes((0x18, Status.STATUS_CODE_ERROR))

_times = struct.Struct("<BQBQ").pack
_time = struct.Struct("<BQ").pack
_double = struct.Struct("<d").pack


class Encoder:
    """Of the spans of one process."""

    def __init__(self, resource: Resource, version: str) -> None:
        # The SDK's words on who tells, with a span to be told: the spans' place is the end of the scope's.
        scope = InstrumentationScope(names.SCOPE, version)
        request = encode_spans([ReadableSpan("", INVALID_SPAN_CONTEXT, resource=resource, instrumentation_scope=scope)])
        of_resource = request.resource_spans[0]
        of_scope = of_resource.scope_spans[0]
        del of_scope.spans[:], of_resource.scope_spans[:]
        self._resource = of_resource.SerializeToString()
        self._scope = of_scope.SerializeToString()

    def request(self, spans: Iterable[Span]) -> ExportTraceServiceRequest:
        """What an export sends."""
        scope = self._scope + b"".join([_field(b"\x12", _span(span)) for span in spans])
        return ExportTraceServiceRequest.FromString(_field(b"\x0a", self._resource + _field(b"\x12", scope)))


def _span(span: Span) -> bytes:
    context, parent, error = span.context, span.parent, span.error
    parts = [b"\x0a\x10", bytes.fromhex(context.trace_id), b"\x12\x08", bytes.fromhex(context.span_id)]
    if context.tracestate:
        parts.append(_tracestate(context.tracestate))
    if parent is not None:
        parts += (b"\x22\x08", bytes.fromhex(parent.span_id))
    parts += (
        _text(b"\x2a", span.name),
        _KINDS[span.is_server],
        _times(0x39, span.start_unix_ns, 0x41, span.end_unix_ns),
    )
    for key, value in span.attributes.items():
        if isinstance(value, float):  # its zero may be negative, which equals the other: no key of a cache
            parts.append(_float_head(key) + _double(value))
        elif isinstance(value, str | int):
            parts.append(_attribute(key, value))
        else:
            parts.append(_attribute(key, tuple(value)))
    for event in span.events:
        parts.append(_event(event))
    for link in span.links:
        ids = b"\x0a\x10" + bytes.fromhex(link.trace_id) + b"\x12\x08" + bytes.fromhex(link.span_id)
        parts.append(_field(b"\x6a", ids + _LINK_FLAGS))
    parts += (_NO_STATUS if error is None else _status(error), _FLAGS[span.is_server and parent is not None])
    return b"".join(parts)


@lru_cache(_CACHED, typed=True)  # True is not 1 here
def _attribute(key: str, value: str | int | tuple[str, ...]) -> bytes:
    """A KeyValue; b"" for an integer that OTLP cannot hold, which the SDK leaves out too."""
    if isinstance(value, int) and not _MIN_INT <= value <= _MAX_INT:
        return b""
    return _field(b"\x4a", _key(key) + _field(b"\x12", _any(value)))


def _any(value: str | int | tuple[str, ...]) -> bytes:
    if isinstance(value, str):
        return _field(b"\x0a", _utf8(value))
    if isinstance(value, bool):
        return b"\x10" + _varint(value)
    if isinstance(value, int):
        return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
    return _field(b"\x2a", b"".join([_field(b"\x0a", _any(each)) for each in value]))


@lru_cache(_CACHED)
def _float_head(key: str) -> bytes:
    """All of a KeyValue but the eight bytes at its end."""
    return _field(b"\x4a", _key(key) + _field(b"\x12", b"\x21" + bytes(8)))[:-8]


@lru_cache(_CACHED)
def _key(key: str) -> bytes:
    return _field(b"\x0a", _utf8(key))


@lru_cache(_CACHED)
def _text(tag: bytes, text: str) -> bytes:
    """A field of a text that is told again and again; an empty one is not written."""
    return _field(tag, _utf8(text)) if text else b""


@lru_cache(_CACHED)
def _status(error: str) -> bytes:
    return _field(b"\x7a", _text(b"\x12", error) + _ERROR)


@lru_cache(_CACHED)
def _tracestate(header: str) -> bytes:
    """By the SDK's reading of it, which leaves out what is not valid."""
    return _field(b"\x1a", _utf8(TraceState.from_header([header]).to_header()))


def _event(event: Event) -> bytes:
    return _field(b"\x5a", _time(0x09, event.unix_ns) + _text(b"\x12", event.name))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


_SMALL = [bytes((number,)) for number in range(0x80)]
