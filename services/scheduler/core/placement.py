"""Where a request's KV comes from when it starts: computed anew, found in the prefix cache, or a sibling's.

The choices of one request share its prompt: the first computes it, the others wait for that and then share its full
blocks. The block that holds the prompt's last token, which each computes itself to sample from, is copied, since each
goes on writing where it ends:

    first choice    [ p p p p ][ p p p p ][ p p p . ]
    second choice    shared     shared    [ p p . . ]   a copy; computes the last p, then its own ids

From the prefix cache come full blocks alone, never the last token, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.request import NO_SLOT, Request


@dataclass(frozen=True)
class Placement:
    """`shared` blocks come first in the table, then `num_new` of the pool's; `copied` fills the first new one."""

    shared: list[int]
    num_new: int
    num_computed: int
    copied: int | None = None
    sibling: Request | None = None
    """Whose prompt it shares; None where there is no such"""


def place(request: Request, pool: BlockPool, block_tokens: int) -> Placement | None:
    """How `request` would start now; None while a sibling computes their prompt."""
    if request.wants_scores:  # of positions that only computing them tells
        return Placement([], -(-request.num_tokens // block_tokens), 0)
    if request.siblings[0].wants_scores:  # they come before any choice's first id
        return None
    if not request.output and len(request.siblings) > 1:
        computing = False
        for sibling in request.siblings:
            if sibling.slot == NO_SLOT:
                continue
            if sibling.num_computed >= request.prompt_tokens:
                return _beside(sibling, request.prompt_tokens, block_tokens)
            computing = True
        if computing:
            return None
    shared = pool.match(request.digests[: (request.num_tokens - 1) // block_tokens])
    num_blocks = -(-request.num_tokens // block_tokens)
    return Placement(shared, num_blocks - len(shared), len(shared) * block_tokens)


def _beside(sibling: Request, prompt_tokens: int, block_tokens: int) -> Placement:
    full = (prompt_tokens - 1) // block_tokens
    begun = (prompt_tokens - 1) % block_tokens > 0  # the last token's block holds others too
    return Placement(sibling.blocks[:full], 1, prompt_tokens - 1, sibling.blocks[full] if begun else None, sibling)


def fits(placement: Placement, pool: BlockPool, spare: int) -> bool:
    """Whether enough is free for it, and `spare` blocks besides."""
    revived = sum(pool.holders(block) == 0 for block in placement.shared)
    return placement.num_new + spare <= pool.num_free - revived
