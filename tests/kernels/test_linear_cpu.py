"""Packed linear layers against float64, and the promise that a row's bits depend on that row alone."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu import linear, paged_attention

ROWS = (1, 2, 3, 4, 5, 6, 7, 16, 17, 64, 97, 257)
SHAPES = ((16, 1), (1, 7), (5, 64), (33, 320), (48, 321), (100, 577), (192, 576), (64, 1536))
"""[outputs, depth]: below, at and past a panel's 16 outputs and a slice's 320 of depth."""


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of values cut to bfloat16, and so exact ones of it."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stored(outputs: int, depth: int, kind: str) -> tuple[linear.Packed, np.ndarray]:
    """Packed weights, and what they mean, float32."""
    weight = numbers(outputs, depth, seed=outputs + depth)
    if kind == "float32":
        return linear.pack(weight), weight
    bits = bfloat16(weight)
    return linear.pack(bits), widened(bits)


def product(
    x: np.ndarray, weights: linear.Packed, bias: np.ndarray | None = None, threads: int | None = None
) -> np.ndarray:
    out = np.full((len(x), weights.outputs), np.nan, np.float32)
    linear.multiply(x, weights, bias, out, threads or paged_attention.get_num_threads())
    return out


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_products_equal_those_of_float64(outputs: int, depth: int, kind: str) -> None:
    """Within the bound of a chain of `depth` roundings, Higham 2002, section 3.1: depth * 2^-24 * sum |x w|."""
    packed, weight = stored(outputs, depth, kind)
    bias = numbers(outputs, seed=1)
    for rows in ROWS:
        x = numbers(rows, depth, seed=rows)
        exact = x.astype(np.float64) @ weight.T.astype(np.float64)
        bound = (depth + 1) * 2.0**-24 * (np.abs(x) @ np.abs(weight.T) + np.abs(bias)) + 1e-12
        assert (np.abs(product(x, packed) - exact) <= bound).all()
        assert (np.abs(product(x, packed, bias) - (exact + bias)) <= bound).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "depth"), [(33, 321), (192, 576)])
def test_a_rows_bits_depend_neither_on_its_neighbours_nor_on_the_threads(outputs: int, depth: int, kind: str) -> None:
    packed, _ = stored(outputs, depth, kind)
    x = numbers(max(ROWS), depth)
    alone = np.concatenate([product(x[i : i + 1], packed) for i in range(len(x))])
    for rows in ROWS:
        for threads in range(1, paged_attention.get_num_threads() + 1):
            assert product(x[:rows], packed, threads=threads).tobytes() == alone[:rows].tobytes()


def test_bfloat16_and_the_same_weights_in_float32_give_the_same_bits() -> None:
    packed, weight = stored(100, 577, "bfloat16")
    for rows in ROWS:
        x = numbers(rows, 577, seed=rows)
        assert product(x, packed).tobytes() == product(x, linear.pack(weight)).tobytes()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 17, 97])
def test_nan_and_infinity_stay_in_their_row(rows: int, kind: str) -> None:
    packed, _ = stored(33, 321, kind)
    x = numbers(rows, 321)
    clean = product(x, packed)
    x[1, 7], x[2, 320] = np.nan, np.inf
    spoiled = product(x, packed)
    assert np.isnan(spoiled[1]).all() and not np.isfinite(spoiled[2]).any()
    others = np.delete(np.arange(rows), [1, 2])
    assert spoiled[others].tobytes() == clean[others].tobytes()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_nan_and_infinity_in_a_weight_reach_its_output_alone(kind: str) -> None:
    packed, _ = stored(33, 64, kind)
    one = {"float32": np.float32, "bfloat16": np.uint16}[kind]
    for output, value in ((4, np.nan), (32, -np.inf)):
        number = np.array([value], np.float32)
        packed.panels[output // 16, 5, output % 16] = (number if one is np.float32 else bfloat16(number))[0]
    out = product(np.abs(numbers(17, 64)) + 1, packed)
    assert np.isnan(out[:, 4]).all() and (out[:, 32] == -np.inf).all()
    assert np.isfinite(np.delete(out, [4, 32], axis=1)).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_gathered_weights_are_those_that_were_packed(kind: str) -> None:
    packed, weight = stored(33, 65, kind)
    for ids in ([], [32], [0, 16, 15, 16, 31]):
        out = np.full((len(ids), 65), np.nan, np.float32)
        linear.gather(packed, np.array(ids, np.int64), out)
        assert np.array_equal(out, weight[ids])
    for missing in (-1, 33):
        with pytest.raises(IndexError, match=f"{missing} are asked for, there are 33"):
            linear.gather(packed, np.array([missing]), np.empty((1, 65), np.float32))


def test_no_rows_and_no_depth() -> None:
    packed, _ = stored(33, 64, "float32")
    assert product(np.zeros((0, 64), np.float32), packed).shape == (0, 33)
    empty = linear.pack(np.zeros((5, 0), np.float32))
    assert (product(np.zeros((2, 0), np.float32), empty) == 0).all()
    assert (product(np.zeros((2, 0), np.float32), empty, np.ones(5, np.float32)) == 1).all()


def test_arrays_that_do_not_fit_are_refused() -> None:
    packed, _ = stored(33, 64, "float32")
    with pytest.raises(ValueError, match=r"x \(2, 65\) and out \(2, 33\) do not fit 33 outputs and 64"):
        product(np.zeros((2, 65), np.float32), packed)
    with pytest.raises(TypeError, match="weights are float64"):
        linear.pack(np.zeros((2, 2)))


@pytest.mark.parametrize(("outputs", "depth"), SHAPES)
def test_packed_bytes_are_told_before_packing(outputs: int, depth: int) -> None:
    for kind, itemsize in (("float32", 4), ("bfloat16", 2)):
        assert stored(outputs, depth, kind)[0].panels.nbytes == linear.packed_bytes(outputs, depth, itemsize)
