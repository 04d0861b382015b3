"""The contract of attention written out in torch, for one prompt from its start and without a cache."""

from __future__ import annotations

import torch

from services.executor.attention.contract import Rotary, Scores


class ReferenceStep:
    """Computes what any backend must, and remembers how a layer wanted it."""

    def __init__(self) -> None:
        self.scores = Scores(1.0)
        """Of the last call."""

    def attend(
        self, layer: int, projected: torch.Tensor, rotary: Rotary | None, scores: Scores, out: torch.Tensor
    ) -> None:
        """As AttentionStep.attend; every token of the one row is new."""
        self.scores = scores
        heads = out.shape[1]
        kv_heads = (projected.shape[1] - heads) // 2
        q, k, v = torch.split(projected, [heads, kv_heads, kv_heads], dim=1)
        if rotary is not None:
            q, k = placed(q, rotary.q_gain, rotary), placed(k, rotary.k_gain, rotary)
        k, v = (one.repeat_interleave(heads // kv_heads, dim=1) for one in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q, k) * scores.scale
        if scores.soft_cap is not None:
            weights = scores.soft_cap * torch.tanh(weights / scores.soft_cap)
        at = torch.arange(len(q), device=q.device)
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (scores.window_tokens or len(q)))
        weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v))


def turned(projected: torch.Tensor, heads: int, rotary: Rotary) -> torch.Tensor:
    """`projected` [tokens, heads + 2 * kv_heads, head_dim] with norms and rotation done, in float32 arithmetic."""
    kv_heads = (projected.shape[1] - heads) // 2
    q, k, v = torch.split(projected.float(), [heads, kv_heads, kv_heads], dim=1)
    done = torch.cat([placed(q, rotary.q_gain, rotary), placed(k, rotary.k_gain, rotary), v], dim=1)
    return done.to(projected.dtype)


def placed(x: torch.Tensor, gain: torch.Tensor | None, rotary: Rotary) -> torch.Tensor:
    """Heads [tokens, heads, head_dim] after the norm, where there is a gain, and the rotation."""
    if gain is not None:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], gain.to(x.dtype) + rotary.gain_offset, rotary.epsilon)
    angles = rotary.cos.shape[1]
    moved, kept = x[..., :angles], x[..., angles:]
    first, second = moved.chunk(2, dim=-1)
    moved = moved * rotary.cos[:, None] + torch.cat([-second, first], dim=-1) * rotary.sin[:, None]
    return torch.cat([moved, kept], dim=-1)
