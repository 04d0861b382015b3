"""What the core works within."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the core works within. `num_blocks` counts the null block; a slot's reuse follows `max_in_flight`.

    A tenant may fill `tenant_share` of the queue. `prefill_reserve` is how many tokens of a step a prompt that does not
    end in it leaves to requests behind it that do. A request that does not fit, for want of blocks or because its
    prompt would have to be cut beside another, is overtaken by at most `max_overtakes` others.
    """

    vocab_size: int
    context_tokens: int
    num_blocks: int
    block_tokens: int
    max_slots: int
    max_step_tokens: int
    max_waiting: int
    max_in_flight: int = 1
    max_waiting_tokens: int = 1 << 40
    tenant_share: float = 1.0
    prefill_reserve: int = 0
    max_overtakes: int = 0
    max_queue_wait_ns: int | None = None
    """Of a request before its first step. None: as long as it takes."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_tokens", "block_tokens", "max_slots", "max_step_tokens", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.context_tokens > self.pool_tokens:
            raise ValueError(f"a context of {self.context_tokens} tokens exceeds the pool's {self.pool_tokens}")

    @property
    def tenant_waiting(self) -> int:
        """Requests of one tenant that may wait."""
        return math.ceil(self.tenant_share * self.max_waiting)

    @property
    def pool_tokens(self) -> int:
        """Tokens that fit when one request holds every block."""
        return (self.num_blocks - 1) * self.block_tokens
