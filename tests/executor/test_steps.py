"""The step thread runs one job after another, outlives what they raise, and ends the process only on a deadline."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.executor.steps import HUNG_EXIT_STATUS, StepThread


def test_jobs_run_in_order_on_one_thread_and_errors_stay_with_their_job() -> None:
    steps = StepThread()
    seen: list[tuple[int, int]] = []

    def job(number: int) -> int:
        seen.append((number, threading.get_ident()))
        if number == 1:
            raise SystemExit("not the thread's")
        return number

    futures = [steps.submit(lambda n=n: job(n)) for n in range(4)]
    assert [f.result(10) for f in futures if f is not futures[1]] == [0, 2, 3]
    assert isinstance(futures[1].exception(), SystemExit)
    assert [number for number, _ in seen] == [0, 1, 2, 3] and len({thread for _, thread in seen}) == 1
    assert steps.is_alive()
    steps.close()
    assert not steps.is_alive()


def test_the_age_of_the_running_job_is_known() -> None:
    steps, release = StepThread(), threading.Event()
    assert steps.running_ms() is None
    future = steps.submit(lambda: release.wait(30))
    while (steps.running_ms() or 0) < 50:
        time.sleep(0.01)
    release.set()
    future.result(10)
    assert steps.running_ms() is None
    steps.close()


def test_the_end_of_the_thread_is_told() -> None:
    ended = threading.Event()
    steps = StepThread(on_end=ended.set)
    steps.submit(lambda: None).result(10)
    assert not ended.is_set()
    steps.close()
    assert ended.wait(10)


def test_the_deadline_of_a_job_does_not_run_while_it_waits_behind_another() -> None:
    """Two jobs of 0.7 s with 1.1 s each: the second is done 1.4 s after it was given."""
    program = (
        "import time\nfrom services.executor.steps import StepThread\nsteps = StepThread()\n"
        "jobs = [steps.submit(lambda: time.sleep(0.7), deadline_s=1.1) for _ in range(2)]\n"
        "for job in jobs: job.result()\nsteps.close()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=60)
    assert ended.returncode == 0


@pytest.mark.parametrize(("sleep_s", "status"), [(30, HUNG_EXIT_STATUS), (0, 0)])
def test_only_a_job_past_its_deadline_ends_the_process(sleep_s: int, status: int) -> None:
    """The second process lives on well past the deadline that its finished job had."""
    program = (
        "import time\nfrom services.executor.steps import StepThread\nsteps = StepThread()\n"
        f"steps.submit(lambda: time.sleep({sleep_s}), deadline_s=0.3).result()\ntime.sleep(0.6)\nsteps.close()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60
    )
    assert ended.returncode == status, ended.stderr
    assert ("passed its deadline" in ended.stderr) == bool(status)
