"""The wire's benchmark: its workload, its bytes by hand, and the keys."""

from __future__ import annotations

import json

import pytest

from loadtest import bench_wire
from loadtest.bench_wire import Times
from services.scheduler.core.step import StepPlan, StepResult

KEYS = {
    "plan_bytes_per_step",
    "result_bytes_per_step",
    "json_delta_bytes_per_step",
    "resend_bytes_per_step",
    "codec_ms",
}
"""What every last line of this benchmark holds, at least."""


def test_the_lengths_are_the_published_range_and_mean() -> None:
    lengths = bench_wire.prompt_lengths(256, 1)
    assert len(lengths) == 256 and sum(lengths) == 256 * 4213
    assert min(lengths) >= 500 and max(lengths) <= 8000
    assert len(set(lengths)) > 200
    assert lengths == bench_wire.prompt_lengths(256, 1) != bench_wire.prompt_lengths(256, 2)


def test_a_step_in_our_messages_and_in_json() -> None:
    plan = StepPlan(9, [], [], [(1, 77)], [0, 1], [1, 1], 600)
    result = StepResult(9, [1, 1], [500, 501])
    ours, theirs = Times(), Times()
    bench_wire.ours(ours, plan, result)
    bench_wire.json_delta(theirs, plan, result)
    # Tags and lengths are a byte each: plan (2) with step (2), groups (2) of new_blocks (2 + 8), slots (2 + 8),
    # computed_tokens (1 + 2), deadline_ms (1 + 3).
    assert ours.plan_bytes == [2 + 2 + (2 + 2 + 8) + (2 + 8) + 3 + 4]
    json_plan = '{"step":9,"computed_tokens":600,"rows":[{"slot":0,"tokens":1},{"slot":1,"tokens":1,"block":77}]}'
    assert theirs.plan_bytes == [len(json_plan)]
    assert theirs.result_bytes == [len('{"step":9,"token_ids":[500,501]}')]


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    measured = bench_wire.Found()
    bench_wire.measure(measured, requests=16, steps=16, seed=1)
    return bench_wire.values(measured)


def test_deltas_do_not_grow_with_prompts_and_re_sending_does(found: dict[str, float]) -> None:
    assert found.keys() >= KEYS
    # 16 slots of 4 bytes, one block pair of 8 bytes in most steps, and some 20 bytes around them.
    assert 64 < found["plan_bytes_per_step"] < 64 + 2 * 8 + 30
    assert found["resend_proto_bytes_per_step"] > 16 * 4213 * 4  # each id is 4 bytes
    assert found["resend_bytes_per_step"] > found["resend_proto_bytes_per_step"]
    assert found["json_delta_bytes_per_step"] > found["plan_bytes_per_step"]


def test_a_chunk_beside_the_decodes_names_its_request_once(found: dict[str, float]) -> None:
    assert found["chunk_plan_bytes_per_step"] < 64 + 2 * 8 + 30 + 12
    assert found["named_chunk_plan_bytes"] > 8000 * 4  # with the prompt


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_wire.main(["--quick", "--requests", "4", "--steps", "3"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.keys() >= KEYS and last["codec_ms"] > 0
