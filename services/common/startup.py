"""Where the time from a process's start to its readiness goes, told in one line of its log."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LEAST_TOLD_S = 0.05
_LINE = re.compile(r"ready in (?P<total>\d+\.\d+) s: (?P<parts>.*)$")
_PART = re.compile(r"(?P<name>[^,]+?) (?P<seconds>\d+\.\d+)(?:, |$)")
_START_TIME_FIELD = 22
"""Of /proc/PID/stat, in clock ticks since boot; proc(5)."""


@dataclass(frozen=True)
class StartTimes:
    """Seconds from the start of a process until it was ready, and what they went into, in that order."""

    total_s: float
    parts_s: dict[str, float]

    def line(self) -> str:
        """For the log: "ready in 7.2 s: imports 3.1, weights 1.0"; without parts that took no time to speak of."""
        told = [f"{name} {part:.1f}" for name, part in self.parts_s.items() if part >= _LEAST_TOLD_S]
        return f"ready in {self.total_s:.1f} s: {', '.join(told)}"


def read_line(line: str) -> StartTimes | None:
    """What `StartTimes.line` wrote at the end of a line; None for another line."""
    if (found := _LINE.search(line)) is None:
        return None
    parts = {part["name"]: float(part["seconds"]) for part in _PART.finditer(found["parts"])}
    return StartTimes(float(found["total"]), parts)


class Startup:
    """The parts of one start; `done` ends one, and the next begins with it.

    `begun_s` and `now_s` are of one clock; by default they count from when the kernel made this process.
    """

    def __init__(self, begun_s: float | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begun_s = self._last_s = now_s() - process_age_s() if begun_s is None else begun_s
        self._parts_s: dict[str, float] = {}
        self._is_ready = False

    def done(self, part: str) -> None:
        """What was done since the last part, or the beginning, was `part`; one that is named again grows."""
        now_s = self._now_s()
        self._parts_s[part] = self._parts_s.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def ready(self, part: str, log: logging.Logger) -> None:
        """The process is ready, `part` was the last; said once, whatever is lost and found again later."""
        if not self._is_ready:
            self._is_ready = True
            self.done(part)
            log.info(self.times().line())

    def times(self) -> StartTimes:
        """Up to the last part."""
        return StartTimes(self._last_s - self._begun_s, dict(self._parts_s))


def process_age_s(pid: int | str = "self", proc: Path = Path("/proc")) -> float:
    """Seconds since the kernel made the process, in steps of a clock tick (10 ms); 0 where the system does not tell."""
    try:
        # After the command's name, which may hold spaces and parentheses.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[_START_TIME_FIELD - 3])
    except (OSError, IndexError, ValueError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
