"""Which part of which tensor a rank holds: transformers' tensor-parallel plan, for one model and a number of ranks.

After Shoeybi et al. 2019, "Megatron-LM", section 3: attention is divided by heads, an MLP by its inner width, each
with outputs divided on the way in ("colwise") and inputs on the way out ("rowwise"), whose partial sums are added over
the ranks; experts are divided each by its own inner width, so that every rank computes a part of whichever is chosen.
Embedding and output layer are divided by vocabulary: a token's embedding is zero on all ranks but the one that has it,
and their sum is it, to the bit. A block of layers is divided as a whole or not at all: one whose plan names anything
else is held whole by every rank, and so are norms and routers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from kernels.cpu import tile
from services.common.errors import StartError
from services.executor import packing
from services.executor.architecture import Architecture

_COLWISE, _ROWWISE, _HEAD, _EMBEDDING = "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"
_EXPERTS, _EXPERTS_IN = "moe_tp_experts", "packed_colwise"
_OTHER_EXPERTS = "moe_"
_EXPERT_PARTS = {"gate_up_proj", "down_proj"}


@dataclass(frozen=True)
class Shard:
    """One rank's place among `size`."""

    rank: int
    size: int
    available_bytes: int
    """Memory that this rank may take: its share of what is free before any rank has begun to load."""
    own_files: bool = False
    """Whether its files may be others than rank 0's, so that it hashes them too."""

    @property
    def hashes(self) -> bool:
        """Whether this rank hashes the files it reads of."""
        return self.rank == 0 or self.own_files


@dataclass(frozen=True)
class Part:
    """Indices [begin, end) of dimension `dim`, in a tensor that is `whole` there.

    A tensor of several `blocks` has so many of that width one after the other, and the part is of each of them.
    """

    dim: int
    begin: int
    end: int
    whole: int
    blocks: int = 1

    @property
    def width(self) -> int:
        """Of the part in all blocks."""
        return self.blocks * (self.end - self.begin)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and past the last index of each block's part."""
        return tuple((block * self.whole + self.begin, block * self.whole + self.end) for block in range(self.blocks))


@dataclass(frozen=True)
class Gathered:
    """A layer whose outputs lie one after the other over the ranks."""

    name: str
    widths: tuple[int, ...]
    """Outputs of each rank."""


@dataclass(frozen=True)
class Division:
    """What one rank holds of a model."""

    shard: Shard
    parts: Mapping[str, Part]
    """By the name of the tensor; all others are held whole."""
    summed: tuple[str, ...]
    """Linear layers whose outputs are terms of a sum over the ranks."""
    gathered: Gathered | None
    """The output layer, divided by vocabulary; None: it is whole."""
    embedding: str
    """The input embedding, divided by vocabulary; empty: it is whole."""
    experts: tuple[str, ...]
    """Modules of experts, whose outputs are terms of a sum too."""
    dropped: frozenset[str]
    """Tensors that rank 0 alone holds."""
    heads: int
    kv_heads: int
    whole: tuple[str, ...]
    """What is not divided, with the reason, for people."""

    def shape(self, model: Architecture) -> Architecture:
        """The model's figures as this rank has them."""
        return replace(model, heads=self.heads, kv_heads=self.kv_heads)


def divide(model: PreTrainedModel, shape: Architecture, shard: Shard) -> Division:
    """Raises StartError where nothing of the model can be divided over so many ranks."""
    work = _Work(model, shape, shard)
    work.divide_blocks()
    work.divide_experts()
    if not work.summed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in work.whole.items()) or "transformers has no plan"
        raise StartError(
            f"{type(model).__name__} cannot be divided over {shard.size} ranks ({reasons}); serve it with --tp-size 1"
        )
    gathered = work.divide_head()
    query, key_value = work.heads_held or (range(shape.heads), range(shape.kv_heads))
    return Division(
        shard=shard,
        parts=work.parts,
        summed=tuple(work.summed),
        gathered=gathered,
        embedding=work.divide_embedding(head_is_divided=gathered is not None),
        experts=tuple(work.experts),
        # Of a sum's bias there must be one.
        dropped=frozenset(name for name in work.summed_biases if shard.rank),
        heads=len(query),
        kv_heads=len(key_value),
        whole=tuple(f"{name} ({reason})" for name, reason in work.whole.items()),
    )


def cut(model: PreTrainedModel, division: Division) -> None:
    """Makes a model without weights as small as the rank's part of it."""
    for name, part in division.parts.items():
        module_name, _, parameter = name.rpartition(".")
        module = model.get_submodule(module_name)
        size = list(getattr(module, parameter).shape)
        size[part.dim] = part.width
        # A parameter of its own, also where it was tied to another.
        setattr(module, parameter, torch.nn.Parameter(torch.empty(size, dtype=model.dtype, device="meta")))
    for name in division.dropped:
        module_name, _, parameter = name.rpartition(".")
        setattr(model.get_submodule(module_name), parameter, None)
    model.requires_grad_(False)


def span(count: int, rank: int, size: int) -> range:
    """A rank's part of `count` things; where they do not divide evenly, the first ranks have one more."""
    least, more = divmod(count, size)
    begin = rank * least + min(rank, more)
    return range(begin, begin + least + (rank < more))


def head_spans(shape: Architecture, rank: int, size: int) -> tuple[range, range] | None:
    """A rank's query heads and kv heads; None where some rank would have none.

    With fewer kv heads than ranks, several ranks hold the same one and divide the query heads that attend to it.
    """
    group = shape.heads // shape.kv_heads
    if shape.kv_heads >= size:
        held = span(shape.kv_heads, rank, size)
        return range(held.start * group, held.stop * group), held
    head_of = [other * shape.kv_heads // size for other in range(size)]
    if group < max(head_of.count(head) for head in head_of):
        return None
    head = head_of[rank]
    mine = span(group, rank - head_of.index(head), head_of.count(head))
    return range(head * group + mine.start, head * group + mine.stop), range(head, head + 1)


@dataclass
class _Work:
    """A division while it is made."""

    model: PreTrainedModel
    shape: Architecture
    shard: Shard
    parts: dict[str, Part] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    summed_biases: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    heads_held: tuple[range, range] | None = None

    def __post_init__(self) -> None:
        self._plan: dict[str, str] = dict(self.model.tp_plan or {})
        self._head_spans = head_spans(self.shape, self.shard.rank, self.shard.size)

    def divide_blocks(self) -> None:
        """Attention and MLPs."""
        for name, layers in self._blocks():
            reason = self._unlike(layers)
            if not reason and hasattr(self.model.get_submodule(name), "layer_idx"):
                reason = self._divide_attention(layers)
            elif not reason:
                reason = self._divide_mlp(layers)
            if reason:
                self.whole.setdefault(_wildcard(name), reason)

    def divide_experts(self) -> None:
        """Where all experts of a layer lie in two tensors: gate and up, and down."""
        for name, module in self.model.named_modules():
            style = self._plan.get(_wildcard(name), "")
            if style.startswith(_OTHER_EXPERTS) and (reason := self._divide_layer_of_experts(name, module, style)):
                self.whole.setdefault(_wildcard(name), reason)

    def divide_embedding(self, *, head_is_divided: bool) -> str:
        """The input embedding's name, where it is divided; one that is also the output layer only as that is."""
        embedding = self.model.get_input_embeddings()
        name: str = next(name for name, module in self.model.named_modules() if module is embedding)
        tied = self.model.config.tie_word_embeddings
        lanes = self._lanes(embedding.num_embeddings)
        if self._plan.get(name) != _EMBEDDING or lanes is None or (tied and not head_is_divided):
            self.whole.setdefault(name, "as the output layer" if tied else "the vocabulary is not divided")
            return ""
        if not packing.gathers(embedding):
            self.whole.setdefault(name, f"a {type(embedding).__name__} does more than gather")
            return ""
        held = lanes[self.shard.rank]
        self.parts[f"{name}.weight"] = Part(0, held.start, held.stop, embedding.num_embeddings)
        return name

    def divide_head(self) -> Gathered | None:
        """The output layer, where it is divided."""
        for name, layer in self.model.named_modules():
            if layer is self.model.get_output_embeddings() and self._plan.get(name) == _HEAD:
                lanes = self._lanes(layer.out_features)
                if lanes is not None:
                    self._outputs(name, layer, lanes[self.shard.rank])
                    return Gathered(name, tuple(len(part) for part in lanes))
        return None

    def _blocks(self) -> Iterator[tuple[str, dict[str, torch.nn.Linear]]]:
        """Modules that the plan divides, with all linear layers among their children."""
        for name, module in self.model.named_modules():
            layers = {f"{name}.{child}": layer for child, layer in module.named_children() if _is_linear(layer)}
            if name and any(_wildcard(layer) in self._plan for layer in layers):
                yield name, layers

    def _divide_layer_of_experts(self, name: str, module: torch.nn.Module, style: str) -> str:
        """Empty, or why not."""
        tensors = dict(module.named_parameters())
        styles = [self._plan.get(_wildcard(f"{name}.{part}"), "none") for part in sorted(tensors)]
        if tensors.keys() != _EXPERT_PARTS or style != _EXPERTS or styles != [_ROWWISE, _EXPERTS_IN]:
            return f"style {style} with {', '.join(sorted(tensors))} as {', '.join(styles)}"
        into, out = tensors["gate_up_proj"].shape, tensors["down_proj"].shape
        width = out[2]
        if into != (out[0], 2 * width, out[1]):
            return f"their tensors are {list(into)} and {list(out)}"
        if (lanes := self._lanes(width)) is None:
            return f"their width is {width}"
        held = lanes[self.shard.rank]
        self.parts[f"{name}.gate_up_proj"] = Part(1, held.start, held.stop, width, blocks=2)
        self.parts[f"{name}.down_proj"] = Part(2, held.start, held.stop, width)
        self.experts.append(name)
        return ""

    def _unlike(self, layers: Mapping[str, torch.nn.Linear]) -> str:
        """Why layers are not the way in and the way out of one block; empty where they are."""
        styles = [self._plan.get(_wildcard(name), "none") for name in layers]
        if sorted(set(styles)) != [_COLWISE, _ROWWISE] or styles.count(_ROWWISE) != 1:
            return f"its layers' styles are {', '.join(styles)}"
        return ""

    def _divide_attention(self, layers: Mapping[str, torch.nn.Linear]) -> str:
        shape = self.shape
        if self._head_spans is None:
            return f"{shape.heads} query heads on {shape.kv_heads} kv heads"
        query, key_value = self._head_spans
        # Wherever a tensor may be of either kind, the two have as many heads.
        known = {shape.heads * shape.head_dim: (query, shape.head_dim)}
        known.setdefault(shape.kv_heads * shape.head_dim, (key_value, shape.head_dim))
        if shape.heads == shape.kv_heads:  # query, key and value in one tensor, head by head
            known.setdefault(3 * shape.heads * shape.head_dim, (query, 3 * shape.head_dim))
        (out,) = [name for name in layers if self._plan[_wildcard(name)] == _ROWWISE]
        ways_in = {name: layer for name, layer in layers.items() if name != out}
        if layers[out].in_features != shape.heads * shape.head_dim or any(
            layer.out_features not in known for layer in ways_in.values()
        ):
            return "its layers are not as wide as its heads"
        for name, layer in ways_in.items():
            self._outputs(name, layer, _times(*known[layer.out_features]))
        self._inputs(out, layers[out], _times(query, shape.head_dim))
        self.heads_held = self._head_spans
        return ""

    def _divide_mlp(self, layers: Mapping[str, torch.nn.Linear]) -> str:
        (out,) = [name for name in layers if self._plan[_wildcard(name)] == _ROWWISE]
        width = layers[out].in_features
        if any(layer.out_features != width for name, layer in layers.items() if name != out):
            return "its layers are not of one width"
        if (lanes := self._lanes(width)) is None:
            return f"its width is {width}"
        held = lanes[self.shard.rank]
        for name, layer in layers.items():
            if name == out:
                self._inputs(name, layer, held)
            else:
                self._outputs(name, layer, held)
        return ""

    def _lanes(self, width: int) -> list[range] | None:
        """Each rank's part of a width, in whole panels of the kernels but for the last; None: too few panels."""
        panels = -(-width // tile.OUTPUTS)
        if panels < self.shard.size:
            return None
        held = [_times(span(panels, rank, self.shard.size), tile.OUTPUTS) for rank in range(self.shard.size)]
        return [range(part.start, min(part.stop, width)) for part in held]

    def _outputs(self, name: str, layer: torch.nn.Linear, held: range) -> None:
        for parameter, tensor in layer.named_parameters(recurse=False):
            self.parts[f"{name}.{parameter}"] = Part(0, held.start, held.stop, len(tensor))

    def _inputs(self, name: str, layer: torch.nn.Linear, held: range) -> None:
        self.parts[f"{name}.weight"] = Part(1, held.start, held.stop, layer.in_features)
        self.summed.append(name)
        if layer.bias is not None:
            self.summed_biases.append(f"{name}.bias")


def _is_linear(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear


def _times(indices: range, unit: int) -> range:
    return range(indices.start * unit, indices.stop * unit)


def _wildcard(name: str) -> str:
    """A module's name as plans spell it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
