"""What cache_rope must make of a batch, written out in float64, and batches for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.cache_rope import CacheRope
from tests.kernels.hostshim.hostshim import HostDevice
from tests.kernels.paged import ROUNDOFF, loaded, stored

EPSILON = 1e-5
FP8_LARGEST = 448.0
UNTOUCHED = 0x5A
"""Every byte of a cache before: no token's value in any type, and not NaN, so that a wrong sum is not hidden."""


@dataclass(frozen=True)
class Shape:
    """Of a model's heads and of how their positions are told."""

    dtype: str = "float32"
    kv_dtype: str = ""
    """empty: dtype"""
    head_dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    block_tokens: int = 16
    rotary_dim: int | None = None
    """None: all of the head"""
    from_frequencies: bool = False
    """cos and sin are made by the kernel, else read from tables"""
    rope_factor: float = 1.0
    norms: bool = False
    norm_offset: float = 0.0

    @property
    def cached(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def rotary(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass
class Batch:
    """Tokens' queries, keys and values, [tokens, (kv_)heads, head_dim] of dtype, and where they go."""

    shape: Shape
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    inv_freq: np.ndarray
    query_norm: np.ndarray
    key_norm: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray
    num_blocks: int


@dataclass
class Written:
    """Query [tokens, heads, head_dim]; caches [num_blocks, kv_heads, block_tokens, head_dim], as bits."""

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray

    def same_bits(self, other: Written) -> bool:
        mine, others = (self.query, self.keys, self.values), (other.query, other.keys, other.values)
        return all(a.tobytes() == b.tobytes() for a, b in zip(mine, others, strict=True))


def batch(
    shape: Shape, tokens: int = 7, *, positions: Sequence[int] | None = None, skipped: Sequence[int] = (), seed: int = 0
) -> Batch:
    """Tokens at scrambled places, those of `skipped` at none."""
    rng = np.random.default_rng(seed)
    num_blocks = 2 + -(-tokens // shape.block_tokens)
    places = rng.permutation(num_blocks * shape.block_tokens)[:tokens].astype(np.int64)
    places[list(skipped)] = -1
    rotary = shape.rotary
    frequencies = 10_000.0 ** (-np.arange(0, rotary, 2) / max(rotary, 1))

    def values(*size: int) -> np.ndarray:
        return stored(rng.standard_normal(size), shape.dtype)

    return Batch(
        shape,
        values(tokens, shape.heads, shape.head_dim),
        values(tokens, shape.kv_heads, shape.head_dim),
        values(tokens, shape.kv_heads, shape.head_dim),
        np.array(rng.integers(0, 5000, tokens) if positions is None else positions, np.int64),
        places,
        frequencies.astype(np.float32),
        values(shape.head_dim),
        values(shape.head_dim),
        rng.uniform(0.001, 0.02, shape.kv_heads).astype(np.float32),
        rng.uniform(0.001, 0.02, shape.kv_heads).astype(np.float32),
        num_blocks,
    )


def angles(batch: Batch) -> np.ndarray:
    """[tokens, rotary_dim / 2] float64; the product is rounded to float32, as transformers' rotary modules do."""
    return (batch.positions.astype(np.float32)[:, None] * batch.inv_freq).astype(np.float64)


def expected(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys, values of the tokens, float64, before they are stored."""
    shape = batch.shape
    cos, sin = np.cos(angles(batch)) * shape.rope_factor, np.sin(angles(batch)) * shape.rope_factor

    def turned(bits: np.ndarray, norm: np.ndarray) -> np.ndarray:
        x = loaded(bits, shape.dtype)
        if shape.norms:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
            x = x * (loaded(norm, shape.dtype) + shape.norm_offset)
        half = shape.rotary // 2
        first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
        x[..., :half] = first * cos[:, None] - second * sin[:, None]
        x[..., half : 2 * half] = second * cos[:, None] + first * sin[:, None]
        return x

    return turned(batch.query, batch.query_norm), turned(batch.key, batch.key_norm), loaded(batch.value, shape.dtype)


def run(device: HostDevice, batch: Batch, *, in_place: bool = False, joined: bool = False) -> Written:
    """What the kernel writes. `joined`: queries, keys and values lie in one buffer, as one product gives them."""
    shape = batch.shape
    tokens = len(batch.query)
    query, key, value = batch.query.copy(), batch.key, batch.value
    width = {"query": shape.heads * shape.head_dim, "key": shape.kv_heads * shape.head_dim}
    strides = [width["query"], width["key"], width["key"]]
    pointers = [device.pointer(array) for array in (query, key, value)]
    if joined:
        whole = np.concatenate([part.reshape(tokens, -1) for part in (query, key, value)], axis=1)
        at = device.pointer(whole)
        strides = [whole.shape[1]] * 3
        pointers = [at, at + width["query"] * whole.itemsize, at + (width["query"] + width["key"]) * whole.itemsize]
    out = query if in_place else stored(np.full(query.shape, np.nan), shape.dtype)
    cache_type = stored(np.zeros(1), shape.cached).dtype
    # A line more than there are heads, so that the strides are not those of a packed cache.
    padded = (batch.num_blocks, shape.kv_heads + 1, shape.block_tokens, shape.head_dim)
    keys, values = (
        np.full(int(np.prod(padded)) * cache_type.itemsize, UNTOUCHED, np.uint8).view(cache_type).reshape(padded)
        for _ in range(2)
    )
    cos, sin = (np.ascontiguousarray(f(angles(batch)) * shape.rope_factor, dtype=np.float32) for f in (np.cos, np.sin))
    call = CacheRope(device, dtype=shape.dtype, kv_dtype=shape.cached, head_dim=shape.head_dim)
    call.params.set(
        query=pointers[0],
        key=pointers[1],
        value=pointers[2],
        query_out=device.pointer(out) if not joined or not in_place else pointers[0],
        keys=device.pointer(keys),
        values=device.pointer(values),
        places=device.pointer(batch.places),
        query_stride=strides[0],
        key_stride=strides[1],
        value_stride=strides[2],
        query_out_stride=strides[0] if joined and in_place else width["query"],
        block_stride=int(np.prod(padded[1:])),
        head_stride=int(np.prod(padded[2:])),
        tokens=tokens,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        block_tokens=shape.block_tokens,
        rotary_dim=shape.rotary,
        rope_factor=shape.rope_factor,
        norm_offset=shape.norm_offset,
        epsilon=EPSILON,
    )
    if shape.from_frequencies:
        call.params.set(inv_freq=device.pointer(batch.inv_freq), positions=device.pointer(batch.positions))
    elif shape.rotary:
        call.params.set(cos=device.pointer(cos), sin=device.pointer(sin), angle_stride=cos.shape[1])
    if shape.norms:
        call.params.set(query_norm=device.pointer(batch.query_norm), key_norm=device.pointer(batch.key_norm))
    if shape.cached == "float8_e4m3":
        call.params.set(key_scales=device.pointer(batch.key_scales), value_scales=device.pointer(batch.value_scales))
    call()
    if joined and in_place:
        out = np.ascontiguousarray(whole[:, : width["query"]]).reshape(query.shape)
    assert (keys[:, -1].view(np.uint8) == UNTOUCHED).all() and (values[:, -1].view(np.uint8) == UNTOUCHED).all()
    return Written(out, keys[:, :-1], values[:, :-1])


def check(batch: Batch, written: Written) -> None:
    """Every number is the float64 one rounded once (float32's own error aside), and nothing else was written."""
    shape = batch.shape
    query, key, value = expected(batch)
    _check_close(loaded(written.query, shape.dtype), query, ROUNDOFF[shape.dtype])
    kept = np.flatnonzero(batch.places >= 0)
    blocks, offsets = np.divmod(batch.places[kept], shape.block_tokens)
    lines = written.keys[blocks, :, offsets], written.values[blocks, :, offsets]
    if shape.cached == "float8_e4m3":
        for line, wanted, scales in zip(lines, (key, value), (batch.key_scales, batch.value_scales), strict=True):
            most = FP8_LARGEST * scales[:, None]
            # e4m3 has 3 bits after the point, and below 2^-6 steps of 2^-9
            roundoff = 2.0**-4, scales[:, None] * 2.0**-10
            _check_close(loaded(line, shape.cached) * scales[:, None], np.clip(wanted[kept], -most, most), *roundoff)
    else:
        _check_close(loaded(lines[0], shape.cached), key[kept], ROUNDOFF[shape.dtype])
        assert lines[1].tobytes() == batch.value[kept].tobytes(), "values are copied to the bit"
    untouched = np.ones((batch.num_blocks, shape.block_tokens), bool)
    untouched[blocks, offsets] = False
    for cache in (written.keys, written.values):
        assert (cache.swapaxes(1, 2)[untouched].view(np.uint8) == UNTOUCHED).all(), "a place of no token was written"


def _check_close(got: np.ndarray, wanted: np.ndarray, roundoff: float, least: float | np.ndarray = 0.0) -> None:
    allowed = np.abs(wanted) * roundoff * 1.001 + least + np.abs(wanted).max(-1, keepdims=True) * 1e-6
    assert np.isfinite(got).all(), "not a number"
    if not got.size:
        return
    excess = np.abs(got - wanted) - allowed
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess.max() <= 0, f"at {worst}: {got[worst]} for {wanted[worst]}"
