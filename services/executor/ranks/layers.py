"""Layers that are one with those of the other ranks: their outputs are added, or put side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kernels.cpu import compact, linear
from services.executor.packing import PackedEmbedding, PackedLinear
from services.executor.ranks.division import Division, Part
from services.executor.ranks.group import Group


class RankPart(torch.nn.Module):
    """A rank's part. Alone it computes its own part; after `connect`, all ranks must call it together."""

    group: Group | None = None


class RankLinear(RankPart, PackedLinear):
    """Of a linear layer."""


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


class SummedExperts(RankPart):
    """Experts of which each has some of its inner width, and so a term of each output."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """As the experts'; [tokens, hidden] is the same on all ranks, to the bit."""
        out: torch.Tensor = self.experts(*inputs).contiguous()
        if self.group is not None:
            self.group.add(out)
        return out


class RankEmbedding(RankPart, PackedEmbedding):
    """Has the embeddings of the ids in `held`; of others, `count` in all, it makes zeros, and the sum is theirs."""

    held = range(0)
    count = 0

    def gather(self, ids: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """As PackedEmbedding's, of all ids that there are."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.count:
            raise IndexError(f"ids {ids.min()} to {ids.max()} are asked for, there are {self.count}")
        mine = (ids >= self.held.start) & (ids < self.held.stop)
        super().gather(np.where(mine, ids - self.held.start, 0), out)
        out[~mine] = 0
        if self.group is not None:
            self.group.add(torch.from_numpy(out))


_L = TypeVar("_L", bound=RankLinear)


def install(model: PreTrainedModel, division: Division) -> None:
    """Takes the place of the packed layers that `division` names; they compute alone until they are connected."""
    for name in division.summed:
        _replace(model, name, SummedLinear)
    if division.gathered is not None:
        _replace(model, division.gathered.name, GatheredLinear).widths = division.gathered.widths
    for name in division.experts:
        model.set_submodule(name, SummedExperts(model.get_submodule(name)))
    if division.embedding:
        _replace_embedding(model, division.embedding, division.parts[f"{division.embedding}.weight"])


def connect(model: PreTrainedModel, division: Division, group: Group) -> None:
    """Joins the layers with those of the other ranks. Raises RuntimeError where one is not in its place any more."""
    layers = [module for module in model.modules() if isinstance(module, RankPart)]
    expected = len(division.summed) + len(division.experts) + (division.gathered is not None) + bool(division.embedding)
    if len(layers) != expected:
        raise RuntimeError(f"the model has {len(layers)} layers to connect, its division names {expected}")
    for layer in layers:
        layer.group = group


def rows(weights: linear.Packed, part: Part) -> linear.Packed:
    """Some of the outputs of packed weights, which they share with them; both ends lie between panels or at the end."""
    return compact.part(weights, part.begin, part.end)


def _replace(model: PreTrainedModel, name: str, kind: type[_L]) -> _L:
    packed = model.get_submodule(name)
    if not isinstance(packed, PackedLinear):
        raise RuntimeError(f"{name} is divided, but not packed")
    layer = kind(packed.weights, packed.bias)
    model.set_submodule(name, layer)
    return layer


def _replace_embedding(model: PreTrainedModel, name: str, part: Part) -> None:
    packed = model.get_submodule(name)
    if not isinstance(packed, PackedEmbedding):
        raise RuntimeError(f"{name} is divided, but not packed")
    layer = RankEmbedding(packed.weights, packed.scale)
    layer.held, layer.count = range(part.begin, part.end), part.whole
    model.set_submodule(name, layer)
