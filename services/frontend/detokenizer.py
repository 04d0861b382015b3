"""Ids to text as they come: whole characters only, equal in the end to a decode of the whole, without the prompt.

    prompt ids                | output ids
    ... context | dangling    | held ...          context: decoded and sent (or the prompt's)
                ^ a character that ends in the output     held: decoded to the part of a character so far

`tokenizers`' DecodeStream does the decoding. Around it this keeps: a prompt that ends inside a character (its first
bytes wait, and no prompt text is sent), whole characters in front of a partial one, and the end of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.tokenizer import Stream, TextTokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_IDS = 8
_HELD_IDS = 64
"""A character is at most 4 ids; more than this without a whole one is broken text, sent as such."""


class Detokenizer:
    """The text of one choice. Any method may raise what the tokenizer raises."""

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._context: list[int]
        self._held: list[int]
        self._stream: Stream
        tail = self._prompt_tail(prompt_ids)
        context = self._clean_part(tail)
        self._restart(context, tail[len(context) :])
        shown = self._after_context()
        sent = shown.rstrip(BROKEN) if _ends_broken(self._bytes(self._held)) else shown
        # Text of `held` that is not to be sent: the prompt's here, what was sent already later on.
        self._sent = sent
        # U+FFFD that stand for the prompt's broken end if the output does not complete it.
        self._prompts_broken = len(shown) - len(sent)
        self._started = False

    def push(self, token_id: int) -> str:
        """The text that one more id makes known, often its own, "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        self._started = True
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:
            # The decode is no longer an extension of the one before (a byte-fallback run that broke). Go on from the
            # held ids alone; a tokenizer that is at fault raises again.
            return self._resynchronize(token_id)
        self._held.append(token_id)
        if text is None:
            return self._peek()
        self._context, self._held = self._held, []
        return self._unsent(text) if self._sent or self._prompts_broken else text

    def show(self, token_id: int) -> str:
        """A special id as it is written, whether or not such are skipped, after what was held back."""
        if token_id not in self._skipped:
            return self.push(token_id)
        held = self.flush()
        self._restart(self._context, [])
        return held + self._tokenizer.written(token_id)

    def flush(self) -> str:
        """What is still held when no more ids come: at most one U+FFFD for a broken end."""
        if not self._started or not self._held:
            return ""
        text = self._after_context()
        if _ends_broken(self._bytes(self._held)) and text.endswith(BROKEN):
            text = text.rstrip(BROKEN) + BROKEN
        self._held = []
        return self._unsent(text)

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last ids of the prompt, as many as make some text: a word's first space depends on what is before."""
        dropped = self._tokenizer.special_ids if self._skip else frozenset()
        wanted = _CONTEXT_IDS
        while True:
            tail: list[int] = []
            for token_id in reversed(prompt_ids):
                if token_id not in dropped:
                    tail.append(token_id)
                if len(tail) == wanted:
                    break
            tail.reverse()
            if len(tail) < wanted or self._decode(tail):
                return tail
            wanted *= 4

    def _clean_part(self, ids: list[int]) -> list[int]:
        """The longest start of `ids` whose text does not end inside a character; empty where none is near the end."""
        for end in range(len(ids), max(len(ids) - _CONTEXT_IDS, 0), -1):
            if not self._decode(ids[:end]).endswith(BROKEN):
                return ids[:end]
        return []

    def _restart(self, context: list[int], held: list[int]) -> None:
        self._context, self._held = context, list(held)
        self._stream = self._tokenizer.stream(context, skip_special_tokens=self._skip)
        if held:
            self._stream.step(self._backend, list(held))

    def _peek(self) -> str:
        """Whole characters in front of a partial one: they need not wait for it."""
        text = self._after_context()
        if len(self._held) > _HELD_IDS:
            self._restart([], [])
            return self._unsent(text)
        if not text.endswith(BROKEN):
            return ""
        whole = text.rstrip(BROKEN)
        if len(whole) <= len(self._sent) or not whole.startswith(self._sent):
            return ""
        fresh = self._unsent(whole)
        self._sent = whole
        return fresh

    def _resynchronize(self, token_id: int) -> str:
        held = [*self._held, token_id]
        text = self._decode(held)
        if text.endswith(BROKEN):
            self._restart([], held)
            return ""
        self._restart(held, [])
        return self._unsent(text)

    def _unsent(self, text: str) -> str:
        """`text`, that of the held ids, without what was sent of it or is the prompt's."""
        fresh, self._sent = text[len(self._sent) :], ""
        while self._prompts_broken and fresh.startswith(BROKEN):
            fresh = fresh[1:]
            self._prompts_broken -= 1
        if fresh:
            self._prompts_broken = 0
        return fresh

    def _after_context(self) -> str:
        before, whole = self._decode(self._context), self._decode(self._context + self._held)
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self._tokenizer.token_bytes(i) for i in ids)


def _ends_broken(data: bytes) -> bool:
    """Whether the last bytes are not whole UTF-8: the start of a character, or not one at all."""
    return data.decode(errors="replace").endswith(BROKEN) and not data.endswith(BROKEN.encode())
