"""The model's forward pass on an accelerator, and what stays there from step to step: KV, block tables, newest ids."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.executor import step_columns
from services.executor.attention.contract import AttentionBackend, DeviceStepShape, Needs, Rotary, Scores
from services.executor.batch import PersistentBatch, StepInputs
from services.executor.device import Device, index
from services.executor.loader import Checkpoint
from services.executor.plan import Int64s, Plan, Settings
from services.executor.runner import ModelRunner
from services.executor.step_columns import StepColumns


@dataclass(frozen=True)
class StepFigures:
    """What the host knows of a step's shape; a graph is captured for one of these."""

    tokens: int
    rows: int
    wanted: int
    """rows whose logits are wanted"""
    leading: int
    """rows from the first on that have one token each"""
    most_tokens: int
    """of the other rows"""
    most_context: int

    @classmethod
    def of(cls, inputs: StepInputs) -> StepFigures:
        counts = np.diff(inputs.query_starts)
        longer = np.flatnonzero(counts != 1)
        leading = int(longer[0]) if len(longer) else len(counts)
        return cls(
            tokens=len(inputs.token_ids),
            rows=len(counts),
            wanted=len(inputs.sampling_rows),
            leading=leading,
            most_tokens=int(counts[leading:].max(initial=0)),
            most_context=int(inputs.contexts.max()),
        )


class DeviceRunner(ModelRunner):
    """Runs a checkpoint's model on `device`. Used by the step thread alone."""

    def __init__(
        self, checkpoint: Checkpoint, backend: AttentionBackend, needs: Needs, device: Device, settings: Settings
    ) -> None:
        super().__init__(checkpoint, backend, needs)
        self._device = device
        self._settings = settings
        self.null_slot = settings.max_slots
        """a line of the tables that holds the null block alone: what pads a step aims there"""
        entries = -(-settings.context_tokens // settings.block_tokens)
        self._tables = torch.zeros(settings.max_slots + 1, entries, dtype=torch.int32, device=device.torch_device)
        self.newest_ids = torch.full((settings.max_slots + 1,), -1, device=device.torch_device)
        """[max_slots + 1] int64 the id that each slot sampled last"""
        self.failed = torch.zeros(settings.max_slots + 1, dtype=torch.int32, device=device.torch_device)
        """[max_slots + 1] not 0: a row of the slot has failed"""

    def allocate(self, num_blocks: int) -> None:
        self._cache = self._backend.allocate(self._needs, self._layers, num_blocks, self._device)

    def calibrating(self) -> AbstractContextManager[None]:
        """The steps within set the fixed scales of keys and values, where there are any."""
        return self._allocated().calibrating()

    def copy_blocks(self, copies: Int64s) -> None:
        if copies.size:
            self._allocated().copy_blocks(*index(copies.T, self._device))

    def follow(self, batch: PersistentBatch, plan: Plan) -> None:
        """Brings to the device what a plan has changed in the batch."""
        if plan.started:
            slots = index(np.array([started.slot for started in plan.started]), self._device)
            self.newest_ids.index_fill_(0, slots, -1)
            self.failed.index_fill_(0, slots, 0)
        if len(changes := batch.table_changes):
            blocks = self._device.upload(batch.tables.reshape(-1)[changes])
            self._tables.view(-1).index_copy_(0, index(changes, self._device), blocks)

    def forget(self) -> None:
        """As before the first step."""
        self.newest_ids.fill_(-1)
        self.failed.zero_()

    def packed(
        self, inputs: StepInputs, tables: npt.NDArray[np.int32], drawn_slots: Int64s, pads: int = 0
    ) -> npt.NDArray[np.uint8]:
        """A step's columns as `compute` reads them; `tables` are the host's. Of `pads` more rows, each is one token of
        the null slot: its context is that token, and it is written into the null block."""
        counts, block_tokens = np.diff(inputs.query_starts), self._settings.block_tokens
        blocks = tables[np.repeat(inputs.slots, counts), inputs.positions // block_tokens]
        tokens = len(inputs.token_ids)
        return step_columns.packed(
            token_ids=_padded(inputs.token_ids, pads, 0),
            drawn_slots=_padded(drawn_slots, pads, -1),
            positions=_padded(inputs.positions, pads, 0),
            places=_padded(blocks.astype(np.int64) * block_tokens + inputs.positions % block_tokens, pads, 0),
            last_tokens=np.append(inputs.query_starts[inputs.sampling_rows + 1] - 1, tokens + np.arange(pads)),
            slots=_padded(inputs.slots, pads, self.null_slot),
            contexts=_padded(inputs.contexts, pads, 1),
            query_starts=np.append(inputs.query_starts, tokens + 1 + np.arange(pads)),
        )

    def run(self, inputs: StepInputs, tables: npt.NDArray[np.int32], drawn_slots: Int64s) -> torch.Tensor:
        """Queues every row's tokens; logits [sampling rows, vocab]."""
        figures = StepFigures.of(inputs)
        buffer = self._device.upload(self.packed(inputs, tables, drawn_slots))
        return self.compute(step_columns.views(buffer, figures.tokens, figures.rows, figures.wanted), figures)

    def run_with_hidden(
        self, inputs: StepInputs, tables: npt.NDArray[np.int32], drawn_slots: Int64s
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`run`, and the hidden states [tokens, hidden] that `head` makes logits of."""
        with self._hidden() as kept:
            logits = self.run(inputs, tables, drawn_slots)
        return logits, kept[0]

    def run_without_cache(self, tokens: int) -> torch.Tensor:
        """A step of so many tokens with all slots sampling, as far as it can be before there is a cache: what it takes
        at its height is what a step takes. Float32 logits, which the sampler may need."""
        positions = torch.arange(tokens, device=self._device.torch_device) % self._settings.context_tokens
        wanted = torch.arange(min(tokens, self._settings.max_slots), device=self._device.torch_device)
        output = self._model(
            input_ids=torch.zeros_like(positions)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            attention_step=_Blank(),
        )
        logits: torch.Tensor = output.logits[0].to(torch.float32, copy=True)
        return logits

    def compute(self, columns: StepColumns, figures: StepFigures) -> torch.Tensor:
        """The forward pass over columns on the device: all that a graph captures. Logits [wanted, vocab]."""
        shape = DeviceStepShape(
            tables=self._tables,
            slots=columns.slots,
            query_starts=columns.query_starts,
            contexts=columns.contexts,
            places=columns.places,
            leading=figures.leading,
            most_tokens=figures.most_tokens,
            most_context=figures.most_context,
        )
        newest = self.newest_ids.index_select(0, columns.drawn_slots.clamp(min=0))
        token_ids = torch.where(columns.drawn_slots >= 0, newest, columns.token_ids)
        output = self._model(
            input_ids=token_ids[None],
            position_ids=columns.positions[None],
            use_cache=False,
            logits_to_keep=columns.last_tokens,
            attention_step=self._allocated().begin(shape),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class _Blank:
    """An attention step that sees nothing."""

    def attend(
        self, layer: int, projected: torch.Tensor, rotary: Rotary | None, scores: Scores, out: torch.Tensor
    ) -> None:
        out.zero_()


def _padded(column: Int64s, pads: int, value: int) -> Int64s:
    return np.append(column, np.full(pads, value)) if pads else column
