"""The CUDA decode kernels, run on the CPU, against attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import instances
from kernels.instances import ARCHITECTURES, FP8
from kernels.launch import Decode, number_of_splits
from tests.kernels.cuda_calls import decode
from tests.kernels.hostshim.hostshim import Fault, HostDevice
from tests.kernels.paged import Batch, batch, padded, spread_out

ORDERS = [("forward", 1), ("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 200)
FAST = [
    ("float16", "float16", 64),
    ("bfloat16", "bfloat16", 128),
    ("bfloat16", FP8, 80),
    ("float16", "float16", 96),
    ("float16", FP8, 256),
]
SLOW = [
    (dtype, kv_dtype, head_dim)
    for dtype in instances.DTYPES
    for kv_dtype in (dtype, FP8)
    for head_dim in instances.HEAD_DIMS
    if (dtype, kv_dtype, head_dim) not in FAST
]


def device(dtype: str = "float16", kv_dtype: str = "float16", head_dim: int = 64, **options: object) -> HostDevice:
    """With both kernels of a type and head size compiled in one go."""
    architecture = ARCHITECTURES[90]
    pair = (instances.decode(architecture, dtype, kv_dtype, head_dim), instances.decode_reduce(dtype, head_dim))
    return HostDevice(architecture, together=pair, **options)  # type: ignore[arg-type]


def rows(*contexts: int) -> list[tuple[int, int]]:
    """Decode rows: one new token each."""
    return [(context, 1) for context in contexts]


def check(given: Batch, *, splits: int = 1, window: int = 0, cap: float = 0.0, **options: object) -> np.ndarray:
    """Compares with float64; returns what the kernel made."""
    host = device(given.dtype, given.kv_dtype, given.query.shape[2], **options)
    found = decode(host, given, splits=splits, window=window, cap=cap)
    np.testing.assert_allclose(found, given.attend(window=window, cap=cap), rtol=0, atol=given.tolerance())
    return found


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_every_type_and_head_size_in_every_order_of_threads(dtype: str, kv_dtype: str, head_dim: int) -> None:
    given = batch(rows(*LENGTHS), dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim)
    for splits in (1, 3):
        found = [check(given, splits=splits, order=order, seed=seed) for order, seed in ORDERS]
        assert all(np.array_equal(found[0], other) for other in found[1:]), "the order of threads shows"


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 17, 40])
def test_groups_of_query_heads(group: int) -> None:
    check(batch(rows(70, 1, 33), group=group, kv_heads=2), splits=2)


@pytest.mark.parametrize("block_tokens", [1, 5, 8, 16, 32, 64, 256])
def test_block_sizes(block_tokens: int) -> None:
    lengths = [max(0, length + by) for length in (block_tokens, 2 * block_tokens) for by in (-1, 0, 1)]
    check(batch(rows(*lengths), block_tokens=block_tokens), splits=2)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 64, 1000])
@pytest.mark.parametrize("splits", [1, 4])
def test_sliding_windows(window: int, splits: int) -> None:
    check(batch(rows(0, 1, 16, 17, 64, 65, 150)), window=window, splits=splits)


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_soft_caps(cap: float) -> None:
    given = batch(rows(1, 40, 100))
    given.query = given.query * np.float16(8)  # so that caps bite
    check(given, cap=cap, splits=2)


def test_blocks_that_rows_share() -> None:
    check(batch(rows(100, 64, 33, 100), shared_blocks=3), splits=2)


def test_splits_without_keys_are_neither_written_nor_read() -> None:
    check(batch(rows(1, 64, 65, 129)), splits=16)


def test_rows_without_tokens_give_zeros_whatever_their_tables_hold() -> None:
    given = batch(rows(0, 30, 0))
    for splits in (1, 4):
        found = check(given, splits=splits)
        assert (found[[0, 2]] == 0).all()


@pytest.mark.parametrize("block_tokens", [1, 16])
def test_requests_of_one_token_give_its_value(block_tokens: int) -> None:
    given = batch(rows(1, 1, 1), block_tokens=block_tokens)
    for splits, window in ((1, 0), (5, 0), (1, 1)):
        found = check(given, splits=splits, window=window).reshape(3, 2, given.group, -1)
        for row, slot in enumerate(given.slots):
            value = given.values[given.tables[slot, 0], :, 0].astype(np.float64)  # [kv_heads, head_dim]
            np.testing.assert_array_equal(found[row], np.repeat(value[:, None], given.group, axis=1))


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_that_lies_in_the_null_block_leaves_the_other_rows_alone(splits: int) -> None:
    given = batch(rows(70, 1, 33, 128))
    alone = check(given, splits=splits)
    found = decode(device(), padded(given, 4), splits=splits)
    assert np.array_equal(found[:4], alone), "the rows of requests are the same bits"


@pytest.mark.parametrize("scales", [(2.0**-9, 300.0), (1.0, 1.0), (0.37, 0.011)])
def test_fp8_scales_are_those_of_a_rows_own_kv_head(scales: tuple[float, float]) -> None:
    given = batch(rows(1, 33, 100), dtype="bfloat16", kv_dtype=FP8)
    given.key_scales, given.value_scales = np.array(scales, np.float32), np.array(scales[::-1], np.float32)
    check(given, splits=2)


def test_nan_among_the_keys_or_values_of_a_row_shows_in_that_row_alone() -> None:
    given = batch(rows(40, 40))
    for cache in (given.keys, given.values):
        kept = cache.copy()
        cache[given.tables[given.slots[1], 0], 0, 3, 5] = np.nan
        found = decode(device(), given, splits=2)
        cache[...] = kept
        assert np.isnan(found[1, : given.group]).any()
        assert not np.isnan(found[0]).any() and not np.isnan(found[1, given.group :]).any()


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.sampled_from(LENGTHS), st.integers(0, 150)), min_size=1, max_size=6),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    block_tokens=st.sampled_from([8, 16, 32]),
    splits=st.sampled_from([1, 2, 3, 7]),
    window=st.sampled_from([0, 0, 9, 32]),
    shared_blocks=st.integers(0, 2),
    seed=st.integers(1, 1000),
)
def test_any_batch(
    lengths: list[int], group: int, block_tokens: int, splits: int, window: int, shared_blocks: int, seed: int
) -> None:
    given = batch(rows(*lengths), group=group, block_tokens=block_tokens, shared_blocks=shared_blocks, seed=seed)
    check(given, splits=splits, window=window, order="random", seed=seed)


def test_nothing_outside_the_buffers_is_touched() -> None:
    check(batch(rows(0, 1, 17, 70)), splits=2, window=50, sanitizer="address")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype", "head_dim"), FAST)
def test_no_type_or_head_size_touches_anything_outside_the_buffers(dtype: str, kv_dtype: str, head_dim: int) -> None:
    given = batch(rows(0, 1, 17, 70, 130), dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, group=7)
    for order in ("forward", "random"):
        check(given, splits=2, order=order, sanitizer="address")


def test_no_two_threads_race_on_a_small_grid() -> None:
    check(batch(rows(40, 130), kv_heads=1, group=1), splits=2, sanitizer="thread")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "kv_dtype", "head_dim"), FAST)
def test_no_two_threads_race(dtype: str, kv_dtype: str, head_dim: int) -> None:
    given = batch(rows(130, 40), dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, kv_heads=1)
    check(given, splits=2, sanitizer="thread")


def test_X8_blocks_past_two_to_the_31_elements() -> None:
    check(spread_out(batch(rows(40))))


@pytest.mark.slow
def test_X8_a_32_bit_offset_is_noticed() -> None:
    place = "table[token / p.block_tokens] * p.block_stride"
    fault = Fault("attn_decode.cu", place, place.replace("p.block_stride", "(int)p.block_stride"))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(spread_out(batch(rows(40))), fault=fault)


def test_splits_fill_the_multiprocessors() -> None:
    slots = 132 * 2  # blocks that an H200 runs at a time
    assert number_of_splits(64 * 8, slots, 4096) == 1  # 1.94 waves of 2: 97%, the most any number gives is 100%
    assert number_of_splits(8, slots, 4096) == 29  # 232 of 264 in one wave; 28 fill less than 85% of what 33 fill
    assert number_of_splits(8, slots, 64) == 1  # a split has at least 64 keys
    assert number_of_splits(1, slots, 100_000) == 225


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 7, "group": 4}, "7 query heads in groups of 4"),
        ({"splits": 0}, "splits is 0"),
        ({"splits": 2}, "2 splits need partial_out"),
        ({"block_stride": 24}, "block_stride is 24: it must be a multiple of 16 elements"),
        ({"keys": 1000}, "keys is 1000: it must be a multiple of 16 bytes"),
    ],
)
def test_wrong_arguments_are_refused_by_name(fields: dict[str, int], message: str) -> None:
    call = Decode(device(), dtype="float16", kv_dtype="float16", head_dim=64)
    call.params.set(**{"heads": 8, "group": 4, "splits": 1} | fields)
    with pytest.raises(ValueError, match=message):
        call(1)


@pytest.mark.parametrize(
    ("capability", "dtype", "kv_dtype", "head_dim", "message"),
    [
        (90, "float16", "float16", 72, "heads of 72"),
        (90, "float32", "float32", 64, "no kernel for float32"),
        (90, "float16", "bfloat16", 64, "over KV in bfloat16"),
        (80, "float16", FP8, 64, "compute capability 89"),
    ],
)
def test_what_no_kernel_serves_is_refused_by_name(
    capability: int, dtype: str, kv_dtype: str, head_dim: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Decode(HostDevice(ARCHITECTURES[capability]), dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim)
