"""A record as a line of text, or as one of JSON. What a client wrote can neither begin a line nor make one long."""

from __future__ import annotations

import json
import logging
import math
import os
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

from services.common.telemetry.context import CURRENT

MESSAGE_CHARS = 4 * 1024
FIELD_CHARS = 1024
"""Of one field's text; longer ones are cut."""
STACK_CHARS = 32 * 1024
"""Of a traceback, whose end says most."""

CONTINUED = "  | "
"""Begins each line of a traceback in text, as no record begins."""

CUT = "..."

Value = str | int | float | bool | None


def escaped(text: str) -> str:
    """With every character escaped that does not show as itself: line ends of all kinds, terminals' codes, changes of
    writing direction, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


class TextFormatter(logging.Formatter):
    """`2026-12-01 02:13:00,123 I frontend services.frontend.server: serving field=value`, then any traceback."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{self.formatTime(record)} {record.levelname:.1} {self._service} {escaped(record.name)}: "
            f"{escaped(_message(record))}"
        )
        for name, value in _fields(record).items():
            line += f" {name}={_as_text(value)}"
        if (error := _error(record)) is not None:
            stack = _stack(error).rstrip("\n").split("\n")
            line = "\n".join([line, *(f"{CONTINUED}{escaped(part)}" for part in stack)])
        return line


class JsonFormatter(logging.Formatter):
    """One object in ASCII: time (RFC 3339, UTC), level, service, pid, logger, message, the record's fields, and
    exception {type, message, stacktrace}."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        told: dict[str, object] = {
            "time": time.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "pid": os.getpid(),
            "logger": record.name,
            "message": _message(record),
        }
        if (error := _error(record)) is not None:
            told["exception"] = {
                "type": type(error).__qualname__,
                "message": _cut(_words_of(error), FIELD_CHARS),
                "stacktrace": _stack(error),
            }
        return json.dumps(told | {name: value for name, value in _fields(record).items() if name not in told})


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception:
        text = f"{record.msg!r} has other arguments than it needs"
    return _cut(text, MESSAGE_CHARS)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Those of the record, each a plain value that JSON has, or a map of such; and the trace of the call at work."""
    fields = {name: _plain(value) for name, value in getattr(record, "fields", {}).items()}
    if (span := CURRENT.get()) is not None and "trace_id" not in fields:
        fields |= {"trace_id": span.trace_id, "span_id": span.span_id}
    return fields


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {_cut(str(key), FIELD_CHARS): _plain(part) for key, part in value.items()}
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return _cut(str(value), FIELD_CHARS)


def _as_text(value: object) -> str:
    """A value without a space or a quotation mark of its own, or as JSON writes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{_as_text(key)}:{_as_text(part)}" for key, part in value.items()) or "-"
    if isinstance(value, str):
        plain = value and value.isprintable() and not set(value) & set(' "\\=,:')
        return value if plain else json.dumps(value)
    return json.dumps(value)


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None


def _stack(error: BaseException) -> str:
    stack = "".join(traceback.format_exception(error))
    return stack if len(stack) <= STACK_CHARS else CUT + stack[-STACK_CHARS:]


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "an exception without words"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - len(CUT)] + CUT
