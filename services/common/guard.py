"""Checks before a call's handler, inside the ErrorInterceptor: what they raise is the call's status."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import grpc

from services.common.errors import RequestError
from services.common.handlers import wrapped
from services.common.refusals import Refusals

Admission: TypeAlias = Callable[[str, Any], Awaitable[AbstractContextManager[Any]]]
"""Of a method ("/package.Service/Method") and a call's context: what stands around the handler. Raises RequestError."""

OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
"""Asked before anything is known of the caller: by probes, load balancers, and tools that ask what is served."""


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls in as `admit` says; the log tells of the others."""

    def __init__(self, admit: Admission, refusals: Refusals | None = None) -> None:
        self._admission = admit
        self.refusals = refusals or Refusals()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(OPEN_SERVICES):
            return handler
        return wrapped(handler, lambda behaviour: self._around(behaviour, method))

    async def _admit(self, method: str, context: Any) -> AbstractContextManager[Any]:
        try:
            return await self._admission(method, context)
        except RequestError as error:
            self.refusals.note(method, context, error)
            raise

    def _around(self, behaviour: Any, method: str) -> Any:
        async def unary(request: Any, context: Any) -> Any:
            with await self._admit(method, context):
                return await behaviour(request, context)

        async def stream(request: Any, context: Any) -> Any:
            with await self._admit(method, context):
                async for response in behaviour(request, context):
                    yield response

        return stream if inspect.isasyncgenfunction(behaviour) else unary


def denied(reason: str, message: str) -> RequestError:
    """PERMISSION_DENIED: who calls is known, and may not."""
    return RequestError(grpc.StatusCode.PERMISSION_DENIED, reason, message)


def unauthenticated(reason: str, message: str) -> RequestError:
    """UNAUTHENTICATED: who calls is not known."""
    return RequestError(grpc.StatusCode.UNAUTHENTICATED, reason, message)
