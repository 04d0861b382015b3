"""Stop strings: found in a stream of text, however it is cut, and never sent in part.

One Knuth-Morris-Pratt automaton (1977) a stop string: its state is how many of its characters the text ends with, so
the longest state is exactly the text that could still become a stop and must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scanned:
    """`text` may be sent; `stop` is the string that matched, after which nothing follows."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Scans one choice's text."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Scanned:
        """Takes the text of one more id. Of several matches the earliest wins, of those the longest.

        Matches that end here while `may_stop` is False (before min_tokens) pass as text.
        """
        if not self._patterns:
            return Scanned(text)
        buffer = self._held + text
        best: tuple[int, int] | None = None
        for pattern in self._patterns:
            for end in pattern.advance(text):
                start = len(self._held) + end - len(pattern.text)
                if may_stop:
                    best = min(best or (start, -len(pattern.text)), (start, -len(pattern.text)))
        if best is not None:
            start, negative_length = best
            stop = buffer[start : start - negative_length]
            self._held = ""
            return Scanned(buffer[:start] + (stop if self._include else ""), stop)
        keep = max(pattern.state for pattern in self._patterns)
        self._held = buffer[len(buffer) - keep :]
        return Scanned(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._failure = _failure(text)

    def advance(self, text: str) -> list[int]:
        """Where, in characters of `text`, matches end."""
        ends = []
        for i, character in enumerate(text):
            while self.state and self.text[self.state] != character:
                self.state = self._failure[self.state]
            if self.text[self.state] == character:
                self.state += 1
            if self.state == len(self.text):
                ends.append(i + 1)
                self.state = self._failure[self.state]
        return ends


def _failure(text: str) -> list[int]:
    """[len + 1]: of each prefix, the length of its longest proper suffix that is a prefix too."""
    table = [0, 0]
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = table[length]
        if text[length] == character:
            length += 1
        table.append(length)
    return table
