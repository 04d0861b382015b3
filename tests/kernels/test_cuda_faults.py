"""Faults planted in the CUDA kernels are found, each by the layer of the tests that is named beside it.

values: float64, five orders of threads, and the shim's own rules; address, thread: a sanitizer. Run again in full when
the shim changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.cuda_calls import decode, prefill
from tests.kernels.faults_page import confirm
from tests.kernels.hostshim.hostshim import Fault, HostDevice, ShimError
from tests.kernels.paged import batch

ORDERS = [("forward", 1), ("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]

DECODE, PREFILL, SHARED, COMMON = "attn_decode.cu", "attn_prefill.cu", "fragments.cuh", "common.cuh"
FP8, FP8_SHARED = f"{DECODE} over fp8", f"{SHARED} over fp8"

FAULTS: list[tuple[str, str, str, str, str]] = [
    # (layer, what is wrong, source, old, new)
    (
        "values",
        "a split runs past the context",
        DECODE,
        "static_cast<int>(min(begin + keys, ",
        "static_cast<int>(max(begin + keys, ",
    ),
    (
        "values",
        "the window is one key too long",
        DECODE,
        "max(0, context - p.window)",
        "max(0, context - p.window - 1)",
    ),
    ("values", "block table of the wrong line", DECODE, "p.slots[row] : row)", "row : row)"),
    ("values", "keys of kv head 0 for all", DECODE, "(p.keys) + kv_head * p.head_stride", "(p.keys)"),
    (
        "values",
        "slot within a block off by one",
        DECODE,
        "token % p.block_tokens) * HEAD_DIM",
        "(token + 1) % p.block_tokens) * HEAD_DIM",
    ),
    (
        "address",
        "queries past the group are stored",
        DECODE,
        "i < queries * HEAD_DIM; i += 32 * WARPS) {\n    const int r",
        "i < 16 * HEAD_DIM; i += 32 * WARPS) {\n    const int r",
    ),
    (
        "values",
        "the ring is refilled a stage early",
        DECODE,
        "fetch();\n    const KV* k_tile",
        "fetch(); fetch();\n    const KV* k_tile",
    ),
    ("values", "waits for the wrong tile", DECODE, "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
    ("values", "warps' sums are not rescaled when merged", DECODE, "sum += weight * sums", "sum += sums"),
    ("values", "the reduce reads splits without keys", DECODE, "if (range.begin >= range.end) break;", ""),
    ("values", "log2 of the sums left out", DECODE, "most + log2f(sum)", "most"),
    (
        "values",
        "no barrier before the merge",
        DECODE,
        "__syncthreads();  // every warp is done",
        "// every warp is done",
    ),
    (
        "values",
        "key fragments swapped",
        SHARED,
        "tile + (lane % 8 + lane / 16 * 8) * ROW + k * 16 + lane / 8 % 2 * 8",
        "tile + (lane % 8 + lane / 8 % 2 * 8) * ROW + k * 16 + lane / 16 * 8",
    ),
    (
        "values",
        "values not transposed",
        SHARED,
        "ldmatrix_x4_transposed(b, tile + lane % 16",
        "ldmatrix_x4(b, tile + lane % 16",
    ),
    ("values", "the output is not rescaled with its sum", SHARED, "out[n][2 * h] *= factor;", ""),
    (
        "values",
        "a row's maximum over two of four lanes",
        COMMON,
        "return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));",
        "return x;",
    ),
    (
        "values",
        "a row's sum over two of four lanes",
        COMMON,
        "return x + __shfl_xor_sync(ALL_LANES, x, 2);",
        "return x;",
    ),
    ("values", "causal mask strict", PREFILL, "key > position ||", "key >= position ||"),
    (
        "values",
        "the second row masked as the first",
        PREFILL,
        "position = positions[t][e >> 1]",
        "position = positions[t][0]",
    ),
    (
        "values",
        "a tile taken for wholly seen",
        PREFILL,
        "first_key + KEYS - 1 <= lowest",
        "first_key + KEYS - 1 <= highest",
    ),
    ("values", "no barrier between tiles", PREFILL, "__syncthreads();  // the tile is there", "// the tile is there"),
    ("values", "rows past the last token stored", PREFILL, "if (packed < packed_rows) {", "{"),
    (
        "values",
        "keys past the end not zeroed",
        PREFILL,
        "if (token < end) {",
        "if (table[token / p.block_tokens] >= 0) {",
    ),
    (
        "values",
        "all rows of a warp are its first sixteen",
        PREFILL,
        "queries + (warp * WARP_ROWS + t * 16) * Q::ROW",
        "queries + warp * WARP_ROWS * Q::ROW",
    ),
    ("values", "the soft cap left out", COMMON, "if (cap == 0) return;\n#pragma", "return;\n#pragma"),
    ("values", "the last tile's missing keys count", DECODE, "if (tile == tiles - 1) {", "if (tile == tiles) {"),
    (
        "values",
        "every kv head has the first one's key scale",
        FP8,
        "p.key_scales[kv_head] : 1.f), p.cap",
        "p.key_scales[0] : 1.f), p.cap",
    ),
    ("values", "every kv head has the first one's value scale", FP8, "p.value_scales[kv_head]", "p.value_scales[0]"),
    ("values", "even and odd dimensions of fp8 values swapped", FP8_SHARED, "even[0], even[1]);", "odd[0], odd[1]);"),
    ("values", "keys past the context are looked up", DECODE, "if (token >= range.end) return -1;", ""),
    (
        "values",
        "a shuffle among half of the lanes",
        COMMON,
        "__shfl_xor_sync(ALL_LANES, x, 1));",
        "__shfl_xor_sync(0xffffu, x, 1));",
    ),
    (
        "values",
        "copies from addresses that are no multiple of 16 bytes",
        PREFILL,
        "chunk, keys + element, place >= 0);",
        "chunk, keys + element + 1, place >= 0);",
    ),
    (
        "address",
        "four fp8 keys read at an odd address",
        FP8_SHARED,
        "k * 16 + lane % 4 * 4;",
        "k * 16 + lane % 4 * 4 + 1;",
    ),
    (
        "address",
        "values copied behind the ring",
        DECODE,
        "cp_async_16(tile + TILE + key",
        "cp_async_16(tile + 3 * TILE + key",
    ),
    ("thread", "lanes read each other's copies unordered", DECODE, "__syncwarp();", ""),
    (
        "thread",
        "no barrier between tiles, seen as a race",
        PREFILL,
        "__syncthreads();  // the tile is there",
        "// the tile is there",
    ),
    (
        "thread",
        "no barrier before the merge, seen as a race",
        DECODE,
        "__syncthreads();  // every warp is done",
        "// every warp is done",
    ),
]


def run_decode(**options: object) -> tuple[np.ndarray, np.ndarray, float]:
    """(found, right, tolerance)"""
    given = batch([(length, 1) for length in (0, 1, 17, 63, 65, 200, 330)], group=3)
    device = HostDevice(**options)  # type: ignore[arg-type]
    ways = ((1, 0, 0.0), (5, 0, 0.0), (2, 20, 0.0), (1, 0, 2.0))
    found = [decode(device, given, splits=splits, window=window, cap=cap) for splits, window, cap in ways]
    right = [given.attend(window=window, cap=cap) for _, window, cap in ways]
    return np.stack(found), np.stack(right), given.tolerance()


def run_fp8(**options: object) -> tuple[np.ndarray, np.ndarray, float]:
    """(found, right, tolerance)"""
    given = batch([(length, 1) for length in (1, 17, 65)], dtype="bfloat16", kv_dtype="float8_e4m3", group=3)
    found = decode(HostDevice(**options), given, splits=2)  # type: ignore[arg-type]
    return found, given.attend(), given.tolerance()


def run_prefill(**options: object) -> tuple[np.ndarray, np.ndarray, float]:
    """(found, right, tolerance)"""
    given = batch([(200, 20), (5, 5), (70, 70), (40, 1)], group=3, kv_heads=1)
    device = HostDevice(**options)  # type: ignore[arg-type]
    found = [prefill(device, given, window=window) for window in (0, 20)]
    return np.stack(found), np.stack([given.attend(window=window) for window in (0, 20)]), given.tolerance()


RUNS: dict[str, tuple[Callable[..., tuple[np.ndarray, np.ndarray, float]], ...]] = {
    DECODE: (run_decode,),
    PREFILL: (run_prefill,),
    SHARED: (run_decode, run_prefill),
    COMMON: (run_decode, run_prefill),
    FP8: (run_fp8,),
    FP8_SHARED: (run_fp8,),
}


def verdict(source: str, layer: str, fault: Fault | None) -> str:
    """What the layer says: "" where it finds nothing."""
    orders = ORDERS if layer == "values" else ORDERS[:1]
    sanitizer = "none" if layer == "values" else layer  # a fault may break the process
    for run in RUNS[source]:
        first = None
        for order, seed in orders:
            try:
                found, right, tolerance = run(order=order, seed=seed, sanitizer=sanitizer, fault=fault)
            except ShimError as error:
                return str(error)
            except AssertionError as error:
                return f"wrong values: {error}"
            if not np.allclose(found, right, rtol=0, atol=tolerance):
                return f"wrong values in {order} order"
            if first is not None and not np.array_equal(first, found):
                return "the order of threads shows"
            first = found
    return ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layer", ["values", "address", "thread"])
@pytest.mark.parametrize("source", [DECODE, PREFILL])
def test_without_a_fault_every_layer_is_quiet(source: str, layer: str) -> None:
    assert verdict(source, layer, None) == ""


SAMPLE = ("the window is one key too long", "values copied behind the ring")
"""Of the fast tests; the whole list is of the slow ones."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layer", "wrong", "source", "old", "new"),
    [pytest.param(*f, id=f"{f[0]}-{f[1]}", marks=[] if f[1] in SAMPLE else pytest.mark.slow) for f in FAULTS],
)
def test_a_planted_fault_is_found(layer: str, wrong: str, source: str, old: str, new: str) -> None:
    found = verdict(source, layer, Fault(source.partition(" ")[0], old, new))
    expected = {"address": "AddressSanitizer|runtime error", "thread": "data race", "values": "."}[layer]
    assert re.search(expected, found), f"{layer} does not notice: {wrong} ({found[:200]})"
    confirm(source, wrong, found)
