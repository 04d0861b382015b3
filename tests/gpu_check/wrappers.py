"""What common.cuh hides (assembly, conversions) and what sampling counts on (IEEE arithmetic), against numpy.

The layouts of registers are those of the PTX ISA: "mma.m16n8k16" for 16-bit elements, "ldmatrix".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import torch

from kernels import instances
from kernels.instances import DTYPES, FP8
from kernels.params import Params
from tests.gpu_check.checks import Check, Place
from tests.kernels.paged import ROUNDOFF, loaded, stored

LANES = np.arange(32)
_C_NAMES = {"float16": "__half", "bfloat16": "__nv_bfloat16"}


def checks(place: Place) -> Iterator[Check]:
    """All of them are quick."""
    probes = Probes(place)
    for dtype in DTYPES:
        yield Check(f"mma m16n8k16, {dtype}", lambda dtype=dtype: probes.mma(dtype))
        yield Check(f"{dtype} from float, in pairs and alone", lambda dtype=dtype: probes.rounding(dtype))
        yield Check(f"pairs of fp8 to {dtype}", lambda dtype=dtype: probes.fp8_pairs(dtype))
    yield Check("ldmatrix, plain and transposed", probes.ldmatrix)
    yield Check("cp.async: three groups, zeros out of range", probes.cp_async)
    yield Check("ex2.approx, quick division, sums over four lanes, soft cap", probes.floats)
    yield Check("fp8 from float, saturating", probes.fp8)
    yield Check("float64: fma, rint, division; high words of products", probes.doubles)
    yield Check("votes, first set bit, atomic add in shared memory", probes.warp)


class Probes:
    """The probe kernels, launched."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.known = {instance.name: instance for instance in instances.probes()}

    def launch(self, name: str, out: np.ndarray, *inputs: np.ndarray, count: int = 0) -> np.ndarray:
        """`inputs` are a, b, c of ProbeParams."""
        device = self.place.device(*self.known.values())
        params = Params("ProbeParams")
        params.set(out=device.pointer(out), count=count)
        for field, array in zip("abc", inputs, strict=False):
            params.set(**{field: device.pointer(array)})
        device.launch(self.known[name], (1, 1, 1), params)
        return out

    def mma(self, dtype: str) -> str:
        """Whole numbers are exact, so every element must sit where the PTX ISA says; then any numbers, to rounding."""
        rng = np.random.default_rng(1)
        worst = 0.0
        for exact in (True, False):

            def numbers(*shape: int, exact: bool = exact) -> np.ndarray:
                drawn = rng.integers(-8, 9, shape) if exact else rng.standard_normal(shape)
                return loaded(stored(drawn, dtype), dtype)

            a, b = numbers(16, 16), numbers(16, 8)
            d = rng.integers(-8, 9, (16, 8)).astype(np.float32)
            row, column = LANES // 4, LANES % 4 * 2
            places_a = [(row + 8 * (j & 1), column + 8 * (j >> 1)) for j in range(4)]
            places_b = [(column + 8 * j, row) for j in range(2)]
            fragments_a = np.stack([_pair(a[r, c], a[r, c + 1], dtype) for r, c in places_a], axis=1)
            fragments_b = np.stack([_pair(b[k, n], b[k + 1, n], dtype) for k, n in places_b], axis=1)
            places_d = [(row + 8 * (j >> 1), column + (j & 1)) for j in range(4)]
            before = np.ascontiguousarray(np.stack([d[r, c] for r, c in places_d], axis=1))
            out = np.full((32, 4), np.nan, np.float32)
            self.launch(f"probe_mma<{_C_NAMES[dtype]}>", out, fragments_a, fragments_b, before)
            right = d + a @ b
            size = np.abs(d) + np.abs(a) @ np.abs(b)
            found = np.full((16, 8), np.nan)
            for j, (r, c) in enumerate(places_d):
                found[r, c] = out[:, j]
            if exact:
                assert (found == right).all(), f"{(found != right).sum()} of 128 elements are not where they should be"
            # Tensor cores add truncated float32s: a bit or two of the largest term a step.
            share = np.abs(found - right) / (size * 2.0**-21)
            assert np.isfinite(found).all() and share.max() <= 1, f"off by {share.max():.2f} of what is allowed"
            worst = max(worst, float(share.max()))
        return f"{worst:.2f} of the rounding allowed"

    def ldmatrix(self) -> str:
        rows = np.random.default_rng(2).integers(0, 1 << 16, (32, 8)).astype(np.uint16)
        out = self.launch("probe_ldmatrix", np.zeros((2, 32, 4), np.uint32), rows)
        row, column = LANES // 4, LANES % 4 * 2
        for matrix in range(4):
            block = rows[matrix * 8 : matrix * 8 + 8].astype(np.uint32)
            assert (out[0, :, matrix] == (block[row, column] | block[row, column + 1] << 16)).all(), "plain"
            assert (out[1, :, matrix] == (block[column, row] | block[column + 1, row] << 16)).all(), "transposed"
        return ""

    def cp_async(self) -> str:
        rng = np.random.default_rng(3)
        source = rng.integers(0, 1 << 32, (3, 32, 4), np.uint32)
        in_range = (rng.random(32) < 0.6).astype(np.int32)
        out = self.launch("probe_cp_async", np.full((3, 32, 4), 7, np.uint32), source, in_range)
        assert (out == np.where(in_range[:, None] > 0, source, 0)).all()
        return ""

    def floats(self) -> str:
        """ex2.approx.ftz: 2 units in the last place (PTX ISA), subnormal results 0; __fdividef: 2 (CUDA C++ guide)."""
        rng = np.random.default_rng(4)
        a = np.concatenate([rng.uniform(-126, 20, 960), [-1e30, -200, -150, 0, -0.0, 1, -1, 88] * 8]).astype(np.float32)
        b = np.exp2(rng.uniform(-60, 60, len(a))).astype(np.float32)
        out = self.launch("probe_floats", np.full((5, len(a)), np.nan, np.float32), a, b, count=len(a))
        wide, four = a.astype(np.float64), a.reshape(-1, 4)
        power = np.exp2(wide)
        power[power < 2.0**-126] = 0
        _close(out[0], power, 2 * 2.0**-23, "2^x", flushes=True)
        quotient = wide / b.astype(np.float64)
        normal = (quotient == 0) | ((np.abs(quotient) > 2.0**-125) & (np.abs(quotient) < 2.0**127))
        _close(out[1, normal], quotient[normal], 3 * 2.0**-23, "division")
        assert (out[2].reshape(-1, 4) == four.max(axis=1, keepdims=True)).all(), "the largest of four lanes"
        sums = four.astype(np.float64).sum(axis=1, keepdims=True)
        size = np.abs(four).astype(np.float64).sum(axis=1, keepdims=True)
        assert (np.abs(out[3].reshape(-1, 4) - sums) <= size * 2.0**-22).all(), "the sum of four lanes"
        bounded = np.abs(wide) < 1e4
        capped = 3 * np.tanh(wide * 0.5 / 3) * math.log2(math.e)
        assert (np.abs(out[4] - capped)[bounded] <= 3 * 2.0**-19).all(), "soft cap"
        return ""

    def rounding(self, dtype: str) -> str:
        """To the nearest, halves to even: torch's, to the bit. NaN stays NaN."""
        rng = np.random.default_rng(5)
        a = np.concatenate(
            [rng.standard_normal(1000) * np.exp2(rng.integers(-20, 15, 1000)), [0.0, -0.0, 65504, 1e-30]]
        )
        halves = 1 + (2 * np.arange(20) + 1) * ROUNDOFF[dtype]
        a = np.concatenate([a, halves, [np.inf, -np.inf, np.nan, 3e38]]).astype(np.float32)
        b = a[::-1].copy()
        out = self.launch(f"probe_pair<{_C_NAMES[dtype]}>", np.zeros((len(a), 2), np.uint32), a, b, count=len(a))
        right_a, right_b = (stored(x, dtype).view(np.uint16).astype(np.uint32) for x in (a, b))
        numbers = ~np.isnan(a) & ~np.isnan(b)
        assert (out[numbers, 0] == (right_a | right_b << 16)[numbers]).all(), "pairs"
        assert (out[numbers, 1] == right_a[numbers]).all(), "alone"
        assert np.isnan(loaded((out[np.isnan(a), 1]).astype(np.uint16), dtype)).all(), "NaN"
        return ""

    def fp8_pairs(self, dtype: str) -> str:
        """All 256 values, in both places of a pair; every one is exact in 16 bits."""
        low, high = np.meshgrid(np.arange(256), np.arange(256, step=5))
        pairs = (low | high << 8).reshape(-1).astype(np.uint16)
        out = self.launch(
            f"probe_fp8_pair<{_C_NAMES[dtype]}>", np.zeros(len(pairs), np.uint32), pairs, count=len(pairs)
        )
        for shift, codes in ((0, low), (16, high)):
            right = loaded(codes.reshape(-1).astype(np.uint8), FP8)
            found = loaded((out >> shift & 0xFFFF).astype(np.uint16), dtype)
            assert np.array_equal(found, right, equal_nan=True), "low" if shift == 0 else "high"
        return ""

    def fp8(self) -> str:
        """To the nearest, halves to even, at most 448; NaN stays NaN."""
        rng = np.random.default_rng(6)
        a = rng.standard_normal(1000) * np.exp2(rng.integers(-12, 10, 1000))
        a = np.concatenate([a, [0, -0.0, 448, 464, 1e9, -1e9, 2.0**-9, 2.0**-10, 17, 18, 19, np.nan]]).astype(
            np.float32
        )
        out = self.launch("probe_fp8", np.zeros(len(a), np.uint32), a, count=len(a))
        right = torch.from_numpy(np.clip(a, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        numbers = ~np.isnan(a)
        assert (out[numbers] == right[numbers]).all(), f"{a[numbers][out[numbers] != right[numbers]][:4]}"
        assert (out[~numbers] & 0x7F == 0x7F).all(), "NaN"
        return ""

    def doubles(self) -> str:
        """To the bit: the ids that sampling draws rest on it."""
        rng = np.random.default_rng(7)
        count = 512
        a, b, c = (rng.standard_normal(count) * np.exp2(rng.integers(-30, 30, count)) for _ in range(3))
        a[:8] = [0.5, 1.5, 2.5, -0.5, -1.5, 2.0**52 + 1, 0.49999999999999994, -0.0]
        c[::2] = -(a * b)[::2]  # nothing but the rounding of the product is left
        out = self.launch("probe_doubles", np.full((4, count), np.nan), a, b, c, count=count)
        exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
        assert (out[0] == exact).all(), "fma"
        assert (out[1] == np.rint(a)).all(), "rint"
        assert (out[2] == a / b).all(), "division"
        u, v = a.view(np.uint64), b.view(np.uint64)
        high = [int(x) * int(y) >> 64 for x, y in zip(u, v, strict=True)]
        assert out[3].view(np.uint64).tolist() == high, "__umul64hi"
        return ""

    def warp(self) -> str:
        a = np.random.default_rng(8).integers(0, 1 << 32, 640, np.uint32)
        a[:5] &= ~np.uint32(1)
        out = self.launch("probe_warp", np.zeros(4, np.uint32), a, count=len(a))
        bits = sum(int(a[lane] & 1) << lane for lane in range(32))
        assert out.tolist() == [int(a.sum(dtype=np.uint32)), bits, int(bits > 0), (bits & -bits).bit_length()]
        return ""


def _pair(low: np.ndarray, high: np.ndarray, dtype: str) -> np.ndarray:
    first, second = (stored(x, dtype).view(np.uint16).astype(np.uint32) for x in (low, high))
    return np.ascontiguousarray(first | second << 16)


def _close(found: np.ndarray, right: np.ndarray, share: float, what: str, *, flushes: bool = False) -> None:
    """Relative; with `flushes` what lies by the smallest normal float may be 0."""
    least = 2.0**-126 * 1.0001 if flushes else 0.0
    excess = np.abs(found - right) - np.abs(right) * share - np.where(right <= least, least, 0)
    assert excess.max() <= 0, (
        f"{what} of {np.argmax(excess)}: {found[np.argmax(excess)]} for {right[np.argmax(excess)]}"
    )
