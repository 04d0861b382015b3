"""An executor without its server, given steps as a scheduler would; what this machine could do at best beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from services.executor import loader
from services.executor.executor import Executor
from services.executor.packing import PackedLinear
from services.executor.plan import Plan, Settings, Started
from services.executor.sampling_params import SamplingParams

BLOCK_TOKENS = 16
PREFILL_TOKENS = 256
CONTEXT_TOKENS = 300
"""Of each row before the decode steps that are timed."""
GEMM_ROWS = 256
_GREEDY = SamplingParams(temperature=0.0)
_BANDWIDTH_BYTES = 1 << 28
"""Far beyond any cache."""


class Bench:
    """A loaded model; every measurement starts from an empty batch."""

    def __init__(self, path: Path, *, threads: int, most_rows: int, most_decodes: int) -> None:
        self._checkpoint: loader.Checkpoint | None = None
        self._row_blocks = -(-(CONTEXT_TOKENS + most_decodes + 1) // BLOCK_TOKENS)
        blocks = 1 + most_rows * self._row_blocks
        context = self._row_blocks * BLOCK_TOKENS
        self._executor = Executor(path, threads=threads, load=self._load)
        settings = Settings(
            context_tokens=context,
            block_tokens=BLOCK_TOKENS,
            max_slots=most_rows,
            max_step_tokens=max(PREFILL_TOKENS, CONTEXT_TOKENS),
        )
        self._vocab_size = self._executor.load(settings, torch.float32, "", lambda progress: None).vocab_size
        self._executor.allocate(blocks)
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
        return self._checkpoint.shape.kv_block_bytes(1, torch.float32.itemsize)

    def prefill_s(self) -> float:
        """Seconds of a step that prefills one prompt of PREFILL_TOKENS."""
        self._executor.reset()
        return self._run((self._started(0, PREFILL_TOKENS),), [0], [PREFILL_TOKENS])

    def decode_s(self, rows: int, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps of `rows` requests that hold CONTEXT_TOKENS at first."""
        self._executor.reset()
        for slot in range(rows):
            self._run((self._started(slot, CONTEXT_TOKENS),), [slot], [CONTEXT_TOKENS])
        return [self._run((), list(range(rows)), [1] * rows) for _ in range(steps)]

    def _load(
        self, path: Path, dtype: torch.dtype, report: loader.Report, expected_hash: str = ""
    ) -> loader.Checkpoint:
        self._checkpoint = loader.load(path, dtype, report, expected_hash)
        return self._checkpoint

    def _started(self, slot: int, tokens: int) -> Started:
        first = 1 + slot * self._row_blocks
        return Started(
            slot=slot,
            token_ids=self._rng.integers(0, min(self._vocab_size, 256), tokens).astype(np.uint32),
            prompt_tokens=tokens,
            computed_tokens=0,
            block_ids=np.arange(first, first + self._row_blocks),
            sampling=_GREEDY,
        )

    def _run(self, started: tuple[Started, ...], slots: list[int], counts: list[int]) -> float:
        self._step += 1
        plan = Plan(
            step=self._step,
            freed_slots=np.zeros(0, np.int64),
            started=started,
            new_blocks=np.zeros((0, 2), np.int64),
            slots=np.array(slots),
            token_counts=np.array(counts),
            computed_tokens=None,
            deadline_s=None,
        )
        begun = time.perf_counter()
        self._executor.execute(plan)
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
