"""Decode steps captured as graphs, at a ladder of sizes: a step is padded up to the next one and replayed.

  rows of a step   | r0 | r1 | r2 | pad |     size 4
  a pad            one token of the null slot, whose table holds the null block: it writes and reads there alone

What else a step holds (prompts, prompt logprobs) runs eagerly, and so does one that is larger than the ladder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from services.executor import step_columns
from services.executor.batch import StepInputs
from services.executor.device import Device, Graph
from services.executor.device_runner import DeviceRunner, StepFigures
from services.executor.plan import Int64s


def ladder(most_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth up to `most_rows`, which closes it."""
    sizes = [size for size in (1, 2, 4, *range(8, most_rows + 1, 8)) if size < most_rows]
    return (*sizes, most_rows)


@dataclass(frozen=True, eq=False)
class _Captured:
    size: int
    buffer: torch.Tensor
    """the step's columns, which the graph reads"""
    graph: Graph


class DecodeGraphs:
    """Graphs of steps in which every row computes one token, and how many steps ran by which.

    `context_tokens` is the longest context that a row may have: the grid is fixed when a graph is captured.
    """

    def __init__(self, runner: DeviceRunner, device: Device, sizes: Sequence[int], context_tokens: int) -> None:
        self._runner = runner
        self._device = device
        self._sizes = sorted(set(sizes))
        self._context_tokens = context_tokens
        self._captured: dict[int, _Captured] = {}
        self._logits: torch.Tensor | None = None
        self.replayed: Counter[int] = Counter()
        """steps by the size of their graph"""
        self.eager = 0
        """steps without one"""

    def capture(self) -> None:
        """Captures all sizes, the largest first, since later ones then find its memory free."""
        for size in reversed(self._sizes):
            self._captured[size] = self._capture(size)

    def run(self, inputs: StepInputs, tables: npt.NDArray[np.int32], drawn_slots: Int64s) -> tuple[torch.Tensor, bool]:
        """Queues a step; logits [sampling rows, vocab], valid until the next step, and whether a graph was replayed."""
        size = self._size_for(inputs)
        if size is None:
            self.eager += 1
            return self._runner.run(inputs, tables, drawn_slots), False
        captured, rows = self._captured[size], len(inputs.slots)
        # All rows' logits are computed; which of them sample may differ from step to step.
        whole = replace(inputs, sampling_rows=np.arange(rows))
        self._device.upload(self._runner.packed(whole, tables, drawn_slots, size - rows), into=captured.buffer)
        captured.graph.replay()
        self.replayed[size] += 1
        logits = self._logits_of(rows)
        if len(inputs.sampling_rows) < rows:
            logits = logits.index_select(0, self._device.upload(inputs.sampling_rows))
        return logits, True

    def _size_for(self, inputs: StepInputs) -> int | None:
        rows = len(inputs.slots)
        if len(inputs.token_ids) != rows or inputs.scored:
            return None
        return next((size for size in self._sizes if size >= rows), None)

    def _capture(self, size: int) -> _Captured:
        figures = StepFigures(size, size, size, leading=size, most_tokens=0, most_context=self._context_tokens)
        packed = self._runner.packed(_nobody(), np.zeros((0, 1), np.int32), np.zeros(0, np.int64), size)
        buffer = torch.empty(len(packed), dtype=torch.uint8, device=self._device.torch_device)
        self._device.upload(packed, into=buffer)
        columns = step_columns.views(buffer, size, size, size)

        def work() -> None:
            logits = self._runner.compute(columns, figures)
            self._logits_of(size, like=logits).copy_(logits)

        work()  # loads kernels and makes what is made once
        return _Captured(size, buffer, self._device.capture(work))

    def _logits_of(self, rows: int, like: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of the one buffer that all graphs write their logits to."""
        if self._logits is None:
            if like is None:
                raise RuntimeError("logits before a graph was captured")
            self._logits = torch.empty(self._sizes[-1], like.shape[1], dtype=like.dtype, device=like.device)
        return self._logits[:rows]


def _nobody() -> StepInputs:
    none = np.zeros(0, np.int64)
    return StepInputs(
        slots=none,
        token_ids=none,
        positions=none,
        query_starts=np.zeros(1, np.int64),
        contexts=none,
        sampling_rows=none,
        places=none,
        failed_slots=none,
    )
