"""How long calls take, by method and status; what a service measures of one beyond that, it hooks in.

https://opentelemetry.io/docs/specs/semconv/rpc/rpc-metrics/
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from typing import Any

import grpc

from services.common.errors import LAST_REASON
from services.common.telemetry import names
from services.common.telemetry.context import CURRENT
from services.common.telemetry.metrics import Metrics


class CallTimes:
    """One call, from its arrival to its end, which counts once. A service's own kind measures more."""

    def __init__(self, metrics: Metrics, method: str) -> None:
        self.metrics = metrics
        self.method = method
        self.begun_s = time.monotonic()
        self.trace = CURRENT.get()
        """The sampled span that is an example of what is measured."""
        self.has_ended = False

    def end(self, code: str) -> None:
        """The call has ended with a gRPC status."""
        self.has_ended = True
        labels = {names.METHOD: self.method, names.STATUS_CODE: code}
        self.metrics.record(names.CALL_DURATION, time.monotonic() - self.begun_s, labels, self.trace)


_CALL: ContextVar[CallTimes | None] = ContextVar("triptych_call_times", default=None)


def call_times() -> CallTimes | None:
    """Of the call that this task serves; None where nothing is measured."""
    return _CALL.get()


class CallMetrics(grpc.aio.ServerInterceptor):
    """Measures the calls of some services. It goes before others, whose time and errors are the call's too."""

    def __init__(
        self, metrics: Metrics, services: Collection[str], times: Callable[[Metrics, str], CallTimes] = CallTimes
    ) -> None:
        """`services` by full name."""
        self.failed: Counter[str] = Counter()
        """Calls that ended with an error of ours, by its reason."""
        self._metrics = metrics
        self._services = frozenset(services)
        self._times = times

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
        return make(  # type: ignore[no-any-return]
            self._measured(getattr(handler, form), method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _measured(self, behaviour: Any, method: str) -> Any:
        async def measured(request: Any, context: Any) -> Any:
            times = self._begin(method, context)
            try:
                answer = await behaviour(request, context)
            except BaseException as error:
                self._end(times, _code(context, error))
                raise
            self._end(times, _code(context, None))
            return answer

        async def measured_stream(request: Any, context: Any) -> Any:
            times = self._begin(method, context)
            code = "CANCELLED"  # a generator that is closed says nothing
            try:
                async for answer in behaviour(request, context):
                    yield answer
                code = _code(context, None)
            except BaseException as error:
                code = _code(context, error)
                raise
            finally:
                self._end(times, code)

        return measured_stream if inspect.isasyncgenfunction(behaviour) else measured

    def _begin(self, method: str, context: Any) -> CallTimes:
        times = self._times(self._metrics, method)
        _CALL.set(times)  # of this call's task alone
        LAST_REASON.set("")
        # A handler that waits for a client that is gone may never hear of it.
        context.add_done_callback(lambda _: self._end(times, _code(context, asyncio.CancelledError())))
        return times

    def _end(self, times: CallTimes, code: str) -> None:
        if times.has_ended:
            return
        times.end(code)
        if code != "OK" and (reason := LAST_REASON.get()):
            self.failed[reason] += 1


_STREAM = {False: "unary", True: "stream"}
_NAMES = {int(code.value[0]): code.name for code in grpc.StatusCode}


def _code(context: Any, error: BaseException | None) -> str:
    """Name of a call's status, given how its handler ended."""
    code = context.code()
    if code:
        return str(code.name) if isinstance(code, grpc.StatusCode) else _NAMES.get(int(code), "UNKNOWN")
    if isinstance(error, asyncio.CancelledError):
        left_s = context.time_remaining()
        return "DEADLINE_EXCEEDED" if left_s is not None and left_s <= 0 else "CANCELLED"
    return "OK" if error is None else "UNKNOWN"
