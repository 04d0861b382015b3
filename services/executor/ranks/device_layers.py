"""Layers on a device that are one with those of the other ranks, as layers.py has them on the CPU; none is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from services.executor import packing
from services.executor.ranks.division import Division, Part
from services.executor.ranks.layers import RankPart, SummedExperts


class DeviceRankLinear(RankPart, torch.nn.Linear):
    """Of a linear layer."""


class DeviceSummedLinear(DeviceRankLinear):
    """Has some of the inputs, and so a term of each output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs of this rank] -> [..., outputs], the same on all ranks."""
        out = super().forward(x)
        if self.group is not None:
            self.group.add(out)
        return out


class DeviceGatheredLinear(DeviceRankLinear):
    """Has some of the outputs, all ranks together the sum of `widths`."""

    widths: Sequence[int] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] -> [..., outputs], of all ranks on rank 0."""
        out = super().forward(x)
        return out if self.group is None else self.group.gather(out, self.widths)


class DeviceRankEmbedding(RankPart):
    """Has the embeddings of the ids in `held`; of others it makes zeros, and the sum over the ranks is theirs."""

    def __init__(self, weight: torch.nn.Parameter, held: range, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.held = held
        self.scale = None if scale is None else torch.nn.Buffer(scale, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] int64, each within the vocabulary -> [..., embedding]."""
        mine = (ids >= self.held.start) & (ids < self.held.stop)
        found = torch.nn.functional.embedding(torch.where(mine, ids - self.held.start, 0), self.weight)
        out = torch.where(mine[..., None], found, 0)
        if self.group is not None:
            self.group.add(out)
        return out if self.scale is None else out * self.scale.to(out.dtype)


_L = TypeVar("_L", bound=DeviceRankLinear)


def install(model: PreTrainedModel, division: Division) -> None:
    """Takes the place of the layers that `division` names; they compute alone until they are connected."""
    for name in division.summed:
        _replace(model, name, DeviceSummedLinear)
    if division.gathered is not None:
        _replace(model, division.gathered.name, DeviceGatheredLinear).widths = division.gathered.widths
    for name in division.experts:
        model.set_submodule(name, SummedExperts(model.get_submodule(name)))
    if division.embedding:
        _replace_embedding(model, division.embedding, division.parts[f"{division.embedding}.weight"])


def _replace(model: PreTrainedModel, name: str, kind: type[_L]) -> _L:
    whole = model.get_submodule(name)
    if not isinstance(whole, torch.nn.Linear):
        raise RuntimeError(f"{name} is divided, but no linear layer")
    outputs, inputs = whole.weight.shape
    layer = kind(inputs, outputs, bias=False, device="meta")
    layer.weight = whole.weight
    layer.register_parameter("bias", whole.bias)
    model.set_submodule(name, layer)
    return layer


def _replace_embedding(model: PreTrainedModel, name: str, part: Part) -> None:
    whole = model.get_submodule(name)
    if not isinstance(whole, torch.nn.Embedding) or not packing.gathers(whole):
        raise RuntimeError(f"{name} is divided, but does more than gather")
    held, weight = range(part.begin, part.end), torch.nn.Parameter(whole.weight, requires_grad=False)
    model.set_submodule(name, DeviceRankEmbedding(weight, held, getattr(whole, "embed_scale", None)))
