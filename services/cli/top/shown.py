"""Numbers as `triptych top` shows them, each within a width that holds for all values; bars and sparklines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NUMBER_WIDTH = 5
SECONDS_WIDTH = 6

UNKNOWN = "-"
CUT = "+"

_SUFFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.-:=+*#"


def number(value: float | None) -> str:
    """At most NUMBER_WIDTH wide: 0.12, 9.8, 512, 9999, 12.3k, 123k, 1.2M."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 0:
        return "<0"
    if isinstance(value, int) or value >= 100:
        value = round(value)
        if value < 10_000:
            return str(value)
    elif value < 1:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    else:
        return f"{value:.1f}"
    for suffix in _SUFFIXES:
        if value < 999.5:
            return f"{value:.1f}{suffix}" if value < 99.95 else f"{value:.0f}{suffix}"
        value /= 1000
    return ">1Y"


def percent(share: float | None) -> str:
    """At most 4 wide."""
    return UNKNOWN if share is None else f"{100 * min(max(share, 0.0), 1.0):.0f}%"


def seconds(value: float | None, *, is_beyond: bool = False) -> str:
    """A latency, at most SECONDS_WIDTH wide: 0.3ms, 12ms, 0.52s, 12.3s, 640s."""
    if value is None:
        return UNKNOWN
    if value < 0.00995:
        text = f"{1000 * value:.1f}ms"
    elif value < 0.0995:
        text = f"{1000 * value:.0f}ms"
    elif value < 9.995:
        text = f"{value:.2f}s"
    elif value < 99.95:
        text = f"{value:.1f}s"
    else:
        text = f"{min(value, 9999):.0f}s"
    return f">{text}" if is_beyond else text


def span(value_s: float) -> str:
    """How long something has lasted, in its two largest units: 3d 4h, 2h 5min, 1min 3s, 42s."""
    left = max(0, int(value_s))
    told: list[str] = []
    for name, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (name == "s" and not told):
            told.append(f"{count}{name}")
        elif told:
            break
    return " ".join(told[:2])


def bar(share: float | None, width: int, *, ascii_only: bool = False) -> str:
    """So much of a width."""
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    filled = round(min(max(share or 0.0, 0.0), 1.0) * width)
    return full * filled + empty * (width - filled)


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """The last `width` values as heights, of which the largest is full; a blank where there is none."""
    marks = _ASCII_SPARKS if ascii_only else _SPARKS
    shown = list(values)[-width:] if width > 0 else []
    top = max((value for value in shown if value is not None), default=0.0)

    def mark(value: float | None) -> str:
        if value is None:
            return " "
        return marks[min(len(marks) - 1, int(value / top * len(marks)))] if top > 0 else marks[0]

    return "".join(map(mark, shown)).rjust(max(width, 0))


def listed(items: Iterable[str], width: int) -> str:
    """As many as fit whole, side by side; then how many are left."""
    parts = list(items)
    for shown in range(len(parts), -1, -1):
        left = len(parts) - shown
        text = "  ".join([*parts[:shown], *([f"{CUT}{left} more"] if left else [])])
        if len(text) <= width:
            return text
    return ""


def fitted(text: str, width: int) -> str:
    """An address in so many places: its end, the port, stays."""
    if len(text) <= width:
        return text
    tail = min(len(text) - text.rfind(":"), width - 2)
    return f"{text[: width - 1 - tail]}~{text[len(text) - tail :]}"
