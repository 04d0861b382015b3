"""Which of several engines a request goes to: the one that is expected to begin with it first.

    wait = (tokens that wait there + tokens of the prompt that are not cached there) / prompt tokens a second there

What waits is told by the engine each second; what was sent to it since is counted here. What is cached there is
guessed from the prompts that it was sent: their blocks' digests are remembered, so that prompts with a beginning in
common meet (as in SGLang's cache-aware load balancing, and for the same reason). Where engines would begin at the same
time, that with fewer requests wins, since its steps are shorter, and then that whose cache is emptier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.engine import Submission

MAX_DIGESTS = 1 << 16
"""Blocks remembered of each engine: 1 million tokens in blocks of 16."""

UNKNOWN_TOKENS_PER_S = 1000.0
"""Of an engine that has computed nothing yet."""


@dataclass(frozen=True)
class Load:
    """An engine's own figures."""

    requests: int = 0
    waiting_tokens: int = 0
    prompt_tokens_per_s: float = 0.0


class Expectation:
    """Of one engine."""

    def __init__(self) -> None:
        self._load = Load()
        self._sent_tokens = 0
        self._sent_requests = 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def told(self, load: Load) -> None:
        """It has said how it is; what was sent before is in that."""
        self._load = load
        self._sent_tokens = self._sent_requests = 0

    def forget(self) -> None:
        """It has been lost, and its cache with it."""
        self.told(Load())
        self._blocks.clear()

    def sent(self, submission: Submission, digests: Sequence[bytes], block_tokens: int) -> None:
        """A request has gone to it; `digests` are those of its prompt's blocks, of the size of this engine's."""
        self._sent_tokens += self._missing_tokens(submission, digests, block_tokens)
        self._sent_requests += 1
        for digest in digests:
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > MAX_DIGESTS:
            self._blocks.popitem(last=False)

    def cost(self, submission: Submission, digests: Sequence[bytes], block_tokens: int) -> tuple[float, int, int]:
        """Seconds until its first step with the whole prompt, requests there, blocks cached; the lower goes first."""
        missing_tokens = self._missing_tokens(submission, digests, block_tokens)
        tokens = self._load.waiting_tokens + self._sent_tokens + missing_tokens
        tokens_per_s = self._load.prompt_tokens_per_s or UNKNOWN_TOKENS_PER_S
        return tokens / tokens_per_s, self._load.requests + self._sent_requests, len(self._blocks)

    def _missing_tokens(self, submission: Submission, digests: Sequence[bytes], block_tokens: int) -> int:
        found = 0
        for digest in digests:
            if digest not in self._blocks:
                break
            found += block_tokens
        received = sum(len(ids) for _, ids in submission.resumed)
        return max(1, len(submission.prompt_ids) - found) + received
