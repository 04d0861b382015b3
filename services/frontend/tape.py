"""What a model writes, read character by character by a format's reader, and what becomes of it: text, thoughts, calls.

A reader is a generator. It looks at the next character (`peek`), takes it (`take`), and what it took is held until it
is known what it was: `begin` a call, `drop` what was only structure, or `give_up`, and it is text as it was written.
Since a reader sees one character at a time, how the text was cut on its way here changes nothing.

    "<tool_call>{"name": "f", "argume|nts": {"a|": 1}}</tool_call>"      | cuts
     held ........................... ^begin  ^arguments
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, str, T]
"""Waits for characters; "" is the end."""

Put: TypeAlias = Callable[[str], None]
Direct: TypeAlias = tuple[frozenset[str], Put]
"""Where a text may go as a whole that has none of these characters: a reader would do the same with each of it."""

BLANK = " \t\n\r"
_NAME_CHARACTERS = 256


class MalformedError(Exception):
    """What was read is not what the format has there."""


@dataclass
class Call:
    """What is new of a call: `name` where it begins, a piece of `arguments` (JSON), `whole` once it has ended."""

    index: int
    name: str = ""
    arguments: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Parts:
    """What is new. `calls` are in order, each index at most once."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def num_bytes(self) -> int:
        """In UTF-8, of all that a client is told."""
        told = [self.text, self.reasoning, *(part for call in self.calls for part in (call.name, call.arguments))]
        return sum(len(part.encode()) for part in told)


class Tape:
    """One choice's output on its way through a reader. `schemas` are the JSON Schemas of its tools' arguments."""

    def __init__(
        self, read: Callable[[Tape], Reading[None]], schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    ) -> None:
        self.schemas = schemas
        self._ahead: deque[str] = deque()
        self._held: list[str] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self._num_calls = 0
        self._direct: Direct | None = None
        self._reader = read(self)
        next(self._reader, None)

    def push(self, text: str) -> Parts:
        """Takes more of the output."""
        if self._direct is not None and self._direct[0].isdisjoint(text):
            self._direct[1](text)
        else:
            for character in text:
                self._reader.send(character)
        return self._parts()

    def finish(self) -> Parts:
        """No more comes. What is held then is text."""
        for _ in self._reader:  # it was waiting: None, and then "" for as long as it asks
            raise RuntimeError("a reader goes on after the end")
        return self._parts()

    def peek(self, direct: Direct | None = None) -> Reading[str]:
        """The next character, "" at the end. Where it has to be waited for, text may go on `direct` instead."""
        if not self._ahead:
            self._direct = direct
            character = (yield) or ""
            self._direct = None
            self._ahead.append(character)
        return self._ahead[0]

    def take(self, put: Put | None = None) -> str:
        """Takes the character that `peek` saw; it is held, and given to `put`."""
        character = self._ahead.popleft()
        self._held.append(character)
        if put is not None:
            put(character)
        return character

    def take_text(self, text: str, put: Put) -> None:
        """Takes a text that came `direct`."""
        self._held.extend(text)
        put(text)

    def text(self, text: str) -> None:
        """Is the answer's text."""
        self._text.append(text)

    def thought(self, text: str) -> None:
        """Is the answer's reasoning."""
        self._reasoning.append(text)

    def begin(self, name: str) -> None:
        """A call begins; what is held was its head. Raises MalformedError for a name that is none."""
        if not name.strip() or not _is_unicode(name):
            raise MalformedError
        self._calls.append(Call(self._num_calls, name))
        self._num_calls += 1
        self.drop()

    def argument(self, piece: str) -> None:
        """More of the arguments of the call that has begun."""
        if not self._calls:
            self._calls.append(Call(self._num_calls - 1))
        self._calls[-1].arguments += piece
        self.drop()

    def end(self) -> None:
        """The call is whole."""
        if not self._calls:
            self._calls.append(Call(self._num_calls - 1))
        self._calls[-1].whole = True
        self.drop()

    def drop(self) -> None:
        """What is held was structure."""
        self._held.clear()

    def give_up(self) -> None:
        """What is held is text as it stands."""
        if self._held:
            self._text.append("".join(self._held))
            self._held.clear()

    def rewind(self) -> None:
        """What is held is to be read once more."""
        self._ahead.extendleft(reversed(self._held))
        self._held.clear()

    def blank(self, put: Put | None = None) -> Reading[str]:
        """Takes blank characters; the first other one, not taken."""
        while True:
            character = yield from self.peek()
            if not character or character not in BLANK:
                return character
            self.take(put)

    def expect(self, *words: str) -> Reading[str]:
        """Takes one of the words, none of which begins another. Raises MalformedError."""
        found = ""
        while found not in words:
            character = yield from self.peek()
            if not character or not any(word.startswith(found + character) for word in words):
                raise MalformedError
            found += self.take()
        return found

    def skip(self, word: str) -> Reading[bool]:
        """Takes a word that may follow, behind blanks, and drops it; False, and nothing is taken, where it does not."""
        try:
            yield from self.blank()
            yield from self.expect(word)
            self.drop()
            return True
        except MalformedError:
            self.rewind()
            return False

    def name(self, end: str) -> Reading[str]:
        """Takes all up to `end`, and `end`. Raises MalformedError where that is too far off to be a name."""
        found = ""
        while not found.endswith(end):
            if not (yield from self.peek()) or len(found) > _NAME_CHARACTERS:
                raise MalformedError
            found += self.take()
        return found.removesuffix(end).strip()

    def until(self, marks: Sequence[str], put: Put, *, loose: str = "", layout: bool = False) -> Reading[str]:
        """Gives characters to `put` up to one of `marks`, which stays held, and is returned; "" at the end.

        Characters of `loose` directly before a mark are dropped. With `layout` what is blank up to the first character
        is dropped too where a mark or the end follows. Marks hold neither.
        """
        stoppers = frozenset(mark[0] for mark in marks) | frozenset(loose)
        lead, held = "".join(self._held), ""
        self._held.clear()
        while True:
            character = yield from self.peek(None if lead or held or layout else (stoppers, put))
            if not character:
                if held or not layout:
                    put(lead + held)
                return ""
            held += self.take()
            self._held.clear()
            while held and not any(mark.startswith(held) for mark in marks):
                if held in loose or (layout and held in BLANK):
                    lead += held
                else:
                    put(lead + held[0])
                    lead, layout = "", False
                held = held[1:]
            if held in marks:
                self._held.append(held)
                return held

    def _parts(self) -> Parts:
        if not self._text and not self._reasoning and not self._calls:
            return _NOTHING
        parts = Parts("".join(self._text), "".join(self._reasoning), tuple(self._calls))
        self._text.clear()
        self._reasoning.clear()
        self._calls.clear()
        return parts


_NOTHING = Parts()


def _is_unicode(text: str) -> bool:
    """Whether it can be sent: JSON and Python may spell halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
