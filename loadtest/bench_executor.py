"""The executor alone, without gRPC: prefill and decode, beside what the machine could do: `python -m
loadtest.bench_executor [--quick]`.

Every rate is of the least time of its steps, as are the two it is compared with: what the code takes when nothing
disturbs it. The medians stand beside them. Other engines are compared through their servers, by loadtest.bench_serve.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from loadtest import report
from loadtest.executor_load import CONTEXT_TOKENS, PREFILL_TOKENS, Bench, matrix_flops_per_s, read_bytes_per_s
from services.common.checkpoint import EMBEDDED_MODEL, find
from services.common.errors import StartError
from services.executor import memory

STREAMS = 16
DECODE_STEPS = 20
PREFILLS = 5
REPETITIONS = 3


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
    """Measures and prints; exit code 1 where the model cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_executor", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or a fetched model (%(default)s)")
    parser.add_argument("--threads", type=int, default=memory.cpus(), help="compute threads (%(default)s)")
    options = parser.parse_args(argv)
    try:
        path = find(options.model)
        facts = report.head("bench_executor")
        bench = Bench(path, threads=options.threads, most_rows=STREAMS, most_decodes=DECODE_STEPS)
    except StartError as error:
        print(f"loadtest.bench_executor: error: {error}", file=sys.stderr)
        return 1
    figures = measure(bench, 1 if options.quick else REPETITIONS)
    print(_table(figures))
    print("\nleft out: vllm (loadtest.bench_serve compares with it, through both servers)\n", flush=True)
    asked = {"model": options.model, "threads": options.threads, "quick": options.quick}
    report.last_line(facts | asked | values(figures))
    return 0


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
        "ratio_vs_vllm": None,
    }


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
