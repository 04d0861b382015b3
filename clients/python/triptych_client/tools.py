"""What a model may call, as `chat` takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triptych.inference.v1 import inference_pb2


@dataclass(frozen=True)
class Tool:
    """A function: `parameters` is the JSON Schema of its arguments, an object's, as a mapping or as text.

    With `strict` its arguments keep to the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | str | None = None
    strict: bool = False


ToolLike = Tool | Mapping[str, Any] | inference_pb2.Tool
"""A Tool, the same as a mapping (also as {"type": "function", "function": {...}}), or the contract's own message."""

ToolChoiceLike = str | inference_pb2.ToolChoice
"""\"auto\", "none", "required", or the name of the tool that must be called; or the contract's own message."""

_MODES = {
    "auto": inference_pb2.ToolChoice.MODE_AUTO,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}
_KEYS = frozenset(Tool.__dataclass_fields__)


def to_proto(tools: Iterable[ToolLike]) -> list[inference_pb2.Tool]:
    """Raises ValueError for a mapping that is no tool."""
    return [_one(tool) for tool in tools]


def choice_to_proto(choice: ToolChoiceLike | None) -> inference_pb2.ToolChoice | None:
    """A tool that is called as a mode takes the contract's own message."""
    if choice is None or isinstance(choice, inference_pb2.ToolChoice):
        return choice
    if choice in _MODES:
        return inference_pb2.ToolChoice(mode=_MODES[choice])
    return inference_pb2.ToolChoice(name=choice)


def _one(tool: ToolLike) -> inference_pb2.Tool:
    if isinstance(tool, inference_pb2.Tool):
        return tool
    if not isinstance(tool, Tool):
        tool = _from_mapping(tool)
    schema = tool.parameters
    return inference_pb2.Tool(
        name=tool.name,
        description=tool.description,
        parameters_json_schema=schema if isinstance(schema, str) else "" if schema is None else json.dumps(schema),
        strict=tool.strict,
    )


def _from_mapping(tool: Any) -> Tool:
    fields = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else tool
    if not isinstance(fields, Mapping) or "name" not in fields or not set(fields) <= _KEYS:
        shown = sorted(map(str, fields)) if isinstance(fields, Mapping) else type(fields).__name__
        raise ValueError(f"a tool has the keys name, description, parameters and strict, not {shown}")
    return Tool(**{key: value for key, value in fields.items() if value is not None})
