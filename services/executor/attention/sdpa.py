"""Attention by torch alone, row by row over gathered pages: slow, on any device, and what others are compared with."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import torch

from services.executor.attention.contract import (
    AttentionBackend,
    Needs,
    Rotary,
    Scores,
    StepShape,
    dtype_name,
    shared_refusals,
)
from services.executor.attention.reference import turned
from services.executor.device import Device

_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SdpaBackend(AttentionBackend):
    """torch's scaled_dot_product_attention, and its formula written out where scores are bent by a soft cap.

    Reads the step's tables back from the device, so that the host waits in every layer.
    """

    name = "torch-sdpa"
    graphs = False

    def refusals(self, needs: Needs) -> list[str]:
        reasons = []
        if not needs.dtype.is_floating_point:
            reasons.append(f"dtype is a floating-point type, not {dtype_name(needs.dtype)}")
        return reasons + shared_refusals(needs, kv_dtypes=_KV_DTYPES, graphs=self.graphs)

    def allocate(self, needs: Needs, layers: int, num_blocks: int, on: Device | None = None) -> SdpaKvCache:
        return SdpaKvCache(needs, layers, num_blocks, torch.device("cpu") if on is None else on.torch_device)


class SdpaKvCache:
    """[keys and values, layers, num_blocks, block_tokens, kv_heads, head_dim]."""

    def __init__(self, needs: Needs, layers: int, num_blocks: int, device: torch.device) -> None:
        shape = (2, layers, num_blocks, needs.block_tokens, needs.kv_heads, needs.head_dim)
        self._stored = torch.empty(shape, dtype=needs.kv_dtype, device=device)
        self.needs = needs

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._stored.index_copy_(2, destinations, self._stored.index_select(2, sources))

    def begin(self, shape: StepShape) -> SdpaStep:
        return SdpaStep(self, shape)

    def calibrating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tokens(self, layer: int) -> torch.Tensor:
        """[keys and values, num_blocks * block_tokens, kv_heads, head_dim], a view."""
        return self._stored[:, layer].flatten(1, 2)


class SdpaStep:
    """A step's rows, and where in the cache their tokens lie."""

    def __init__(self, cache: SdpaKvCache, shape: StepShape) -> None:
        self._cache = cache
        starts, contexts = shape.query_starts.tolist(), shape.contexts.tolist()
        self._rows = list(itertools.pairwise(starts))
        block_tokens = cache.needs.block_tokens
        self._places = []
        for slot, context in zip(shape.slots.tolist(), contexts, strict=True):
            blocks = shape.tables[slot, : -(-context // block_tokens)].long()
            offsets = torch.arange(block_tokens, device=blocks.device)
            self._places.append((blocks[:, None] * block_tokens + offsets).flatten()[:context])

    def attend(
        self, layer: int, projected: torch.Tensor, rotary: Rotary | None, scores: Scores, out: torch.Tensor
    ) -> None:
        heads = out.shape[1]
        if rotary is not None:
            projected = turned(projected, heads, rotary)
        kv_heads = self._cache.needs.kv_heads
        queries, fresh = projected[:, :heads], torch.stack(torch.split(projected[:, heads:], kv_heads, dim=1))
        stored = self._cache.tokens(layer)
        for (begin, end), places in zip(self._rows, self._places, strict=True):
            stored[:, places[len(places) - (end - begin) :]] = fresh[:, begin:end].to(stored.dtype)
        # Only now, since a row may read blocks that another one fills in this step.
        for (begin, end), places in zip(self._rows, self._places, strict=True):
            keys, values = stored[:, places].to(projected.dtype)
            out[begin:end] = _row(queries[begin:end], keys, values, scores)


def _row(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> torch.Tensor:
    """queries [tokens, heads, head_dim], the last of the row; keys, values [context, kv_heads, head_dim]."""
    tokens, context = len(queries), len(keys)
    at = torch.arange(context - tokens, context, device=queries.device)[:, None]
    distance = at - torch.arange(context, device=queries.device)
    seen = (distance >= 0) & (distance < (scores.window_tokens or context))
    q = queries.transpose(0, 1)
    k, v = (one.transpose(0, 1).repeat_interleave(q.shape[0] // keys.shape[1], dim=0) for one in (keys, values))
    if scores.soft_cap is None:
        made = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=scores.scale
        )[0]
    else:
        bent = scores.soft_cap * torch.tanh(q.float() @ k.float().mT * (scores.scale / scores.soft_cap))
        made = (bent.masked_fill(~seen, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)
    return made.transpose(0, 1)
