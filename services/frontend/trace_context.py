"""W3C trace context of a call (https://www.w3.org/TR/trace-context/), out of its metadata."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

MAX_TRACESTATE_BYTES = 512
"""What the standard asks carriers to pass on at least; a longer one is left out."""

_VERSION = "00"
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<ids>(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2})(?P<more>-.*)?"
)


class TraceContext(NamedTuple):
    """As in the headers; both empty for a call that is part of no trace."""

    traceparent: str = ""
    tracestate: str = ""


def trace_context_of(context: Any) -> TraceContext:
    """What a call came with. One that is invalid by the standard counts as none: a trace is no reason to refuse."""
    metadata = context.invocation_metadata() or ()
    parents = [value for key, value in metadata if key == "traceparent"]
    parent = _read_parent(parents[0]) if len(parents) == 1 else ""
    state = ",".join(value for key, value in metadata if key == "tracestate" and isinstance(value, str))
    return TraceContext(parent, state if parent and len(state.encode()) <= MAX_TRACESTATE_BYTES else "")


def _read_parent(header: str | bytes) -> str:
    """In version 00, as which a later one is to be read; "" for one that is not valid."""
    found = _PARENT.fullmatch(header) if isinstance(header, str) else None
    if found is None or found["version"] == "ff" or (found["version"] == _VERSION and found["more"]):
        return ""
    is_valid = found["trace"].strip("0") and found["span"].strip("0")
    return f"{_VERSION}-{found['ids']}" if is_valid else ""
