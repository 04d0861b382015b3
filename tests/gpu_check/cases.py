"""Every kernel, in every type and head size, against float64: the cases that tests/kernels runs on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from kernels import instances
from kernels.instances import DTYPES, FP8, FP8_FROM, HEAD_DIMS, Instance
from tests.gpu_check.checks import Check, Place
from tests.kernels import cache_rope, cuda_calls, sampling
from tests.kernels.cache_rope import Shape
from tests.kernels.paged import Batch, batch

DECODE_ROWS = [(context, 1) for context in (0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 200)]
LONG_ROWS = [(context, 1) for context in (3000, 1, 517, 0)]
PREFILL_ROWS = [(16, 16), (75, 5), (33, 33), (32, 15), (130, 17), (100, 1), (64, 64)]
SHIM_KEYS = ("float16 float16 64", f"bfloat16 {FP8} 80", "bfloat16 bfloat16 128")
"""What the shim does in a dry run: the others compile for too long, and are in tests/kernels."""


def checks(place: Place) -> Iterator[Check]:
    """A line a kernel, type and head size."""
    architecture = place.kernels().architecture
    for dtype, head_dim in itertools.product(DTYPES, HEAD_DIMS):
        for kv_dtype in (dtype, FP8) if architecture.capability >= FP8_FROM else (dtype,):
            if not _wanted(place, dtype, kv_dtype, head_dim):
                continue
            what = f"{dtype}, KV {kv_dtype}, heads of {head_dim}"
            pair = (
                instances.decode(architecture, dtype, kv_dtype, head_dim),
                instances.decode_reduce(dtype, head_dim),
            )
            kind = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": head_dim}
            yield Check(f"attn_decode, {what}", lambda pair=pair, kind=kind: _decode(place, pair, kind))
            yield Check(f"attn_prefill, {what}", lambda kind=kind: _prefill(place, kind))
            yield Check(f"cache_rope, {what}", lambda kind=kind: _cache_rope(place, kind))
    for dtype, head_dim in itertools.product((*DTYPES, "float32"), HEAD_DIMS):
        if _wanted(place, dtype, dtype, head_dim) or (dtype == "float32" and head_dim == 64):
            kind = {"dtype": dtype, "kv_dtype": dtype, "head_dim": head_dim}
            yield Check(f"attn_reference, {dtype}, heads of {head_dim}", lambda kind=kind: _reference(place, kind))
            if dtype == "float32":
                yield Check(f"cache_rope, float32, heads of {head_dim}", lambda kind=kind: _cache_rope(place, kind))
    for dtype in (*DTYPES, "float32") if not (place.dry or place.few) else ("float32",):
        yield Check(f"sampling, logits in {dtype}", lambda dtype=dtype: _sampling(place, dtype))
    if not place.few:
        yield Check("blocks past element 2^31", lambda: _far(place))


def _wanted(place: Place, dtype: str, kv_dtype: str, head_dim: int) -> bool:
    return not (place.dry or place.few) or f"{dtype} {kv_dtype} {head_dim}" in SHIM_KEYS


def _worst(given: Batch, found: np.ndarray, **scores: float) -> float:
    """The largest error as a share of what rounding may do."""
    error = np.abs(found - given.attend(**scores)).max(initial=0)
    assert np.isfinite(found).all(), "not a number where nothing was poisoned"
    share = float(error) / given.tolerance()
    assert share <= 1, f"off by {share:.2f} of what rounding may do, {scores}"
    return share


def _told(shares: Sequence[float]) -> str:
    return f"{len(shares)} batches, at worst {max(shares):.2f} of the rounding allowed"


def _decode(place: Place, pair: tuple[Instance, Instance], kind: dict[str, object]) -> str:
    shares = []
    runs = [(DECODE_ROWS, 4, 1, 0, 0.0), (DECODE_ROWS, 7, 3, 0, 0.0), (DECODE_ROWS[4:], 3, 4, 40, 5.0)]
    runs += [(LONG_ROWS, 8, 16, 0, 0.0), (LONG_ROWS, 17, 5, 1000, 0.0)] if not place.dry else []
    for rows, group, splits, window, cap in runs[: 2 if place.dry or place.few else None]:
        given = batch(rows, group=group, shared_blocks=2, **kind)
        found = cuda_calls.decode(place.device(*pair), given, splits=splits, window=window, cap=cap)
        shares.append(_worst(given, found, window=window, cap=cap))
    return _told(shares)


def _prefill(place: Place, kind: dict[str, object]) -> str:
    shares = []
    runs = [(PREFILL_ROWS[:4], 4, 0, 0.0), (PREFILL_ROWS, 7, 40, 5.0), ([(700, 300), (513, 513)], 3, 0, 0.0)]
    for rows, group, window, cap in runs[: 1 if place.dry or place.few else None]:
        given = batch(rows, group=group, kv_heads=1 if place.dry else 2, **kind)
        found = cuda_calls.prefill(place.device(), given, window=window, cap=cap)
        shares.append(_worst(given, found, window=window, cap=cap))
    return _told(shares)


def _reference(place: Place, kind: dict[str, object]) -> str:
    shares = []
    for window, cap in ((0, 0.0), (9, 5.0)):
        given = batch(PREFILL_ROWS[:4], **kind)
        found = cuda_calls.reference(place.device(), given, window=window, cap=cap)
        shares.append(_worst(given, found, window=window, cap=cap))
    return _told(shares)


def _cache_rope(place: Place, kind: dict[str, object]) -> str:
    """Tables and frequencies, with norms and without, queries in place; every number is rounded once."""
    dtype, kv_dtype, head_dim = str(kind["dtype"]), str(kind["kv_dtype"]), int(str(kind["head_dim"]))
    shapes = [
        Shape(dtype, kv_dtype, head_dim, norms=True, from_frequencies=True, norm_offset=1.0, rope_factor=1.3),
        Shape(dtype, kv_dtype, head_dim, rotary_dim=32, heads=7, kv_heads=1, block_tokens=5),
        Shape(dtype, kv_dtype, head_dim, rotary_dim=0, heads=3, kv_heads=3),
    ]
    for shape in shapes:
        made = cache_rope.batch(shape, tokens=37, skipped=(0, 20))
        cache_rope.check(made, cache_rope.run(place.device(), made))
    made = cache_rope.batch(shapes[0], tokens=9)
    device = place.device()
    cache_rope.check(made, cache_rope.run(device, made, in_place=True, joined=True))
    return f"{len(shapes) + 1} batches"


def _sampling(place: Place, dtype: str) -> str:
    """Ids that are kept and drawn, by 1024 threads a row, are those of the filters as written out in long double."""
    vocab, count, threads = (1009, 12, 64) if place.dry else (20_011, 40, 1024)
    rows = sampling.mixed_rows(count, vocab)
    rough = sampling.mixed_logits(count, vocab)
    logits = cuda_calls.loaded(cuda_calls.stored(rough, dtype), dtype).astype(np.float32)
    masks = np.random.default_rng(1).random((1, vocab)) < 0.9
    masks[:, 0] = True
    rows[::3] = [sampling.Row(1.0, top_k=60, top_p=0.95, mask_row=0, seed=i) for i in range(len(rows[::3]))]
    drawn = sampling.draw(place.device(), logits, rows, masks=masks, dtype=dtype, threads=threads)
    sampling.check(logits, rows, drawn, masks)
    bad = logits[:2].copy()
    bad[0, 77] = np.nan
    failed = sampling.draw(place.device(), bad, [sampling.Row(1.0)] * 2, dtype=dtype, threads=threads).failed
    assert failed.tolist() == [1, 0], "NaN is flagged, in its own row"
    return f"{count} rows of {vocab} ids"


def _far(place: Place) -> str:
    """The batch of row X8: two caches of 4 GiB, all blocks but one behind 2^31 elements."""
    from tests.kernels.paged import spread_out

    given = batch([(40, 1), (20, 1)])
    device = place.kernels() if place.dry else place.device()  # the shim reads where they are: no 8 GiB are carried
    found = cuda_calls.decode(device, spread_out(given), splits=1)
    return _told([_worst(given, found)])
