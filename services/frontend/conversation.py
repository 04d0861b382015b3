"""A conversation, once it is through the door: own types."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PastCall:
    """A call of an earlier answer; `arguments` is a JSON object, `written` the text it came as."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    written: str


@dataclass(frozen=True)
class Turn:
    """A message. `calls` and `reasoning` are an assistant's, `call_id` a tool's: the call it answers."""

    role: str
    text: str
    name: str = ""
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True)
class Tool:
    """What a model may call; `schema` is the JSON Schema of its arguments, an object's."""

    name: str
    description: str
    schema: Mapping[str, Any]
    strict: bool = False


class Calling(enum.Enum):
    """Whether the answer may, must or must not call a tool."""

    AUTO = enum.auto()
    NONE = enum.auto()
    REQUIRED = enum.auto()


@dataclass(frozen=True)
class ToolUse:
    """What may be called, and how: `tools` are all of the request, `named` is the one that must be called."""

    tools: tuple[Tool, ...] = ()
    calling: Calling = Calling.NONE
    named: str = ""
    parallel: bool = True


@dataclass(frozen=True)
class Conversation:
    """What a chat template is asked to write. `continues`: the last turn, an assistant's, is to be gone on with."""

    turns: tuple[Turn, ...]
    tool_use: ToolUse = ToolUse()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False

    @property
    def size(self) -> int:
        """Characters of its messages and what a template writes around them, roughly: many empty ones are work too."""
        return sum(len(turn.text) + len(turn.reasoning) + 64 * (1 + len(turn.calls)) for turn in self.turns)

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Those the model is told of: none that it must not call."""
        return () if self.tool_use.calling is Calling.NONE else self.tool_use.tools
