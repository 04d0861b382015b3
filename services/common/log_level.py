"""SetLogLevel of AdminService, as each service that serves it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from triptych.engine.v1 import admin_pb2

from services.common import logs
from services.common.errors import RequestError, invalid
from services.common.logs import logger_levels

SERVED = frozenset({"level", "logger", "duration_s"})
"""Fields of its request."""

Elsewhere = Callable[[str, str, int | None], Awaitable[str]]
"""Sets it in another process: level, logger, duration_s. Why it could not; empty where it has."""


async def set_all(
    request: admin_pb2.SetLogLevelRequest, here: str, elsewhere: Mapping[str, Elsewhere]
) -> admin_pb2.SetLogLevelResponse:
    """In this process, service `here`, and elsewhere, by service. Raises RequestError where no process takes it."""
    level, logger = request.level, request.logger
    duration_s = request.duration_s if request.HasField("duration_s") else None
    try:
        logger_levels.check(level, duration_s)
    except ValueError as error:
        raise _refusal(str(error)) from error
    errors = {here: _set_here(level, logger, duration_s)}
    for service, set_there in elsewhere.items():
        errors[service] = await set_there(level, logger, duration_s)
    if errors[here] and all(errors.values()):
        raise _refusal("; ".join(f"{service}: {error}" for service, error in errors.items()))
    return admin_pb2.SetLogLevelResponse(
        services=[admin_pb2.SetLogLevelResponse.Service(name=service, error=error) for service, error in errors.items()]
    )


def fields(request: admin_pb2.SetLogLevelRequest) -> dict[str, object]:
    """For the line of the log that tells of the call."""
    return {"level": request.level or "configured", "logger": request.logger or "all", "for_s": request.duration_s}


def _set_here(level: str, logger: str, duration_s: int | None) -> str:
    try:
        logs.levels().set(level, logger, duration_s)
    except ValueError as error:
        return str(error)
    return ""


def _refusal(message: str) -> RequestError:
    """A ValueError's words begin with the field at fault."""
    field, _, rest = message.partition(" is ")
    return invalid(field, f"is {rest}") if field in SERVED else invalid("logger", message)
