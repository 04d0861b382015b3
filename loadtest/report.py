"""What every benchmark prints: the machine, the commit, a table, and one JSON object as the last line.

report.head("bench_serve")
report.table(("system", "tokens/s"), rows)
report.last_line({"out_tokens_per_s": 12.3})
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value at `percent` in [0, 100], None of no values.

    Linear between the two closest ranks: definition 7 of Hyndman and Fan, Sample Quantiles in Statistical Packages
    (1996), which is numpy's default.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent {percent} is not in [0, 100]")
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below, above = math.floor(rank), math.ceil(rank)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """Median and range of repetitions, "12.3 (11.9-12.8)"; "-" where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = f"{median(known):.{digits}f}"
    return middle if len(known) == 1 else f"{middle} ({min(known):.{digits}f}-{max(known):.{digits}f})"


def number(value: float | None, digits: int = 3) -> str:
    """One number for a table, "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def middle(values: Sequence[float | None]) -> float | None:
    """The median of those that are known, None where none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first is aligned left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(_line(cells, widths) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def machine() -> str:
    """Processor, CPUs this process may use, memory, load, and what computes: a line to judge a number by."""
    cpus = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        f"{_processor()}, {cpus} CPUs, {memory_gib:.0f} GiB",
        f"load {os.getloadavg()[0]:.1f}",
        f"Python {platform.python_version()}",
    ]
    return ", ".join(parts + [f"{name} {_version(name)}" for name in ("torch", "grpcio")])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def commit() -> str:
    """The short hash, with "-dirty" where files differ from it; "unknown" outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def head(name: str) -> dict[str, str]:
    """Prints what was measured, where and when, and returns it for the last line."""
    facts = {"benchmark": name, "machine": machine(), "commit": commit(), "started": time.strftime("%FT%T%z")}
    for key, value in facts.items():
        print(f"{key:<9} {value}", flush=True)
    print(flush=True)
    return facts


def last_line(values: Mapping[str, object]) -> None:
    """One JSON object (RFC 8259: infinities and NaN are refused with ValueError)."""
    print(json.dumps(values, allow_nan=False), flush=True)
