"""An executor without its server, given steps as a scheduler would; what this machine could do at best beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from services.executor import loader
from services.executor.executor import Executor
from services.executor.packing import PackedLinear
from services.executor.plan import Int64s, Plan, Settings, Started
from services.executor.sampling_params import SamplingParams
from services.scheduler.core.limits import Limits

BLOCK_TOKENS = 16
PREFILL_TOKENS = 256
CONTEXT_TOKENS = 300
"""Of each row before the decode steps that are timed."""
GEMM_ROWS = 256
_GREEDY = SamplingParams(temperature=0.0)
_NO_PAIRS: Int64s = np.zeros((0, 2), np.int64)
_BANDWIDTH_BYTES = 1 << 28
"""Far beyond any cache."""


class Bench:
    """A loaded model; every measurement starts from an empty batch."""

    def __init__(self, path: Path, *, threads: int, most_rows: int, most_decodes: int, most_tokens: int = 0) -> None:
        """`most_tokens`: of a request that is run by others than this one's methods."""
        self._checkpoint: loader.Checkpoint | None = None
        self._row_blocks = -(-max(CONTEXT_TOKENS + most_decodes + 1, most_tokens) // BLOCK_TOKENS)
        blocks = 1 + most_rows * self._row_blocks
        context = self._row_blocks * BLOCK_TOKENS
        self.executor = Executor(path, threads=threads, load=self._load)
        settings = Settings(
            context_tokens=context,
            block_tokens=BLOCK_TOKENS,
            max_slots=most_rows,
            max_step_tokens=max(PREFILL_TOKENS, CONTEXT_TOKENS),
        )
        self.vocab_size = self.executor.load(settings, torch.float32, "", lambda progress: None).vocab_size
        self.limits = Limits(
            vocab_size=self.vocab_size,
            context_tokens=context,
            num_blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            max_slots=most_rows,
            max_step_tokens=PREFILL_TOKENS,
            max_waiting=most_rows,
            prefill_reserve=PREFILL_TOKENS // 4,
        )
        """Of a core for this executor; a step's tokens are the scheduler's default."""
        self.executor.allocate(blocks)
        self._step = 0
        self._rng = np.random.default_rng(0)

    def linears(self) -> list[PackedLinear]:
        """Of the layers and the head, in the order in which they run."""
        assert self._checkpoint is not None
        return [module for module in self._checkpoint.model.modules() if isinstance(module, PackedLinear)]

    def weight_bytes(self) -> int:
        """Read by a decode step: all linear layers."""
        return sum(one.weights.panels.nbytes for one in self.linears())

    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        assert self._checkpoint is not None
        shape = self._checkpoint.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * torch.float32.itemsize

    def prefill_s(self) -> float:
        """Seconds of a step that prefills one prompt of PREFILL_TOKENS."""
        self.executor.reset()
        return self._run((self._started(0, PREFILL_TOKENS),), [0], [PREFILL_TOKENS])

    def decode_s(self, rows: int, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps of `rows` requests that hold CONTEXT_TOKENS at first.

        One prompt is computed, and its blocks are copied for the others: what they hold costs a decode the same.
        """
        self.executor.reset()
        first = self._started(0, CONTEXT_TOKENS)
        self._run((first,), [0], [CONTEXT_TOKENS])
        for slot in range(1, rows):
            blocks = self._blocks(slot)
            one = replace(first, slot=slot, computed_tokens=CONTEXT_TOKENS - 1, block_ids=blocks)
            self._run((one,), [slot], [1], np.stack([first.block_ids, blocks], axis=1))
        return [self._run((), list(range(rows)), [1] * rows) for _ in range(steps)]

    def _load(
        self, path: Path, dtype: torch.dtype, report: loader.Report, expected_hash: str = ""
    ) -> loader.Checkpoint:
        self._checkpoint = loader.load(path, dtype, report, expected_hash)
        return self._checkpoint

    def _started(self, slot: int, tokens: int) -> Started:
        return Started(
            slot=slot,
            token_ids=self._rng.integers(0, min(self.vocab_size, 256), tokens).astype(np.uint32),
            prompt_tokens=tokens,
            computed_tokens=0,
            block_ids=self._blocks(slot),
            sampling=_GREEDY,
        )

    def _blocks(self, slot: int) -> Int64s:
        return 1 + slot * self._row_blocks + np.arange(self._row_blocks)

    def _run(
        self, started: tuple[Started, ...], slots: list[int], counts: list[int], copies: Int64s = _NO_PAIRS
    ) -> float:
        self._step += 1
        plan = Plan(
            step=self._step,
            freed_slots=np.zeros(0, np.int64),
            started=started,
            new_blocks=_NO_PAIRS,
            slots=np.array(slots),
            token_counts=np.array(counts),
            computed_tokens=None,
            deadline_s=None,
            copies=copies,
        )
        begun = time.perf_counter()
        self.executor.execute(plan)
        return time.perf_counter() - begun


def matrix_flops_per_s(linears: list[PackedLinear], times: int) -> float:
    """torch's rate over these layers' shapes at GEMM_ROWS rows in float32, each in the faster of its two layouts."""
    seconds, flops = 0.0, 0
    found: dict[tuple[int, int], float] = {}
    for outputs, depth in ((one.weights.outputs, one.weights.depth) for one in linears):
        if (outputs, depth) not in found:
            weight, x = torch.randn(outputs, depth), torch.randn(GEMM_ROWS, depth)
            x_transposed = x.T.contiguous()
            by_rows = _least(lambda w=weight, x=x: torch.nn.functional.linear(x, w), times)  # type: ignore[misc]
            by_columns = _least(lambda w=weight, x=x_transposed: w @ x, times)  # type: ignore[misc]
            found[outputs, depth] = min(by_rows, by_columns)
        seconds += found[outputs, depth]
        flops += 2 * GEMM_ROWS * outputs * depth
    return flops / seconds


def read_bytes_per_s(times: int) -> float:
    """Memory read bandwidth: a sum over more than any cache holds, by torch's threads."""
    numbers = torch.ones(_BANDWIDTH_BYTES // 4)
    return _BANDWIDTH_BYTES / _least(numbers.sum, times)


def _least(work: Callable[[], object], times: int) -> float:
    work()
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
