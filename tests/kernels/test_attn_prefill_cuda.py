"""The CUDA prefill kernels, run on the CPU, against attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import instances
from kernels.instances import FP8
from kernels.launch import Reference
from tests.kernels.cuda_calls import prefill, reference
from tests.kernels.hostshim.hostshim import HostDevice
from tests.kernels.paged import Batch, batch, padded, spread_out

ORDERS = [("forward", 1), ("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]
ROWS = [(1, 1), (5, 5), (16, 16), (75, 5), (33, 33), (32, 15), (130, 17), (100, 1), (64, 64), (65, 32)]
"""(context, new tokens): whole prompts, chunks behind earlier ones, a decode; lengths around blocks and tiles."""
FAST = [("float16", "float16", 64), ("bfloat16", "bfloat16", 128), ("bfloat16", FP8, 80), ("float16", "float16", 256)]
SLOW = [
    (dtype, kv_dtype, head_dim)
    for dtype in instances.DTYPES
    for kv_dtype in (dtype, FP8)
    for head_dim in instances.HEAD_DIMS
    if (dtype, kv_dtype, head_dim) not in FAST
]


def check(given: Batch, *, window: int = 0, cap: float = 0.0, **options: object) -> np.ndarray:
    """Compares with float64; returns what the kernel made."""
    found = prefill(HostDevice(**options), given, window=window, cap=cap)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, given.attend(window=window, cap=cap), rtol=0, atol=given.tolerance())
    return found


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_every_type_and_head_size_in_every_order_of_threads(dtype: str, kv_dtype: str, head_dim: int) -> None:
    given = batch(ROWS[2:7], dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, kv_heads=1)
    found = [check(given, order=order, seed=seed) for order, seed in ORDERS]
    assert all(np.array_equal(found[0], other) for other in found[1:]), "the order of threads shows"


def test_whole_prompts_chunks_and_decodes_in_one_launch() -> None:
    check(batch(ROWS))


@pytest.mark.parametrize("group", [1, 3, 7, 8, 17])
def test_groups_of_query_heads(group: int) -> None:
    check(batch([(40, 33), (5, 5)], group=group, kv_heads=2))


@pytest.mark.parametrize("block_tokens", [1, 5, 16, 32, 256])
def test_block_sizes(block_tokens: int) -> None:
    contexts = [max(1, block_tokens + by) for by in (-1, 0, 1)] + [70]
    check(batch([(context, min(context, 9)) for context in contexts], block_tokens=block_tokens))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 40, 64, 1000])
def test_sliding_windows(window: int) -> None:
    check(batch([(150, 20), (70, 70), (3, 3), (100, 1)]), window=window)


def test_a_window_and_a_soft_cap_together() -> None:
    given = batch([(70, 30), (20, 20)])
    given.query = given.query * np.float16(8)  # so that the cap bites
    check(given, cap=5.0)
    check(given, cap=5.0, window=16)


def test_blocks_that_rows_share() -> None:
    check(batch([(100, 20), (64, 16), (90, 90)], shared_blocks=3))


def test_requests_of_one_token_and_of_none() -> None:
    check(batch([(1, 1), (1, 1), (0, 0), (1, 1)]))


def test_padding_that_lies_in_the_null_block_leaves_the_other_rows_alone() -> None:
    given = batch([(70, 20), (5, 5), (33, 1)])
    alone = check(given)
    found = prefill(HostDevice(), padded(given, 3))
    assert np.array_equal(found[:26], alone), "the rows of requests are the same bits"


@pytest.mark.parametrize("scales", [(2.0**-9, 300.0), (0.37, 0.011)])
def test_fp8_scales_are_those_of_a_rows_own_kv_head(scales: tuple[float, float]) -> None:
    given = batch([(40, 20), (5, 5)], dtype="bfloat16", kv_dtype=FP8)
    given.key_scales, given.value_scales = np.array(scales, np.float32), np.array(scales[::-1], np.float32)
    check(given)


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_soft_caps(cap: float) -> None:
    given = batch([(70, 30), (20, 20)])
    given.query = given.query * np.float16(8)  # so that the cap bites
    check(given, cap=cap)


def test_a_row_without_new_tokens_is_left_out() -> None:
    check(batch([(20, 20), (30, 0), (5, 5)]))


def test_nan_among_the_values_of_a_row_shows_in_that_row_and_kv_head_alone() -> None:
    given = batch([(40, 40), (40, 40)])
    given.values[given.tables[given.slots[1], 1], 0, 4, 5] = np.nan  # the key at position 20, of kv head 0
    found = prefill(HostDevice(), given)
    bad = np.isnan(found).any(axis=2)
    assert bad[60:, : given.group].all()
    assert not bad[:40].any() and not bad[:, given.group :].any()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    block_tokens=st.sampled_from([8, 16, 32]),
    window=st.sampled_from([0, 0, 9, 32]),
    shared_blocks=st.integers(0, 2),
    seed=st.integers(1, 1000),
)
def test_any_batch(
    rows: list[tuple[int, int]], group: int, block_tokens: int, window: int, shared_blocks: int, seed: int
) -> None:
    given = batch(
        [(before + new, new) for before, new in rows],
        group=group,
        kv_heads=1,
        block_tokens=block_tokens,
        shared_blocks=shared_blocks,
        seed=seed,
    )
    check(given, window=window, order="random", seed=seed)


def test_nothing_outside_the_buffers_is_touched() -> None:
    check(batch([(70, 20), (5, 5), (20, 1)]), window=50, sanitizer="address")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype", "head_dim"), FAST)
def test_no_type_or_head_size_touches_anything_outside_the_buffers(dtype: str, kv_dtype: str, head_dim: int) -> None:
    given = batch(ROWS[:6], dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, group=7, kv_heads=1)
    for order in ("forward", "random"):
        check(given, order=order, sanitizer="address")


def test_no_two_threads_race_on_a_small_grid() -> None:
    check(batch([(70, 5)], kv_heads=1, group=1), sanitizer="thread")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "kv_dtype", "head_dim"), FAST)
def test_no_two_threads_race(dtype: str, kv_dtype: str, head_dim: int) -> None:
    given = batch([(130, 10), (20, 20)], dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, kv_heads=1)
    check(given, sanitizer="thread")


def test_X8_blocks_past_two_to_the_31_elements() -> None:
    given = spread_out(batch([(40, 10), (20, 20)]))
    check(given)
    found = reference(HostDevice(), given)
    np.testing.assert_allclose(found, given.attend(), rtol=0, atol=given.tolerance())


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 80), ("float32", 128), ("bfloat16", 64)])
def test_the_reference_kernel(dtype: str, head_dim: int) -> None:
    given = batch([(20, 20), (33, 5), (40, 1), (5, 5)], dtype=dtype, head_dim=head_dim)
    for window, cap in ((0, 0.0), (9, 5.0)):
        found = reference(HostDevice(), given, window=window, cap=cap)
        np.testing.assert_allclose(found, given.attend(window=window, cap=cap), rtol=0, atol=given.tolerance())


def test_a_reference_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="float8_e4m3 heads of 64"):
        Reference(HostDevice(), dtype=FP8, head_dim=64)
