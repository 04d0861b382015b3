"""The CPU backend: numba's kernels over a paged cache in float32, bfloat16 or int8."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch

from kernels.cpu import kv_cache, paged_attention
from services.executor.attention.contract import (
    AttentionBackend,
    Needs,
    Rotary,
    Scores,
    StepShape,
    dtype_name,
    shared_refusals,
)
from services.executor.device import Device

_STORED = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.uint16), torch.int8: np.dtype(np.int8)}
"""How the kernels see a KV dtype; uint16 are the bits of a bfloat16."""
_NO_ANGLES, _NO_GAIN = np.zeros((1, 0), np.float32), np.zeros(0, np.float32)


class CpuBackend(AttentionBackend):
    """Arithmetic in float32 on any CPU; any head size, block size, window and soft cap, whole groups of heads."""

    name = "cpu-numba"
    graphs = False

    def refusals(self, needs: Needs) -> list[str]:
        reasons = []
        if needs.device != "cpu":
            reasons.append(f"runs on cpu, not on {needs.device}")
        if needs.dtype != torch.float32:
            reasons.append(f"dtype is float32 alone, not {dtype_name(needs.dtype)}")
        return reasons + shared_refusals(needs, kv_dtypes=_STORED, graphs=self.graphs)

    def allocate(self, needs: Needs, layers: int, num_blocks: int, on: Device | None = None) -> CpuKvCache:
        return CpuKvCache(needs, layers, num_blocks)


class CpuKvCache:
    """One array for keys and values of all layers, so that a block is copied in one operation."""

    def __init__(self, needs: Needs, layers: int, num_blocks: int) -> None:
        self.needs = needs
        vectors = (2, layers, num_blocks, needs.kv_heads, needs.block_tokens)
        # By torch, whose allocator says how much memory there is not.
        self._stored = torch.empty((*vectors, needs.head_dim), dtype=needs.kv_dtype)
        self._scales = torch.empty(vectors if needs.is_scaled else (2, layers, 0, 0, 0))
        of_keys = (num_blocks, needs.kv_heads, needs.head_dim, needs.block_tokens)
        stored = self._stored.view(torch.uint16) if needs.kv_dtype == torch.bfloat16 else self._stored
        keys, values = stored.numpy()
        self.whole = kv_cache.LayerCache(keys.reshape(layers, *of_keys), values, *self._scales.numpy())
        """of all layers"""
        self.layers = tuple(kv_cache.LayerCache(*parts) for parts in zip(*vars(self.whole).values(), strict=True))
        self._queries = np.empty((0, needs.heads, needs.head_dim), np.float32)

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for tensor in (self._stored, self._scales) if self.needs.is_scaled else (self._stored,):
            tensor.index_copy_(2, destinations, tensor.index_select(2, sources))

    def begin(self, shape: StepShape) -> CpuStep:
        return CpuStep(self, shape)

    def calibrating(self) -> AbstractContextManager[None]:
        return nullcontext()  # each key and value has a scale of its own

    def queries(self, tokens: int) -> kv_cache.Float32s:
        """A buffer [tokens, heads, head_dim] that all layers of a step share, kept for the next step."""
        if len(self._queries) < tokens:
            self._queries = np.empty((tokens, *self._queries.shape[1:]), np.float32)
        return self._queries[:tokens]


class CpuStep:
    """A step's rows as the kernels take them, and the cut of its work, made once and used by every layer."""

    def __init__(self, cache: CpuKvCache, shape: StepShape) -> None:
        self.cache = cache
        parts = (shape.tables, shape.slots, shape.query_starts, shape.contexts)
        self.rows = kv_cache.Rows(*(one.numpy() for one in parts))
        self.tokens = int(self.rows.query_starts[-1])

    @property
    def is_decode(self) -> bool:
        """Whether each row has one token."""
        return self.tokens == len(self.rows.slots)

    @cached_property
    def _items(self) -> paged_attention.Int64s:
        needs, rows = self.cache.needs, self.rows
        return paged_attention.work_items(
            rows.query_starts, rows.contexts, needs.heads, needs.kv_heads, paged_attention.get_num_threads()
        )

    def attend(
        self, layer: int, projected: torch.Tensor, rotary: Rotary | None, scores: Scores, out: torch.Tensor
    ) -> None:
        cache, queries = self.cache.layers[layer], self.cache.queries(self.tokens)
        kv_cache.write(projected.numpy(), *_arrays(rotary), queries, cache, self.rows)
        window, cap = scores.window_tokens or 0, scores.soft_cap or 0.0
        paged_attention.attend(queries, cache, self.rows, self._items, scores.scale, window, cap, out.numpy())


def _arrays(
    rotary: Rotary | None,
) -> tuple[kv_cache.Float32s, kv_cache.Float32s, kv_cache.Float32s, kv_cache.Float32s, float]:
    if rotary is None:
        return _NO_ANGLES, _NO_ANGLES, _NO_GAIN, _NO_GAIN, 0.0
    q_gain, k_gain = (_NO_GAIN if gain is None else gain.numpy() for gain in (rotary.q_gain, rotary.k_gain))
    if rotary.gain_offset:
        q_gain, k_gain = q_gain + rotary.gain_offset, k_gain + rotary.gain_offset
    return rotary.cos.numpy(), rotary.sin.numpy(), q_gain, k_gain, rotary.epsilon
