"""A step of the scheduler's pure core, 256 and 1,024 running decodes: `python -m loadtest.bench_scheduler [--quick]`.

Beside it the scheduler's whole work for a step, bytes in and bytes out, and vLLM's own scheduler where it is installed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from triptych.executor.v1 import executor_pb2

from loadtest import command, peer_vllm_scheduler, peers, plot, report
from loadtest.core_load import CoreLoad, spread_phases
from services.common import collector
from services.common.errors import StartError
from services.scheduler import outputs
from services.scheduler.core.step import StepResult
from services.scheduler.plan_codec import column, decode_result, encode_plan

REQUESTS = (256, 1024)
PROMPT_TOKENS = (128, 4096)
STEPS = 300
WARMUP_STEPS = 20
REPETITIONS = 5
QUICK_STEPS_WHOLE = 100


@dataclass(frozen=True)
class Case:
    """So many requests, all of them decoding."""

    requests: int
    prompt_tokens: int

    @property
    def prompts(self) -> list[int]:
        """Their prompt lengths."""
        return spread_phases(self.requests, self.prompt_tokens)


@dataclass(frozen=True)
class Repetition:
    """Milliseconds of each step."""

    plan_ms: tuple[float, ...]
    apply_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...] = ()
    """CPU time of plan + apply: what is left of the wall's where other processes want the core too."""
    whole_ms: tuple[float, ...] = ()
    """Plan, encode_plan, decode_result, apply, split, encode, from and to the bytes of the two streams."""

    @property
    def both_ms(self) -> list[float]:
        """plan + apply."""
        return [plan + apply for plan, apply in zip(self.plan_ms, self.apply_ms, strict=True)]


@dataclass
class Found:
    """A case's repetitions, ours and a peer's."""

    case: Case
    ours: list[Repetition] = field(default_factory=list)
    vllm: list[Repetition] = field(default_factory=list)


def measure(case: Case, *, steps: int, whole_steps: int, seed: int) -> Repetition:
    """One repetition on a core of its own."""
    load = CoreLoad(case.prompts, decode_steps=WARMUP_STEPS + steps + whole_steps, seed=seed)
    load.prefill()
    for _ in range(WARMUP_STEPS):
        load.core.apply(load.answer(load.plan()), load.now_ns)
    one = _core_steps(load, steps)
    return replace(one, whole_ms=_whole_steps(load, whole_steps))


def _core_steps(load: CoreLoad, steps: int) -> Repetition:
    core, now_ns, clock, cpu = load.core, load.now_ns, time.perf_counter, time.thread_time
    plan_ms, apply_ms, cpu_ms = [], [], []
    for _ in range(steps):
        start_cpu_s, start_s = cpu(), clock()
        plan = core.plan(now_ns)
        planned_s, planned_cpu_s = clock(), cpu()
        assert plan is not None
        result = load.answer(plan)
        apply_cpu_s, apply_s = cpu(), clock()
        updates = core.apply(result, now_ns)
        core.take_kv_events()
        end_s, end_cpu_s = clock(), cpu()
        assert len(updates.keys) == len(plan.slots)
        plan_ms.append(1e3 * (planned_s - start_s))
        apply_ms.append(1e3 * (end_s - apply_s))
        cpu_ms.append(1e3 * (planned_cpu_s - start_cpu_s + end_cpu_s - apply_cpu_s))
    return Repetition(tuple(plan_ms), tuple(apply_ms), tuple(cpu_ms))


def _whole_steps(load: CoreLoad, steps: int) -> tuple[float, ...]:
    core, now_ns, clock = load.core, load.now_ns, time.perf_counter
    whole_ms = []
    for _ in range(steps):
        start_s = clock()
        plan = core.plan(now_ns)
        assert plan is not None
        encode_plan(plan).SerializeToString()
        planned_s = clock()
        answer = _as_sent(load.answer(plan))
        apply_s = clock()
        result, logprobs = decode_result(executor_pb2.RunResponse.FromString(answer).result, len(plan.slots))
        updates = core.apply(result, now_ns)
        for share in outputs.split(updates, logprobs).values():
            outputs.encode(share).SerializeToString()
        core.take_kv_events()
        whole_ms.append(1e3 * (planned_s - start_s + clock() - apply_s))
    return tuple(whole_ms)


def _as_sent(result: StepResult) -> bytes:
    """As an executor sends it; here every row samples."""
    message = executor_pb2.StepResult(step=result.step, token_ids=column(result.token_ids))
    return executor_pb2.RunResponse(result=message).SerializeToString()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where a peer cannot be measured."""
    options = _parser().parse_args(argv)
    collector.settle()  # as the scheduler's process does once it has started
    return command.run("bench_scheduler", _run(options), (StartError,))


async def _run(options: argparse.Namespace) -> None:
    if options.plot is not None:
        plot.require()
    python = peers.python_of(peers.VLLM)
    facts = report.head("bench_scheduler")
    times = 1 if options.quick else options.repetitions
    found = [Found(Case(n, prompt)) for n in options.requests for prompt in options.prompt_tokens]
    print(
        f"pure core, prefix cache on, blocks of 16, 2 stop ids, all requests decode; {options.steps} steps a "
        f"repetition, repetitions: {times}\n",
        flush=True,
    )
    for repetition in range(times):
        for one in found:
            seed = options.seed + repetition
            one.ours.append(measure(one.case, steps=options.steps, whole_steps=options.whole_steps, seed=seed))
            _say(
                f"{one.case.requests} requests, prompt {one.case.prompt_tokens}: {median(one.ours[-1].both_ms):.3f} ms"
            )
    if python is not None:
        await _measure_vllm(
            python, [one for one in found if one.case.prompt_tokens == options.prompt_tokens[0]], options
        )
    print(_table(found))
    if left_out := peers.absent_line((peers.VLLM,)):
        print(f"\n{left_out}")
    print(flush=True)
    if options.plot is not None:
        _draw(options.plot, found)
    report.last_line(facts | {"repetitions": times, "steps": options.steps, "quick": options.quick} | values(found))


async def _measure_vllm(python: Path, found: Sequence[Found], options: argparse.Namespace) -> None:
    _say("vLLM's scheduler on the same requests")
    times = 1 if options.quick else options.repetitions
    measured = await peer_vllm_scheduler.measure(
        python,
        [one.case.prompts for one in found],
        steps=options.steps,
        warmup_steps=WARMUP_STEPS,
        repetitions=times,
        seed=options.seed,
    )
    for one, repetitions in zip(found, measured, strict=True):
        for times_s in repetitions:
            one.vllm.append(Repetition(tuple(1e3 * s for s in times_s.plan_s), tuple(1e3 * s for s in times_s.apply_s)))


def values(found: Sequence[Found]) -> dict[str, Any]:
    """Medians over the repetitions of each one's median step, in ms; plain keys are of the shortest prompts."""
    flat: dict[str, Any] = {}
    short, long = min(one.case.prompt_tokens for one in found), max(one.case.prompt_tokens for one in found)
    for one in found:
        name = f"{one.case.requests}" if one.case.prompt_tokens == short else None
        if name is None:
            flat[f"plan_apply_{one.case.requests}_prompt_{one.case.prompt_tokens}_ms"] = _middle(one.ours)
            continue
        flat[f"plan_apply_{name}_ms"] = _middle(one.ours)
        flat[f"plan_{name}_ms"] = median(median(part.plan_ms) for part in one.ours)
        flat[f"apply_{name}_ms"] = median(median(part.apply_ms) for part in one.ours)
        flat[f"plan_apply_{name}_cpu_ms"] = median(median(part.cpu_ms) for part in one.ours)
        flat[f"plan_apply_{name}_p99_ms"] = median(report.percentile(part.both_ms, 99) or 0.0 for part in one.ours)
        flat[f"whole_step_{name}_ms"] = report.middle([median(part.whole_ms) for part in one.ours if part.whole_ms])
        flat[f"vllm_{name}_ms"] = _middle(one.vllm) if one.vllm else None
    few, many = min(one.case.requests for one in found), max(one.case.requests for one in found)
    vllm = flat[f"vllm_{few}_ms"]
    flat["ratio_vs_vllm"] = None if vllm is None else vllm / flat[f"plan_apply_{few}_ms"]
    if many > few:
        growth = flat[f"plan_apply_{many}_ms"] / flat[f"plan_apply_{few}_ms"]
        flat["exponent_in_requests"] = math.log(growth) / math.log(many / few)
    if long > short:
        flat["long_to_short_prompt_ratio"] = flat[f"plan_apply_{few}_prompt_{long}_ms"] / flat[f"plan_apply_{few}_ms"]
    return flat


def _middle(repetitions: Sequence[Repetition]) -> float:
    return median(median(one.both_ms) for one in repetitions)


def _table(found: Sequence[Found]) -> str:
    """Medians of the steps, with the range over the repetitions; p99 is of all steps."""
    rows = []
    for one in found:
        rows.append(_row("triptych", one.case, one.ours))
        if one.vllm:
            rows.append(_row("vllm", one.case, one.vllm))
    return report.table(
        (
            "ms a step: median (range)",
            "requests",
            "prompt",
            "plan",
            "apply",
            "plan + apply",
            "p99",
            "CPU",
            "whole step",
        ),
        rows,
    )


def _row(name: str, case: Case, repetitions: Sequence[Repetition]) -> tuple[str, ...]:
    def cell(values: Sequence[Sequence[float]]) -> str:
        return report.spread([median(one) for one in values if one], 3)

    p99 = report.percentile([ms for one in repetitions for ms in one.both_ms], 99)
    return (
        name,
        str(case.requests),
        str(case.prompt_tokens),
        cell([one.plan_ms for one in repetitions]),
        cell([one.apply_ms for one in repetitions]),
        cell([one.both_ms for one in repetitions]),
        report.number(p99),
        cell([one.cpu_ms for one in repetitions]),
        cell([one.whole_ms for one in repetitions]),
    )


def _draw(file: Path, found: Sequence[Found]) -> None:
    def steps_s(repetitions: Sequence[Repetition]) -> list[float]:
        return [ms / 1e3 for one in repetitions for ms in one.both_ms]

    panels: dict[str, dict[str, list[float]]] = {}
    for one in found:
        lines = panels.setdefault(f"plan + apply, {one.case.requests} requests", {})
        lines[f"triptych, prompt {one.case.prompt_tokens}"] = steps_s(one.ours)
        if one.vllm:
            lines[f"vllm, prompt {one.case.prompt_tokens}"] = steps_s(one.vllm)
    plot.cumulative(file, "a step of the scheduler", panels)


def _say(line: str) -> None:
    print(f"loadtest.bench_scheduler: {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_scheduler", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="one repetition")
    add("--repetitions", type=int, default=REPETITIONS, help="without --quick (%(default)s)")
    add("--requests", type=int, nargs="+", default=REQUESTS, help="running decodes (%(default)s)")
    add("--prompt-tokens", type=int, nargs="+", default=PROMPT_TOKENS, help="(%(default)s)")
    add("--steps", type=int, default=STEPS, help="a repetition (%(default)s)")
    add("--whole-steps", type=int, default=QUICK_STEPS_WHOLE, help="timed from bytes to bytes (%(default)s)")
    add("--seed", type=int, default=1, help="of ids (%(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw the steps' times; needs the extra `bench`")
    return parser


if __name__ == "__main__":
    sys.exit(main())
