"""What a format of tool calls is: how its calls are read, and what spans of text hold a model to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.tape import Reading, Tape


@dataclass(frozen=True)
class Span:
    """A call as text: what opens it, its arguments, what closes it. Once `trigger` is written, a span must follow."""

    begin: str
    end: str
    trigger: str


@dataclass(frozen=True)
class ToolCallFormat:
    """`read` gives calls and text to a tape; `marks` are what of it may be special tokens of a tokenizer.

    `span` is a call of the named tool, around its arguments as JSON: a model that is held to a schema writes it. Where
    the format has arguments of another kind, `read` takes both.
    """

    name: str
    read: Callable[[Tape], Reading[None]]
    marks: tuple[str, ...]
    span: Callable[[str], Span]
