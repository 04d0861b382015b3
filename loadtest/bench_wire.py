"""Bytes and codec time of a step between scheduler and executor: `python -m loadtest.bench_wire [--quick]`.

The published workload: 256 requests, prompts of 500-8,000 tokens with a mean of 4,213, blocks of 16, 64 decode steps.
Plans come from the core, messages from the two services' own codecs; beside them what re-sending everything, and
deltas as JSON, would take.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from triptych.executor.v1 import executor_pb2
from triptych.inference.v1 import generation_pb2

from loadtest import report
from loadtest.core_load import BLOCK_TOKENS, CoreLoad
from services.executor import wire
from services.executor.logprobs import Logprobs
from services.executor.plan import Outcome
from services.scheduler.core.step import Start, StepPlan, StepResult
from services.scheduler.plan_codec import decode_result, encode_plan

REQUESTS = 256
SHORTEST, LONGEST, MEAN = 500, 8000, 4213
STEPS = 64
CHUNK_TOKENS = 2048
REPETITIONS = 5
RESEND_STEPS = 2
"""Re-sends timed a repetition: each takes tenths of a second as JSON."""

SAMPLING = generation_pb2.Sampling(temperature=0.0)


@dataclass
class Times:
    """Bytes and milliseconds of one way to say the same steps."""

    plan_bytes: list[int] = field(default_factory=list)
    result_bytes: list[int] = field(default_factory=list)
    codec_ms: list[float] = field(default_factory=list)
    """Both messages, encoded and decoded."""


@dataclass
class Found:
    """`chunk` are steps with a 2,048-token chunk beside the decodes, `named` those in which its request starts."""

    ours: Times = field(default_factory=Times)
    chunk: Times = field(default_factory=Times)
    named: Times = field(default_factory=Times)
    json_delta: Times = field(default_factory=Times)
    resend: Times = field(default_factory=Times)
    json_resend: Times = field(default_factory=Times)

    def rows(self) -> list[tuple[str, Times]]:
        """With their names in the table."""
        return [
            ("JSON, everything again", self.json_resend),
            ("these messages, everything again", self.resend),
            ("JSON deltas", self.json_delta),
            ("these deltas", self.ours),
            (f"these, and a {CHUNK_TOKENS}-token chunk", self.chunk),
            ("the same, its request named whole", self.named),
        ]


def prompt_lengths(requests: int, seed: int) -> list[int]:
    """Uniform over the published range; the draw behind the published mean is not known, so this one is moved to it."""
    lengths = np.random.default_rng(seed).integers(SHORTEST, LONGEST + 1, requests)
    while (excess := int(lengths.sum()) - requests * MEAN) != 0:
        step = int(np.sign(excess)) * max(1, abs(excess) // requests)
        moved = np.clip(lengths - step, SHORTEST, LONGEST)
        lengths = moved if abs(excess) >= requests else np.where(np.arange(requests) < abs(excess), moved, lengths)
    return [int(length) for length in lengths]


def measure(found: Found, *, requests: int, steps: int, seed: int) -> None:
    """One repetition of everything."""
    prompts = prompt_lengths(requests, seed)
    load = CoreLoad(prompts, decode_steps=steps + RESEND_STEPS, seed=seed, sampling=SAMPLING)
    whole = load.prefill()  # as they started: without the ids sampled since, some 1% more
    for _ in range(steps):
        plan = load.plan()
        result = load.answer(plan)
        ours(found.ours, plan, result)
        json_delta(found.json_delta, plan, result)
        load.core.apply(result, load.now_ns)
    for _ in range(RESEND_STEPS):
        plan = load.plan()
        result = load.answer(plan)
        resend(found.resend, plan, whole)
        json_resend(found.json_resend, plan, whole, result)
        load.core.apply(result, load.now_ns)
    _chunks(found, prompts, seed)


def _chunks(found: Found, prompts: Sequence[int], seed: int) -> None:
    """One request fewer decodes; in its place a prompt of the longest length is computed in chunks."""
    load = CoreLoad(
        prompts[:-1],
        decode_steps=8,
        more=[LONGEST],
        max_step_tokens=len(prompts) - 1 + CHUNK_TOKENS,
        seed=seed,
        sampling=SAMPLING,
    )
    load.prefill()
    load.submit(LONGEST)
    for times in (found.named, found.chunk, found.chunk):
        plan = load.plan()
        assert plan.token_counts[-1] == CHUNK_TOKENS and len(plan.slots) == len(prompts), plan.token_counts
        result = load.answer(plan)
        ours(times, plan, result)
        load.core.apply(result, load.now_ns)


def ours(times: Times, plan: StepPlan, result: StepResult) -> None:
    """Both messages through the codecs of both services, to bytes and back."""
    clock = time.perf_counter
    outcome = _outcome(result)
    start_s = clock()
    sent = encode_plan(plan).SerializeToString()
    taken = wire.plan(executor_pb2.RunRequest.FromString(sent).plan)
    message = wire.result(outcome, received_unix_ns=time.time_ns(), wait_us=10)
    answered = executor_pb2.RunResponse(result=message).SerializeToString()
    back, _ = decode_result(executor_pb2.RunResponse.FromString(answered).result, len(plan.slots))
    end_s = clock()
    assert taken.slots.tolist() == plan.slots and back.token_ids == result.token_ids
    times.plan_bytes.append(len(sent))
    times.result_bytes.append(len(answered))
    times.codec_ms.append(1e3 * (end_s - start_s))


def _outcome(result: StepResult) -> Outcome:
    return Outcome(
        step=result.step,
        token_counts=np.array(result.token_counts, np.int64),
        token_ids=np.array(result.token_ids, np.int64),
        failed_slots=(),
        logprob_places=np.zeros(0, np.int64),
        logprobs=Logprobs.none(),
        prompt_scores=(),
        execute_us=8000,
        sample_us=500,
    )


def json_delta(times: Times, plan: StepPlan, result: StepResult) -> None:
    """The same deltas, one object a row as is usual, without spaces."""

    def encode() -> str:
        grown = dict(plan.new_blocks)
        rows = [
            {"slot": slot, "tokens": count} | ({"block": grown[slot]} if slot in grown else {})
            for slot, count in zip(plan.slots, plan.token_counts, strict=True)
        ]
        return _json({"step": plan.step, "computed_tokens": plan.computed_tokens, "rows": rows})

    _timed(times, encode, lambda: _json({"step": result.step, "token_ids": result.token_ids}))


def json_resend(times: Times, plan: StepPlan, whole: Sequence[Start], result: StepResult) -> None:
    """Every request named whole in every step."""

    def encode() -> str:
        rows = [
            {
                "slot": start.slot,
                "token_ids": start.token_ids.tolist(),
                "block_ids": start.block_ids,
                "computed_tokens": start.num_computed,
                "sampling": {"temperature": 0.0},
                "seed": start.seed,
                "stop_ids": sorted(start.submission.stop_ids),
            }
            for start in whole
        ]
        return _json({"step": plan.step, "rows": rows})

    _timed(times, encode, lambda: _json({"step": result.step, "token_ids": result.token_ids}))


def _timed(times: Times, plan: Callable[[], str], result: Callable[[], str]) -> None:
    start_s = time.perf_counter()
    sent, answered = plan().encode(), result().encode()
    json.loads(sent)
    json.loads(answered)
    times.codec_ms.append(1e3 * (time.perf_counter() - start_s))
    times.plan_bytes.append(len(sent))
    times.result_bytes.append(len(answered))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def resend(times: Times, plan: StepPlan, whole: Sequence[Start]) -> None:
    """The plan's own message with every request among those that start."""
    again = StepPlan(plan.step, [], list(whole), [], plan.slots, plan.token_counts, plan.computed_tokens)
    start_s = time.perf_counter()
    sent = encode_plan(again).SerializeToString()
    taken = wire.plan(executor_pb2.RunRequest.FromString(sent).plan)
    times.codec_ms.append(1e3 * (time.perf_counter() - start_s))
    assert len(taken.started) == len(whole)
    times.plan_bytes.append(len(sent))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    options = _parser().parse_args(argv)
    facts = report.head("bench_wire")
    times = 1 if options.quick else options.repetitions
    print(
        f"{options.requests} requests, prompts of {SHORTEST}-{LONGEST} tokens, mean {MEAN}, blocks of {BLOCK_TOKENS}, "
        f"{options.steps} decode steps, seed {options.seed}; repetitions: {times}\n",
        flush=True,
    )
    found = Found()
    for _ in range(times):
        measure(found, requests=options.requests, steps=options.steps, seed=options.seed)
    print(_table(found), end="\n\n", flush=True)
    report.last_line(facts | {"repetitions": times, "quick": options.quick} | values(found))
    return 0


def values(found: Found) -> dict[str, Any]:
    """Medians over all steps; the plain keys are ours."""
    return {
        "plan_bytes_per_step": median(found.ours.plan_bytes),
        "plan_bytes_max": max(found.ours.plan_bytes),
        "result_bytes_per_step": median(found.ours.result_bytes),
        "codec_ms": median(found.ours.codec_ms),
        "codec_p99_ms": report.percentile(found.ours.codec_ms, 99),
        "chunk_plan_bytes_per_step": median(found.chunk.plan_bytes),
        "chunk_plan_bytes_max": max(found.chunk.plan_bytes),
        "named_chunk_plan_bytes": median(found.named.plan_bytes),
        "json_delta_bytes_per_step": median(found.json_delta.plan_bytes),
        "json_delta_codec_ms": median(found.json_delta.codec_ms),
        "resend_bytes_per_step": median(found.json_resend.plan_bytes),
        "resend_codec_ms": median(found.json_resend.codec_ms),
        "resend_proto_bytes_per_step": median(found.resend.plan_bytes),
        "resend_proto_codec_ms": median(found.resend.codec_ms),
    }


def _table(found: Found) -> str:
    def row(name: str, times: Times) -> tuple[str, ...]:
        return (
            name,
            f"{median(times.plan_bytes):,.0f}",
            f"{max(times.plan_bytes):,}",
            f"{median(times.result_bytes):,.0f}" if times.result_bytes else "-",
            report.number(median(times.codec_ms)),
            report.number(report.percentile(times.codec_ms, 99)),
        )

    header = ("a step", "plan, bytes", "largest", "result, bytes", "codec, ms", "p99")
    return report.table(header, [row(name, times) for name, times in found.rows()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_wire", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="one repetition")
    add("--repetitions", type=int, default=REPETITIONS, help="without --quick (%(default)s)")
    add("--requests", type=int, default=REQUESTS, help="(%(default)s)")
    add("--steps", type=int, default=STEPS, help="decode steps a repetition (%(default)s)")
    add("--seed", type=int, default=1, help="of lengths and ids (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
