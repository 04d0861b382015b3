"""W3C trace context (https://www.w3.org/TR/trace-context/): where a span stands in its trace, and the call at work."""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from typing import NamedTuple

MAX_TRACESTATE_BYTES = 512
"""What the standard asks carriers to pass on at least; a longer one is left out."""

_VERSION = "00"
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<ids>(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2}))"
    r"(?P<more>-.*)?"
)
_SAMPLED = 0x01


class SpanContext(NamedTuple):
    """Ids as lower-case hex, of 32 and 16 digits; flags as 2."""

    trace_id: str
    span_id: str
    flags: str = "01"
    tracestate: str = ""

    @property
    def is_sampled(self) -> bool:
        """Whether its spans are kept."""
        return bool(int(self.flags, 16) & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The header."""
        return f"{_VERSION}-{self.trace_id}-{self.span_id}-{self.flags}"

    def child(self) -> SpanContext:
        """Of a new span in the same trace."""
        return SpanContext(self.trace_id, new_span_id(), self.flags, self.tracestate)


def read_parent(header: object, tracestate: str = "") -> SpanContext | None:
    """In version 00, as which a later one is to be read; None for what is not valid."""
    found = _PARENT.fullmatch(header) if isinstance(header, str) else None
    if found is None or found["version"] == "ff" or (found["version"] == _VERSION and found["more"]):
        return None
    if not found["trace"].strip("0") or not found["span"].strip("0"):
        return None
    return SpanContext(found["trace"], found["span"], found["flags"], tracestate)


def new_trace_id() -> str:
    """Random; not 0, which is none."""
    return f"{random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """Random; not 0, which is none."""
    return f"{random.getrandbits(64) or 1:016x}"


CURRENT: ContextVar[SpanContext | None] = ContextVar("triptych_span", default=None)
"""The sampled span of the call that this task serves; None: there is none, or nothing is traced."""


def current_trace_id() -> str:
    """Of the call that this task serves, for log lines and exemplars; "" where it is not traced."""
    found = CURRENT.get()
    return "" if found is None else found.trace_id
