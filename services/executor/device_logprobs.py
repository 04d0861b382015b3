"""Log-probabilities as services/executor/logprobs.py makes them, by torch on the device, where nothing waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.executor.batch import ScoredSpan
from services.executor.device import Device, as_array, index
from services.executor.logprobs import Logprobs
from services.executor.plan import Int64s, PromptScores
from services.executor.scorer import Head, Scored, pieces


@dataclass(frozen=True, eq=False)
class FoundLogprobs:
    """Of [n] rows of logits, on the device or on the host."""

    own: torch.Tensor
    """[n] float64"""
    ranks: torch.Tensor
    """[n] int64"""
    top_ids: torch.Tensor
    """[n, most] int64 likeliest first, the lower id first among equals"""
    top: torch.Tensor
    """[n, most] float64"""

    @classmethod
    def of(cls, logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> FoundLogprobs:
        """Of logits [n, vocab] float32 and an id a row. Rows with NaN or +inf mean nothing. Softmax in float64."""
        wide = logits.double()
        normalizer = wide.logsumexp(dim=1, keepdim=True)
        own = logits.gather(1, token_ids[:, None])
        top_ids = _likeliest(logits, most)
        return cls(
            own=(own.double() - normalizer)[:, 0],
            ranks=1 + (logits > own).sum(dim=1),
            top_ids=top_ids,
            top=wide.gather(1, top_ids) - normalizer,
        )

    def downloaded(self, device: Device) -> FoundLogprobs:
        """Copies on the host, valid once the device has come to the end of its queue as it is now."""
        return FoundLogprobs(*(device.download(one) for one in (self.own, self.ranks, self.top_ids, self.top)))

    def told(self, tops: Int64s) -> Logprobs:
        """Of copies on the host, with `tops` [n] alternatives each."""
        own, ranks, top_ids, top = (as_array(one) for one in (self.own, self.ranks, self.top_ids, self.top))
        return Logprobs.chosen(own, ranks, top_ids, top, tops)


def _likeliest(logits: torch.Tensor, most: int) -> torch.Tensor:
    """[n, most] ids. Score and id as one whole number, since topk leaves open which of equal ones comes first."""
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[1] - 1
    keys = (ordered << 32) + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(most, dim=1).values & 0xFFFFFFFF)


@dataclass(frozen=True, eq=False)
class PendingScores:
    """What a step says of prompt ids, on its way to the host."""

    spans: tuple[ScoredSpan, ...] = ()
    found: tuple[FoundLogprobs, ...] = ()
    tops: Int64s | None = None

    def told(self, failed_slots: frozenset[int]) -> Scored:
        """Once it is there; `failed_slots` have no scores."""
        if self.tops is None:
            return Scored(failed_slots=tuple(sorted(failed_slots)))
        parts, at = [], 0
        for one in self.found:
            parts.append(one.told(self.tops[at : at + len(one.own)]))
            at += len(one.own)
        logprobs, at, scores = Logprobs.joined(parts), 0, []
        for span in self.spans:
            stop = at + len(span.token_ids)
            if span.slot not in failed_slots:
                scores.append(PromptScores(span.slot, span.start, logprobs[at:stop]))
            at = stop
        return Scored(tuple(scores), tuple(sorted(failed_slots)))


def score(
    spans: Sequence[ScoredSpan], hidden: torch.Tensor, head: Head, vocab_size: int, failed: torch.Tensor, device: Device
) -> PendingScores:
    """As scorer.score; slots whose logits are NaN or +inf anywhere are counted in `failed` [slots] int32."""
    wanted = np.concatenate([span.token_ids for span in spans])
    tops = np.concatenate([np.full(len(span.token_ids), span.top) for span in spans]).clip(max=vocab_size)
    slots = np.concatenate([np.full(len(span.token_ids), span.slot) for span in spans])
    found, at = [], 0
    for tokens in pieces(spans, vocab_size):
        which = slice(at, at + len(tokens))
        logits = head(hidden.index_select(0, index(tokens, device)))[:, :vocab_size].float()
        bad = ~torch.isfinite(logits.amax(dim=1))
        failed.index_add_(0, index(slots[which], device), bad.to(failed.dtype))
        one = FoundLogprobs.of(logits, index(wanted[which], device), int(tops[which].max(initial=0)))
        found.append(one.downloaded(device))
        at += len(tokens)
    return PendingScores(tuple(spans), tuple(found), tops)
