"""Paged attention written out in float64, and batches for it in which everything a kernel must not read is poisoned."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Unit roundoff: half the distance from 1 to the next value."""
_TORCH = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3": torch.float8_e4m3fn,
}

_MAP_NORESERVE = 0x4000
"""Of Linux; Python's mmap does not name it."""


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to `dtype`, as bits where numpy has no such type."""
    rounded = torch.from_numpy(np.asarray(values, np.float32)).to(_TORCH[dtype])
    if dtype in ("float16", "float32"):
        return rounded.numpy()
    return rounded.view(torch.uint8 if dtype == "float8_e4m3" else torch.uint16).numpy()


def loaded(bits: np.ndarray, dtype: str) -> np.ndarray:
    """What `stored` gave, in float64."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(_TORCH[dtype]).to(torch.float64).numpy()


@dataclass
class Batch:
    """Rows of (context, new tokens) over scrambled blocks."""

    dtype: str
    kv_dtype: str
    query: np.ndarray
    """[tokens, heads, head_dim] of dtype."""
    keys: np.ndarray
    """[num_blocks, kv_heads, block_tokens, head_dim] of kv_dtype, NaN in every slot without a token."""
    values: np.ndarray
    tables: np.ndarray
    """[lines, entries], -1 in every entry without a block."""
    slots: np.ndarray
    contexts: np.ndarray
    query_starts: np.ndarray
    key_scales: np.ndarray
    """[kv_heads], ones where KV is not fp8."""
    value_scales: np.ndarray

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.keys.shape[1]

    def tolerance(self) -> float:
        """Weights and outputs are rounded once each, by at most a roundoff of the largest value; between is float32."""
        rows = [values * self.value_scales[:, None] for values in self._gathered(self.values)]
        return max(float(np.abs(values).max(initial=0)) for values in rows) * (2 * ROUNDOFF[self.dtype] + 2e-6)

    def attend(self, *, window: int = 0, cap: float = 0.0) -> np.ndarray:
        """[tokens, heads, head_dim] float64: softmax(query keys / sqrt(head_dim)) values, causal in a row."""
        query, keys, values = loaded(self.query, self.dtype), self._gathered(self.keys), self._gathered(self.values)
        kv_heads, head_dim = self.keys.shape[1], self.keys.shape[3]
        queries = query.reshape(-1, kv_heads, self.group, head_dim)
        out = np.zeros(queries.shape)
        for row, context in enumerate(self.contexts):
            begin, end = self.query_starts[row], self.query_starts[row + 1]
            k = keys[row].swapaxes(0, 1) * self.key_scales[:, None, None]
            v = values[row].swapaxes(0, 1) * self.value_scales[:, None, None]
            for token in range(begin, end if context else begin):
                seen = context - (end - token) + 1
                first = max(0, seen - window) if window else 0
                scores = queries[token] @ k[:, first:seen].swapaxes(1, 2) * head_dim**-0.5  # [kv_heads, group, keys]
                scores = cap * np.tanh(scores / cap) if cap else scores
                weights = np.exp(scores - scores.max(axis=2, keepdims=True))
                out[token] = weights / weights.sum(axis=2, keepdims=True) @ v[:, first:seen]
        return out.reshape(query.shape)

    def _gathered(self, cache: np.ndarray) -> list[np.ndarray]:
        """[context, kv_heads, head_dim] a row."""
        block_tokens = cache.shape[2]
        found = []
        for slot, context in zip(self.slots, self.contexts, strict=True):
            blocks = self.tables[slot][: -(-int(context) // block_tokens)]
            lines = cache[blocks].swapaxes(1, 2).reshape(-1, cache.shape[1], cache.shape[3])[:context]
            found.append(loaded(lines, self.kv_dtype))
        return found


def batch(
    rows: Sequence[tuple[int, int]],
    *,
    dtype: str = "float16",
    kv_dtype: str | None = None,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_tokens: int = 16,
    shared_blocks: int = 0,
    seed: int = 0,
) -> Batch:
    """`rows` of (context, new tokens); the first `shared_blocks` blocks of all rows are the longest row's."""
    rng = np.random.default_rng(seed)
    kv_dtype = kv_dtype or dtype
    contexts = np.array([context for context, _ in rows], np.int32)
    needed = -(-contexts // block_tokens)
    ids = rng.permutation(np.arange(1, int(needed.sum()) + 3)).astype(np.int32)
    slots = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
    tables = np.full((len(rows) + 2, max(int(needed.max()), 1)), -1, np.int32)
    shape = (len(ids) + 1, kv_heads, block_tokens, head_dim)
    keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    taken = 0
    longest = int(np.argmax(contexts))
    for row in sorted(range(len(rows)), key=lambda row: row != longest):
        context = contexts[row]
        table = tables[slots[row]]
        table[: needed[row]] = ids[taken : taken + needed[row]]
        taken += int(needed[row])
        table[: min(shared_blocks, needed[row])] = tables[slots[longest]][: min(shared_blocks, needed[row])]
        for i, block in enumerate(table[: needed[row]]):
            held = min(block_tokens, int(context) - i * block_tokens)
            if np.isnan(keys[block, 0, 0, 0]):
                keys[block, :, :held] = rng.standard_normal((kv_heads, held, head_dim))
                values[block, :, :held] = rng.standard_normal((kv_heads, held, head_dim))
    starts = np.concatenate([[0], np.cumsum([new for _, new in rows])]).astype(np.int32)
    query = rng.standard_normal((int(starts[-1]), kv_heads * group, head_dim))
    scaled = kv_dtype == "float8_e4m3"
    scales = rng.uniform(0.5, 2, (2, kv_heads)) if scaled else np.ones((2, kv_heads))
    key_scales, value_scales = scales.astype(np.float32)
    return Batch(
        dtype,
        kv_dtype,
        stored(query, dtype),
        stored(keys, kv_dtype),
        stored(values, kv_dtype),
        tables,
        slots,
        contexts,
        starts,
        key_scales,
        value_scales,
    )


def padded(given: Batch, rows: int) -> Batch:
    """The batch with `rows` more of one token each, which all lie in the null block, as in a captured step's padding.

    Nothing is in that block but NaN.
    """
    lines, tables = len(given.tables), np.zeros((rows, given.tables.shape[1]), np.int32)
    last = int(given.query_starts[-1])
    return replace(
        given,
        query=np.concatenate([given.query, given.query[:rows]]),
        tables=np.concatenate([given.tables, tables]),
        slots=np.concatenate([given.slots, np.arange(lines, lines + rows, dtype=np.int32)]),
        contexts=np.concatenate([given.contexts, np.ones(rows, np.int32)]),
        query_starts=np.concatenate([given.query_starts, last + 1 + np.arange(rows, dtype=np.int32)]),
    )


def vast(blocks: int, shape: Sequence[int]) -> np.ndarray:
    """[blocks, *shape] float16 zeros, of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, blocks * int(np.prod(shape)) * 2, flags=flags)
    return np.frombuffer(memory, np.float16).reshape(blocks, *shape)


def spread_out(given: Batch) -> Batch:
    """The same float16 batch with its blocks, all but one, past element 2^31 of caches of 4 GiB and more."""
    held, shape = len(given.keys), given.keys.shape[1:]
    places = (1 << 31) // int(np.prod(shape)) + 10 + 3 * np.arange(held)
    places[held // 2] = 5
    keys, values = (vast(int(places.max()) + 1, shape) for _ in range(2))
    keys[places], values[places] = given.keys, given.values
    tables = np.where(given.tables >= 0, places[given.tables], -1).astype(np.int32)
    return replace(given, keys=keys, values=values, tables=tables)
