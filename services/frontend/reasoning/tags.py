"""Reasoning between tags at the start of an answer: <think>...</think> of DeepSeek R1 and Qwen3, [THINK] of Magistral.

https://huggingface.co/Qwen/Qwen3-8B#switching-between-thinking-and-non-thinking-mode
https://huggingface.co/mistralai/Magistral-Small-2507
"""

from __future__ import annotations

from dataclasses import dataclass

from services.frontend.tape import Reading, Tape


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags, and the name that configuration and Model have for them."""

    name: str
    open: str
    close: str

    @property
    def marks(self) -> tuple[str, ...]:
        """What of it may be special tokens of a tokenizer."""
        return (self.open, self.close)

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt's last words have opened the tag: the answer begins inside it."""
        return prompt.rstrip().endswith(self.open)

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt's last words have closed the tag: there is to be no reasoning."""
        return prompt.rstrip().endswith(self.close)

    def is_left_open(self, answer: str) -> bool:
        """Whether an answer so far has opened the tag and not closed it."""
        return answer.rfind(self.open) > answer.rfind(self.close)

    def read(self, tape: Tape, *, inside: bool) -> Reading[None]:
        """Reads up to where the answer begins. Line breaks just inside the tags and after them are layout."""
        if not inside and not (yield from tape.skip(self.open)):
            return
        yield from _drop_line_breaks(tape)
        if (yield from tape.until((self.close,), tape.thought, loose="\n")):
            tape.drop()
            yield from _drop_line_breaks(tape)


def _drop_line_breaks(tape: Tape) -> Reading[None]:
    while (yield from tape.peek()) == "\n":
        tape.take()
        tape.drop()


FORMATS = {
    form.name: form
    for form in (ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("mistral", "[THINK]", "[/THINK]"))
}


def recognise(template: str) -> ReasoningFormat | None:
    """By the tags a template looks for in earlier answers, or writes; None without any."""
    return next((form for form in FORMATS.values() if form.open in template or form.close in template), None)
