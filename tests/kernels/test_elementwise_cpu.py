"""RMSNorm and the gated product against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernels.cpu import elementwise

SHAPES = ((1, 1), (1, 576), (3, 17), (40, 576), (257, 100))
"""[rows, width], on both sides of where threads are woken."""


def numbers(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    elementwise.rms_norm(x, gain, 1e-5, out)
    return out


def gated(gate_up: np.ndarray) -> np.ndarray:
    out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
    elementwise.silu_multiply(gate_up, out)
    return out


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_equals_its_definition(rows: int, width: int, scale: float) -> None:
    x, gain = numbers(rows, width) * np.float32(scale), numbers(1, width, seed=1)[0]
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * gain
    np.testing.assert_allclose(normed(x, gain), exact, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_the_gated_product_equals_its_definition(rows: int, width: int, scale: float) -> None:
    gate_up = numbers(rows, 2 * width) * np.float32(scale)
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:].astype(np.float64)
    exact = gate / (1 + np.exp(-gate)) * up
    # e^-g is off by the rounding of its exponent, g / ln 2, as well.
    assert (np.abs(gated(gate_up) - exact) <= (2e-6 + 2.0**-23 * np.abs(gate)) * np.abs(exact) + 1e-30).all()


def test_gates_far_from_0() -> None:
    gates = np.array([[-3e38, -1e3, -100, 100, 1e3, 3e38, np.inf]], np.float32)
    out = gated(np.concatenate([gates, np.ones_like(gates)], axis=1))[0]
    assert np.abs(out[:3]).max() <= 3e38 * 2.0**-126
    assert out[3:].tolist() == gates[0, 3:].tolist()


@pytest.mark.parametrize("rows", [3, 400])
@pytest.mark.parametrize("function", [gated, lambda x: normed(x, np.ones(x.shape[1], np.float32))])
def test_nan_stays_in_its_row_and_a_row_does_not_depend_on_the_others(
    function: Callable[[np.ndarray], np.ndarray], rows: int
) -> None:
    x = numbers(rows, 96)
    clean = function(x)
    assert np.concatenate([function(x[i : i + 1]) for i in range(rows)]).tobytes() == clean.tobytes()
    x[1, 7] = np.nan
    spoiled = function(x)
    assert np.isnan(spoiled[1, 7])
    assert np.delete(spoiled, 1, axis=0).tobytes() == np.delete(clean, 1, axis=0).tobytes()
