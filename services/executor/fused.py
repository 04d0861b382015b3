"""Modules that compute what transformers' do, in fewer passes over memory and fewer calls of Python.

Each has `forward`, as the module it stands for, and `compute`, by which a fused layer calls it on its own buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu import elementwise
from services.executor.attention.contract import AttentionStep, Rotary, Scores
from services.executor.packing import PackedLinear
from services.executor.scratch import Scratch

Float32s = npt.NDArray[np.float32]
Angles = tuple[torch.Tensor, torch.Tensor]
"""transformers' position_embeddings: cos and sin, [1, tokens, angles] each."""


class FusedNorm(torch.nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, gain: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(gain, requires_grad=False)
        self.width = len(gain)
        self.epsilon = epsilon
        self._gain = gain.numpy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] float32 -> the same shape."""
        rows = x.reshape(-1, self.width).contiguous()
        out = torch.empty(rows.shape)
        self.compute(rows.numpy(), out.numpy())
        return out.view(x.shape)

    def compute(self, x: Float32s, out: Float32s, added: Float32s | None = None) -> None:
        """x [rows, width]; it becomes x + added first, where something is added. `out` may be x."""
        elementwise.rms_norm(x, self._gain, self.epsilon, out, added)


class FusedMlp(torch.nn.Module):
    """down(act(gate(x)) * up(x)): gate and up are one product; with SiLU their product is one pass."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, act: torch.nn.Module, scratch: Scratch) -> None:
        super().__init__()
        self.width = gate_up.weights.depth
        self.gate_up = gate_up
        self.down_proj = down
        self.act = act
        self.is_silu = type(act).__name__ in ("SiLUActivation", "SiLU")
        self._scratch = scratch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] float32 -> the same shape."""
        rows = x.reshape(-1, self.width).contiguous()
        out = torch.empty(len(rows), self.down_proj.weights.outputs)
        self.compute(rows.numpy(), out.numpy())
        return out.view(*x.shape[:-1], out.shape[-1])

    def compute(self, x: Float32s, out: Float32s) -> None:
        """x [rows, inputs], out [rows, outputs]."""
        width = self.down_proj.weights.depth
        gate_up = self._scratch.take("gate_up", len(x), 2 * width)
        inner = self._scratch.take("inner", len(x), width)
        self.gate_up.compute(x, gate_up.array)
        if self.is_silu:
            elementwise.silu_multiply(gate_up.array, inner.array)
        else:
            torch.mul(self.act(gate_up.tensor[:, :width]), gate_up.tensor[:, width:], out=inner.tensor)
        self.down_proj.compute(inner.array, out)


@dataclass(frozen=True)
class Heads:
    """Of an attention module."""

    queries: int
    kv: int
    dim: int
    angles: int
    """numbers of a head that are rotated"""


class FusedAttention(torch.nn.Module):
    """Queries, keys and values are one product; norms and rotation of heads are left to the attention backend."""

    def __init__(
        self,
        qkv: PackedLinear,
        out: PackedLinear,
        heads: Heads,
        layer: int,
        scores: Scores,
        norms: tuple[FusedNorm, FusedNorm] | None,
        scratch: Scratch,
    ) -> None:
        super().__init__()
        self.width = qkv.weights.depth
        self.angles = heads.angles
        self.qkv_proj = qkv
        self.o_proj = out
        q_norm, k_norm = norms or (None, None)
        self.q_norm: FusedNorm | None = q_norm
        self.k_norm: FusedNorm | None = k_norm
        self.heads = heads
        self.layer = layer
        self.scores = scores
        self._scratch = scratch

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles,
        attention_mask: torch.Tensor | None = None,
        *,
        attention_step: AttentionStep,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, tokens, width] float32 -> [1, tokens, outputs]; a mask is not needed for a causal model."""
        rows = hidden_states[0].contiguous()
        out = torch.empty(len(rows), self.o_proj.weights.outputs)
        self.compute(rows.numpy(), position_embeddings, attention_step, out.numpy())
        return out[None], None

    def compute(self, x: Float32s, angles: Angles, step: AttentionStep, out: Float32s) -> None:
        """x [tokens, width], out [tokens, outputs]."""
        heads = self.heads
        projected = self._scratch.take("projected", len(x), self.qkv_proj.weights.outputs)
        attended = self._scratch.take("attended", len(x), heads.queries * heads.dim)
        self.qkv_proj.compute(x, projected.array)
        step.attend(
            self.layer,
            projected.tensor.view(len(x), heads.queries + 2 * heads.kv, heads.dim),
            self._rotary(angles),
            self.scores,
            attended.tensor.view(len(x), heads.queries, heads.dim),
        )
        self.o_proj.compute(attended.array, out)

    def _rotary(self, angles: Angles) -> Rotary:
        cos, sin = angles[0][0], angles[1][0]
        if self.q_norm is None or self.k_norm is None:
            return Rotary(cos, sin)
        return Rotary(cos, sin, self.q_norm.weight, self.k_norm.weight, self.q_norm.epsilon)


@dataclass(frozen=True)
class Norms:
    """Of a layer: before its two parts and, in some families, after them."""

    before_attention: FusedNorm
    after_attention: FusedNorm | None
    before_mlp: FusedNorm
    after_mlp: FusedNorm | None


_NORMS = {
    2: ("input_layernorm", "post_attention_layernorm"),
    4: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names that transformers gives a layer's norms, by how many there are, in the order in which they run."""


class FusedLayer(torch.nn.Module):
    """x + attention(norm(x)), then the same with the MLP, in one call; of the MLP anything may be kept."""

    def __init__(self, norms: Norms, attention: FusedAttention, mlp: torch.nn.Module, scratch: Scratch) -> None:
        super().__init__()
        self.width = attention.width
        self.self_attn = attention
        self.mlp = mlp
        held = [norm for norm in vars(norms).values() if norm is not None]
        for name, norm in zip(_NORMS[len(held)], held, strict=True):
            self.add_module(name, norm)
        self.norms = norms
        self._scratch = scratch

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: Angles,
        attention_step: AttentionStep,
        **others: Any,
    ) -> torch.Tensor:
        """hidden_states [1, tokens, width] float32, contiguous; it is changed to the result, and returned."""
        stream = hidden_states[0]
        x = stream.numpy()
        normed = self._scratch.take("normed", len(x), self.width)
        part = self._scratch.take("part", len(x), self.width)
        self.norms.before_attention.compute(x, normed.array)
        self.self_attn.compute(normed.array, position_embeddings, attention_step, part.array)
        if self.norms.after_attention is not None:
            self.norms.after_attention.compute(part.array, part.array)
        self.norms.before_mlp.compute(x, normed.array, added=part.array)
        if isinstance(self.mlp, FusedMlp):
            self.mlp.compute(normed.array, part.array)
        else:
            part.tensor.copy_(self.mlp(normed.tensor[None])[0])
        if self.norms.after_mlp is not None:
            self.norms.after_mlp.compute(part.array, part.array)
        stream.add_(part.tensor)
        return hidden_states
