"""What a step tells the device, in one copy: columns of several types packed into one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_TYPES = {
    "token_ids": np.int64,
    "drawn_slots": np.int64,
    "positions": np.int64,
    "places": np.int64,
    "last_tokens": np.int64,
    "slots": np.int32,
    "contexts": np.int32,
    "query_starts": np.int32,
}


@dataclass(frozen=True, eq=False)
class StepColumns:
    """A step's columns on the device, views of one buffer."""

    token_ids: torch.Tensor
    """[tokens] int64; any where drawn_slots names a slot"""
    drawn_slots: torch.Tensor
    """[tokens] int64 the slot whose last sampled id the token is, -1: token_ids has it"""
    positions: torch.Tensor
    """[tokens] int64"""
    places: torch.Tensor
    """[tokens] int64 block * block_tokens + offset"""
    last_tokens: torch.Tensor
    """[n] int64 tokens whose logits are wanted"""
    slots: torch.Tensor
    """[rows] int32"""
    contexts: torch.Tensor
    """[rows] int32"""
    query_starts: torch.Tensor
    """[rows + 1] int32"""


def packed(**columns: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The columns one after the other, in the types and the order of StepColumns."""
    arrays = [columns[name].astype(kind, copy=False) for name, kind in _TYPES.items()]
    offsets, size = _offsets([array.nbytes for array in arrays])
    buffer = np.zeros(size, np.uint8)
    for array, offset in zip(arrays, offsets, strict=True):
        buffer[offset : offset + array.nbytes] = array.view(np.uint8)
    return buffer


def packed_bytes(tokens: int, rows: int, wanted: int) -> int:
    """Size of what `packed` makes."""
    return _offsets(_sizes(tokens, rows, wanted))[1]


def views(buffer: torch.Tensor, tokens: int, rows: int, wanted: int) -> StepColumns:
    """The columns in a buffer on the device."""
    sizes = _sizes(tokens, rows, wanted)
    offsets, _ = _offsets(sizes)
    kinds = {np.int64: torch.int64, np.int32: torch.int32}
    found = {
        name: buffer[offset : offset + size].view(kinds[kind])
        for (name, kind), size, offset in zip(_TYPES.items(), sizes, offsets, strict=True)
    }
    return StepColumns(**{field.name: found[field.name] for field in fields(StepColumns)})


def _sizes(tokens: int, rows: int, wanted: int) -> list[int]:
    counts = dict.fromkeys(("token_ids", "drawn_slots", "positions", "places"), tokens)
    counts |= {"last_tokens": wanted, "slots": rows, "contexts": rows, "query_starts": rows + 1}
    return [counts[name] * np.dtype(kind).itemsize for name, kind in _TYPES.items()]


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, at
