"""More than the engine can do: `python -m loadtest.bench_overload [--quick]`.

Stub executor, scheduler and frontend. First what the engine can do, by as many callers as it has slots, each of whom
asks again when answered; then five times that, open loop, for two minutes, with a limit of waiting; then, one by one,
requests until the wait is over. A refusal counts from the time its request was due, as a first token does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from loadtest import command, open_loop, pipeline, report, workload
from loadtest.open_loop import Ask, Outcome
from loadtest.pipeline import Running
from services.common.checkpoint import EMBEDDED_MODEL
from services.common.errors import StartError

SLOTS = 32
STEP_MS = 20.0
MAX_QUEUE_WAIT_S = 2.0
TIMES = 5.0
SECONDS, QUICK_SECONDS = 120.0, 20.0
CAPACITY_S = 6.0
PROMPT, OUTPUT = workload.Lengths.parse("16-256"), workload.Lengths.parse("16-96")
TIMEOUT_S = 60.0
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED.name
SAMPLE_S = 1.0
SETTLED_S = 5.0
"""From the start of the load: memory is compared with what it was then."""

RECOVERED_S = 0.25
"""A first token after so long is one that did not wait."""


@dataclass(frozen=True)
class Found:
    """Of one run. `rss_mb` by process: samples, one a second."""

    capacity_per_s: float
    outcomes: Sequence[Outcome]
    seconds: float
    rss_mb: Mapping[str, Sequence[float]]
    recovery_s: float

    @property
    def accepted(self) -> list[Outcome]:
        """Answered in full."""
        return [outcome for outcome in self.outcomes if outcome.failure is None]

    @property
    def refused(self) -> list[Outcome]:
        """Told to come back later."""
        return [outcome for outcome in self.outcomes if outcome.failure == REFUSED]

    @property
    def others(self) -> Counter[str]:
        """What should not be."""
        return Counter(outcome.failure for outcome in self.outcomes if outcome.failure not in (None, REFUSED))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where a process does not start or a request fails that is not refused."""
    options = _parser().parse_args(argv)
    return command.run("bench_overload", _run(options), (StartError, pipeline.StreamError, open_loop.CallError))


async def _run(options: argparse.Namespace) -> None:
    facts = report.head("bench_overload")
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    print(
        f"{options.model}, stub executor, {options.slots} slots, steps of {STEP_MS:g} ms: {options.times:g} times what "
        f"the engine can do for {seconds:g} s, max_queue_wait_s {options.max_queue_wait_s:g}; prompts of {PROMPT.text} "
        f"tokens, {OUTPUT.text} out\n",
        flush=True,
    )
    found = await measure(options, seconds)
    print(_table(found, options.max_queue_wait_s), flush=True)
    report.last_line(facts | {"model": options.model, "seconds": seconds} | values(found, options))
    if found.others:
        raise pipeline.StreamError(f"requests failed that were not refused: {dict(found.others)}")


async def measure(options: argparse.Namespace, seconds: float) -> Found:
    """Capacity, overload, recovery."""
    wait = ("--max-queue-wait-s", str(options.max_queue_wait_s))
    async with (
        pipeline.engine(options.model, options.slots, step_ms=STEP_MS, scheduler_flags=wait) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        ask = open_loop.over_grpc(channel)
        vocab_size = await open_loop.vocab_size(channel, "", TIMEOUT_S)
        capacity_per_s = await _capacity(ask, vocab_size, options.slots)
        _say(f"{capacity_per_s:.1f} requests a second are what the engine can do")
        plan = workload.poisson(
            rate_per_s=options.times * capacity_per_s,
            prompt=PROMPT,
            output=OUTPUT,
            vocab_size=vocab_size,
            seed=options.seed,
            max_requests=workload.MAX_REQUESTS,
            duration_s=seconds,
            warmup_s=0.0,
        )
        rss_mb: dict[str, list[float]] = {name: [] for name in running.pids}
        sampling = asyncio.create_task(_sample(running, rss_mb))
        try:
            load = asyncio.create_task(open_loop.run(plan, ask, timeout_s=TIMEOUT_S))
            await asyncio.sleep(open_loop.LEAD_S + seconds)
            recovery_s = await _recovery(ask, plan)
            outcomes = await load
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
    return Found(capacity_per_s, outcomes, seconds, rss_mb, recovery_s)


async def _capacity(ask: Ask, vocab_size: int, slots: int) -> float:
    """Requests a second that as many callers get answered as there are slots; the first and last seconds apart."""
    plan = workload.burst(streams=slots * 64, prompt=PROMPT, output=OUTPUT, vocab_size=vocab_size, seed=1)
    requests = iter(itertools.cycle(plan.requests))
    ends_s: list[float] = []
    begun_s = time.monotonic()

    async def caller() -> None:
        while time.monotonic() - begun_s < CAPACITY_S:
            async for _ in ask(next(requests), TIMEOUT_S):
                pass
            ends_s.append(time.monotonic() - begun_s)

    await asyncio.gather(*(caller() for _ in range(slots)))
    counted = [at_s for at_s in ends_s if CAPACITY_S / 3 < at_s <= CAPACITY_S]
    if not counted:
        raise pipeline.StreamError(f"no request was answered within {CAPACITY_S:g} s")
    return len(counted) / (CAPACITY_S * 2 / 3)


async def _recovery(ask: Ask, plan: workload.Plan) -> float:
    """Seconds until a request starts without a wait."""
    begun_s = time.monotonic()
    one = workload.Planned(0.0, plan.requests[0].prompt_ids, 1)
    while True:
        sent_s = time.monotonic()
        if sent_s - begun_s > TIMEOUT_S:
            raise pipeline.StreamError(f"requests still wait {TIMEOUT_S:g} s after the load has ended")
        try:
            async for _ in ask(one, TIMEOUT_S):
                pass
        except open_loop.CallError as error:
            if error.kind != REFUSED:
                raise
        else:
            if time.monotonic() - sent_s < RECOVERED_S:
                return sent_s - begun_s
        await asyncio.sleep(0.05)


async def _sample(running: Running, rss_mb: Mapping[str, list[float]]) -> None:
    processes = {name: psutil.Process(pid) for name, pid in running.pids.items()}
    while True:
        for name, process in processes.items():
            rss_mb[name].append(process.memory_info().rss / 1e6)
        await asyncio.sleep(SAMPLE_S)


def values(found: Found, options: argparse.Namespace) -> dict[str, Any]:
    """What goes into the last line."""
    ttft_s = [outcome.token_s[0] for outcome in found.accepted]
    refused_ms = [1e3 * outcome.end_s for outcome in found.refused]
    limit_s = options.max_queue_wait_s
    return {
        "times": options.times,
        "max_queue_wait_s": limit_s,
        "capacity_per_s": found.capacity_per_s,
        "requests": len(found.outcomes),
        "accepted": len(found.accepted),
        "refused": len(found.refused),
        "refused_late": sum(outcome.end_s >= limit_s for outcome in found.refused),
        "failed": sum(found.others.values()),
        "ttft_p50_s": report.percentile(ttft_s, 50),
        "ttft_p99_s": report.percentile(ttft_s, 99),
        "ttft_p99_of_limit": None if not ttft_s else (report.percentile(ttft_s, 99) or 0.0) / limit_s,
        "refusal_p50_ms": report.percentile(refused_ms, 50),
        "refusal_p99_ms": report.percentile(refused_ms, 99),
        "goodput_of_capacity": len(found.accepted) / (found.seconds * found.capacity_per_s),
        "recovery_s": found.recovery_s,
        "rss_growth_mb": {name: growth_mb(samples) for name, samples in found.rss_mb.items()},
    }


def growth_mb(samples: Sequence[float]) -> float | None:
    """From the mean of three samples once the load has settled to that of the last three."""
    settled = samples[round(SETTLED_S / SAMPLE_S) :]
    return None if len(settled) < 6 else sum(settled[-3:]) / 3 - sum(settled[:3]) / 3


def _table(found: Found, limit_s: float) -> str:
    shown = values(found, argparse.Namespace(times=0, max_queue_wait_s=limit_s))
    rows = [
        (
            "requests answered, refused, refused late",
            f"{shown['accepted']}, {shown['refused']}, {shown['refused_late']}",
        ),
        ("first token, p50 and p99", f"{report.number(shown['ttft_p50_s'])}, {report.number(shown['ttft_p99_s'])} s"),
        ("p99 of the limit", report.number(shown["ttft_p99_of_limit"], 2)),
        (
            "refusal, p50 and p99",
            f"{report.number(shown['refusal_p50_ms'], 1)}, {report.number(shown['refusal_p99_ms'], 1)} ms",
        ),
        ("answered of what the engine can do", report.number(shown["goodput_of_capacity"], 2)),
        ("no wait after", f"{found.recovery_s:.1f} s"),
        *((f"memory of the {name}", _memory(samples)) for name, samples in found.rss_mb.items()),
    ]
    return report.table(("", "measured"), rows)


def _memory(samples: Sequence[float]) -> str:
    return f"{max(samples, default=0):.0f} MB at most, {report.number(growth_mb(samples), 1)} MB growth"


def _say(line: str) -> None:
    print(f"loadtest.bench_overload: {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_overload", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{QUICK_SECONDS:g} s instead of {SECONDS:g}")
    add("--seconds", type=float, help="of the load, whatever --quick says")
    add("--times", type=float, default=TIMES, help="the load, of what the engine can do (%(default)s)")
    add("--slots", type=int, default=SLOTS, help="choices that run at once (%(default)s)")
    add("--max-queue-wait-s", type=float, default=MAX_QUEUE_WAIT_S, help="the scheduler's (%(default)s)")
    add("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)")
    add("--seed", type=int, default=0, help="of arrivals, lengths and prompts (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
