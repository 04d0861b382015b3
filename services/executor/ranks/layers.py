"""Linear layers that are one with those of the other ranks: their outputs are added, or put side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kernels.cpu import linear, tile
from services.executor.packing import PackedLinear
from services.executor.ranks.division import Division, Part
from services.executor.ranks.group import Group


class RankLinear(PackedLinear):
    """A rank's part. Alone it computes its own part; after `connect`, all ranks must call it together."""

    group: Group | None = None


class SummedLinear(RankLinear):
    """Has some of the inputs, and so a term of each output."""

    def compute(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """x [rows, inputs of this rank]; out [rows, outputs] is the same on all ranks, to the bit."""
        super().compute(x, out)
        if self.group is not None:
            self.group.add(torch.from_numpy(out))


class GatheredLinear(RankLinear):
    """Has some of the outputs, all ranks together the sum of `widths`."""

    widths: Sequence[int] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] float32 -> [..., outputs] on rank 0; the other ranks return their own outputs alone."""
        out = super().forward(x)
        return out if self.group is None else self.group.gather(out, self.widths)


_L = TypeVar("_L", bound=RankLinear)


def install(model: PreTrainedModel, division: Division) -> None:
    """Takes the place of the packed layers that `division` names; they compute alone until they are connected."""
    for name in division.summed:
        _replace(model, name, SummedLinear)
    if division.gathered is not None:
        _replace(model, division.gathered.name, GatheredLinear).widths = division.gathered.widths


def connect(model: PreTrainedModel, division: Division, group: Group) -> None:
    """Joins the layers with those of the other ranks. Raises RuntimeError where one is not in its place any more."""
    layers = [module for module in model.modules() if isinstance(module, RankLinear)]
    if len(layers) != (expected := len(division.summed) + (division.gathered is not None)):
        raise RuntimeError(f"the model has {len(layers)} layers to connect, its division names {expected}")
    for layer in layers:
        layer.group = group


def rows(weights: linear.Packed, part: Part) -> linear.Packed:
    """Some of the outputs of packed weights, which they share with them; both ends lie between panels or at the end."""
    first, last = part.begin // tile.OUTPUTS, -(-part.end // tile.OUTPUTS)
    return linear.Packed(weights.panels[first:last], part.end - part.begin)


def _replace(model: PreTrainedModel, name: str, kind: type[_L]) -> _L:
    packed = model.get_submodule(name)
    if not isinstance(packed, PackedLinear):
        raise RuntimeError(f"{name} is divided, but not packed")
    layer = kind(packed.weights, packed.bias)
    model.set_submodule(name, layer)
    return layer
