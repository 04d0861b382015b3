"""Idle is idle: what the scheduler and the executor cost when there is nothing to do."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import running

WATCHED_S = 60


def cpu_s(process: psutil.Process) -> float:
    """Seconds of a core that it has used, in all its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_idle_scheduler_and_executor_use_under_one_percent_of_a_core(tiny: Path, tmp_path: Path) -> None:
    """With six times as many self-tests as by default. CPU time does not depend on what else the machine does."""
    with running(tiny, tmp_path, scheduler=["--self-test-interval-s", "5", "--log-level", "debug"]) as cluster:
        watched = [psutil.Process(cluster.processes[name].pid) for name in ("scheduler", "executor")]
        before = [cpu_s(process) for process in watched]
        time.sleep(WATCHED_S)
        used = [after - cpu_s_before for after, cpu_s_before in zip(map(cpu_s, watched), before, strict=True)]
        assert sum(used) < 0.01 * WATCHED_S, f"scheduler and executor used {used} s in {WATCHED_S} s"
        assert "a self-test took" in cluster.log("scheduler")
