"""W3C trace context of a call (https://www.w3.org/TR/trace-context/): its span's, else what its metadata holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from services.common.telemetry.context import CURRENT, MAX_TRACESTATE_BYTES, SpanContext, read_parent


class TraceContext(NamedTuple):
    """As in the headers; both empty for a call that is part of no trace."""

    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or ""."""
        return self.traceparent[3:35]


def trace_context_of(context: Any) -> TraceContext:
    """What goes on from a call: its own span where it is traced, else what it came with."""
    found = CURRENT.get() or parent_of(context)
    return TraceContext() if found is None else TraceContext(found.traceparent, found.tracestate)


def parent_of(context: Any) -> SpanContext | None:
    """What a call came with. One that is invalid by the standard counts as none: a trace is no reason to refuse."""
    metadata = context.invocation_metadata() or ()
    parents = [value for key, value in metadata if key == "traceparent"]
    if len(parents) != 1:
        return None
    state = ",".join(value for key, value in metadata if key == "tracestate" and isinstance(value, str))
    return read_parent(parents[0], state if len(state.encode()) <= MAX_TRACESTATE_BYTES else "")
