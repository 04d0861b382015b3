"""The whole stack on a real model, 16 streams and 1: `python -m loadtest.bench_serve [--quick]`, beside its peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from loadtest import command, open_loop, peer_transformers, peer_vllm, peers, plot, report, serve_load, stack
from loadtest.serve_load import Measured, Repetition
from services.common.checkpoint import EMBEDDED_MODEL, find, read_config, tokenizer_size
from services.common.errors import StartError

OURS = "triptych"
REPETITIONS = 3
CONNECT_S = 10.0
SERVING = {peers.VLLM: peer_vllm.serving, peers.TRANSFORMERS: peer_transformers.serving}

Metric = Callable[[Repetition], float | None]
METRICS: dict[str, Metric] = {
    "total_tokens_per_s": lambda one: one.many.total_tokens_per_s,
    "out_tokens_per_s": lambda one: one.many.out_tokens_per_s,
    "ttft_p50_s": lambda one: report.percentile(one.many.ttft_s, 50),
    "ttft_p99_s": lambda one: report.percentile(one.many.ttft_s, 99),
    "itl_p50_s": lambda one: report.percentile(one.many.itl_s, 50),
    "itl_p99_s": lambda one: report.percentile(one.many.itl_s, 99),
    "single_stream_tokens_per_s": lambda one: one.single_tokens_per_s,
    "single_stream_itl_p50_s": lambda one: report.percentile(one.single.itl_s, 50),
}
"""Of one repetition; latencies are of the 16 streams unless they say single."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where an engine does not start or a request fails."""
    options = _parser().parse_args(argv)
    return command.run("bench_serve", _run(options), (StartError, serve_load.LoadError, open_loop.CallError))


async def _run(options: argparse.Namespace) -> None:
    if options.plot is not None:
        plot.require()
    chosen = {name: python for name in SERVING if (python := peers.python_of(name)) is not None}
    facts = report.head("bench_serve")
    times = 1 if options.quick else options.repetitions
    print(
        f"{options.model}, float32: {serve_load.STREAMS} streams at once, prompts of {serve_load.PROMPT_TOKENS.text} "
        f"tokens, {serve_load.OUTPUT_TOKENS.text} out; then 1 stream, prompt of "
        f"{serve_load.SINGLE_PROMPT_TOKENS.text}; repetitions: {times}\n",
        flush=True,
    )
    found = [await _ours(options.model, times, options.seed)]
    for name, python in chosen.items():
        found.append(await _peer(name, python, find(options.model), times, options.seed))
    print(_table(found))
    if left_out := peers.absent_line(tuple(SERVING)):
        print(f"\n{left_out}")
    print(flush=True)
    if options.plot is not None:
        _draw(options.plot, found)
    report.last_line(facts | {"model": options.model, "repetitions": times, "quick": options.quick} | values(found))


async def _ours(model: str, times: int, seed: int) -> Measured:
    measured = Measured(OURS)
    _say("starting the three services")
    flags = ["--model", model, "--scheduler.dtype", "float32"]
    async with stack.running(flags) as address, grpc.aio.insecure_channel(address) as channel:
        vocab_size = await open_loop.vocab_size(channel, "", CONNECT_S)
        ask = open_loop.over_grpc(channel)
        await serve_load.repeat(ask, measured, vocab_size=vocab_size, times=times, seed=seed)
    return _done(measured)


async def _peer(name: str, python: Path, model: Path, times: int, seed: int) -> Measured:
    measured = Measured(name.lower())
    _say(f"starting {measured.name}")
    vocab_size = read_config(model).vocab_size or tokenizer_size(model)
    if vocab_size is None:
        raise StartError(f"{model} tells no vocab_size, so no prompts can be made of its ids; take another --model")
    async with SERVING[name](python, model) as ask:
        await serve_load.repeat(ask, measured, vocab_size=vocab_size, times=times, seed=seed)
    return _done(measured)


def _done(measured: Measured) -> Measured:
    """Told at once, in case a later system takes longer than the reader's patience."""
    total = report.spread([METRICS["total_tokens_per_s"](one) for one in measured.repetitions])
    _say(f"{measured.name}: {total} total tokens/s")
    return measured


def _say(line: str) -> None:
    print(f"loadtest.bench_serve: {line}", file=sys.stderr, flush=True)


def values(found: Sequence[Measured]) -> dict[str, Any]:
    """Medians over the repetitions: ours under the plain keys, a peer's with its name before them."""
    flat: dict[str, Any] = {}
    for measured in found:
        prefix = "" if measured.name == OURS else f"{measured.name}_"
        for key, metric in METRICS.items():
            flat[prefix + key] = report.middle([metric(one) for one in measured.repetitions])
    for name in SERVING:
        peer = flat.get(f"{name.lower()}_total_tokens_per_s")
        flat[f"ratio_vs_{name.lower()}"] = None if peer is None else flat["total_tokens_per_s"] / peer
    return flat


def _table(found: Sequence[Measured]) -> str:
    """A row a number, a column a system: medians, with the range of the repetitions."""
    rows = []
    for key, metric in METRICS.items():
        cells = [report.spread([metric(one) for one in measured.repetitions], _digits(key)) for measured in found]
        rows.append((key, *cells))
    return report.table(("median (range)", *(measured.name for measured in found)), rows)


def _digits(key: str) -> int:
    return 1 if key.endswith("_per_s") else 3


def _draw(file: Path, found: Sequence[Measured]) -> None:
    def all_of(measured: Measured, pick: Callable[[Repetition], Sequence[float]]) -> list[float]:
        return [value for one in measured.repetitions for value in pick(one)]

    panels = {
        "TTFT": {measured.name: all_of(measured, lambda one: one.many.ttft_s) for measured in found},
        "inter-token latency": {measured.name: all_of(measured, lambda one: one.many.itl_s) for measured in found},
    }
    plot.cumulative(file, f"{serve_load.STREAMS} streams at once", panels)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_serve", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="one repetition")
    add("--repetitions", type=_positive, default=REPETITIONS, help="without --quick (%(default)s)")
    add("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or the name of a fetched model (%(default)s)")
    add("--seed", type=int, default=0, help="of lengths and prompts (%(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw the latencies; needs the extra `bench`")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
