"""The CUDA kernel that norms, turns and writes, run on the CPU, against the same in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kernels import instances
from kernels.instances import FP8
from kernels.launch import CacheRope
from tests.kernels.hostshim.hostshim import HostDevice
from tests.kernels.paged import ROUNDOFF, loaded, stored, vast

BLOCKS, BLOCK_TOKENS, EPSILON = 7, 16, 1e-6
FAST = [("float16", "float16", 64), ("bfloat16", FP8, 128), ("float32", "float32", 80)]
SLOW = [
    (dtype, kv_dtype, head_dim)
    for dtype in (*instances.DTYPES, "float32")
    for kv_dtype in ((dtype, FP8) if dtype != "float32" else (dtype,))
    for head_dim in instances.HEAD_DIMS
    if (dtype, kv_dtype, head_dim) not in FAST
]


@dataclass
class Step:
    """New tokens of a step, and what their places in the cache are."""

    dtype: str
    kv_dtype: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    places: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    norms: np.ndarray
    """[2, head_dim] of queries and of keys."""
    scales: np.ndarray
    """[2, kv_heads] of keys and of values."""


def step(
    dtype: str = "float16",
    kv_dtype: str = "float16",
    head_dim: int = 64,
    *,
    heads: int = 7,
    kv_heads: int = 3,
    rotary_dim: int = 0,
    seed: int = 0,
) -> Step:
    """Five tokens; the fourth has no place."""
    rng = np.random.default_rng(seed)
    angles = rng.uniform(0, 6, (5, (rotary_dim or head_dim) // 2))
    places = rng.permutation(BLOCKS * BLOCK_TOKENS)[:5].astype(np.int64)
    places[3] = -1
    scales = rng.uniform(0.5, 2, (2, kv_heads)) if kv_dtype == FP8 else np.ones((2, kv_heads))
    return Step(
        dtype,
        kv_dtype,
        stored(rng.standard_normal((5, heads, head_dim)), dtype),
        stored(rng.standard_normal((5, kv_heads, head_dim)), dtype),
        stored(rng.standard_normal((5, kv_heads, head_dim)), dtype),
        places,
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32),
        scales.astype(np.float32),
    )


def expected(given: Step, norm: bool, rope: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries and keys as they shall be, [tokens, heads, head_dim] float64, and the values as they are."""
    turned = []
    for heads, weights in zip((given.query, given.key), given.norms, strict=True):
        x = loaded(heads, given.dtype)
        if norm:
            x = x / np.sqrt((x**2).mean(axis=2, keepdims=True) + EPSILON) * weights
        if rope:
            half = given.cos.shape[1]
            cos, sin = (each.astype(np.float64)[:, None, :] for each in (given.cos, given.sin))
            low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            x = np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=2)
        turned.append(x)
    return turned[0], turned[1], loaded(given.value, given.dtype)


def write(
    given: Step, norm: bool, rope: bool, caches: list[np.ndarray] | None = None, **options: object
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [tokens, heads, head_dim] in float64, and whole key and value caches; NaN where nothing was written."""
    device = HostDevice(**options)  # type: ignore[arg-type]
    head_dim, kv_heads = given.key.shape[2], given.key.shape[1]
    out = stored(np.full(given.query.shape, np.nan), given.dtype)
    shape = (BLOCKS, kv_heads, BLOCK_TOKENS, head_dim)
    caches = caches or [stored(np.full(shape, np.nan), given.kv_dtype) for _ in range(2)]
    call = CacheRope(device, dtype=given.dtype, kv_dtype=given.kv_dtype, head_dim=head_dim)
    norms, scales = [each.copy() for each in given.norms], [each.copy() for each in given.scales]
    call.params.set(
        query=device.pointer(given.query),
        key=device.pointer(given.key),
        value=device.pointer(given.value),
        query_out=device.pointer(out),
        keys=device.pointer(caches[0]),
        values=device.pointer(caches[1]),
        places=device.pointer(given.places),
        query_stride=given.query[0].size,
        key_stride=given.key[0].size,
        value_stride=given.value[0].size,
        query_out_stride=given.query[0].size,
        block_stride=kv_heads * BLOCK_TOKENS * head_dim,
        head_stride=BLOCK_TOKENS * head_dim,
        tokens=5,
        heads=given.query.shape[1],
        kv_heads=kv_heads,
        block_tokens=BLOCK_TOKENS,
        epsilon=EPSILON,
    )
    if norm:
        call.params.set(query_norm=device.pointer(norms[0]), key_norm=device.pointer(norms[1]))
    if rope:
        cos, sin = device.pointer(given.cos), device.pointer(given.sin)
        call.params.set(cos=cos, sin=sin, rotary_dim=2 * given.cos.shape[1])
    if given.kv_dtype == FP8:
        call.params.set(key_scales=device.pointer(scales[0]), value_scales=device.pointer(scales[1]))
    call(5)
    return loaded(out, given.dtype), *caches


def check(given: Step, *, norm: bool = True, rope: bool = True, **options: object) -> None:
    """Compares queries and caches with float64; every place that belongs to no token still holds NaN."""
    query, keys, values = write(given, norm, rope, **options)
    right_query, right_key, right_value = expected(given, norm, rope)
    near = {"atol": 1e-5, "rtol": ROUNDOFF[given.dtype]}  # rounded once; the sums before are float32
    np.testing.assert_allclose(query, right_query, **near)
    if given.kv_dtype == FP8:
        near = {"atol": 2.0**-9, "rtol": 2.0**-4}  # e4m3: 3 bits after the point, subnormals from 2^-6 in steps of 2^-9
    for cache, right, scales in ((keys, right_key, given.scales[0]), (values, right_value, given.scales[1])):
        lines = np.full((BLOCKS * BLOCK_TOKENS, *right.shape[1:]), np.nan)
        written = given.places >= 0
        lines[given.places[written]] = (right / scales[:, None])[written]
        cache = loaded(cache, given.kv_dtype)
        right_cache = lines.reshape(BLOCKS, BLOCK_TOKENS, *right.shape[1:]).swapaxes(1, 2)
        np.testing.assert_allclose(cache, right_cache, equal_nan=True, **near)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_every_type_and_head_size_in_every_order_of_threads(dtype: str, kv_dtype: str, head_dim: int) -> None:
    for order in ("forward", "reverse", "random"):
        check(step(dtype, kv_dtype, head_dim), order=order)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rope", [False, True])
def test_norm_and_rope_are_left_out_where_a_model_has_none(norm: bool, rope: bool) -> None:
    check(step(), norm=norm, rope=rope)


@pytest.mark.parametrize("rotary_dim", [16, 32, 48, 64])
def test_rope_of_a_part_of_the_dimensions(rotary_dim: int) -> None:
    check(step(rotary_dim=rotary_dim))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (16, 16), (33, 1)])
def test_any_number_of_heads(heads: int, kv_heads: int) -> None:
    check(step(heads=heads, kv_heads=kv_heads))


def test_X8_places_past_two_to_the_31_elements() -> None:
    given = step()
    blocks = (1 << 31) // given.key[0].size // BLOCK_TOKENS + 10
    given.places = given.places + np.where(given.places >= 0, (blocks - BLOCKS) * BLOCK_TOKENS, 0)
    caches = [vast(blocks, (given.key.shape[1], BLOCK_TOKENS, given.key.shape[2])) for _ in range(2)]
    write(given, False, False, caches)
    for cache, right in zip(caches, (given.key, given.value), strict=True):
        for token in (0, 1, 2, 4):
            block, offset = divmod(int(given.places[token]), BLOCK_TOKENS)
            np.testing.assert_array_equal(cache[block, :, offset], right[token])


def test_nothing_outside_the_buffers_is_touched() -> None:
    check(step(), sanitizer="address")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype", "head_dim"), FAST)
def test_no_type_races_or_touches_anything_outside_the_buffers(dtype: str, kv_dtype: str, head_dim: int) -> None:
    for sanitizer in ("address", "thread"):
        check(step(dtype, kv_dtype, head_dim), sanitizer=sanitizer)


@pytest.mark.parametrize("rotary_dim", [8, 80, 24])
def test_a_rotary_dimension_the_kernel_cannot_turn_is_refused(rotary_dim: int) -> None:
    call = CacheRope(HostDevice(), dtype="float16", kv_dtype="float16", head_dim=64)
    call.params.set(cos=1, rotary_dim=rotary_dim, heads=1, kv_heads=1)
    with pytest.raises(ValueError, match=f"rotary_dim is {rotary_dim}"):
        call(1)
