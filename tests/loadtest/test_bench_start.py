"""The benchmark of a start: what it makes of what the processes tell, and the whole of it on a tiny checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest import bench_start
from loadtest.bench_start import Start
from loadtest.report import ROOT
from services.common.errors import StartError
from services.common.startup import StartTimes

KEYS = {"start_to_first_token_s", "start_to_ready_s", "cpu_s", "executor_imports_s", "executor_weights_s"}
"""What every last line of this benchmark holds, at least."""


def start(seconds: float) -> Start:
    told = {
        "executor": StartTimes(seconds - 1, {"imports": seconds / 2, "KV pool and warm-up": 0.5}),
        "triptych": StartTimes(seconds, {"imports": 0.4}),
    }
    return Start(seconds, seconds + 0.5, 2 * seconds, told)


def test_medians_of_the_whole_and_of_each_part() -> None:
    starts = [start(seconds) for seconds in (9.0, 8.0, 20.0)]
    assert bench_start.values(starts) == {
        "start_to_first_token_s": 9.5,
        "start_to_ready_s": 9.0,
        "cpu_s": 18.0,
        "executor_imports_s": 4.5,
        "executor_kv_pool_and_warm_up_s": 0.5,
        "triptych_imports_s": 0.4,
    }
    rows = bench_start.table(starts).splitlines()
    assert [row.split("  ")[0] for row in rows[2:5]] == [
        "the command to the first token",
        "the command to ready",
        "CPU time of the four processes",
    ]
    assert any(row.startswith("  imports") and "4.5 (4.0-10.0)" in row for row in rows)


async def test_a_model_that_is_not_there_ends_it_with_what_was_said(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no model at '.*nothing'"):
        await bench_start.measure(["--model", str(tmp_path / "nothing")])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quick_mode_starts_the_engine_and_says_where_the_seconds_went(tmp_path: Path) -> None:
    from tests.support.checkpoints import tiny_llama

    model = tiny_llama(tmp_path / "tiny-llama")
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.bench_start", "--quick", "--model", str(model)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last.keys() >= KEYS and all(last[key] is not None for key in KEYS)
    # The executor's parts follow one another within the whole; a tenth each is lost to rounding.
    parts = [value for key, value in last.items() if key.startswith("executor_")]
    assert 0 < sum(parts) <= last["start_to_ready_s"] + 0.1 * len(parts)
    assert last["start_to_ready_s"] < last["start_to_first_token_s"]
    assert last["cpu_s"] > last["executor_imports_s"] / 10
