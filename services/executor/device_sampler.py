"""Draws the next ids on the device: the order of operations and the ids of services/executor/sampler.py.

What changes single logits is done by torch on a float32 copy of them, and only where a row asks for it; mask,
temperature, filters and draw are one kernel (kernels/sampling.py). The host waits for nothing, and no id need be known
on the host: the newest id of a history is read where it was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels import instances
from kernels.instances import Instance
from kernels.sampling import MOST_IDS, Sampling, pack_columns
from services.common.errors import StartError
from services.executor.device import Device, index
from services.executor.device_logprobs import FoundLogprobs
from services.executor.plan import Int64s
from services.executor.sampler import Masks
from services.executor.sampling_columns import Entries, SampleRows
from services.executor.sampling_params import GREEDY_BELOW

BAD_LOGITS, NO_ID_LEFT = 1, -1
"""Why a row has failed: its logits are NaN or +inf (of prompt ids too: then 1 or more), or bans leave no id."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """One id a row, on the device."""

    token_ids: torch.Tensor
    """[rows] int64; 0 where it failed"""
    failed: torch.Tensor
    """[rows] int32 BAD_LOGITS or NO_ID_LEFT; 0: it has not"""
    scored: Int64s
    """[n] rows that logprobs are told of, rising"""
    tops: Int64s
    """[n] alternatives to each"""
    logprobs: FoundLogprobs | None
    """of `scored`"""


class DeviceSampler:
    """Draws from a vocabulary of `vocab_size` ids by logits in `dtype`; columns past it are never drawn.

    Raises StartError for a vocabulary that the kernel cannot sum.
    """

    def __init__(self, device: Device, vocab_size: int, dtype: torch.dtype, threads: int = 1024) -> None:
        if vocab_size > MOST_IDS:
            raise StartError(f"the vocabulary has {vocab_size} ids, the sampling kernel takes up to {MOST_IDS}")
        self._device = device
        self._vocab_size = vocab_size
        self._kernels = {
            kind: Sampling(device.kernels, dtype=str(kind).removeprefix("torch."), threads=threads)
            for kind in {dtype, torch.float32}
        }

    @staticmethod
    def instances(dtype: torch.dtype, threads: int = 1024) -> list[Instance]:
        """Kernels that are launched."""
        return [instances.sampling(name, threads) for name in {str(dtype).removeprefix("torch."), "float32"}]

    def draw(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        masks: Masks | None = None,
        newest_ids: torch.Tensor | None = None,
    ) -> Drawn:
        """Logits [rows, vocab_size or more] in the sampler's dtype are read, never written.

        newest_ids [rows] int64: the id that a row has sampled last, for its place in the history; any where none was.
        """
        if logits.ndim != 2 or len(logits) != len(rows) or logits.shape[1] < self._vocab_size:
            raise ValueError(f"logits are {tuple(logits.shape)}, wanted ({len(rows)}, {self._vocab_size} or more)")
        token_ids, failed = self._launch(self._adjust(logits, rows, newest_ids), rows, masks)
        if len(touched := _touched(rows, masks)):
            token_ids, failed = self._told_apart(logits, touched, token_ids, failed)
        scored = np.flatnonzero(rows.columns["logprobs"] >= 0)
        tops = rows.columns["logprobs"][scored].clip(max=self._vocab_size)
        return Drawn(token_ids, failed, scored, tops, self._logprobs(logits, token_ids, scored, tops))

    def _launch(self, scores: torch.Tensor, rows: SampleRows, masks: Masks | None) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(rows)
        token_ids = torch.empty(count, dtype=torch.int64, device=scores.device)
        failed = torch.empty(count, dtype=torch.int32, device=scores.device)
        columns, mask_row = rows.columns, np.full(count, -1)
        if masks is not None:
            mask_row[masks.rows] = np.arange(len(masks.rows))
        off = columns["top_k"] >= self._vocab_size
        packed = self._device.upload(
            pack_columns(
                greedy=columns["temperature"] < GREEDY_BELOW,
                temperature=columns["temperature"],
                top_k=np.where(off, 0, columns["top_k"]),
                top_p=columns["top_p"],
                min_p=columns["min_p"],
                seed=columns["seed"],
                position=rows.positions,
                mask_row=mask_row,
            ).view(np.uint8)
        )
        words = None if masks is None else self._device.upload(np.ascontiguousarray(masks.words, "<u4").view(np.int32))
        kernel = self._kernels[scores.dtype]
        kernel.params.set(
            logits=scores.data_ptr(),
            rows=packed.data_ptr(),
            masks=0 if words is None else words.data_ptr(),
            token_ids=token_ids.data_ptr(),
            failed=failed.data_ptr(),
            logits_stride=scores.stride(0),
            mask_stride=0 if words is None else words.stride(0),
            vocab=self._vocab_size,
        )
        kernel(count)
        return token_ids, failed

    def _adjust(self, logits: torch.Tensor, rows: SampleRows, newest_ids: torch.Tensor | None) -> torch.Tensor:
        """The scores to draw by."""
        if not len(_touched(rows, None)):
            return logits
        scores = logits[:, : self._vocab_size].to(torch.float32, copy=True)
        flat = scores.view(-1)
        if len(rows.allowed.rows):
            places = self._places(rows.allowed)
            kept = flat.index_select(0, places)
            scores.index_fill_(0, index(np.unique(rows.allowed.rows), self._device), -torch.inf)
            flat.index_copy_(0, places, kept)
        if len(rows.banned.rows):
            flat.index_fill_(0, self._places(rows.banned), -torch.inf)
        if len(rows.biased.rows):
            places = self._places(rows.biased)
            bias = self._device.upload(rows.biased.values)
            flat.index_copy_(0, places, (flat.index_select(0, places).double() + bias).float())
        if len(rows.history.rows):
            self._penalize(flat, rows, newest_ids)
        return scores

    def _told_apart(
        self, logits: torch.Tensor, touched: Int64s, token_ids: torch.Tensor, failed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `touched` rows, whose scores are not the model's own: NaN and +inf that a ban has hidden are found, and
        what fails though its logits are good has no id left."""
        rows = index(touched, self._device)
        good = torch.isfinite(logits[:, : self._vocab_size].index_select(0, rows).amax(dim=1))
        why = torch.where(good, NO_ID_LEFT * failed.index_select(0, rows), BAD_LOGITS).to(failed.dtype)
        failed = failed.index_copy(0, rows, why)
        return torch.where(failed != 0, 0, token_ids), failed

    def _places(self, entries: Entries) -> torch.Tensor:
        return index(entries.rows * self._vocab_size + entries.ids, self._device)

    def _penalize(self, flat: torch.Tensor, rows: SampleRows, newest_ids: torch.Tensor | None) -> None:
        """Touches the ids in history alone. One that is there twice is read twice before it is written twice."""
        history, columns = rows.history, rows.columns[rows.history.rows]
        which = index(history.rows, self._device)
        ids = index(history.ids, self._device)
        if newest_ids is not None and len(history.newest):
            rows_of = index(history.rows[history.newest], self._device)
            ids.index_copy_(0, index(history.newest, self._device), newest_ids.index_select(0, rows_of))
        places = which * self._vocab_size + ids
        counts = torch.zeros_like(flat, dtype=torch.int32)
        counts.scatter_add_(0, places, self._device.upload(history.in_output.astype(np.int32)))
        in_output = counts.index_select(0, places)
        repetition, presence, frequency = (
            self._device.upload(np.ascontiguousarray(columns[f"{name}_penalty"]))
            for name in ("repetition", "presence", "frequency")
        )
        before = flat.index_select(0, places).double()
        after = torch.where(before > 0, before / repetition, before * repetition)
        after = after - presence * (in_output > 0) - frequency * in_output
        flat.index_copy_(0, places, after.float())

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, scored: Int64s, tops: Int64s
    ) -> FoundLogprobs | None:
        if not len(scored):
            return None
        which = index(scored, self._device)
        own = logits[:, : self._vocab_size].index_select(0, which).float()
        return FoundLogprobs.of(own, token_ids.index_select(0, which), int(tops.max(initial=0)))


def _touched(rows: SampleRows, masks: Masks | None) -> Int64s:
    """Rows whose scores are not the model's own logits, rising."""
    parts = [rows.allowed.rows, rows.banned.rows, rows.biased.rows, rows.history.rows]
    if masks is not None:
        parts.append(masks.rows)
    return np.unique(np.concatenate(parts)) if any(map(len, parts)) else np.zeros(0, np.int64)
