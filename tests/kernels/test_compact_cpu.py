"""Compact weights are the bits they were packed from, and products over them those over bfloat16, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu import compact, linear, paged_attention
from tests.kernels.test_linear_cpu import bfloat16, numbers, widened

pytestmark = pytest.mark.skipif(not compact.IS_SERVED, reason="compact weights are computed with AVX-512 alone")

SHAPES = ((1, 8), (33, 72), (16, 64), (100, 576), (48, 1536))
"""[outputs, depth]: below, at and past a panel's 16 outputs, a group's 64 of depth and a slice of more rows."""
ROWS = (1, 2, 5, 6, 7, 8, 12, 13, 16, 23, 24, 25, 97)
"""At and past the heights of tiles, and where more rows are multiplied in another way."""


def bits(outputs: int, depth: int) -> np.ndarray:
    return bfloat16(numbers(outputs, depth, seed=outputs + depth))


def with_outliers(outputs: int, depth: int) -> np.ndarray:
    """The first and the last group of the first panel, and one in its middle, have more than 16 exponents."""
    weight = bits(outputs, depth)
    for at in {0, depth // 2, depth - 24}:
        weight[0, at : at + 24] = (np.arange(24) + 110) << 7
    return weight


def packed(weight: np.ndarray) -> compact.Compact:
    weights = compact.pack(weight)
    assert isinstance(weights, compact.Compact)
    return weights


def same_bits(weights: linear.Packed, weight: np.ndarray) -> bool:
    return bool(np.array_equal(compact.unpack(weights).panels, linear.pack(weight).panels))


def product(x: np.ndarray, weights: linear.Packed, bias: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
    out = np.full((len(x), weights.outputs), np.nan, np.float32)
    compact.multiply(x, weights, bias, out, threads)
    return out


@pytest.mark.parametrize("code", range(16))
def test_every_sign_fraction_and_exponent_comes_back_by_every_code(code: int) -> None:
    """All 65,536 bit patterns, 16 exponents a group: the one asked for is the code-th of its table."""
    for first in range(0, 256, 16):
        exponents = np.roll(np.arange(first, first + 16), code)
        patterns = (exponents[:, None] << 7 | np.arange(128)).reshape(-1)
        weight = np.concatenate([patterns, patterns | 0x8000]).astype(np.uint16)[: 16 * 256].reshape(256, 16).T.copy()
        weights = packed(weight)
        assert not len(weights.outliers) and same_bits(weights, weight)


@pytest.mark.parametrize("made", [bits, with_outliers])
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_products_have_the_bits_of_those_over_bfloat16(outputs: int, depth: int, made: object) -> None:
    if made is with_outliers and depth < 576:
        pytest.skip("one of so few groups that is an outlier is too many")
    weight = (with_outliers if made is with_outliers else bits)(outputs, depth)
    if made is with_outliers:
        weight = np.concatenate([weight] + [bits(outputs, depth)] * 3)
    weights, plain = packed(weight), linear.pack(weight)
    assert (len(weights.outliers) > 0) == (made is with_outliers)
    bias = numbers(len(weight), seed=1)
    for rows in ROWS:
        x = numbers(rows, depth, seed=rows)
        for threads in range(1, paged_attention.get_num_threads() + 1):
            for one in (None, bias):
                expected = np.full((rows, len(weight)), np.nan, np.float32)
                linear.multiply(x, plain, one, expected, threads)
                assert product(x, weights, one, threads).tobytes() == expected.tobytes(), (rows, threads)


@pytest.mark.parametrize("rows", [1, 16, 97])
def test_nan_and_infinity_stay_in_their_row_and_reach_their_output_alone(rows: int) -> None:
    weight = bits(33, 576)
    weight[20, 100], weight[7, 9] = 0x7FC0, 0xFF80
    out = product(np.abs(numbers(rows, 576)) + 1, packed(weight))
    assert np.isnan(out[:, 20]).all() and (out[:, 7] == -np.inf).all()
    assert np.isfinite(np.delete(out, [7, 20], axis=1)).all()
    x = numbers(rows, 576)
    x[0, 5] = np.nan
    out = product(x, packed(bits(33, 576)))
    assert np.isnan(out[0]).all() and np.isfinite(out[1:]).all()


def test_gathered_weights_are_those_that_were_packed() -> None:
    weight = np.concatenate([with_outliers(33, 576), bits(64, 576)])
    weights = packed(weight)
    for ids in ([], [96], [0, 16, 15, 16, 31]):
        out = np.full((len(ids), 576), np.nan, np.float32)
        compact.gather(weights, np.array(ids, np.int64), out)
        assert np.array_equal(out, widened(weight[ids]))
    with pytest.raises(IndexError, match="97 are asked for, there are 97"):
        compact.gather(weights, np.array([97]), np.empty((1, 576), np.float32))


def test_what_is_joined_or_a_part_keeps_its_outliers() -> None:
    first, second, third = (np.concatenate([with_outliers(16, 576), bits(112, 576)]) for _ in range(3))
    second[:16, 64:128] = first[:16, :64]
    both = compact.joined([packed(first), packed(second), packed(third)])
    every = np.concatenate([first, second, third])
    assert isinstance(both, compact.Compact) and same_bits(both, every)
    assert same_bits(compact.part(both, 112, 176), every[112:176])
    x = numbers(3, 576)
    assert product(x, compact.part(both, 128, 192)).tobytes() == product(x, both)[:, 128:192].tobytes()


def test_what_does_not_fit_stays_as_it_is_and_can_be_joined_with_what_does() -> None:
    wild = np.random.default_rng(0).integers(0, 1 << 16, (32, 576)).astype(np.uint16)
    odd = bits(32, 577)
    for weight in (wild, odd):
        weights = compact.pack(weight)
        assert not isinstance(weights, compact.Compact) and same_bits(weights, weight)
    tame = bits(32, 576)
    both = compact.joined([packed(tame), compact.pack(wild)])
    assert not isinstance(both, compact.Compact) and same_bits(both, np.concatenate([tame, wild]))


@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_bytes_are_told_before_packing_and_come_to_12_bits_a_weight(outputs: int, depth: int) -> None:
    nbytes = packed(bits(outputs, depth)).panels.nbytes
    assert nbytes == compact.compact_bytes(outputs, depth)
    padded = -(-outputs // 16) * 16 * depth
    if depth >= 576:
        assert nbytes < 1.03 * padded * 12 / 8


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x \(2, 65\) and out \(2, 33\) do not fit 33 outputs and 72"):
        product(np.zeros((2, 65), np.float32), packed(bits(33, 72)))
    assert product(np.zeros((0, 72), np.float32), packed(bits(33, 72))).shape == (0, 33)
