"""What this process may use: memory, CPUs and threads by the cgroup's limits (v1 and v2), not by the host's totals."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import StartError

KV_SHARE = 0.5
"""Of the memory left after the weights; the rest is for activations, the allocator and neighbours in the cgroup."""

_V1_UNLIMITED = 1 << 60
"""Cgroup v1 spells "no limit" as a number of pages near 2^63."""


@dataclass(frozen=True)
class Hierarchy:
    """Where limits are read; tests point it at a folder of their own."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


HOST = Hierarchy()


def available_bytes(at: Hierarchy = HOST) -> int:
    """Bytes this process can still take: the least of the host's MemAvailable and every enclosing cgroup's rest."""
    rest = [_host_available(at)]
    for folder in _folders(at, "memory"):
        limit = _integer(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _integer(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _V1_UNLIMITED:
            rest.append(max(0, limit - (used - _reclaimable(folder / "memory.stat"))))
    return min(rest)


def cpus(at: Hierarchy = HOST) -> int:
    """CPUs this process is granted, rounded down, at least 1: its affinity and every enclosing cgroup's quota."""
    granted = float(len(os.sched_getaffinity(0)))
    for folder in _folders(at, "cpu"):
        if (quota := _cpu_quota(folder)) is not None:
            granted = min(granted, quota)
    return max(1, math.floor(granted))


THREAD_VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
"""What users bound the threads of torch and of numba with, everywhere on a machine; the lower one holds for both."""


@dataclass(frozen=True)
class Threads:
    """Compute threads, and why so many."""

    count: int
    reason: str


def compute_threads(
    asked: int | None, environ: Mapping[str, str] = os.environ, at: Hierarchy = HOST, ranks: int = 1
) -> Threads:
    """Of each of `ranks` processes: `asked`, else its part of the CPUs that the cgroup grants, or fewer where the
    environment says so.

    Raises StartError for more than CPUs that this process may run on, or more than numba was told to make.
    """
    bounds = {name: count for name in THREAD_VARIABLES if (count := _leading_integer(environ.get(name, "")))}
    if asked is None:
        shared = f", divided by {ranks} ranks" if ranks > 1 else ""
        threads = Threads(max(1, cpus(at) // ranks), f"the CPUs that the cgroup grants{shared}")
        for name, count in bounds.items():
            if count < threads.count:
                threads = Threads(count, f"{name} is {count}")
        return threads
    check_threads(asked)
    if asked > (most := bounds.get("NUMBA_NUM_THREADS", asked)):
        raise StartError(f"--threads is {asked}, but NUMBA_NUM_THREADS is {most}; raise that, or unset it")
    return Threads(asked, f"--threads is {asked}")


def check_threads(asked: int) -> None:
    """Raises StartError for more than CPUs that this process may run on."""
    if asked > (allowed := len(os.sched_getaffinity(0))):
        raise StartError(f"--threads is {asked}, this process may run on {allowed} CPUs; ask for {allowed} or fewer")


def _leading_integer(text: str) -> int:
    """Of "4" or "4,2", OpenMP's list with a number a level; 0 where there is none."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def threads_left(at: Hierarchy = HOST) -> int | None:
    """Processes and threads that may still be started under every enclosing cgroup's pids limit; None: no limit."""
    rest = []
    for folder in _folders(at, "pids"):
        limit, used = _integer(folder / "pids.max"), _integer(folder / "pids.current")
        if limit is not None and used is not None:
            rest.append(max(0, limit - used))
    return min(rest, default=None)


def kv_budget_bytes(asked: int | None, available: int, ranks: int = 1, share: float = KV_SHARE) -> int:
    """Bytes for KV of each of `ranks` processes: `asked`, else `share` of `available`, which is each one's too.

    Raises StartError where more is asked than there is.
    """
    if asked is None:
        return int(available * share)
    if asked > available:
        a_rank = f" for each of {ranks} ranks, {ranks * asked} in all" if ranks > 1 else ""
        left = f", {available} of them a rank's" if ranks > 1 else ""
        raise StartError(
            f"--kv-memory-bytes is {asked}{a_rank}, but {ranks * available} bytes are left after the weights{left}; "
            "ask for less or raise the memory limit"
        )
    return asked


def _host_available(at: Hierarchy) -> int:
    for line in (at.proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StartError(f"{at.proc / 'meminfo'} has no MemAvailable")


def _folders(at: Hierarchy, controller: str) -> Iterator[Path]:
    """This process's cgroup folder and its ancestors, for v2 and for v1's `controller`.

    In a container the path names what is mounted elsewhere; there the mount's root is this process's group.
    """
    try:
        lines = (at.proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = at.cgroup
        elif controller in controllers.split(","):
            root = at.cgroup / controller
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _integer(*paths: Path) -> int | None:
    """The number in the first file that is there; None for "max" or no file."""
    for path in paths:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.lstrip("-").isdigit() else None
    return None


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel gives up before it kills: v2's inactive_file, v1's total_inactive_file."""
    try:
        pairs = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))


def _cpu_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except OSError:
        v1_quota, v1_period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
        return v1_quota / v1_period if v1_quota and v1_period and v1_quota > 0 else None
    return None if quota == "max" else int(quota) / int(period)
