"""The executor alone, without gRPC, beside what the machine could do, the whole stack, and other engines' libraries:
`python -m loadtest.bench_executor [--quick]`.

First single steps: every rate is of the least time of its steps, as are the two it is compared with, what the code
takes when nothing disturbs it. Then bench_serve's load, 16 streams and 1, driven through the scheduler's core and the
executor in this process; in turn with it through the three services over gRPC; and through each peer as a library.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from loadtest import command, open_loop, peer_offline, peer_transformers, peers, report, serve_load, stack
from loadtest.alone import Alone
from loadtest.executor_load import CONTEXT_TOKENS, PREFILL_TOKENS, Bench, matrix_flops_per_s, read_bytes_per_s
from loadtest.serve_load import Measured, Repetition, Run
from services.common.checkpoint import EMBEDDED_MODEL, find
from services.common.errors import StartError
from services.executor import memory

STREAMS = serve_load.STREAMS
REQUEST_TOKENS = serve_load.PROMPT_TOKENS.largest + serve_load.OUTPUT_TOKENS.largest
DECODE_STEPS = 20
PREFILLS = 5
REPETITIONS = 3
ALONE = "alone"
STACK = "stack"
PEERS = (peers.VLLM, peers.TRANSFORMERS, peers.LLAMACPP)
SLOW_PEERS = (peers.TRANSFORMERS, peers.LLAMACPP)
"""--quick gives them prompts and outputs of half the length."""

METRICS: dict[str, Callable[[Repetition], float]] = {
    "total_tokens_per_s": lambda one: one.many.total_tokens_per_s,
    "out_tokens_per_s": lambda one: one.many.out_tokens_per_s,
    "single_stream_tokens_per_s": lambda one: one.single_tokens_per_s,
    "single_decode_tokens_per_s": lambda one: one.single_decode_tokens_per_s,
}
"""Of one repetition of the load; `single_stream` holds the prefill, `single_decode` begins after the first id."""


@dataclass(frozen=True)
class Figures:
    """What was measured: seconds of each step, and of the machine."""

    prefill_s: Sequence[float]
    decode_16_s: Sequence[float]
    decode_1_s: Sequence[float]
    matrix_flops_per_s: float
    read_bytes_per_s: float
    prefill_flops: int
    """Of the linear layers, for PREFILL_TOKENS tokens and one row of the head."""
    decode_1_bytes: int
    """Weights, and the keys and values of the context."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where the model cannot be served or a request fails."""
    options = _parser().parse_args(argv)
    return command.run("bench_executor", _run(options), (StartError, serve_load.LoadError, open_loop.CallError))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_executor", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one repetition; half lengths for slow peers")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or a fetched model (%(default)s)")
    parser.add_argument("--threads", type=int, default=memory.cpus(), help="compute threads (%(default)s)")
    return parser


async def _run(options: argparse.Namespace) -> None:
    path = find(options.model)
    chosen = {name: python for name in PEERS if (python := peers.python_of(name)) is not None}
    unfit = chosen.pop(peers.LLAMACPP, None) is not None and options.model != EMBEDDED_MODEL
    if not unfit and (python := peers.python_of(peers.LLAMACPP)) is not None:
        chosen[peers.LLAMACPP] = python
    facts = report.head("bench_executor")
    bench = Bench(
        path, threads=options.threads, most_rows=STREAMS, most_decodes=DECODE_STEPS, most_tokens=REQUEST_TOKENS
    )
    times = 1 if options.quick else REPETITIONS
    figures = measure(bench, times)
    print(_table(figures), flush=True)
    async with serving(options.model, options.threads) as through_stack:
        runs = {ALONE: Alone(bench.executor, bench.limits).run, STACK: through_stack}
        found = await compare(runs, bench.vocab_size, times)
    for name, python in chosen.items():
        async with _peer(name, python, path, options.threads) as run:
            found += await compare({name.lower(): run}, bench.vocab_size, times, lengths_for(name, options.quick))
    print(f"\n{_load_table(found)}")
    if options.quick and (halved := [name.lower() for name in chosen if name in SLOW_PEERS]):
        print(f"\nhalf the lengths: {', '.join(halved)}")
    left_out = peers.absent_line(PEERS)
    print("\n".join(["", *filter(None, [left_out, "left out: llamacpp (its file is the embedded model)" * unfit]), ""]))
    asked = {"model": options.model, "threads": options.threads, "repetitions": times, "quick": options.quick}
    report.last_line(facts | asked | values(figures) | load_values(found))


@asynccontextmanager
async def serving(model: str, threads: int) -> AsyncIterator[Run]:
    """The three services, asked over gRPC. Raises StartError."""
    flags = ["--model", model, "--scheduler.dtype", "float32", "--executor.threads", str(threads)]
    async with stack.running(flags) as address, grpc.aio.insecure_channel(address) as channel:
        yield serve_load.over(open_loop.over_grpc(channel))


def _peer(name: str, python: Path, model: Path, threads: int) -> AbstractAsyncContextManager[Run]:
    if name == peers.VLLM:
        return peer_offline.vllm(python, model)
    return peer_offline.llamacpp(python, threads) if name == peers.LLAMACPP else _transformers(python, model)


@asynccontextmanager
async def _transformers(python: Path, model: Path) -> AsyncIterator[Run]:
    async with peer_transformers.serving(python, model) as ask:
        yield serve_load.over(ask)


def lengths_for(peer: str, quick: bool) -> serve_load.Lengths:
    """Of the load through a peer: halves for slow ones of a quick run, which has little time."""
    return serve_load.HALF if quick and peer in SLOW_PEERS else serve_load.WHOLE


async def compare(
    runs: dict[str, Run], vocab_size: int, times: int, lengths: serve_load.Lengths = serve_load.WHOLE
) -> list[Measured]:
    """The load through each of the systems, in turn. Raises LoadError."""
    found = [Measured(name) for name in runs]
    for name, run in runs.items():
        await serve_load.warm_up(run, name, vocab_size)
    for seed in range(times):
        for measured in found:
            one = await serve_load.once(
                runs[measured.name], measured.name, vocab_size=vocab_size, seed=seed, lengths=lengths
            )
            measured.repetitions.append(one)
            told = f"{measured.name}: {one.many.total_tokens_per_s:.1f} total tokens/s"
            print(f"loadtest.bench_executor: {told}", file=sys.stderr, flush=True)
    return found


def measure(bench: Bench, repetitions: int) -> Figures:
    """Takes turns, so that a neighbour that disturbs the machine for a while disturbs all alike."""
    prefill, sixteen, one, matrix, read = [], [], [], [], []
    bench.prefill_s()
    for _ in range(repetitions):
        prefill += [bench.prefill_s() for _ in range(PREFILLS)]
        matrix.append(matrix_flops_per_s(bench.linears(), PREFILLS))
        sixteen += bench.decode_s(STREAMS, DECODE_STEPS)
        one += bench.decode_s(1, DECODE_STEPS)
        read.append(read_bytes_per_s(PREFILLS))
    shapes = [(layer.weights.outputs, layer.weights.depth) for layer in bench.linears()]
    *layers, head = (outputs * depth for outputs, depth in shapes)
    return Figures(
        prefill_s=prefill,
        decode_16_s=sixteen,
        decode_1_s=one,
        matrix_flops_per_s=max(matrix),
        read_bytes_per_s=max(read),
        prefill_flops=2 * (PREFILL_TOKENS * sum(layers) + head),
        decode_1_bytes=bench.weight_bytes() + CONTEXT_TOKENS * bench.kv_token_bytes(),
    )


def values(figures: Figures) -> dict[str, Any]:
    """The keys of the last line."""
    return {
        "prefill_tokens_per_s": PREFILL_TOKENS / min(figures.prefill_s),
        "decode_16_tokens_per_s": STREAMS / min(figures.decode_16_s),
        "decode_1_tokens_per_s": 1 / min(figures.decode_1_s),
        "prefill_share_of_gemm": figures.prefill_flops / min(figures.prefill_s) / figures.matrix_flops_per_s,
        "decode_share_of_bandwidth": figures.decode_1_bytes / min(figures.decode_1_s) / figures.read_bytes_per_s,
        "gemm_gflop_per_s": figures.matrix_flops_per_s / 1e9,
        "read_gb_per_s": figures.read_bytes_per_s / 1e9,
    }


def load_values(found: Sequence[Measured]) -> dict[str, Any]:
    """The keys of the last line that tell of the load: medians, each with its system's name before it."""
    flat: dict[str, Any] = {
        f"{measured.name}_{key}": report.middle([metric(one) for one in measured.repetitions])
        for measured in found
        for key, metric in METRICS.items()
    }

    def ratio(key: str, of: str, to: str) -> float | None:
        over, under = flat.get(f"{of}_{key}"), flat.get(f"{to}_{key}")
        return None if over is None or under is None else over / under

    for name in map(str.lower, PEERS):
        flat[f"ratio_vs_{name}"] = ratio("total_tokens_per_s", ALONE, name)
        flat[f"ratio_vs_{name}_single"] = ratio("single_decode_tokens_per_s", ALONE, name)
    flat["share_of_executor_alone"] = ratio("total_tokens_per_s", STACK, ALONE)
    return flat


def _load_table(found: Sequence[Measured]) -> str:
    rows = [
        (key, *(report.spread([metric(one) for one in measured.repetitions]) for measured in found))
        for key, metric in METRICS.items()
    ]
    return report.table((f"{STREAMS} streams, then 1", *(measured.name for measured in found)), rows)


def _table(figures: Figures) -> str:
    found = values(figures)
    rows = [
        (what, f"{min(seconds) * 1e3:.1f}", f"{median(seconds) * 1e3:.1f}", f"{found[rate]:.1f}", share)
        for what, seconds, rate, share in (
            (
                f"prefill of {PREFILL_TOKENS}",
                figures.prefill_s,
                "prefill_tokens_per_s",
                f"{found['prefill_share_of_gemm']:.2f} of torch's {found['gemm_gflop_per_s']:.0f} GFLOP/s",
            ),
            (f"decode, {STREAMS} rows", figures.decode_16_s, "decode_16_tokens_per_s", ""),
            (
                "decode, 1 row",
                figures.decode_1_s,
                "decode_1_tokens_per_s",
                f"{found['decode_share_of_bandwidth']:.2f} of {found['read_gb_per_s']:.1f} GB/s",
            ),
        )
    ]
    return report.table(("a step", "least ms", "median ms", "tokens/s", "share"), rows)


if __name__ == "__main__":
    sys.exit(main())
