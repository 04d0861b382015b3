"""The contract of an attention backend: what it declares, and what it is called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch

from services.executor.architecture import Architecture


@dataclass(frozen=True)
class Needs:
    """What a model on a device asks of a backend."""

    device: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    windows: bool = False
    """Layers whose tokens see a limited number of tokens before them."""
    soft_caps: bool = False
    """Layers that bend their scores by a tanh."""

    @classmethod
    def of(cls, shape: Architecture, *, device: str, dtype: torch.dtype, block_tokens: int) -> Self:
        """Of a model whose weights and KV are in `dtype`."""
        return cls(
            device=device,
            dtype=dtype,
            kv_dtype=dtype,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=block_tokens,
            windows=shape.windows,
            soft_caps=shape.soft_caps,
        )


@dataclass(frozen=True)
class Scores:
    """How a layer makes attention scores out of queries and keys."""

    scale: float
    window_tokens: int | None = None
    """Tokens a query sees, its own included; None: all before it."""
    soft_cap: float | None = None
    """A score s becomes soft_cap * tanh(s / soft_cap); None: it stays."""


@dataclass(frozen=True, eq=False)
class KvCache:
    """Keys and values of all layers: [num_blocks, kv_heads, block_tokens, head_dim] a layer. Block 0 is null."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class StepShape:
    """Where a step's tokens lie; the same for all layers. All int64 on the CPU but `tables`, int32."""

    tables: torch.Tensor
    """[slots, entries] block ids; entries past a row's context are not read."""
    slots: torch.Tensor
    """[rows] a row's line in `tables`."""
    query_starts: torch.Tensor
    """[rows + 1] where a row's tokens begin in the flat batch."""
    contexts: torch.Tensor
    """[rows] tokens of a row, the step's included."""
    items: torch.Tensor
    """[n, 4] the backend's own cut of the work; empty where it makes none."""


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Travels through the model's forward call as the keyword argument `attention_step`."""

    backend: AttentionBackend
    cache: KvCache
    shape: StepShape


class AttentionBackend(Protocol):
    """Writes new keys and values into blocks and attends to a row's tokens, causally."""

    name: str

    def refusals(self, needs: Needs) -> list[str]:
        """Why this backend cannot serve `needs`; empty where it can."""

    def cut(self, query_starts: torch.Tensor, contexts: torch.Tensor, needs: Needs) -> torch.Tensor:
        """StepShape.items of a step, made once and used by every layer."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        shape: StepShape,
        scores: Scores,
    ) -> torch.Tensor:
        """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] -> like query.

        `keys` and `values` are the layer's KV tensors and are written.
        """
