"""One choice's raw text to reasoning, text and tool calls, by the formats of its model."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.grammar import Grammar
from services.frontend.reasoning.tags import ReasoningFormat
from services.frontend.tape import Call, Parts, Reading, Tape
from services.frontend.tool_calls.format import ToolCallFormat

CALL_ID_CHARACTERS = 9
"""Mistral's templates take ids of nine letters and digits and no others."""
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class OutputFormats:
    """What is looked for in an answer; None: not. `in_reasoning`: the prompt has opened the reasoning already.

    `schemas` are the JSON Schemas of what may be called, by name: some formats leave it to them what is text.
    """

    reasoning: ReasoningFormat | None = None
    tool_calls: ToolCallFormat | None = None
    in_reasoning: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def marks(self) -> tuple[str, ...]:
        """What steers reading though it may be a special token, which text leaves out."""
        found = self.reasoning.marks if self.reasoning else ()
        return found + (self.tool_calls.marks if self.tool_calls else ())

    def held_to(self, grammar: Grammar | None) -> OutputFormats:
        """What is left to look for: a grammar holds from the first id, and one that never closes reasoning has none."""
        if grammar is None or self.reasoning is None or grammar.has_room_for(self.reasoning.close):
            return self
        return replace(self, reasoning=None, in_reasoning=False)

    def read(self, tape: Tape) -> Reading[None]:
        """All of an answer."""
        if self.reasoning is not None:
            yield from self.reasoning.read(tape, inside=self.in_reasoning)
        if self.tool_calls is not None:
            yield from self.tool_calls.read(tape)
        else:
            yield from tape.until((), tape.text)


class OutputReader:
    """Of one choice."""

    def __init__(self, formats: OutputFormats) -> None:
        self._tape = Tape(formats.read, formats.schemas)
        self.whole_calls = 0

    def push(self, text: str) -> Parts:
        """What more text makes known."""
        return self._counted(self._tape.push(text))

    def finish(self) -> Parts:
        """The rest, when no more comes: a call that was not yet one is text."""
        return self._counted(self._tape.finish())

    def _counted(self, parts: Parts) -> Parts:
        self.whole_calls += sum(call.whole for call in parts.calls)
        return parts


class CallIds:
    """Ids of the calls of one choice: the same whenever the same request is answered, others in every other one."""

    def __init__(self, prompt_ids: Sequence[int], seed: int, choice: int) -> None:
        self._key = (prompt_ids, seed, choice)
        self._digest: bytes | None = None

    def of(self, call: Call) -> str:
        """A hash over prompt, seed, choice and index."""
        if self._digest is None:
            prompt_ids, seed, choice = self._key
            numbers = (seed, choice, *prompt_ids)
            self._digest = hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers)).digest()
        number = int.from_bytes(hashlib.sha256(self._digest + call.index.to_bytes(8, "little")).digest())
        letters = []
        for _ in range(CALL_ID_CHARACTERS):
            number, letter = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[letter])
        return "".join(letters)
