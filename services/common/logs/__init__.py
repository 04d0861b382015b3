"""Logs of every process: one record a line on standard error, as text for people or JSON for collectors.

What a record tells beside its message are its fields: `log.info("request ended", extra={"fields": {"status": "OK"}})`.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Any

from services.common.logs.delivery import Deliverer, Writer
from services.common.logs.formats import JsonFormatter, TextFormatter
from services.common.logs.logger_levels import Levels

__all__ = ["Levels", "dropped", "fatal", "flush", "levels", "setup"]

STANDARD_ERROR = 2
FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}

log = logging.getLogger(__name__)


class _Process:
    """What this process has set up; None before."""

    deliverer: Deliverer | None = None
    levels: Levels | None = None
    is_json = False


def setup(service: str, level: str, log_format: str = "text") -> None:
    """Sends all records of this process to standard error, from a thread of its own; again replaces what was before.

    `service` is told in each, so that those of several processes can be told apart; `level` is one of
    logger_levels.LEVELS, `log_format` text or json.
    """
    deliverer = Deliverer(Writer(STANDARD_ERROR), FORMATTERS[log_format](service))
    logging.basicConfig(handlers=[deliverer], force=True)
    _Process.deliverer, _Process.levels, _Process.is_json = deliverer, Levels(level), log_format == "json"
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def levels() -> Levels:
    """Of this process's loggers, to be changed while it runs."""
    if _Process.levels is None:
        _Process.levels = Levels()
    return _Process.levels


def flush() -> None:
    """Returns when all that was logged is written, or after delivery.END_S: before a process ends other than by
    returning, or writes to standard error itself."""
    if _Process.deliverer is not None:
        _Process.deliverer.flush()


def dropped() -> int:
    """Records that were lost since the start, because standard error was not read in time."""
    return 0 if _Process.deliverer is None else _Process.deliverer.dropped


def fatal(message: str) -> None:
    """Why this process ends, in one line: a record where these are JSON, else as a command says it."""
    if _Process.is_json:
        log.critical("%s", message)
    else:
        flush()
        print(f"triptych: error: {message}", file=sys.stderr)  # noqa: T201
    flush()


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    log.critical("this process ends: nobody caught an exception", exc_info=(kind, error, trace))
    flush()


def _uncaught_in_thread(told: Any) -> None:
    if told.exc_type is not SystemExit:
        name = told.thread.name if told.thread is not None else "unknown"
        log.critical("thread %s ends: nobody caught an exception", name, exc_info=told.exc_value)
