"""What holds a model to its tools: a grammar of spans, one a tool, made where the request promises more than a try."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from triptych.inference.v1 import generation_pb2

from services.frontend.conversation import Calling, Tool, ToolUse
from services.frontend.tool_calls.format import ToolCallFormat

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def promise(tool_use: ToolUse) -> str:
    """The field of the request that a grammar is needed for; "" where there is none."""
    if tool_use.calling is Calling.NONE:
        return ""
    if tool_use.calling is Calling.REQUIRED:
        return "tool_choice"
    strict = next((i for i, tool in enumerate(tool_use.tools) if tool.strict), None)
    if strict is not None:
        return f"tools[{strict}].strict"
    return "" if tool_use.parallel else "parallel_tool_calls"


def make(tool_use: ToolUse, form: ToolCallFormat) -> generation_pb2.Grammar:
    """Of a request that promises something: a format with spans is needed.

    REQUIRED and a named tool hold all arguments to their schemas; AUTO those of strict tools, the others to an object.
    A named tool is called once.
    """
    span = form.span
    if span is None:
        raise ValueError(f"calls of the format {form.name} have no spans")
    tools = [tool for tool in tool_use.tools if tool_use.named in ("", tool.name)]
    required = tool_use.calling is Calling.REQUIRED
    tags = []
    for tool in tools:
        text = span(tool.name)
        schema = _schema(tool) if required or tool.strict else _ANY_OBJECT
        tags.append(
            generation_pb2.Grammar.Tag(
                begin=text.begin, json_schema=json.dumps(schema, ensure_ascii=False), end=text.end, trigger=text.trigger
            )
        )
    single = bool(tool_use.named) or not tool_use.parallel
    return generation_pb2.Grammar(
        structural_tags=generation_pb2.Grammar.StructuralTags(tags=tags, required=required, single=single)
    )


def _schema(tool: Tool) -> Mapping[str, Any]:
    if not tool.schema:
        return _NO_ARGUMENTS
    return tool.schema if "type" in tool.schema else {**tool.schema, "type": "object"}
