"""The SERVER span of one call, from its arrival to its end, and the parts of its time that this service owned.

https://opentelemetry.io/docs/specs/semconv/rpc/grpc/
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc

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
        self, tracer: Tracer, method: str, context: SpanContext, parent: SpanContext | None, kind: Kind
    ) -> None:
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


def server_span() -> ServerSpan | None:
    """Of the call that this task serves; None where it is not traced."""
    return _SERVING.get()


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """Spans for the calls of some services. It goes before all others, whose time and errors are the call's too."""

    def __init__(
        self,
        tracer: Tracer,
        services: Collection[str],
        parent_of: Callable[[Any], SpanContext | None],
        kinds: Mapping[str, Kind],
    ) -> None:
        """`services` by full name; `kinds` by full method, "package.Service/Method"; `parent_of` reads metadata."""
        self._tracer = tracer
        self._services = frozenset(services)
        self._parent_of = parent_of
        self._kinds = kinds
        self._open: set[ServerSpan] = set()

    def close(self) -> None:
        """Ends the spans of calls that were cut with the server."""
        for span in tuple(self._open):
            span.end("CANCELLED")
        self._open.clear()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        if handler is None or method.partition("/")[0] not in self._services:
            return handler
        form = f"{_STREAM[handler.request_streaming]}_{_STREAM[handler.response_streaming]}"
        make = getattr(grpc, f"{form}_rpc_method_handler")
        traced = self._traced(getattr(handler, form), method)
        return make(  # type: ignore[no-any-return]
            traced,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _traced(self, behaviour: Any, method: str) -> Any:
        async def traced(request: Any, context: Any) -> Any:
            span = self._begin(method, context)
            if span is None:
                return await behaviour(request, context)
            try:
                answer = await behaviour(request, context)
            except BaseException as error:
                self._end(span, _code(context, error))
                raise
            self._end(span, _code(context, None))
            return answer

        async def traced_stream(request: Any, context: Any) -> Any:
            span = self._begin(method, context)
            code = "CANCELLED"  # a generator that is closed says nothing
            try:
                async for answer in behaviour(request, context):
                    yield answer
                code = _code(context, None)
            except BaseException as error:
                code = _code(context, error)
                raise
            finally:
                if span is not None:
                    self._end(span, code)

        return traced_stream if inspect.isasyncgenfunction(behaviour) else traced

    def _begin(self, method: str, context: Any) -> ServerSpan | None:
        parent = self._parent_of(context)
        own = self._tracer.begin(parent)
        if own is None:
            return None
        span = ServerSpan(self._tracer, method, own, parent, self._kinds.get(method, Kind()))
        CURRENT.set(own)  # of this call's task alone
        _SERVING.set(span)
        self._open.add(span)
        context.add_done_callback(lambda _: self._call_is_over(span, context))
        return span

    def _end(self, span: ServerSpan, code: str) -> None:
        span.end(code)
        self._open.discard(span)

    def _call_is_over(self, span: ServerSpan, context: Any) -> None:
        """Its handler has ended, or is told to; one that waits for a client that is gone may never hear of it."""
        if span in self._open:
            code, now_ns = _code(context, asyncio.CancelledError()), time.time_ns()

            def give_up() -> None:
                span.end(code, now_ns)
                self._open.discard(span)

            asyncio.get_running_loop().call_later(STUCK_S, give_up)


_STREAM = {False: "unary", True: "stream"}


def _code(context: Any, error: BaseException | None) -> str:
    """Name of a call's status, given how its handler ended: all but an abort is of a call that is gone, since what
    else a handler raises is made an abort further in, and fails as one only where no client is left to hear of it."""
    if error is not None and not isinstance(error, grpc.aio.AbortError):
        left_s = context.time_remaining()
        return "DEADLINE_EXCEEDED" if left_s is not None and left_s <= 0 else "CANCELLED"
    code = context.code()
    if code is None or code == 0:
        return "OK" if error is None else "UNKNOWN"
    return str(code.name) if isinstance(code, grpc.StatusCode) else _NAMES.get(int(code), "UNKNOWN")


_NAMES = {int(code.value[0]): code.name for code in grpc.StatusCode}
