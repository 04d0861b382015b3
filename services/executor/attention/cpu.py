"""The CPU backend: numba's kernel as a torch operator, so that eager and compiled models see one op."""

from __future__ import annotations

import torch

from kernels.cpu import paged_attention
from services.executor.attention.contract import Needs, Scores, StepShape

_LIBRARY = torch.library.Library("triptych", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "paged_attention_cpu(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor tables,"
    " Tensor slots, Tensor query_starts, Tensor contexts, Tensor items, float scale,"
    " int window, float cap) -> Tensor"
)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    items: torch.Tensor,
    scale: float,
    window: int,
    cap: float,
) -> torch.Tensor:
    out = torch.empty(query.shape, dtype=query.dtype)
    paged_attention.attend(
        query.contiguous().numpy(),
        key.contiguous().numpy(),
        value.contiguous().numpy(),
        keys.numpy(),
        values.numpy(),
        tables.numpy(),
        slots.numpy(),
        query_starts.numpy(),
        contexts.numpy(),
        items.numpy(),
        paged_attention.float32(scale),
        window,
        paged_attention.float32(cap),
        out.numpy(),
    )
    return out


def _shape_only(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


_LIBRARY.impl("paged_attention_cpu", _run, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("triptych::paged_attention_cpu", _shape_only, lib=_LIBRARY)


class CpuBackend:
    """float32 on any CPU; any head size, block size, window, soft cap and whole number of query heads a kv head."""

    name = "cpu-numba"

    def refusals(self, needs: Needs) -> list[str]:
        reasons = []
        if needs.device != "cpu":
            reasons.append(f"runs on cpu, not on {needs.device}")
        for what, dtype in (("dtype", needs.dtype), ("kv_dtype", needs.kv_dtype)):
            if dtype != torch.float32:
                reasons.append(f"{what} is float32 alone, not {str(dtype).removeprefix('torch.')}")
        if needs.heads % needs.kv_heads:
            reasons.append(f"{needs.heads} query heads are no multiple of {needs.kv_heads} kv heads")
        return reasons

    def cut(self, query_starts: torch.Tensor, contexts: torch.Tensor, needs: Needs) -> torch.Tensor:
        return torch.from_numpy(
            paged_attention.work_items(
                query_starts.numpy(), contexts.numpy(), needs.heads, needs.kv_heads, paged_attention.get_num_threads()
            )
        )

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
        out: torch.Tensor = torch.ops.triptych.paged_attention_cpu(
            query,
            key,
            value,
            keys,
            values,
            shape.tables,
            shape.slots,
            shape.query_starts,
            shape.contexts,
            shape.items,
            scores.scale,
            scores.window_tokens or 0,
            scores.soft_cap or 0.0,
        )
        return out
