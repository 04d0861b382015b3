"""The contract of an attention backend: what it declares, and what it is called with."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from kernels.instances import FP8, Instance
from services.executor.architecture import Architecture
from services.executor.device import Device


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
    capability: int | None = None
    """Compute capability of a CUDA device, 90 for 9.0."""
    graphs: bool = False
    """Steps must be capturable in CUDA graphs."""

    @classmethod
    def of(
        cls,
        shape: Architecture,
        *,
        device: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        block_tokens: int,
        capability: int | None = None,
        graphs: bool = False,
    ) -> Self:
        """Of a model computed in `dtype`."""
        return cls(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=block_tokens,
            windows=shape.windows,
            soft_caps=shape.soft_caps,
            capability=capability,
            graphs=graphs,
        )

    @property
    def is_scaled(self) -> bool:
        """Whether each key and value of a head has a float32 scale beside it, as integers need."""
        return not self.kv_dtype.is_floating_point

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values, and their scales."""
        vector_bytes = self.head_dim * self.kv_dtype.itemsize + (torch.float32.itemsize if self.is_scaled else 0)
        return 2 * self.kv_heads * self.block_tokens * vector_bytes


@dataclass(frozen=True)
class Scores:
    """How a layer makes attention scores out of queries and keys."""

    scale: float
    window_tokens: int | None = None
    """Tokens a query sees, its own included; None: all before it."""
    soft_cap: float | None = None
    """A score s becomes soft_cap * tanh(s / soft_cap); None: it stays."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """What becomes of queries and keys before they meet: an RMSNorm a head where there are gains, then a rotation.

    Of n angles a token, the first n numbers of a head are rotated, number i together with number i + n/2.
    """

    cos: torch.Tensor
    """[tokens, angles] float32"""
    sin: torch.Tensor
    q_gain: torch.Tensor | None = None
    """[head_dim] in the model's dtype"""
    k_gain: torch.Tensor | None = None
    epsilon: float = 0.0
    gain_offset: float = 0.0
    """added to the gains: 1 where a family stores them around 0"""


@dataclass(frozen=True, eq=False)
class StepShape:
    """Where a step's tokens lie; the same for all layers. On a CPU all int64 but `tables`, int32."""

    tables: torch.Tensor
    """[slots, entries] block ids; entries past a row's context are not read."""
    slots: torch.Tensor
    """[rows] a row's line in `tables`."""
    query_starts: torch.Tensor
    """[rows + 1] where a row's tokens begin in the flat batch."""
    contexts: torch.Tensor
    """[rows] tokens of a row, the step's included."""


@dataclass(frozen=True, eq=False)
class DeviceStepShape(StepShape):
    """A step on an accelerator, all int32 there, and what the host knows of it: nothing need be read back.

    A step that is captured in a graph is replayed with other slots and contexts, but never with a longer context than
    `most_context` or a row of more tokens than `most_tokens`.
    """

    places: torch.Tensor
    """[tokens] int64 block * block_tokens + offset, where a token's key and value go"""
    leading: int
    """rows from the first on that have one token each"""
    most_tokens: int
    """of the other rows; 0 where there are none"""
    most_context: int


class AttentionStep(Protocol):
    """A backend at work on one step. Travels through the model's forward call as the keyword `attention_step`."""

    def attend(
        self, layer: int, projected: torch.Tensor, rotary: Rotary | None, scores: Scores, out: torch.Tensor
    ) -> None:
        """Writes the keys and values of a layer's new tokens into its blocks and attends, causally, to each row's.

        projected [tokens, heads + 2 * kv_heads, head_dim]: a token's query heads, its key heads, its value heads, as
        the layer's products gave them; with `rotary` None they are what attends and is kept. out [tokens, heads,
        head_dim] is written. In the model's dtype, contiguous. `projected` may be overwritten.
        """


class KvCache(Protocol):
    """Keys and values of all layers in blocks, laid out as a backend likes. Block 0 is null."""

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies blocks [n] of all layers; all sources are read first."""

    def begin(self, shape: StepShape) -> AttentionStep:
        """What a step's layers call."""

    def calibrating(self) -> AbstractContextManager[None]:
        """The steps within are typical ones; where keys and values are kept with fixed scales, they set these."""


def shared_refusals(needs: Needs, *, kv_dtypes: Collection[torch.dtype], graphs: bool) -> list[str]:
    """What a backend that keeps KV in one of `kv_dtypes` cannot serve; `graphs`: its steps can be captured."""
    reasons = []
    if needs.kv_dtype not in kv_dtypes:
        reasons.append(f"kv_dtype is {_either(kv_dtypes)}, not {dtype_name(needs.kv_dtype)}")
    if needs.heads % needs.kv_heads:
        reasons.append(f"{needs.heads} query heads are no multiple of {needs.kv_heads} kv heads")
    if needs.graphs and not graphs:
        reasons.append("its steps cannot be captured in CUDA graphs")
    return reasons


def _either(kv_dtypes: Collection[torch.dtype]) -> str:
    names = [dtype_name(dtype) for dtype in kv_dtypes]
    return f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names)


def dtype_name(dtype: torch.dtype) -> str:
    """As people, config.json and the kernels know it."""
    return FP8 if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


class AttentionBackend(Protocol):
    """Makes the KV tensors, writes new keys and values into their blocks and attends to a row's tokens, causally."""

    name: str
    graphs: bool
    """Its steps may be captured in CUDA graphs."""

    def refusals(self, needs: Needs) -> list[str]:
        """Why this backend cannot serve `needs`; empty where it can."""

    def instances(self, needs: Needs) -> list[Instance]:
        """CUDA kernels that it launches."""
        return []

    def allocate(self, needs: Needs, layers: int, num_blocks: int, on: Device | None = None) -> KvCache:
        """KV tensors on a device, None being the CPU; not initialized: no slot is read before it is written."""
