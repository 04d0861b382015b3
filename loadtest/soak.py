"""Hours in small: `python -m loadtest.soak --seconds 1800` keeps an engine at 80% of what it can do with calls of many
kinds, and fails where one went wrong or something grew."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from triptych.inference.v1 import inference_pb2_grpc

from loadtest import command, mixture, parts, report
from loadtest.parts import Held, Parts
from services.common.checkpoint import EMBEDDED_MODEL
from services.common.errors import StartError

SECONDS = 1800.0
SHARE = 0.8
CLIENTS = 16
"""That ask one call after the other while capacity is measured."""
ROUNDS = 6
"""Of load; after each the engine must come to rest with all its blocks free."""
WARM_SHARE = 1 / 3
"""Of the time, in which caches fill and memory may grow."""
MAX_GROWTH_MIB = 16.0
MAX_MORE = 8
"""Descriptors or threads at rest over those after the warm-up: connections come and go."""
MAX_IN_FLIGHT = 512
KEPT_ERRORS = 20
MIB = 1 << 20


class SoakError(Exception):
    """The run found a fault; the message lists it."""


@dataclass(frozen=True)
class Sample:
    """What a process held at a time, in seconds of load."""

    at_s: float
    held: Held


@dataclass
class Calls:
    """What became of the calls, by kind."""

    ended_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in mixture.KINDS})
    token_ids: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    skipped: int = 0
    """Not sent, since MAX_IN_FLIGHT were under way."""

    @property
    def ended(self) -> int:
        """Those that ended as they should."""
        return sum(map(len, self.ended_s.values()))

    async def make(self, name: str, stub: mixture.Stub, rng: random.Random) -> None:
        """Makes one and keeps what became of it."""
        begun_s = time.monotonic()
        try:
            self.token_ids += await mixture.KINDS[name][1](stub, rng)
        except (grpc.aio.AioRpcError, mixture.WrongAnswerError) as error:
            self.failed += 1
            told = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self.errors = [*self.errors, f"{name}: {told}"][:KEPT_ERRORS]
        else:
            self.ended_s[name].append(time.monotonic() - begun_s)


@dataclass
class Soak:
    """A run on an engine; `loaded_s` counts the seconds of load so far, pauses left out."""

    engine: Parts
    stub: mixture.Stub
    rng: random.Random
    calls: Calls = field(default_factory=Calls)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    resting: list[dict[str, Held]] = field(default_factory=list)
    loaded_s: float = 0.0

    async def capacity_per_s(self, seconds: float) -> float:
        """Calls that CLIENTS, each asking again as soon as it is answered, are given a second."""
        begun_s = time.monotonic()

        async def client(rng: random.Random) -> None:
            while time.monotonic() - begun_s < seconds:
                await self.calls.make(mixture.drawn(rng), self.stub, rng)

        before = self.calls.ended
        await asyncio.gather(*(client(random.Random(self.rng.random())) for _ in range(CLIENTS)))
        return (self.calls.ended - before) / (time.monotonic() - begun_s)

    async def load(self, seconds: float, rate_per_s: float, every_s: float) -> None:
        """Calls at Poisson times for `seconds`, then waits for those under way; samples memory meanwhile."""
        begun_s, running = time.monotonic(), set[asyncio.Task[None]]()
        sampler = asyncio.create_task(self._sample(begun_s, every_s))
        due_s = begun_s
        try:
            while (due_s := due_s + self.rng.expovariate(rate_per_s)) < begun_s + seconds:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                if len(running) >= MAX_IN_FLIGHT:
                    self.calls.skipped += 1
                    continue
                rng = random.Random(self.rng.random())
                task = asyncio.create_task(self.calls.make(mixture.drawn(rng), self.stub, rng))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        finally:
            for task in (sampler, *running):
                task.cancel()
            await asyncio.gather(sampler, *running, return_exceptions=True)
        self.loaded_s += time.monotonic() - begun_s

    async def rest(self) -> None:
        """Waits until the engine is idle and keeps what each process then holds. Raises StartError."""
        await self.engine.wait_idle()
        self.resting.append({name: Held.by(pid) for name, pid in self.engine.pids.items()})

    async def _sample(self, begun_s: float, every_s: float) -> None:
        while True:
            if ended := self.engine.ended():
                raise StartError(f"{', '.join(ended)} ended under load")
            for name, pid in self.engine.pids.items():
                at_s = self.loaded_s + time.monotonic() - begun_s
                self.samples.setdefault(name, []).append(Sample(at_s, Held.by(pid)))
            await asyncio.sleep(every_s)


@dataclass(frozen=True)
class Growth:
    """Of a process after the warm-up: a line fitted to its memory, and what it held more at the last rest."""

    rss_mib: float
    """Mean."""
    grown_mib: float
    """The fitted line's end less its start."""
    error_mib: float
    """Of that, one standard error, from the scatter about the line."""
    descriptors: int
    threads: int

    @property
    def is_flat(self) -> bool:
        """Whether it kept within the bounds."""
        return self.grown_mib <= MAX_GROWTH_MIB and self.descriptors <= MAX_MORE and self.threads <= MAX_MORE


def growth(samples: Sequence[Sample], resting: Sequence[Held]) -> Growth:
    """Of samples in the order of time, the first WARM_SHARE left out. Raises SoakError where fewer than 3 are left."""
    last_s = samples[-1].at_s if samples else 0.0
    kept = [sample for sample in samples if sample.at_s >= last_s * WARM_SHARE]
    if len(kept) < 3:
        raise SoakError(f"{len(kept)} samples after the warm-up are too few for a line; let it run longer")
    at_s = np.array([sample.at_s for sample in kept])
    rss_mib = np.array([sample.held.rss_bytes for sample in kept]) / MIB
    slope, start = np.polyfit(at_s, rss_mib, 1)
    scatter = rss_mib - (slope * at_s + start)
    error = math.sqrt(float(scatter @ scatter) / (len(kept) - 2) / float(((at_s - at_s.mean()) ** 2).sum()))
    span_s = float(at_s[-1] - at_s[0])
    first, last = resting[int(len(resting) * WARM_SHARE)], resting[-1]
    return Growth(
        float(rss_mib.mean()),
        float(slope) * span_s,
        error * span_s,
        last.descriptors - first.descriptors,
        last.threads - first.threads,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and prints; exit code 1 where something went wrong or grew."""
    options = _parser().parse_args(argv)
    return command.run("soak", _run(options), (StartError, SoakError))


async def _run(options: argparse.Namespace) -> None:
    facts = report.head("soak")
    step_ms = options.step_ms if options.stub else None
    async with (
        parts.started(options.model, step_ms=step_ms) as engine,
        grpc.aio.insecure_channel(engine.address) as channel,
    ):
        soak = Soak(engine, inference_pb2_grpc.InferenceServiceStub(channel), random.Random(options.seed))
        rate_per_s = options.rate
        if rate_per_s is None:
            capacity_per_s = await soak.capacity_per_s(min(60.0, options.seconds / 6))
            rate_per_s = options.share * capacity_per_s
            print(f"{CLIENTS} clients at once are given {capacity_per_s:.2f} calls/s", flush=True)
        print(f"{options.seconds:g} s of load at {rate_per_s:.2f} calls/s, in {ROUNDS} rounds\n", flush=True)
        if rate_per_s <= 0:
            raise SoakError("\n".join(["no call was answered while capacity was measured:", *soak.calls.errors]))
        every_s = min(5.0, options.seconds / 60)
        facts |= {"model": options.model, "executor": "stub" if options.stub else "real"}
        try:
            for number in range(ROUNDS):
                await soak.load(options.seconds / ROUNDS, rate_per_s, every_s)
                await soak.rest()
                _say(f"round {number + 1} of {ROUNDS}: {soak.calls.ended} calls, {soak.calls.failed} failed, idle")
        except asyncio.CancelledError:
            _report(soak, facts | {"rate_per_s": rate_per_s, "cut_short": True})  # Ctrl-C: what there was until then
            raise
        _report(soak, facts | {"rate_per_s": rate_per_s, "cut_short": False})


def _report(soak: Soak, facts: dict[str, Any]) -> None:
    """Prints what was found. Raises SoakError where that is a fault."""
    if not soak.resting:
        raise SoakError("ended before the first round had; nothing is known of memory")
    grown = {name: growth(samples, [held[name] for held in soak.resting]) for name, samples in soak.samples.items()}
    print(_calls_table(soak.calls), end="\n\n")
    print(_growth_table(grown), end="\n\n", flush=True)
    faults = [f"{soak.calls.failed} calls failed:", *soak.calls.errors] if soak.calls.failed else []
    faults += [f"{name} grew: {one}" for name, one in grown.items() if not one.is_flat]
    if soak.calls.skipped:
        faults.append(f"{soak.calls.skipped} calls were not sent: {MAX_IN_FLIGHT} were under way")
    report.last_line(facts | values(soak, grown))
    if faults:
        raise SoakError("\n".join(faults))


def values(soak: Soak, grown: dict[str, Growth]) -> dict[str, Any]:
    """For the last line."""
    flat: dict[str, Any] = {
        "loaded_s": soak.loaded_s,
        "rounds_idle": len(soak.resting),
        "calls": soak.calls.ended,
        "calls_failed": soak.calls.failed,
        "calls_skipped": soak.calls.skipped,
        "token_ids": soak.calls.token_ids,
    }
    for name, one in grown.items():
        kind = name.partition("-")[0]
        flat |= {f"{kind}_rss_mib": one.rss_mib, f"{kind}_grown_mib": one.grown_mib}
        flat |= {f"{kind}_more_descriptors": one.descriptors, f"{kind}_more_threads": one.threads}
    return flat


def _calls_table(calls: Calls) -> str:
    rows = [
        (name, str(len(took)), *(report.number(report.percentile(took, percent)) for percent in (50, 99)))
        for name, took in calls.ended_s.items()
    ]
    return report.table(("calls", "ended well", "p50, s", "p99, s"), rows)


def _growth_table(grown: dict[str, Growth]) -> str:
    rows = [
        (
            name,
            f"{one.rss_mib:.1f}",
            f"{one.grown_mib:+.2f} +- {one.error_mib:.2f}",
            f"{one.descriptors:+d}",
            f"{one.threads:+d}",
        )
        for name, one in grown.items()
    ]
    return report.table(("after the warm-up", "RSS, MiB", "grown, MiB", "descriptors", "threads"), rows)


def _say(line: str) -> None:
    print(f"loadtest.soak: {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--seconds", type=_positive, default=SECONDS, help="of load, capacity's measurement not counted (%(default)g)")
    add("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)")
    add("--stub", action="store_true", help="a stub in place of the executor: many more calls for frontend, scheduler")
    add("--step-ms", type=float, default=10.0, help="that a step of the stub takes (%(default)g)")
    add("--share", type=_positive, default=SHARE, help="of the measured capacity (%(default)g)")
    add("--rate", type=_positive, help="calls/s; unset: measured")
    add("--seed", type=int, default=0, help="of kinds, prompts and times (%(default)s)")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and finite")
    return value


if __name__ == "__main__":
    sys.exit(main())
