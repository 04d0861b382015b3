"""What tracing every request costs: `python -m loadtest.bench_tracing [--quick]`.

Frontend and scheduler over a stub executor, twice: one pair of processes sends the spans of all requests to a collector
beside it, the other traces nothing. They take turns, and their CPU time a request is compared turn by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import NormalDist, mean, stdev
from typing import Any

from loadtest import command, peer_process, pipeline, report
from loadtest.pipeline import Running
from services.common.checkpoint import EMBEDDED_MODEL
from services.common.errors import StartError

STREAMS = 64
TOKENS = 128
STEP_MS = 20.0
"""So long that all streams keep step: how many steps they share would else be chance, and cost more than tracing."""

BURSTS = 2
WARMUP_TOKENS = 16
SETTLE_S = 1.5
"""After which the spans of a burst have left: they wait a second for others."""

PAIRS = 16
"""Of short turns: what the machine does besides, for seconds or minutes, then meets both sides."""

SERVICES = ("frontend", "scheduler")


@dataclass
class Found:
    """The turns of each, pair by pair: CPU seconds a request, by service."""

    off: list[dict[str, float]] = field(default_factory=list)
    on: list[dict[str, float]] = field(default_factory=list)

    def costs_pct(self) -> list[float]:
        """What tracing adds to the CPU time of a request, by pair."""
        return [100 * (sum(on.values()) / sum(off.values()) - 1) for on, off in zip(self.on, self.off, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where a process does not start or a stream fails."""
    options = _parser().parse_args(argv)
    return command.run("bench_tracing", _run(options), (StartError, pipeline.StreamError))


async def _run(options: argparse.Namespace) -> None:
    os.environ.setdefault("OTEL_METRICS_EXPORTER", "none")  # metrics would go to the collector, too
    facts = report.head("bench_tracing")
    pairs = 1 if options.quick else options.pairs
    print(
        f"{options.model}: {options.streams} streams of {options.tokens} ids at once, stub executor, all requests "
        f"traced or none; pairs: {pairs}\n",
        flush=True,
    )
    found = await measure(options, pairs)
    print(_table(found), flush=True)
    report.last_line(facts | {"model": options.model, "pairs": pairs, "quick": options.quick} | values(found, options))


async def measure(options: argparse.Namespace, pairs: int) -> Found:
    """All pairs. In each the sides take turns, burst by burst, and who goes first changes: off, on, on, off. So a trend
    is not one side's alone, nor are the caches that a side finds cold after the other's turn."""
    found = Found()
    streams = options.streams
    async with (
        collector() as endpoint,
        pipeline.engine(options.model, streams, step_ms=options.step_ms) as off,
        pipeline.engine(options.model, streams, step_ms=options.step_ms, flags=("--otlp-endpoint", endpoint)) as on,
    ):
        for running in (off, on):
            await pipeline.measure(running, streams=streams, tokens=WARMUP_TOKENS)
        for number in range(pairs):
            spent: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
            for turn in range(options.bursts):
                sides = [("off", off), ("on", on)]
                for side, running in sides if (number + turn) % 2 == 0 else reversed(sides):
                    spent[side].append(await _burst(running, options))
            found.off.append(_mean(spent["off"]))
            found.on.append(_mean(spent["on"]))
            print(f"loadtest.bench_tracing: {found.costs_pct()[-1]:+.1f}%", file=sys.stderr, flush=True)
    return found


async def _burst(running: Running, options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds a request, by service."""
    begun = {name: pipeline.cpu_seconds(running.pids[name]) for name in SERVICES}
    await pipeline.measure(running, streams=options.streams, tokens=options.tokens)
    await asyncio.sleep(SETTLE_S)  # the last spans are on their way
    return {
        name: (pipeline.cpu_seconds(running.pids[name]) - since_s) / options.streams for name, since_s in begun.items()
    }


def _mean(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: mean(turn[name] for turn in turns) for name in SERVICES}


@asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """The URL of one in a process of its own, whose time is nobody's here."""
    port = peer_process.free_port()
    async with pipeline.ours([sys.executable, "-m", "loadtest.otlp_sink", "--port", str(port)]) as process:
        await pipeline.ready(f"127.0.0.1:{port}", {"collector": process}, pipeline.connects)
        yield f"http://127.0.0.1:{port}"


def values(found: Found, options: argparse.Namespace) -> dict[str, Any]:
    """The mean cost, and the interval that holds it with 95% confidence; none of a single pair."""
    costs = found.costs_pct()
    return {
        "cpu_cost_pct": mean(costs),
        "cpu_cost_pct_ci95": confidence_95(costs),
        "cpu_ms_per_request_off": report.middle([1e3 * sum(turn.values()) for turn in found.off]),
        "cpu_ms_per_request_on": report.middle([1e3 * sum(turn.values()) for turn in found.on]),
        "tokens_per_request": options.tokens,
    }


def confidence_95(samples: Sequence[float]) -> list[float] | None:
    """The 95% interval of their mean by Student's t; None of fewer than two.

    The quantile is Abramowitz and Stegun's 26.7.5, right to 1% from four samples on.
    """
    freedom = len(samples) - 1
    if freedom < 1:
        return None
    z = NormalDist().inv_cdf(0.975)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    half = t * stdev(samples) / math.sqrt(len(samples))
    return [mean(samples) - half, mean(samples) + half]


def _table(found: Found) -> str:
    rows = [
        (f"{name}: {service}", report.spread([1e3 * turn[service] for turn in turns], 2))
        for name, turns in (("off", found.off), ("on", found.on))
        for service in SERVICES
    ]
    rows.append(("cost, %", report.spread(found.costs_pct())))
    return report.table(("CPU: median (range)", "ms a request"), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_tracing", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="one pair")
    add("--pairs", type=int, default=PAIRS, help="without --quick (%(default)s)")
    add("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)")
    add("--streams", type=int, default=STREAMS, help="at once (%(default)s)")
    add("--bursts", type=int, default=BURSTS, help="of each side in a pair (%(default)s)")
    add("--step-ms", type=float, default=STEP_MS, help="time that a step of the stub executor takes (%(default)g)")
    add("--tokens", type=int, default=TOKENS, help="of a stream, one message each (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
