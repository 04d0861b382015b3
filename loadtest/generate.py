"""Open-loop load on a running server: `python -m loadtest.generate --address HOST:PORT --rate 2 --duration 60`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from loadtest import open_loop, plot, report, workload
from loadtest.summary import ServiceLevel, Summary, summarize
from services.common.errors import StartError

NO_BOUND_REQUESTS = workload.MAX_REQUESTS
CONNECT_S = 10.0
PLOT_ENDINGS = (".svg", ".png", ".pdf")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs once and prints; exit code 1 where no request ended well, or none could be sent."""
    options = _parser().parse_args(argv)
    try:
        return asyncio.run(_run(options))
    except (StartError, workload.WorkloadError, open_loop.CallError) as error:
        print(f"loadtest.generate: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _run(options: argparse.Namespace) -> int:
    _check(options)
    level = ServiceLevel(options.slo_ttft_s, options.slo_itl_s, options.slo_gap_s, options.slo_e2e_s)
    lengths = workload.Lengths.parse(options.prompt_tokens), workload.Lengths.parse(options.output_tokens)
    async with grpc.aio.insecure_channel(options.address) as channel:
        vocab_size = await open_loop.vocab_size(channel, options.model, CONNECT_S)
        plan = workload.poisson(
            rate_per_s=options.rate,
            prompt=lengths[0],
            output=lengths[1],
            vocab_size=vocab_size,
            seed=options.seed,
            max_requests=options.requests,
            duration_s=options.duration_s,
            warmup_s=options.warmup_s,
        )
        facts = report.head("generate") | _said(options, plan)
        ask = open_loop.over_grpc(channel, model=options.model, temperature=options.temperature)
        outcomes = await open_loop.run(plan, ask, timeout_s=options.timeout_s)
    summary = summarize(plan, outcomes, level)
    _show(summary, level, outcomes)
    if options.json is not None:
        _write(options.json, facts | summary.values(), outcomes)
    if options.plot is not None:
        panels = {"TTFT": summary.ttft_s, "inter-token latency": summary.itl_s, "end to end": summary.e2e_s}
        title = f"{options.rate:g} requests/s, {options.prompt_tokens} prompt and {options.output_tokens} output tokens"
        plot.cumulative(options.plot, title, {name: {"triptych": values} for name, values in panels.items()})
    report.last_line(facts | summary.values())
    return 0 if summary.ok else 1


def _check(options: argparse.Namespace) -> None:
    """What can be known to fail is told before the load, not after it."""
    if options.timeout_s <= 0:
        raise workload.WorkloadError(f"a timeout of {options.timeout_s} s is not above 0")
    for flag, file in (("--json", options.json), ("--plot", options.plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise StartError(f"{flag} {file}: there is no folder {file.parent}")
    if options.plot is not None:
        if options.plot.suffix not in PLOT_ENDINGS:
            raise StartError(f"--plot {options.plot}: its ending is none of {', '.join(PLOT_ENDINGS)}")
        plot.require()


def _said(options: argparse.Namespace, plan: workload.Plan) -> dict[str, object]:
    print(
        f"{len(plan.requests)} requests, Poisson at {options.rate:g}/s over {plan.end_s:.1f} s, the first "
        f"{plan.warmup_s:g} s not counted; prompt tokens {options.prompt_tokens}, output tokens "
        f"{options.output_tokens}, seed {options.seed}\n",
        flush=True,
    )
    return {
        "address": options.address,
        "rate_requests_per_s": options.rate,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "seed": options.seed,
        "warmup_s": options.warmup_s,
        "arrivals_s": plan.end_s,
    }


def _show(summary: Summary, level: ServiceLevel, outcomes: Sequence[open_loop.Outcome]) -> None:
    print(summary.table())
    print(
        f"\n{summary.ok} of {summary.requests} ended well; {summary.out_tokens_per_s:.1f} output and "
        f"{summary.total_tokens_per_s:.1f} total tokens/s"
    )
    for kind, count in sorted(summary.failures.items()):
        first = next(outcome.message for outcome in outcomes if outcome.failure == kind)
        print(f"{count} failed, {kind}; the first: {first}")
    if level.is_set:
        goodput = report.number(summary.goodput_requests_per_s)
        print(f"goodput: {summary.good} of {summary.requests} kept the service level, {goodput} requests/s")
    if (lag_s := max(summary.lag_s)) > 0.1:
        print(f"this client sent up to {lag_s:.2f} s late: it is short of CPU, and its own delay is in the latencies")
    print(flush=True)


def _write(file: Path, values: dict[str, object], outcomes: Sequence[open_loop.Outcome]) -> None:
    rows = [
        {
            "due_s": outcome.due_s,
            "lag_s": outcome.lag_s,
            "prompt_tokens": outcome.prompt_tokens,
            "token_s": outcome.token_s,
            "end_s": outcome.end_s,
            "failure": outcome.failure,
        }
        for outcome in outcomes
    ]
    file.write_text(json.dumps(values | {"outcomes": rows}, allow_nan=False) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.generate",
        description="Sends requests at the times of a Poisson process, whether or not earlier ones were answered, and "
        "measures each from the time it was due. Lengths: 64, 50-550 (uniform), normal:MEAN,SD,LOW-HIGH, "
        "lognormal:MEDIAN,SIGMA,LOW-HIGH.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--address", default="127.0.0.1:50051", help="HOST:PORT of a frontend (%(default)s)")
    add("--model", default="", help="model to ask for; by default the one served there")
    add("--rate", type=float, required=True, help="mean arrivals a second")
    add("--duration", dest="duration_s", type=float, default=60.0, help="seconds of arrivals (%(default)g)")
    add("--requests", type=int, default=NO_BOUND_REQUESTS, help="at most so many, warm-up included (%(default)s)")
    add("--warmup", dest="warmup_s", type=float, default=0.0, help="first seconds that are not counted (%(default)g)")
    add("--timeout", dest="timeout_s", type=float, default=120.0, help="deadline, s after the due time (%(default)g)")
    add("--prompt-tokens", default="50-550", metavar="LENGTHS", help="(%(default)s)")
    add("--output-tokens", default="64", metavar="LENGTHS", help="(%(default)s)")
    add("--temperature", type=float, default=0.0, help="(%(default)g)")
    add("--seed", type=int, default=0, help="of arrivals, lengths and prompts (%(default)s)")
    add("--slo-ttft-s", type=float, help="service level: time to first token")
    add("--slo-itl-s", type=float, help="service level: a request's mean inter-token latency")
    add("--slo-gap-s", type=float, help="service level: a request's longest gap between tokens")
    add("--slo-e2e-s", type=float, help="service level: time to its end")
    add("--json", type=Path, metavar="FILE", help="write the result with every request's times")
    add("--plot", type=Path, metavar="FILE", help=f"draw the latencies ({', '.join(PLOT_ENDINGS)})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
