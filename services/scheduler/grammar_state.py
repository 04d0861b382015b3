"""Where one choice stands in its grammar: ids go in, masks come out. Lives in the thread that builds masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from triptych.inference.v1 import generation_pb2

Words = npt.NDArray[np.uint32]
"""[ceil(vocab / 32)] bit i of word j stands for id 32 j + i."""


class GrammarFailedError(Exception):
    """The matcher has failed, or took an id that it does not allow; the message says what it says."""


class ContradictedError(Exception):
    """The grammar allows ids, the request's bans none of them."""


@dataclass(frozen=True, eq=False)
class Bans:
    """What a request may not draw, whatever its grammar allows: `always`, and `early` up to `min_tokens`."""

    always: Words | None = None
    early: Words | None = None
    min_tokens: int = 0

    @classmethod
    def of(cls, sampling: generation_pb2.Sampling, stop_ids: Sequence[int], min_tokens: int, vocab_size: int) -> Bans:
        """As the executor's sampler bans; see the order of operations there."""
        biased_out = [token_id for token_id, bias in sampling.logit_bias.items() if bias == -np.inf]
        banned = [*sampling.banned_token_ids, *biased_out]
        always = words_of(banned, vocab_size) if banned else None
        if sampling.allowed_token_ids:
            others = ~words_of(sampling.allowed_token_ids, vocab_size)
            always = others if always is None else always | others
        early = words_of(stop_ids, vocab_size) if min_tokens and stop_ids else None
        return cls(always, early, min_tokens)

    def leave(self, words: Words, position: int) -> Words:
        """What of `words` may be drawn at an output position."""
        if self.always is not None:
            words = words & ~self.always
        if self.early is not None and position < self.min_tokens:
            words = words & ~self.early
        return words

    def forbid(self, token_id: int, position: int) -> bool:
        """Whether an id may not stand at an output position."""
        early = self.early if position < self.min_tokens else None
        return any(
            words is not None and bool(words[token_id // 32] >> (token_id % 32) & 1) for words in (self.always, early)
        )


class GrammarState:
    """Of one choice, from the ids it has. `forces`: ids without an alternative follow without being drawn."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, bans: Bans, *, forces: bool = False) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._bans = bans
        self._forces = forces
        self._position = 0
        self.ended = False
        """The language allows nothing more, or its end was drawn."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Goes on by ids of the output. Raises GrammarFailedError."""
        for token_id in token_ids:
            if self.ended:
                return  # drawn before that was known
            if not self._matcher.consume_token(token_id):
                raise GrammarFailedError(self._matcher.get_error() or f"id {token_id} is not allowed")
            self._position += 1
            self._look()

    def force(self) -> list[int]:
        """The ids that follow without an alternative, perhaps none; goes on by them. Raises GrammarFailedError.

        They end before one that is banned: the next mask is then the contradiction that it is.
        """
        if not self._forces or self.ended:
            return []
        forced = []
        for position, token_id in enumerate(self._matcher.compute_ff_tokens(), self._position):
            if token_id >= 32 * self._num_words or self._bans.forbid(token_id, position):
                break
            forced.append(token_id)
        self.take(forced)
        return forced

    def mask(self) -> Words | None:
        """Of the next id; None where nothing more is to be drawn, and the output is to end here.

        Raises GrammarFailedError, and ContradictedError where no id is left.
        """
        if self.ended:
            return None
        found = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        self._look()
        words = self._bans.leave(self._fitted(found), self._position)
        if words.any():
            return words
        if self._matcher.is_accepting():  # all that is left of it are stop ids, which are banned
            self.ended = True
            return None
        raise ContradictedError

    def _look(self) -> None:
        if not self._matcher.is_stopped():
            return
        if self._matcher.is_error():
            raise GrammarFailedError(self._matcher.get_error())
        self.ended = True

    def _fitted(self, words: Words) -> Words:
        """To the model's vocabulary, which may be padded past the tokenizer's, or shorter."""
        if len(words) == self._num_words:
            return words
        fitted = np.zeros(self._num_words, np.uint32)
        fitted[: len(words)] = words[: self._num_words]
        return fitted


def words_of(token_ids: Sequence[int], vocab_size: int) -> Words:
    """Words with the bits of these ids, each below the vocabulary."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[np.array(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)
