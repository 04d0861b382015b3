"""Calls of the CUDA kernels' launchers on batches of tests/kernels/paged.py."""

from __future__ import annotations

import numpy as np

from kernels.launch import Decode, Prefill, Reference
from tests.kernels.hostshim.hostshim import HostDevice
from tests.kernels.paged import Batch, loaded, stored


def attention_fields(device: HostDevice, batch: Batch, out: np.ndarray, window: int, cap: float) -> dict[str, float]:
    """The fields that decode and prefill share."""
    _, kv_heads, block_tokens, head_dim = batch.keys.shape
    heads = batch.query.shape[1]
    fp8 = batch.kv_dtype == "float8_e4m3"
    return {
        "out": device.pointer(out),
        "query": device.pointer(batch.query),
        "keys": device.pointer(batch.keys),
        "values": device.pointer(batch.values),
        "tables": device.pointer(batch.tables),
        "slots": device.pointer(batch.slots),
        "contexts": device.pointer(batch.contexts),
        "key_scales": device.pointer(batch.key_scales) if fp8 else 0,
        "value_scales": device.pointer(batch.value_scales) if fp8 else 0,
        "out_stride": heads * head_dim,
        "query_stride": heads * head_dim,
        "block_stride": kv_heads * block_tokens * head_dim,
        "head_stride": block_tokens * head_dim,
        "table_stride": batch.tables.shape[1],
        "heads": heads,
        "group": batch.group,
        "block_tokens": block_tokens,
        "window": window,
        "scale": head_dim**-0.5,
        "cap": cap,
    }


def decode(device: HostDevice, batch: Batch, *, splits: int = 1, window: int = 0, cap: float = 0.0) -> np.ndarray:
    """[rows, heads, head_dim] float64 of what attn_decode, and with splits attn_decode_reduce, make of a batch."""
    rows, heads, head_dim = batch.query.shape
    out = stored(np.full(batch.query.shape, np.nan), batch.dtype)
    partial_out = np.full((rows, heads, splits, head_dim), np.nan, np.float32)
    partial_lse = np.full((rows, heads, splits), np.nan, np.float32)
    call = Decode(device, dtype=batch.dtype, kv_dtype=batch.kv_dtype, head_dim=head_dim)
    call.params.set(**attention_fields(device, batch, out, window, cap), splits=splits)
    if splits > 1:
        call.params.set(partial_out=device.pointer(partial_out), partial_lse=device.pointer(partial_lse))
    call(rows)
    return loaded(out, batch.dtype)


def prefill(device: HostDevice, batch: Batch, *, window: int = 0, cap: float = 0.0) -> np.ndarray:
    """[tokens, heads, head_dim] float64 of what attn_prefill makes of a batch."""
    out = stored(np.full(batch.query.shape, np.nan), batch.dtype)
    call = Prefill(device, dtype=batch.dtype, kv_dtype=batch.kv_dtype, head_dim=batch.query.shape[2])
    call.params.set(**attention_fields(device, batch, out, window, cap))
    call.params.set(query_starts=device.pointer(batch.query_starts), rows=len(batch.contexts))
    call(int(np.diff(batch.query_starts).max()))
    return loaded(out, batch.dtype)


def reference(device: HostDevice, batch: Batch, *, window: int = 0, cap: float = 0.0) -> np.ndarray:
    """[tokens, heads, head_dim] float64 of what attn_reference makes of a batch."""
    out = stored(np.full(batch.query.shape, np.nan), batch.dtype)
    call = Reference(device, dtype=batch.dtype, head_dim=batch.query.shape[2])
    call.params.set(**attention_fields(device, batch, out, window, cap))
    call.params.set(query_starts=device.pointer(batch.query_starts), rows=len(batch.contexts))
    call(len(batch.query))
    return loaded(out, batch.dtype)
