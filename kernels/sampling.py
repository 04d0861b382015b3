"""Launching sampling: the next id of each row, by rows of parameters that lie on the device.

The kernel serves mask, temperature, top-k, top-p, min-p and the draw. What changes single logits (bias, penalties, ids
that are banned for a while) is applied to them before, by torch; what reports (logprobs, ranks) reads the logits as the
model made them, by torch too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels import instances
from kernels.instances import DTYPES, Instance
from kernels.launch import Device
from kernels.params import Params

MOST_IDS = 1 << 19
"""In a vocabulary: weights of so many ids sum to less than 2^64."""

ROW = np.dtype(
    [
        ("log2_a_score", "<f8"),
        ("top_p", "<f8"),
        ("least_log2", "<f8"),
        ("seed", "<u8"),
        ("position", "<u8"),
        ("top_k", "<i4"),
        ("mask_row", "<i4"),
        ("kind", "<i4"),
        ("unused", "<i4"),
    ]
)
"""SamplingRow of csrc/sampling.cu."""

_IDLE, _GREEDY, _RANDOM = range(3)


@dataclass(frozen=True)
class Row:
    """How one row's id is drawn; fields as in generation.proto's Sampling."""

    temperature: float | None
    """None: the likeliest id, and nothing but the mask counts."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """uint64"""
    position: int = 0
    """of the draw among the row's output ids"""
    mask_row: int | None = None
    """Line of `masks`; None: every id is allowed."""


def pack(rows: Sequence[Row | None]) -> npt.NDArray[np.void]:
    """[rows] of ROW; None: the row is not drawn, as one that pads a captured batch."""
    packed = np.zeros(len(rows), ROW)
    for at, row in zip(packed, rows, strict=True):
        if row is None:
            continue
        at["mask_row"] = -1 if row.mask_row is None else row.mask_row
        at["kind"] = _GREEDY if row.temperature is None else _RANDOM
        if row.temperature is not None:
            at["log2_a_score"] = 1 / (math.log(2) * row.temperature)
        at["top_p"], at["top_k"] = row.top_p, row.top_k
        at["least_log2"] = math.log2(row.min_p) if row.min_p > 0 else -math.inf
        at["seed"], at["position"] = row.seed, row.position
    return packed


def pack_columns(
    *,
    greedy: npt.NDArray[np.bool_],
    temperature: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    seed: npt.NDArray[np.uint64],
    position: npt.NDArray[np.int64],
    mask_row: npt.NDArray[np.int64],
) -> npt.NDArray[np.void]:
    """As `pack`, of parameters that lie in columns [rows]; top_k 0 or less: off, mask_row negative: no mask."""
    packed = np.zeros(len(greedy), ROW)
    packed["kind"] = np.where(greedy, _GREEDY, _RANDOM)
    packed["log2_a_score"] = 1 / (math.log(2) * np.where(greedy, 1.0, temperature))
    packed["least_log2"] = np.log2(min_p, out=np.full(len(min_p), -np.inf), where=min_p > 0)
    packed["top_p"], packed["top_k"] = top_p, top_k
    packed["seed"], packed["position"], packed["mask_row"] = seed, position, mask_row
    return packed


class Sampling:
    """Draws ids. Set the fields of `params`, then call."""

    def __init__(self, device: Device, *, dtype: str, threads: int = 1024) -> None:
        if dtype not in (*DTYPES, "float32"):
            raise ValueError(f"no kernel draws from logits in {dtype}: there are {DTYPES} and float32")
        self._device = device
        self.instance: Instance = instances.sampling(dtype, threads)
        self.params = Params("SamplingParams")

    def __call__(self, rows: int) -> None:
        """Queues the draw of `rows` rows; none: nothing. ValueError where the vocabulary is too large."""
        vocab = int(self.params.get("vocab"))
        if not 0 < vocab <= MOST_IDS:
            raise ValueError(f"the vocabulary has {vocab} ids: 1 to {MOST_IDS}")
        if rows:
            self._device.launch(self.instance, (rows, 1, 1), self.params)
