"""Buffers of a step, kept from one step to the next: what a layer computes before its result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, eq=False)
class Rows:
    """A buffer [rows, width] float32, as torch and as numpy see it."""

    tensor: torch.Tensor
    array: npt.NDArray[np.float32]


class Scratch:
    """One buffer a purpose, as large as the most rows asked for so far: a steady step allocates nothing.

    Layers share it, since they run one after the other; so nothing in it outlives a layer. For the step thread alone.
    """

    def __init__(self) -> None:
        self._held: dict[str, Rows] = {}
        self._views: dict[str, Rows] = {}

    def take(self, purpose: str, rows: int, width: int) -> Rows:
        """Not initialized, and overwritten by the next that asks for the same purpose."""
        view = self._views.get(purpose)
        if view is not None and view.array.shape == (rows, width):
            return view
        held = self._held.get(purpose)
        if held is None or held.array.size < rows * width:
            self._held.pop(purpose, None)
            self._views.pop(purpose, None)
            held = self._held[purpose] = _rows(torch.empty(1, rows * width))
        view = self._views[purpose] = _rows(held.tensor.view(-1)[: rows * width].view(rows, width))
        return view


def _rows(tensor: torch.Tensor) -> Rows:
    return Rows(tensor, tensor.numpy())
