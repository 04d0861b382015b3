"""Levels of this process's loggers, as configured, and as an operator has set them since."""

from __future__ import annotations

import logging
import threading

LEVELS = ("debug", "info", "warning", "error")
MAX_DURATION_S = 7 * 24 * 3600

ALWAYS = "services.common.audit"
"""Has a level of its own."""
_GRPC = "grpc"


class Levels:
    """What is set holds for a logger and those below it that are not set themselves; of any thread."""

    def __init__(self, configured: str | None = None) -> None:
        """`configured`: of LEVELS; None: what the root logger has now."""
        self._configured = logging.root.level if configured is None else logging.getLevelName(configured.upper())
        self._lock = threading.RLock()
        self._set: set[str] = set()
        self._timers: dict[str, threading.Timer] = {}
        self._apply("", self._configured)

    def set(self, level: str, logger: str = "", duration_s: float | None = None) -> None:
        """`level` of LEVELS, or empty: as configured again; for so long, None: until it is set again. `logger`: its
        name, or the beginning of names up to a dot; empty: the root. Raises ValueError naming what is wrong."""
        check(level, duration_s)
        if logger and not is_known(logger):
            raise ValueError(f"logger is {logger[:128]!r}, and this process has none of that name or below it")
        if logger == ALWAYS:
            raise ValueError(f"logger is {ALWAYS!r}, whose lines are always told")
        with self._lock:
            if (timer := self._timers.pop(logger, None)) is not None:
                timer.cancel()
            if not level:
                self._reset(logger)
                return
            self._set.add(logger)
            self._apply(logger, logging.getLevelName(level.upper()))
            if duration_s is not None:
                self._start_timer(logger, duration_s)

    def _start_timer(self, logger: str, duration_s: float) -> None:
        def end() -> None:
            with self._lock:
                if self._timers.get(logger) is timer:  # not set anew meanwhile
                    del self._timers[logger]
                    self._reset(logger)

        timer = threading.Timer(duration_s, end)
        timer.daemon = True
        self._timers[logger] = timer
        timer.start()

    def _reset(self, logger: str) -> None:
        self._set.discard(logger)
        self._apply(logger, logging.NOTSET if logger else self._configured)

    def _apply(self, logger: str, level: int) -> None:
        logging.getLogger(logger or None).setLevel(level)
        if _GRPC not in self._set:  # its own debug records are about its event loop, one a call
            logging.getLogger(_GRPC).setLevel(max(logging.INFO, logging.root.level))


def check(level: str, duration_s: float | None) -> None:
    """Raises ValueError, naming the field, for what no process takes."""
    if level and level not in LEVELS:
        raise ValueError(f"level is {level[:64]!r}; it is one of {', '.join(LEVELS)}, or empty for the configured one")
    if duration_s is None:
        return
    if not level:
        raise ValueError("duration_s is set without a level; what is configured has no end, leave it out")
    if not 1 <= duration_s <= MAX_DURATION_S:
        raise ValueError(f"duration_s is {duration_s:g}; it must be in [1, {MAX_DURATION_S}]")


def is_known(logger: str) -> bool:
    """A logger of that name, or below it, has been made."""
    names = tuple(logging.root.manager.loggerDict)
    return logger in names or any(name.startswith(f"{logger}.") for name in names)
