"""The machine: its CPU, what the cgroup grants, and which of our packages are installed."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from services.cli.doctor.findings import Finding, Section
from services.cli.parts import part
from services.common.config import SERVICES
from services.common.errors import StartError

_FEATURES = {
    "x86_64": {
        "AVX2": "avx2",
        "FMA": "fma",
        "F16C": "f16c",
        "AVX-512": "avx512f",
        "AVX-512 VNNI": "avx512_vnni",
        "AVX-512 BF16": "avx512_bf16",
        "AMX": "amx_tile",
    },
    "aarch64": {"NEON": "asimd", "FP16": "asimdhp", "DOT": "asimddp", "SVE": "sve", "BF16": "bf16", "I8MM": "i8mm"},
}
"""By machine: a name for people, and the kernel's in /proc/cpuinfo."""

PROCESSES = len(SERVICES) + 1
"""The three, and their supervisor."""

_OWN_THREADS = 8
_POOL_THREADS = (4, 16)
"""gRPC's pool has a thread a CPU, at least and at most these."""


def cpu(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str | None = None) -> Section:
    """The CPU and the vector units that the kernel lets us use."""
    machine = machine or platform.machine()
    try:
        fields: dict[str, str] = dict(re.findall(r"^(\S[^:\t]*?)\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE))
    except OSError as error:  # of a system without one
        return Section("CPU", (Finding("features", f"cannot read {cpuinfo}: {error.strerror}", "note"),))
    have = set(fields.get("flags", fields.get("Features", "")).split())
    known = _FEATURES.get(machine, {})
    present = [name for name, flag in known.items() if flag in have]
    absent = [name for name, flag in known.items() if flag not in have]
    text = ", ".join(present) or "none that is known here"
    text += f"; not {', '.join(absent)}" if absent else ""
    model = fields.get("model name", "unnamed")
    return Section(
        "CPU",
        (
            Finding("model", f"{model}, {machine}", facts={"machine": machine}),
            Finding("features", text, facts={"present": present, "absent": absent}),
        ),
    )


def threads_needed(cpus: int, compute_threads: int, processes: int = PROCESSES) -> int:
    """No fewer than the threads that `triptych up` and its services have, all together."""
    least, most = _POOL_THREADS
    return processes * (_OWN_THREADS + min(most, max(least, cpus))) + 2 * compute_threads


def limits(ranks: int = 1) -> Section:
    """What the cgroup and the affinity leave to the processes, the executor being `ranks` of them."""
    processes = PROCESSES + ranks - 1
    try:
        memory = part("services.executor.memory", extra="executor", what="reading the limits")
    except StartError as error:
        return Section("Limits", (Finding("limits", str(error), "note"),))
    granted, allowed, host = memory.cpus(), len(os.sched_getaffinity(0)), os.cpu_count() or 1
    shared = "" if granted >= processes else f"; the {processes} processes share them, and steps wait for one another"
    return Section(
        "Limits",
        (
            Finding(
                "CPUs",
                f"{granted} granted by the cgroup, of {allowed} this process may run on, of {host}{shared}",
                "ok" if granted >= processes else "note",
                {"granted": granted, "allowed": allowed, "host": host},
            ),
            _memory(memory.available_bytes()),
            _threads(memory.threads_left(), threads_needed(host, granted, processes), processes),
        ),
    )


def _memory(available: int) -> Finding:
    return Finding(
        "memory", f"{available / 1e9:.2f} GB free, within the cgroup's limit", facts={"available_bytes": available}
    )


def _threads(left: int | None, needed: int, processes: int = PROCESSES) -> Finding:
    facts = {"left": left, "needed": needed}
    if left is None:
        return Finding(
            "threads", f"no limit by the cgroup; {processes} processes with up to {needed} threads", facts=facts
        )
    if left >= needed:
        return Finding("threads", f"{left} more may start; the {processes} processes have up to {needed}", facts=facts)
    return Finding(
        "threads",
        f"{left} more may start, the {processes} processes have up to {needed}; raise the cgroup's pids limit",
        "fault",
        facts,
    )


def packages() -> Section:
    """This distribution and its extras."""
    return Section(
        "Packages",
        (
            Finding("python", platform.python_version()),
            Finding("triptych", version("triptych"), facts={"version": version("triptych")}),
            *(_extra(name, needed=True) for name in SERVICES),
            _extra("cli", needed=False),
        ),
    )


def _extra(extra: str, *, needed: bool) -> Finding:
    versions: dict[str, str] = {}
    lacking: list[str] = []
    for name in _requirements(extra):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            lacking.append(name)
    if lacking:
        text = f"{', '.join(lacking)} not installed; pip install 'triptych[{extra}]'"
        return Finding(extra, text, "fault" if needed else "note", {"lacking": lacking})
    return Finding(
        extra, ", ".join(f"{name} {number}" for name, number in versions.items()), facts={"versions": versions}
    )


def _requirements(extra: str) -> list[str]:
    """Distributions that an extra of this one names."""
    found = []
    for line in requires("triptych") or ():
        requirement, _, marker = line.partition(";")
        if re.search(rf"""extra == ['"]{extra}['"]""", marker) and (name := re.match(r"[\w.-]+", requirement)):
            found.append(name[0])
    return found
