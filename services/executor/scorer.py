"""Log-probabilities of prompt ids, from the hidden states of the tokens before them.

The logits of a whole prompt never exist at once (8,192 rows of 49,152 ids are 1.6 GB): hidden states go through the
model's head in pieces of at most PIECE_BYTES of float32 logits, whatever requests they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.executor.batch import ScoredSpan
from services.executor.logprobs import Logprobs
from services.executor.plan import Int64s, PromptScores

PIECE_BYTES = 16 << 20
"""Of float32 logits."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [rows, hidden] to logits [rows, vocab or more]."""


@dataclass(frozen=True)
class Scored:
    """What a step says of prompt ids; a slot whose logits are NaN or +inf anywhere has failed, and no scores."""

    scores: tuple[PromptScores, ...] = ()
    failed_slots: tuple[int, ...] = ()


def score(spans: Sequence[ScoredSpan], hidden: torch.Tensor, head: Head, vocab_size: int) -> Scored:
    """`hidden` is [tokens, hidden], of the step's flat batch. Ranks count ids below `vocab_size` alone."""
    wanted = np.concatenate([span.token_ids for span in spans])
    tops = np.concatenate([np.full(len(span.token_ids), span.top) for span in spans])
    found, bad_pieces, at = [], [], 0
    for tokens in pieces(spans, vocab_size):
        which = slice(at, at + len(tokens))
        logits = head(hidden[torch.from_numpy(tokens)])[:, :vocab_size].float().numpy()
        found.append(Logprobs.of(logits, wanted[which], tops[which]))
        bad_pieces.append(~np.isfinite(logits.max(axis=1)))
        at += len(tokens)
    logprobs, bad = Logprobs.joined(found), np.concatenate(bad_pieces)
    scores, failed, at = [], [], 0
    for span in spans:
        stop = at + len(span.token_ids)
        if bad[at:stop].any():
            failed.append(span.slot)
        else:
            scores.append(PromptScores(span.slot, span.start, logprobs[at:stop]))
        at = stop
    return Scored(tuple(scores), tuple(failed))


def pieces(spans: Sequence[ScoredSpan], vocab_size: int) -> Iterator[Int64s]:
    """Tokens of the flat batch [rows], span after span, whose logits are made at once; the same on every rank."""
    tokens = np.concatenate([span.first_token + np.arange(len(span.token_ids)) for span in spans])
    rows = max(1, PIECE_BYTES // (4 * vocab_size))
    for at in range(0, len(tokens), rows):
        yield tokens[at : at + rows]
