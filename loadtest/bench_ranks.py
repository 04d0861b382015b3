"""The executor alone, by one process and divided over several, on the same cores: `python -m loadtest.bench_ranks
[--quick]`.

Both are loaded at once and take turns. One process has all compute threads, the ranks divide them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from triptych.executor.v1 import executor_pb2 as pb
from triptych.inference.v1 import generation_pb2

from kernels.cpu import paged_attention
from loadtest import report
from services.common.checkpoint import EMBEDDED_MODEL, find
from services.common.errors import StartError
from services.executor import memory, wire
from services.executor.executor import Executor
from services.executor.plan import Settings
from services.executor.ranks.leader import LeadingExecutor
from services.executor.ranks.peers import ChildPeers

BLOCK_TOKENS = 16
PREFILL_TOKENS = 256
CONTEXT_TOKENS = 64
"""Of each row before the decode steps that are timed."""
STREAMS = 16
DECODE_STEPS = 12
REPETITIONS = 3
_ROW_BLOCKS = -(-(PREFILL_TOKENS + DECODE_STEPS + 1) // BLOCK_TOKENS)
_BLOCKS = 1 + STREAMS * _ROW_BLOCKS
_TIMEOUT_S = 300.0

WORK = {"prefill": (1, PREFILL_TOKENS), "decode_16": (STREAMS, STREAMS), "decode_1": (1, 1)}
"""By name: rows, and tokens of a step."""


class Turn:
    """A loaded executor; its threads are set before it is timed, since both share a process."""

    def __init__(self, executor: Executor, threads: int) -> None:
        self._executor = executor
        self._threads = threads
        self._step = 0
        settings = Settings(_ROW_BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS, STREAMS, PREFILL_TOKENS)
        self.vocab_size = executor.load(settings, torch.float32, "", lambda progress: None).vocab_size
        executor.allocate(_BLOCKS)

    def seconds(self) -> dict[str, list[float]]:
        """Of each step, by the name of its work."""
        torch.set_num_threads(self._threads)
        paged_attention.set_num_threads(self._threads)
        return {
            "prefill": [self._prefill(0, PREFILL_TOKENS) for _ in range(2)],
            "decode_1": self._decodes(1),
            "decode_16": self._decodes(STREAMS),
        }

    def _prefill(self, slot: int, tokens: int) -> float:
        if slot == 0:
            self._executor.reset()
        return self._run(started=[_started(slot, tokens)], slots=_column(slot), token_counts=_column(tokens))

    def _decodes(self, rows: int) -> list[float]:
        for slot in range(rows):
            self._prefill(slot, CONTEXT_TOKENS)
        return [self._run(slots=_column(*range(rows))) for _ in range(DECODE_STEPS)]

    def _run(self, **fields: Any) -> float:
        self._step += 1
        plan = wire.plan(pb.StepPlan(step=self._step, **fields))
        begun = time.perf_counter()
        self._executor.execute(plan)
        return time.perf_counter() - begun


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 where the model cannot be served."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_ranks", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="checkpoint folder, or a fetched model (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that divide the model (%(default)s)")
    parser.add_argument("--threads", type=int, default=memory.cpus(), help="of all ranks together (%(default)s)")
    options = parser.parse_args(argv)
    if not 2 <= options.ranks <= options.threads:
        parser.error(f"--ranks is {options.ranks}; from 2 to the {options.threads} threads that they divide")
    try:
        path = find(options.model)
        facts = report.head("bench_ranks")
        seconds = measure(path, options.ranks, options.threads, 1 if options.quick else REPETITIONS)
    except StartError as error:
        print(f"loadtest.bench_ranks: error: {error}", file=sys.stderr)
        return 1
    print(_table(seconds, options.ranks), flush=True)
    asked = {"model": options.model, "ranks": options.ranks, "threads": options.threads, "quick": options.quick}
    report.last_line(facts | asked | values(seconds))
    return 0


def measure(path: Path, ranks: int, threads: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step by the name of its work, "one" process's and the "ranks"'."""
    each = threads // ranks
    peers = ChildPeers(path, size=ranks, threads=each, timeout_s=_TIMEOUT_S, log_level="warning")
    leading = LeadingExecutor(path, peers=peers, threads=each)
    try:
        turns = {"one": Turn(Executor(path, threads=threads), threads), "ranks": Turn(leading, each)}
        found: dict[str, dict[str, list[float]]] = {who: {name: [] for name in WORK} for who in turns}
        for _ in range(repetitions):
            for who, turn in turns.items():
                for name, seconds in turn.seconds().items():
                    found[who][name] += seconds
    finally:
        leading.close()
    return found


def values(seconds: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """The keys of the last line: rates and their ratio, of least times."""
    found: dict[str, float] = {}
    for name, (_, tokens) in WORK.items():
        one, ranks = (tokens / min(seconds[who][name]) for who in ("one", "ranks"))
        found |= {
            f"{name}_tokens_per_s_one": one,
            f"{name}_tokens_per_s_ranks": ranks,
            f"{name}_ratio_ranks_to_one": ranks / one,
        }
    return found


def _table(seconds: dict[str, dict[str, list[float]]], ranks: int) -> str:
    found = values(seconds)
    rows = [
        (
            name,
            *(
                f"{min(seconds[who][name]) * 1e3:.1f} / {median(seconds[who][name]) * 1e3:.1f}"
                for who in ("one", "ranks")
            ),
            f"{found[f'{name}_ratio_ranks_to_one']:.2f}",
        )
        for name in WORK
    ]
    return report.table(("a step, least / median ms", "1 process", f"{ranks} ranks", "tokens/s, ranks to one"), rows)


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.1f} / {median(seconds) * 1e3:.1f}"


def _started(slot: int, tokens: int) -> pb.NewRequest:
    first = 1 + slot * _ROW_BLOCKS
    ids = np.random.default_rng(slot).integers(3, 256, tokens)
    return pb.NewRequest(
        slot=slot,
        token_ids=_column(*ids),
        prompt_tokens=tokens,
        block_ids=[_column(*range(first, first + _ROW_BLOCKS))],
        sampling=generation_pb2.Sampling(temperature=0),
    )


def _column(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


if __name__ == "__main__":
    sys.exit(main())
