"""The line that says where a start's time went, and the process's own age that it counts from."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.startup import StartTimes, Startup, process_age_s, read_line


def test_parts_follow_one_another_and_add_up() -> None:
    times = iter([103.0, 103.5, 107.5, 108.0])
    startup = Startup(begun_s=100.0, now_s=lambda: next(times))
    for part in ("imports", "waiting for a scheduler", "weights", "imports"):
        startup.done(part)
    found = startup.times()
    assert found == StartTimes(8.0, {"imports": 3.5, "waiting for a scheduler": 0.5, "weights": 4.0})
    assert found.line() == "ready in 8.0 s: imports 3.5, waiting for a scheduler 0.5, weights 4.0"


def test_a_line_reads_back_out_of_a_log() -> None:
    times = StartTimes(12.3, {"imports": 4.0, "allocation and warm-up": 8.3})
    assert read_line(f"2026-01-01 00:00:00,000 I executor services.executor.server: {times.line()}") == times
    assert read_line("triptych | ready when you are") is None


def test_time_counts_from_when_the_process_was_made() -> None:
    code = "from services.common.startup import Startup; s = Startup(); s.done('imports'); print(s.times().total_s)"
    begun_s = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    took_s = time.monotonic() - begun_s
    assert 0.01 < float(said.stdout) < took_s + 0.02  # a tick on either side


def test_a_system_that_does_not_tell_counts_from_now(tmp_path: Path) -> None:
    assert process_age_s(proc=tmp_path) == 0.0
    stat = tmp_path / "self" / "stat"
    stat.parent.mkdir()
    stat.write_text("7 (a) name) S 1")
    assert process_age_s(proc=tmp_path) == 0.0
    ticks_ago = int((time.clock_gettime(time.CLOCK_BOOTTIME) - 5) * 100)
    stat.write_text("7 (a) name) S " + " ".join(["1"] * 18) + f" {ticks_ago} 1 1")
    assert process_age_s(proc=tmp_path) == pytest.approx(5, abs=0.1)
