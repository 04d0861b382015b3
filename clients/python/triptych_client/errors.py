"""The one exception of this package, decoded from google.rpc.Status (https://google.aip.dev/193)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from triptych_client import rich_status

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
    for packed in status.details:
        if (info := rich_status.detail(packed, "ErrorInfo")) is not None:
            reason = str(info.reason)
        elif (bad := rich_status.detail(packed, "BadRequest")) is not None:
            violations = tuple(Violation(v.field, v.description) for v in bad.field_violations)
        elif (retry := rich_status.detail(packed, "RetryInfo")) is not None:
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return TriptychError(
        error.code(),
        reason,
        status.message or error.details() or error.code().name,
        violations=violations,
        retry_after_s=retry_after_s,
        request_id=text_of(error.initial_metadata(), REQUEST_ID_KEY),
    )


def cancelled() -> TriptychError:
    """By this side."""
    return TriptychError(grpc.StatusCode.CANCELLED, "", "the call was cancelled by this client")


def text_of(metadata: Any, key: str) -> str | None:
    """The first text value of a key in a call's metadata (None: it has none), None without one."""
    for name, value in metadata or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None


def _status(error: Any) -> Any:
    for name, value in error.trailing_metadata() or ():
        if name == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            return rich_status.status(value)
    return rich_status.status(b"")
