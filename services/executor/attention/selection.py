"""Chooses the attention backend: an ordered list, and the reasons of those passed over."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface

from services.common.errors import StartError
from services.executor.attention.contract import AttentionBackend, AttentionStep, Needs, Scores
from services.executor.attention.cpu import CpuBackend

BACKENDS: tuple[AttentionBackend, ...] = (CpuBackend(),)
"""The best first."""

IMPLEMENTATION = "triptych"
"""attn_implementation of every model served."""

_WITHOUT_EFFECT = frozenset({"dropout", "output_router_logits", "position_ids", "use_cache"})
"""What else models pass on: nothing is dropped out, and positions are in queries and keys already."""

log = logging.getLogger(__name__)


def survey(needs: Needs) -> dict[str, list[str]]:
    """Each backend, the best first, with its reasons for not serving `needs`; none where it does."""
    return {backend.name: backend.refusals(needs) for backend in BACKENDS}


def select(needs: Needs) -> AttentionBackend:
    """The first backend that serves `needs`. Raises StartError with the whole table when none does."""
    passed_over: list[str] = []
    for backend in BACKENDS:
        reasons = backend.refusals(needs)
        if not reasons:
            log.info("attention: %s%s", backend.name, "".join(f"; not {line}" for line in passed_over))
            return backend
        passed_over.append(f"{backend.name}: {', '.join(reasons)}")
    raise StartError(f"no attention backend serves this model here: {'; '.join(passed_over)}")


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_step: AttentionStep,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls a layer: query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim].

    `sliding_window` and `softcap` are the layer's own. Raises NotImplementedError for anything else that would change
    what is computed, so that no model is served wrongly.
    """
    if unknown := sorted(name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None):
        raise NotImplementedError(f"{type(module).__name__} passes {', '.join(unknown)} to attention; not served")
    projected = torch.cat([one[0].transpose(0, 1) for one in (query, key, value)], dim=1)
    out = projected.new_empty(query.shape[2], query.shape[1], query.shape[3])
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    attention_step.attend(layer, projected, None, Scores(scaling, sliding_window, softcap), out)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _attend)
