"""One case of each kernel under NVIDIA's compute-sanitizer, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.gpu_check.checks import Check, Place, SkippedError

TOOLS = ("memcheck", "racecheck", "synccheck")
"""Reads and writes out of bounds; races in shared memory; barriers that not all threads reach."""
MOST_S = 60
_FOUND = 99


def checks(place: Place) -> Iterator[Check]:
    """A tool each."""
    for tool in TOOLS:
        yield Check(f"compute-sanitizer {tool}", lambda tool=tool: _run(place, tool))


def _run(place: Place, tool: str) -> str:
    place.needs_card("it watches a card; the shim's sanitizers are in tests/kernels")
    program = shutil.which("compute-sanitizer") or _beside_cuda()
    if program is None:
        raise SkippedError("compute-sanitizer is neither on PATH nor in CUDA_HOME/bin")
    time_s = min(MOST_S, place.left_s())
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), sys.executable, "-m", "tests.gpu_check"]
    command += ["--only", "wrappers", "cases", "--few", "--cubins", str(place.cubins)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=time_s)
    except subprocess.TimeoutExpired:
        raise SkippedError(f"not done within {time_s:.0f} s") from None
    if done.returncode == 0:
        return next((line.strip("= \n") for line in done.stdout.splitlines() if "ERROR SUMMARY" in line), "")
    lines = [line for line in done.stdout.splitlines() if line.startswith("=========")] or done.stdout.splitlines()
    raise AssertionError(f"exit status {done.returncode}\n" + "\n".join([*lines[:5], done.stderr[-500:]]))


def _beside_cuda() -> str | None:
    program = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return str(program) if program.exists() else None
