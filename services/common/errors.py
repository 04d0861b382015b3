"""Errors a caller sees, and their one translation to google.rpc.Status (https://google.aip.dev/193)."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from services.common.handlers import wrapped

DOMAIN = "triptych"
STATUS_DETAILS_KEY = "grpc-status-details-bin"

MESSAGE_BYTES = 1024
"""Of an error's message, and of a violation's description. A message travels up to three times: percent-encoded as
grpc-message, and in the base64 of google.rpc.Status, alone and as a violation. Together they stay below the 8 KB that
gRPC peers take as metadata, and the Status below 3 KB."""
FIELD_BYTES = 256
_VIOLATIONS_BYTES = 1536

log = logging.getLogger(__name__)

LAST_REASON: ContextVar[str] = ContextVar("triptych_last_reason", default="")
"""ErrorInfo.reason of the error that the call of this task ended with; "" for none of ours."""


class StartError(Exception):
    """The process cannot serve; its message is one line for the operator, without a traceback."""


@dataclass(frozen=True)
class Violation:
    """One field at fault: its path in the request ("options.stop[1]") and what is wrong with it."""

    field: str
    description: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", clip(self.field, FIELD_BYTES))
        object.__setattr__(self, "description", clip(self.description, MESSAGE_BYTES))

    @property
    def size_bytes(self) -> int:
        """On the wire, about."""
        return len(self.field.encode()) + len(self.description.encode()) + 8


class RequestError(Exception):
    """A request that ends with a status other than OK.

    `reason` is ErrorInfo.reason (UPPER_SNAKE_CASE, stable for programs); `message` is for people, names the thing, the
    value, the limit and what to do, and never holds prompt text; past MESSAGE_BYTES it is cut. `retry_after_s`
    says when another try is worth while.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        message = clip(message, MESSAGE_BYTES)
        super().__init__(message)
        self.code = code
        self.reason = clip(reason, FIELD_BYTES)
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s

    @property
    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The rich status, as gRPC carries it."""
        return ((STATUS_DETAILS_KEY, to_status(self).SerializeToString()),)


def clip(text: str, limit_bytes: int) -> str:
    """A text of at most `limit_bytes` in UTF-8; one that is cut ends with an ellipsis."""
    raw = text.encode(errors="replace")
    if len(raw) <= limit_bytes:
        return text
    end = "\N{HORIZONTAL ELLIPSIS}"
    return raw[: limit_bytes - len(end.encode())].decode(errors="ignore") + end


def invalid(field: str, description: str, reason: str = "INVALID_FIELD") -> RequestError:
    """INVALID_ARGUMENT for one field; the message is "field: description"."""
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        reason,
        f"{field}: {description}",
        violations=(Violation(field, description),),
    )


def unserved(field: str, description: str = "is not served yet") -> RequestError:
    """UNIMPLEMENTED for a field, or a value of it, that the contract names and this version does not serve."""
    return RequestError(
        grpc.StatusCode.UNIMPLEMENTED,
        "FIELD_NOT_SERVED",
        f"{field} {description}",
        violations=(Violation(field, description),),
    )


def unavailable(reason: str, message: str, retry_after_s: float = 1.0) -> RequestError:
    """UNAVAILABLE: nothing is wrong with the request; it may succeed later or elsewhere."""
    return RequestError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s=retry_after_s)


def to_status(error: RequestError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        room = _VIOLATIONS_BYTES
        for violation in error.violations:
            room -= violation.size_bytes
            if room < 0:
                break  # the first ones are enough to begin with
            bad.field_violations.add(field=violation.field, description=violation.description)
        details.append(bad)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns RequestError into its status, and any other exception into INTERNAL with one log line and no details."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        guarded = _guarded_stream if handler.response_streaming else _guarded_unary
        return wrapped(handler, lambda behaviour: guarded(behaviour, method))


def _guarded_stream(behaviour: Any, method: str) -> Any:
    if not inspect.isasyncgenfunction(behaviour):  # a coroutine that writes by itself, as the stock Watch does
        return _guarded_unary(behaviour, method)

    async def guarded(request: Any, context: Any) -> Any:
        try:
            async for response in behaviour(request, context):
                yield response
        except RequestError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            await _abort_internal(context, method)

    return guarded


def _guarded_unary(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except RequestError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            await _abort_internal(context, method)

    return guarded


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Ends the call with the error's status and details."""
    LAST_REASON.set(error.reason)
    await context.abort(error.code, error.message, error.trailing_metadata)
    raise AssertionError("abort returned")


async def _abort_internal(context: grpc.aio.ServicerContext[Any, Any], method: str) -> NoReturn:
    if context.cancelled():  # a write that finds the client gone says so by an error of its own
        raise asyncio.CancelledError from None
    log.exception("%s failed", method)
    await abort(
        context,
        RequestError(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error; the server's log holds the details"),
    )
