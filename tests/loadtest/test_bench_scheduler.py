"""The scheduler's benchmark: what it runs is what it says, and the keys come out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest import bench_scheduler, peer_vllm_scheduler
from loadtest.bench_scheduler import Case, Found, Repetition, values
from loadtest.core_load import BLOCK_TOKENS, FIRST_ID, STOP_IDS, CoreLoad, spread_phases
from services.common.errors import StartError

KEYS = {"plan_apply_256_ms", "plan_apply_1024_ms", "ratio_vs_vllm"}
"""What every last line of this benchmark holds, at least."""


def test_the_load_decodes_one_id_a_request_a_step_and_fills_blocks_of_some() -> None:
    load = CoreLoad(spread_phases(32, 40), decode_steps=2 * BLOCK_TOKENS)
    load.prefill()
    grown = []
    for _ in range(2 * BLOCK_TOKENS):
        plan = load.plan()
        assert plan.token_counts == [1] * 32 and not plan.started
        updates = load.core.apply(load.answer(plan), load.now_ns)
        assert updates.counts == [1] * 32 and not updates.finished
        assert min(updates.token_ids) >= FIRST_ID > max(STOP_IDS)
        grown.append(len(plan.new_blocks))
        load.core.check_books()
    assert grown == [2] * 2 * BLOCK_TOKENS  # 32 requests, at each of 16 phases two
    assert load.core.cached_blocks > 0  # the prefix cache is on


def test_a_repetition_times_every_step_in_its_parts() -> None:
    one = bench_scheduler.measure(Case(16, 20), steps=5, whole_steps=3, seed=1)
    assert [len(part) for part in (one.plan_ms, one.apply_ms, one.cpu_ms, one.whole_ms)] == [5, 5, 5, 3]
    assert min((*one.plan_ms, *one.apply_ms, *one.whole_ms)) > 0
    assert one.both_ms[0] == one.plan_ms[0] + one.apply_ms[0]


def repetition(plan_ms: float, apply_ms: float) -> Repetition:
    return Repetition((plan_ms,), (apply_ms,), (0.5,), (2.0,))


def test_the_keys_are_medians_and_the_ratios_are_of_one_run() -> None:
    found = [
        Found(Case(256, 128), [repetition(0.1, 0.3), repetition(0.1, 0.5), repetition(0.1, 0.4)], [repetition(3, 2)]),
        Found(Case(256, 4096), [repetition(0.1, 0.5)]),
        Found(Case(1024, 128), [repetition(0.5, 1.5)], [repetition(20, 10)]),
        Found(Case(1024, 4096), [repetition(0.5, 1.5)]),
    ]
    flat = values(found)
    assert flat["plan_apply_256_ms"] == pytest.approx(0.5)
    assert flat["apply_256_ms"] == pytest.approx(0.4)
    assert flat["ratio_vs_vllm"] == pytest.approx(5 / 0.5)
    assert flat["exponent_in_requests"] == pytest.approx(1.0)  # 4 times the requests, 4 times the time
    assert flat["long_to_short_prompt_ratio"] == pytest.approx(0.6 / 0.5)
    assert flat.keys() >= KEYS


def test_the_whole_benchmark_on_few_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRIPTYCH_PEER_VLLM", raising=False)
    small = ["--requests", "8", "16", "--prompt-tokens", "16", "32", "--steps", "4", "--whole-steps", "2"]
    assert bench_scheduler.main(["--quick", *small]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["plan_apply_8_ms"] > 0 and found["plan_apply_16_ms"] > 0 and found["ratio_vs_vllm"] is None
    assert found["quick"] is True and found["repetitions"] == 1
    assert "left out: vllm (set TRIPTYCH_PEER_VLLM)" in shown


async def measured_by(
    script: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> Sequence[Sequence[peer_vllm_scheduler.PeerTimes]]:
    """What becomes of a peer whose script is this one."""
    file = folder / "script.py"
    file.write_text(script)
    monkeypatch.setattr(peer_vllm_scheduler, "_SCRIPT", file)
    return await peer_vllm_scheduler.measure(
        Path(sys.executable), [[16, 17], [20]], steps=2, warmup_steps=1, repetitions=2, seed=1
    )


async def test_a_peers_times_come_back_by_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = """
import json, sys
asked = json.loads(sys.argv[1])
print("chatter")
print(json.dumps([
    {"plan_s": [len(case["prompt_tokens"])] * asked["steps"], "apply_s": [time] * asked["steps"]}
    for case in asked["cases"] for time in range(asked["repetitions"])
]))
"""
    first, second = await measured_by(script, monkeypatch, tmp_path)
    assert [(one.plan_s, one.apply_s) for one in first] == [((2, 2), (0, 0)), ((2, 2), (1, 1))]
    assert [one.plan_s for one in second] == [(1, 1), (1, 1)]


async def test_a_peer_that_fails_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"(?s)could not be measured.*no vllm here"):
        await measured_by("raise SystemExit('no vllm here')", monkeypatch, tmp_path)
