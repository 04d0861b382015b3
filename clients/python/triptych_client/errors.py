"""The one exception of this package, decoded from google.rpc.Status (https://google.aip.dev/193)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

REQUEST_ID_KEY = "triptych-request-id"
_STATUS_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class Violation:
    """One field at fault: its path in the request ("options.stop[1]") and what is wrong with it."""

    field: str
    description: str


class TriptychError(Exception):
    """A call that did not end with OK.

    `reason` is a stable name for programs, empty when the error arose before a server answered (nothing listens, the
    deadline passed on the way). `retry_after_s` is set where another try may succeed. `request_id` is the server's.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.request_id = request_id


def from_rpc(error: Any) -> TriptychError:
    """What the server said, as far as it said it; `error` is an AioRpcError, or the RpcError of a call that blocks."""
    status = _status(error)
    reason = ""
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None
    for detail in status.details:
        if info := _unpack(detail, error_details_pb2.ErrorInfo):
            reason = str(info.reason)
        elif bad := _unpack(detail, error_details_pb2.BadRequest):
            violations = tuple(Violation(v.field, v.description) for v in bad.field_violations)
        elif retry := _unpack(detail, error_details_pb2.RetryInfo):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return TriptychError(
        error.code(),
        reason,
        status.message or error.details() or error.code().name,
        violations=violations,
        retry_after_s=retry_after_s,
        request_id=text_of(error.initial_metadata(), REQUEST_ID_KEY),
    )


def text_of(metadata: Any, key: str) -> str | None:
    """The first text value of a key in a call's metadata (None: it has none), None without one."""
    for name, value in metadata or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None


def _status(error: Any) -> Any:
    for name, value in error.trailing_metadata() or ():
        if name == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def _unpack(packed: Any, message_type: Any) -> Any:
    message = message_type()
    return message if packed.Unpack(message) else None
