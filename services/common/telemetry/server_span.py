"""The SERVER span of one call, from its arrival to its end, and the parts of its time that this service owned.

https://opentelemetry.io/docs/specs/semconv/rpc/grpc/
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

from services.common.telemetry import names
from services.common.telemetry.context import CURRENT, SpanContext
from services.common.telemetry.spans import Attributes, Span, Value
from services.common.telemetry.tracing import Tracer

STUCK_S = 1.0
"""A handler that does not come back from a call that is over is given so long; then its span ends without it."""

_FAULTS_OF_SERVERS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Codes that are an error of a server's span; the others are its client's doing."""

_SERVING: ContextVar[ServerSpan | None] = ContextVar("triptych_server_span", default=None)


class Kind(NamedTuple):
    """How the calls of a method are told: the part that they begin with, "" for none, and what is known of all."""

    first_part: str = ""
    attributes: Attributes = MappingProxyType({})


class ServerSpan:
    """`end` counts once. Parts follow one another: `begin` ends the one before."""

    def __init__(
        self,
        tracer: Tracer,
        method: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: Kind,
        under_way: set[ServerSpan],
    ) -> None:
        """It leaves `under_way` with its end."""
        self.context = context
        self.start_unix_ns = time.time_ns()
        self.attributes: dict[str, Value] = {
            names.RPC_SYSTEM_NAME: "grpc",
            names.RPC_METHOD: method,
            **kind.attributes,
        }
        self._tracer = tracer
        self._method = method
        self._parent = parent
        self._under_way = under_way
        self._ended = False
        self._parts: list[tuple[str, int, int]] = []
        self._part = kind.first_part
        self._part_since_ns = self.start_unix_ns

    def begin(self, part: str, unix_ns: int) -> None:
        """The time is this service's from then on, for `part`."""
        self.leave(unix_ns)
        self._part, self._part_since_ns = part, max(unix_ns, self.start_unix_ns)

    def leave(self, unix_ns: int) -> None:
        """The time is another's from then on."""
        if self._part:
            self._parts.append((self._part, self._part_since_ns, max(unix_ns, self._part_since_ns)))
        self._part = ""

    def age_s(self) -> float:
        """Since the call came."""
        return (time.time_ns() - self.start_unix_ns) / 1e9

    def end(self, code: str, unix_ns: int | None = None) -> None:
        """The call has ended with a gRPC status."""
        if self._ended:
            return
        self._ended = True
        self._under_way.discard(self)
        end_ns = max(unix_ns or time.time_ns(), self.start_unix_ns)
        self.attributes[names.RPC_RESPONSE_STATUS_CODE] = code
        if code != "OK":
            self.attributes[names.ERROR_TYPE] = code
        error = code if code in _FAULTS_OF_SERVERS else None
        last = self._part
        self.leave(end_ns)
        for name, start_ns, part_end_ns in self._parts:
            fault = error if name == last else None
            part_end_ns = min(part_end_ns, end_ns)
            start_ns = min(start_ns, part_end_ns)
            self._tracer.end(Span(name, self.context.child(), self.context, start_ns, part_end_ns, {}, error=fault))
        self._tracer.end(
            Span(
                self._method,
                self.context,
                self._parent,
                self.start_unix_ns,
                end_ns,
                self.attributes,
                is_server=True,
                error=error,
            )
        )

    def over(self, code: str) -> None:
        """The call has ended; its handler is told to, and may yet say what it knows."""
        asyncio.get_running_loop().call_later(STUCK_S, self.end, code, time.time_ns())


_PLAIN = Kind()


def server_span() -> ServerSpan | None:
    """Of the call that this task serves; None where it is not traced."""
    return _SERVING.get()


class Tracing:
    """Makes the spans of calls; it is the first of an interceptor's tellers, so that what others tell can name them."""

    def __init__(
        self, tracer: Tracer, parent_of: Callable[[Any], SpanContext | None], kinds: Mapping[str, Kind]
    ) -> None:
        """`kinds` by full method, "package.Service/Method"; `parent_of` reads metadata."""
        self._tracer = tracer
        self._parent_of = parent_of
        self._kinds = kinds
        self._open: set[ServerSpan] = set()

    def close(self) -> None:
        """Ends the spans of calls that were cut with the server."""
        for span in tuple(self._open):
            span.end("CANCELLED")
        self._open.clear()

    def begin(self, method: str, context: Any) -> ServerSpan | None:
        """A call has come."""
        parent = self._parent_of(context)
        own = self._tracer.begin(parent)
        if own is None:
            return None
        span = ServerSpan(self._tracer, method, own, parent, self._kinds.get(method, _PLAIN), self._open)
        CURRENT.set(own)  # of this call's task alone
        _SERVING.set(span)
        self._open.add(span)
        return span
