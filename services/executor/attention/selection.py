"""Chooses the attention backend: an ordered list, and the reasons of those passed over."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface

from services.common.errors import StartError
from services.executor.attention.contract import AttentionBackend, AttentionStep, Needs, Scores
from services.executor.attention.cpu import CpuBackend
from services.executor.attention.cuda import CudaBackend
from services.executor.attention.sdpa import SdpaBackend

BACKENDS: tuple[AttentionBackend, ...] = (CpuBackend(), CudaBackend(), SdpaBackend())
"""The best first."""

IMPLEMENTATION = "triptych"
"""attn_implementation of every model served."""

_WITHOUT_EFFECT = frozenset({"dropout", "output_router_logits", "position_ids", "use_cache"})
"""What else models pass on: nothing is dropped out, and positions are in queries and keys already."""

log = logging.getLogger(__name__)


def survey(needs: Needs) -> dict[str, list[str]]:
    """Each backend, the best first, with its reasons for not serving `needs`; none where it does."""
    return {backend.name: backend.refusals(needs) for backend in BACKENDS}


def select(needs: Needs, name: str | None = None) -> AttentionBackend:
    """The first backend that serves `needs`, or the one of that name. Raises StartError with the reasons, of all
    backends or of that one, where it cannot be."""
    if name is not None:
        return _named(name, needs)
    passed_over: list[str] = []
    for backend in BACKENDS:
        reasons = backend.refusals(needs)
        if not reasons:
            log.info("attention: %s%s", backend.name, "".join(f"; not {line}" for line in passed_over))
            return backend
        passed_over.append(f"{backend.name}: {', '.join(reasons)}")
    raise StartError(f"no attention backend serves this model here: {'; '.join(passed_over)}")


def _named(name: str, needs: Needs) -> AttentionBackend:
    backend = next((one for one in BACKENDS if one.name == name), None)
    if backend is None:
        known = ", ".join(one.name for one in BACKENDS)
        raise StartError(f"--attention-backend is {name}, which there is not; there are {known}")
    if reasons := backend.refusals(needs):
        raise StartError(f"--attention-backend is {name}, which cannot serve this model here: {', '.join(reasons)}")
    log.info("attention: %s, as --attention-backend says", name)
    return backend


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
