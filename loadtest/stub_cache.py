"""The stub engine's prefix cache: digests of prompt blocks that were seen, nothing behind them."""

from __future__ import annotations

import itertools

from triptych.engine.v1 import engine_pb2

from services.common.digests import DIGEST_BYTES

_ID_BYTES = 4


class StubCache:
    """Holds every digest it is shown; `block_tokens` 0 is an engine without blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seen: set[bytes] = set()

    def misfit(self, submit: engine_pb2.Submit) -> str | None:
        """What is wrong with a Submit's digests, if anything."""
        blocks = _num_ids(submit) // self._block_tokens if self._block_tokens else 0
        if submit.block_digests and len(submit.block_digests) != blocks * DIGEST_BYTES:
            return f"block_digests has {len(submit.block_digests)} bytes, the prompt has {blocks} full blocks"
        if (submit.root_digest or submit.block_digests) and len(submit.root_digest) != DIGEST_BYTES:
            return f"root_digest has {len(submit.root_digest)} bytes, not {DIGEST_BYTES}"
        return None

    def cached_tokens(self, submit: engine_pb2.Submit) -> int:
        """Prompt ids whose blocks were seen before, the last id never; they are seen from now on."""
        column = submit.block_digests
        digests = [column[start : start + DIGEST_BYTES] for start in range(0, len(column), DIGEST_BYTES)]
        hits = sum(1 for _ in itertools.takewhile(self._seen.__contains__, digests))
        self._seen.update(digests)
        usable = (_num_ids(submit) - 1) // self._block_tokens if digests else 0
        return min(hits, usable) * self._block_tokens


def _num_ids(submit: engine_pb2.Submit) -> int:
    return len(submit.prompt_ids) // _ID_BYTES
