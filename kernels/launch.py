"""Launching the CUDA kernels: one signature for a GPU (CuPy) and for the CPU (tests/kernels/hostshim).

Pointers are addresses (`tensor.data_ptr()`); nothing here knows torch. What a kernel computes, and the meaning of every
field, stands in csrc/params.cuh.
"""

from __future__ import annotations

from typing import Protocol

from kernels import instances
from kernels.instances import FP8, Architecture, Instance
from kernels.params import Params

Grid = tuple[int, int, int]

QUERY_TILE = 16
"""Query heads of a kv head that a block of the decode kernel takes."""
SPLIT_KEYS = 64
"""A split of a context is whole pieces of so many keys."""
_WAVE_EFFICIENCY = 0.85


class Device(Protocol):
    """What runs kernels."""

    architecture: Architecture

    def launch(self, instance: Instance, grid: Grid, params: Params) -> None:
        """Queues a grid of `instance` on the device's stream."""


def number_of_splits(blocks: int, slots: int, most_keys: int) -> int:
    """Parts to cut every row's context into, so that `slots` blocks that run at a time are kept busy.

    The smallest number whose waves are filled to 85% of what the best number fills them. `blocks` is the grid with one
    split, `slots` multiprocessors times blocks of one, `most_keys` the longest context.
    """
    most = max(1, min(-(-most_keys // SPLIT_KEYS), slots))

    def efficiency(splits: int) -> float:
        waves = blocks * splits / slots
        return waves / -(-blocks * splits // slots)

    filled = [efficiency(splits) for splits in range(1, most + 1)]
    enough = _WAVE_EFFICIENCY * max(filled)
    return 1 + next(i for i, value in enumerate(filled) if value >= enough)


class Decode:
    """Attention of one new token a row.

    Set the fields of `params` that change (pointers a layer, contexts and tables a step), then call.
    """

    def __init__(self, device: Device, *, dtype: str, kv_dtype: str, head_dim: int) -> None:
        _check_types(device, dtype, kv_dtype, head_dim)
        self._device = device
        self.attend = instances.decode(device.architecture, dtype, kv_dtype, head_dim)
        self.reduce = instances.decode_reduce(dtype, head_dim)
        self.params = Params("DecodeParams")

    def __call__(self, rows: int) -> None:
        """Attends for `rows` rows; with more than one split the parts are merged by a second kernel."""
        heads, group, splits = (int(self.params.get(name)) for name in ("heads", "group", "splits"))
        _check_heads(heads, group)
        if splits < 1:
            raise ValueError(f"splits is {splits}: at least 1")
        if splits > 1 and not (self.params.get("partial_out") and self.params.get("partial_lse")):
            raise ValueError(f"{splits} splits need partial_out and partial_lse")
        _check_alignment(self.params)
        tiles = heads // group * -(-group // QUERY_TILE)
        self._device.launch(self.attend, (splits, tiles, rows), self.params)
        if splits > 1:
            self._device.launch(self.reduce, (heads, rows, 1), self.params)


class Prefill:
    """Causal attention of any number of new tokens a row, tensor cores where the type has them."""

    def __init__(self, device: Device, *, dtype: str, kv_dtype: str, head_dim: int) -> None:
        _check_types(device, dtype, kv_dtype, head_dim)
        self._device = device
        self._rows = instances.prefill_rows(head_dim)
        self.attend = instances.prefill(device.architecture, dtype, kv_dtype, head_dim)
        self.params = Params("PrefillParams")

    def __call__(self, most_tokens: int) -> None:
        """`most_tokens`: new tokens of the row that has most."""
        rows, heads, group = (int(self.params.get(name)) for name in ("rows", "heads", "group"))
        _check_heads(heads, group)
        _check_alignment(self.params)
        tiles = -(-most_tokens * group // self._rows)
        self._device.launch(self.attend, (tiles, heads // group, rows), self.params)


class Reference:
    """As Prefill, slowly, in the type of its operands; serves float32 too."""

    def __init__(self, device: Device, *, dtype: str, head_dim: int) -> None:
        if dtype not in (*instances.DTYPES, "float32") or head_dim not in instances.HEAD_DIMS:
            raise ValueError(f"no reference kernel for {dtype} heads of {head_dim}")
        self._device = device
        self.attend = instances.reference(dtype, head_dim)
        self.params = Params("PrefillParams")

    def __call__(self, tokens: int) -> None:
        """`tokens`: new tokens of all rows."""
        heads = int(self.params.get("heads"))
        _check_heads(heads, int(self.params.get("group")))
        self._device.launch(self.attend, (heads, tokens, 1), self.params)


def _check_heads(heads: int, group: int) -> None:
    if group < 1 or heads < group or heads % group:
        raise ValueError(f"{heads} query heads in groups of {group}: the group must divide the heads")


_ALIGNED = ("query", "keys", "values", "out")
_STRIDES = ("out_stride", "query_stride", "block_stride", "head_stride")


def _check_alignment(params: Params) -> None:
    """Kernels move 16 bytes at a time."""
    for name in _ALIGNED + _STRIDES:
        if name in params.layout.fields and int(params.get(name)) % 16:
            what = "elements" if name in _STRIDES else "bytes"
            raise ValueError(f"{name} is {params.get(name)}: it must be a multiple of 16 {what}")


def _check_types(device: Device, dtype: str, kv_dtype: str, head_dim: int) -> None:
    if dtype not in instances.DTYPES or head_dim not in instances.HEAD_DIMS:
        raise ValueError(
            f"no kernel for {dtype} heads of {head_dim}: there are {instances.DTYPES} of {instances.HEAD_DIMS}"
        )
    if kv_dtype not in (dtype, FP8):
        raise ValueError(f"no kernel computes in {dtype} over KV in {kv_dtype}: KV can be {dtype} or {FP8}")
    if kv_dtype == FP8 and device.architecture.capability < instances.FP8_FROM:
        raise ValueError(
            f"fp8 KV needs compute capability {instances.FP8_FROM}, the device has {device.architecture.capability}"
        )
