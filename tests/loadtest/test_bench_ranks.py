"""bench_ranks: its arithmetic, and one run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_ranks
from tests.support.checkpoints import tiny_llama


def test_rates_are_of_least_times_and_the_ratio_is_of_rates() -> None:
    seconds = {
        "one": {"prefill": [2.0, 1.0], "decode_16": [0.5], "decode_1": [0.1]},
        "ranks": {"prefill": [2.0], "decode_16": [0.25], "decode_1": [0.4, 0.2]},
    }
    found = bench_ranks.values(seconds)
    assert found["prefill_tokens_per_s_one"] == 256 and found["prefill_tokens_per_s_ranks"] == 128
    assert found["decode_16_tokens_per_s_one"] == 32 and found["decode_16_ratio_ranks_to_one"] == 2
    assert found["decode_1_ratio_ranks_to_one"] == pytest.approx(0.5)


def test_more_ranks_than_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_ranks.main(["--ranks", "4", "--threads", "2"])
    assert "--ranks is 4; from 2 to the 2 threads" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_llama(tmp_path / "m")
    assert bench_ranks.main(["--quick", "--model", str(path), "--threads", "2"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ranks"] == 2 and last["decode_16_ratio_ranks_to_one"] > 0
