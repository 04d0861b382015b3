"""What frontend and scheduler carry, over a stub executor: `python -m loadtest.bench_pipeline [--quick]`.

256 streams at once, one message a token, as a share of what a bare grpc.aio server and the same client exchange in the
same run; and tokens a second where the client asks for coalesced deltas.
"""

from __future__ import annotations

import argparse
import pstats
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import command, pipeline, report
from loadtest.pipeline import Rate
from services.common.checkpoint import EMBEDDED_MODEL
from services.common.errors import StartError

STREAMS = 256
TOKENS = 256
BARE_TOKENS = 320
COALESCED_TOKENS = 480
MIN_DELTA_TOKENS = 16
WARMUP_TOKENS = 8
REPETITIONS = 5
PROFILED_LINES = 16


@dataclass
class Found:
    """The repetitions of each, in turn; no coalesced ones where the frontend serves none."""

    bare: list[Rate] = field(default_factory=list)
    ours: list[Rate] = field(default_factory=list)
    coalesced: list[Rate] = field(default_factory=list)

    def rows(self) -> list[tuple[str, list[Rate]]]:
        """With their names in the table, those that were measured."""
        named = [("bare grpc.aio", self.bare), ("triptych", self.ours), ("triptych, coalesced", self.coalesced)]
        return [(name, rates) for name, rates in named if rates]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where a process does not start or a stream fails."""
    options = _parser().parse_args(argv)
    return command.run("bench_pipeline", _run(options), (StartError, pipeline.StreamError))


async def _run(options: argparse.Namespace) -> None:
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    facts = report.head("bench_pipeline")
    times = 1 if options.quick else options.repetitions
    print(
        f"{options.model}: {options.streams} streams at once, stub executor, the client on the same cores; "
        f"coalesced: {options.min_delta_tokens} ids a message; repetitions: {times}\n",
        flush=True,
    )
    found = await measure(options, times)
    print(_table(found))
    if not found.coalesced:
        print("\nleft out: coalesced deltas, which this frontend does not serve")
    print(f"\n{_cpu_table(found)}\n", flush=True)
    if options.profile is not None:
        for name in ("frontend", "scheduler"):
            print(f"cProfile of the {name}, by its own time:")
            stats = pstats.Stats(str(options.profile / f"{name}.prof"), stream=sys.stdout)
            stats.strip_dirs().sort_stats("tottime").print_stats(PROFILED_LINES)
    report.last_line(facts | {"model": options.model, "repetitions": times, "quick": options.quick} | values(found))


async def measure(options: argparse.Namespace, times: int) -> Found:
    """All repetitions; bare and ours in turn, so that a noisy minute is not one side's alone."""
    found = Found()
    streams, tokens = options.streams, options.tokens
    async with (
        pipeline.bare() as bare,
        pipeline.engine(options.model, streams, step_ms=options.step_ms, profile=options.profile) as ours,
    ):
        coalesces = await pipeline.coalesces(ours.address)
        for running in (bare, ours):
            await pipeline.measure(running, streams=streams, tokens=WARMUP_TOKENS)
        for _ in range(times):
            found.bare.append(await pipeline.measure(bare, streams=streams, tokens=options.bare_tokens))
            found.ours.append(await pipeline.measure(ours, streams=streams, tokens=tokens))
            if coalesces:
                one = await pipeline.measure(
                    ours,
                    streams=streams,
                    tokens=options.coalesced_tokens,
                    min_delta_tokens=options.min_delta_tokens,
                )
                found.coalesced.append(one)
            _say(", ".join(f"{name} {rates[-1].messages_per_s:.0f} messages/s" for name, rates in found.rows()))
    return found


def values(found: Found) -> dict[str, Any]:
    """Medians over the repetitions; the share is of each repetition's own pair."""
    tokens_per_s = report.middle([rate.tokens_per_s for rate in found.ours])
    coalesced = report.middle([rate.tokens_per_s for rate in found.coalesced])
    shares = [ours.messages_per_s / bare.messages_per_s for ours, bare in zip(found.ours, found.bare, strict=True)]
    flat: dict[str, Any] = {
        "out_tokens_per_s": tokens_per_s,
        "out_tokens_per_s_coalesced": coalesced,
        "coalesced_ratio": None if coalesced is None or not tokens_per_s else coalesced / tokens_per_s,
        "share_of_bare_grpc": report.middle(shares),
        "bare_messages_per_s": report.middle([rate.messages_per_s for rate in found.bare]),
        "messages_per_s": report.middle([rate.messages_per_s for rate in found.ours]),
    }
    for name in ("frontend", "scheduler", "executor", pipeline.CLIENT):
        flat[f"{name}_cpu_us_per_token"] = report.middle([1e6 * one.cpu_s[name] / one.token_ids for one in found.ours])
    return flat


def _table(found: Found) -> str:
    rows = [
        (
            name,
            report.spread([rate.messages_per_s for rate in rates], 0),
            report.spread([rate.tokens_per_s for rate in rates], 0),
            report.spread([_share(rate, bare) for rate, bare in zip(rates, found.bare, strict=True)], 2),
        )
        for name, rates in found.rows()
    ]
    return report.table(("median (range)", "messages/s", "tokens/s", "messages, of bare"), rows)


def _share(rate: Rate, bare: Rate) -> float:
    return rate.messages_per_s / bare.messages_per_s


def _cpu_table(found: Found) -> str:
    """Where the time of the two cores goes: microseconds a token, and the share of one core."""
    rows = []
    for name, rates in found.rows():
        for process in rates[0].cpu_s:
            rows.append(
                (
                    f"{name}: {process}",
                    report.spread([1e6 * rate.cpu_s[process] / rate.token_ids for rate in rates]),
                    report.spread([rate.cpu_s[process] / rate.span_s for rate in rates], 2),
                )
            )
    return report.table(("CPU: median (range)", "us a token", "of a core"), rows)


def _say(line: str) -> None:
    print(f"loadtest.bench_pipeline: {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_pipeline", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="one repetition")
    add("--repetitions", type=int, default=REPETITIONS, help="without --quick (%(default)s)")
    add("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)")
    add("--streams", type=int, default=STREAMS, help="at once (%(default)s)")
    add("--tokens", type=int, default=TOKENS, help="of a stream, one message each (%(default)s)")
    add("--bare-tokens", type=int, default=BARE_TOKENS, help="messages of a stream of the bare pair (%(default)s)")
    add("--coalesced-tokens", type=int, default=COALESCED_TOKENS, help="of a coalesced stream (%(default)s)")
    add("--min-delta-tokens", type=int, default=MIN_DELTA_TOKENS, help="ids a coalesced message holds (%(default)s)")
    add("--step-ms", type=float, default=0.0, help="time that a step of the stub executor takes (%(default)g)")
    add("--profile", type=Path, metavar="FOLDER", help="run frontend and scheduler under cProfile, which slows them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
