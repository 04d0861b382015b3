"""Modules that compute on a device what transformers' do, in fewer launches: one product for queries, keys and values,
one for gate and up, heads normed and turned by the kernel that writes them into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.executor.attention.contract import AttentionStep, Rotary, Scores
from services.executor.device_elementwise import Elementwise
from services.executor.fused import Heads

Angles = tuple[torch.Tensor, torch.Tensor]
"""transformers' position_embeddings: cos and sin, [1, tokens, angles] each."""


class DeviceNorm(torch.nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, gain: torch.Tensor, epsilon: float, offset: float, elementwise: Elementwise) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(gain, requires_grad=False)
        self.width = len(gain)
        self.epsilon = epsilon
        self.offset = offset
        self._elementwise = elementwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> the same shape."""
        norm = self._elementwise.norm(self.epsilon, self.offset)
        normed: torch.Tensor = norm(x.reshape(-1, self.width), self.weight)
        return normed.view(x.shape)


class DeviceMlp(torch.nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self, gate_up: torch.nn.Linear, down: torch.nn.Linear, act: torch.nn.Module, elementwise: Elementwise
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down
        self.act_fn = act
        self._elementwise = elementwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] -> [..., outputs]."""
        gate_up = self.gate_up(x.reshape(-1, x.shape[-1]))
        out: torch.Tensor = self.down_proj(self._elementwise.gated(self.act_fn)(gate_up))
        return out.view(*x.shape[:-1], out.shape[-1])


class DeviceAttention(torch.nn.Module):
    """Norms and rotation of heads are left to the attention backend."""

    def __init__(
        self,
        qkv: torch.nn.Linear,
        out: torch.nn.Linear,
        heads: Heads,
        layer: int,
        scores: Scores,
        norms: Sequence[DeviceNorm],
    ) -> None:
        """`norms` of query and of key heads, or none."""
        super().__init__()
        self.qkv_proj = qkv
        self.o_proj = out
        q_norm, k_norm = norms or (None, None)
        self.q_norm: DeviceNorm | None = q_norm
        self.k_norm: DeviceNorm | None = k_norm
        self.heads = heads
        self.layer = layer
        self.scores = scores

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles,
        attention_mask: torch.Tensor | None = None,
        *,
        attention_step: AttentionStep,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, tokens, width] -> [1, tokens, outputs]; a mask is not needed for a causal model."""
        heads, tokens = self.heads, hidden_states.shape[1]
        projected = self.qkv_proj(hidden_states[0]).view(tokens, -1, heads.dim)
        attended = projected.new_empty(tokens, heads.queries, heads.dim)
        attention_step.attend(self.layer, projected, self._rotary(position_embeddings), self.scores, attended)
        return self.o_proj(attended.view(1, tokens, -1)), None

    def _rotary(self, angles: Angles) -> Rotary:
        cos, sin = (one[0].float() for one in angles)
        if self.q_norm is None or self.k_norm is None:
            return Rotary(cos, sin)
        norm = self.q_norm
        return Rotary(cos, sin, norm.weight, self.k_norm.weight, norm.epsilon, norm.offset)


class DeviceLayer(torch.nn.Module):
    """x + attention(norm(x)), then the same with the MLP, which may be anything; in some families both are normed
    before they are added. All norms have one epsilon and offset."""

    def __init__(
        self, attention: torch.nn.Module, mlp: torch.nn.Module, norms: dict[str, DeviceNorm], elementwise: Elementwise
    ) -> None:
        """`norms` by transformers' names."""
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        for name, norm in norms.items():
            self.add_module(name, norm)
        first, second, *more = norms.values()
        self.width = first.width
        after_attention, after_mlp = (norm.weight for norm in more) if more else (None, None)
        # In a tuple, which registers them no second time.
        self._gains = (first.weight, second.weight, after_attention, after_mlp)
        self._elementwise = elementwise
        self._epsilon, self._offset = first.epsilon, first.offset

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: Angles, attention_step: AttentionStep, **others: Any
    ) -> torch.Tensor:
        """hidden_states [1, tokens, width] -> the same shape."""
        ways, kind = self._elementwise, (self._epsilon, self._offset)
        before_attention, before_mlp, after_attention, after_mlp = self._gains
        x = hidden_states[0]
        normed = ways.norm(*kind)(x, before_attention)
        attended, _ = self.self_attn(
            normed[None], position_embeddings=position_embeddings, attention_step=attention_step, **others
        )
        more = () if after_attention is None else (after_attention,)
        x, normed = ways.add_norm(*kind, after=bool(more))(x, attended[0], before_mlp, *more)
        part = self.mlp(normed[None])[0]
        x = x + part if after_mlp is None else ways.add(*kind)(x, part, after_mlp)
        out: torch.Tensor = x[None]
        return out


class WideAngles(torch.nn.Module):
    """A model's rotary embedding, whose cosines and sines stay in float32 whatever the model is in."""

    def __init__(self, rotary: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        self.rotary = rotary
        self._like = torch.nn.Buffer(torch.empty(1, 1, 1, dtype=torch.float32, device=device), persistent=False)

    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """As `rotary`'s, which reads of x its type and device alone."""
        return self.rotary(self._like, *arguments, **options)
