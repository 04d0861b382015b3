"""Each call from its arrival to its end, for all who tell of it: one wrapper around its handler.

A call that is over may leave its handler where it is: one that waits for a client that is gone need not hear of it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

import grpc

from services.common.handlers import wrapped


class Told(Protocol):
    """What one teller keeps of a call. Only the first end counts."""

    def end(self, code: str) -> None:
        """Its handler has come back, for a call that ended with this status."""

    def over(self, code: str) -> None:
        """The call has ended with this status, before its handler came back."""


class Teller(Protocol):
    """Who tells of calls."""

    def begin(self, method: str, context: Any) -> Told | None:
        """A call has come, of "package.Service/Method"; None: it is not told."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Tells of the calls of some services. It goes before others, whose time and errors are the call's too."""

    def __init__(self, services: Collection[str], tellers: Sequence[Teller]) -> None:
        """`services` by full name; of the tellers the first begins first and ends last."""
        self._services = frozenset(services)
        self._tellers = tuple(tellers)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        if handler is None or method.partition("/")[0] not in self._services:
            return handler
        return wrapped(handler, lambda behaviour: self._around(behaviour, method))

    def _around(self, behaviour: Any, method: str) -> Any:
        async def told(request: Any, context: Any) -> Any:
            call = _Call(self._tellers, method, context)
            try:
                answer = await behaviour(request, context)
            except BaseException as error:
                call.end(_code(context, error))
                raise
            call.end(_code(context, None))
            return answer

        async def told_stream(request: Any, context: Any) -> Any:
            call = _Call(self._tellers, method, context)
            code = "CANCELLED"  # a generator that is closed says nothing
            try:
                async for answer in behaviour(request, context):
                    yield answer
                code = _code(context, None)
            except BaseException as error:
                code = _code(context, error)
                raise
            finally:
                call.end(code)

        return told_stream if inspect.isasyncgenfunction(behaviour) else told


class _Call:
    """One under way."""

    def __init__(self, tellers: Sequence[Teller], method: str, context: Any) -> None:
        self._told = [told for teller in tellers if (told := teller.begin(method, context)) is not None]
        self._context = context
        if self._told:
            context.add_done_callback(self._over)

    def end(self, code: str) -> None:
        while self._told:
            self._told.pop().end(code)

    def _over(self, _: Any) -> None:
        for told in reversed(self._told):
            told.over(_code(self._context, asyncio.CancelledError()))


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
