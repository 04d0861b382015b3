"""Attention as one custom op of torch, so that eager code, torch.compile and CUDA graphs all see the same call.

An op takes tensors and numbers alone, so what launches the kernels is named by a number. The fake implementation says
that nothing is returned: the arguments named in MUTATED are written in place. See torch.library.custom_op.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

MUTATED = ("projected", "out", "keys", "values")


class Call(NamedTuple):
    """What the op is called with, but for the launcher's number; in its order."""

    projected: torch.Tensor
    out: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    query_gain: torch.Tensor | None
    key_gain: torch.Tensor | None
    places: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    contexts: torch.Tensor
    leading: int
    most_tokens: int
    most_context: int
    scale: float
    window: int
    cap: float
    gain_offset: float
    epsilon: float


class Launcher(Protocol):
    """Runs the kernels of one model: its types, heads and block size."""

    def attend(self, call: Call) -> None:
        """As the op of that name."""


_launchers: WeakValueDictionary[int, Launcher] = WeakValueDictionary()


def register(launcher: Launcher) -> int:
    """The number that the op knows a launcher by, as long as somebody holds the launcher."""
    number = max(_launchers, default=0) + 1
    _launchers[number] = launcher
    return number


@torch.library.custom_op("triptych::paged_attention", mutates_args=MUTATED)
def paged_attention(
    launcher: int,
    projected: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    places: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    leading: int,
    most_tokens: int,
    most_context: int,
    scale: float,
    window: int,
    cap: float,
    gain_offset: float,
    epsilon: float,
) -> None:
    """Turns queries and keys, writes new keys and values into the cache, and attends to each row's.

    projected [tokens, heads + 2 * kv_heads, head_dim], whose queries are turned in place; out [tokens, heads,
    head_dim]; keys, values [num_blocks, kv_heads, block_tokens, head_dim]; scales [kv_heads] float32 of fp8; cos, sin
    [tokens, angles] float32, of which the first half is read, None: nothing is turned; gains [head_dim] of the RMSNorm
    before that, None: there is none; places [tokens] int64 block * block_tokens + offset; tables [slots, entries],
    slots [rows], query_starts [rows + 1], contexts [rows] int32, as in StepShape. The first `leading` rows have one
    token each; `most_tokens` is what the longest of the others has, `most_context` the longest context. `window` 0: all
    tokens are seen; `cap` 0: scores stay.
    """
    _launchers[launcher].attend(
        Call(
            projected, out, keys, values, key_scales, value_scales, cos, sin, query_gain, key_gain, places, tables,
            slots, query_starts, contexts, leading, most_tokens, most_context, scale, window, cap, gain_offset, epsilon,
        )
    )  # fmt: skip


@paged_attention.register_fake
def _fake(*arguments: object) -> None:
    """Nothing new has a shape."""
